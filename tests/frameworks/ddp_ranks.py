"""Ranks under DistributedDataParallel: the acts of tests/frameworks/test_torch_ddp.py.

Each rank is a process, forked from one that has imported torch. What is checked here fails the
process, and its output tells why. The last act is what a user's training does, and writes down
how long its rank has waited.
"""

from __future__ import annotations

import copy
import datetime
import gc
import io
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.torch.adapter import ADAPTER
from holdfast.torch.ddp import WaitMeter, find_ddp, refuse, replicated_keys, settle_buckets

WIDTH = 12
FEW_LAYERS_A_BUCKET = WIDTH * WIDTH * 4 * 2.5 / 2**20
Stored = tuple[dict[str, Any], dict[str, Any]]


class Layers(nn.Module):
    """Used in the order of `order`, which may leave some out."""

    def __init__(self, order: Callable[[int], list[int]], dtypes: list[torch.dtype]) -> None:
        super().__init__()
        self.order = order
        layers = [nn.Linear(WIDTH, WIDTH, dtype=dtypes[i % len(dtypes)]) for i in range(6)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for number in self.order(step):
            layer = self.layers[number]
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float()


def layers(
    order: Callable[[int], list[int]] = lambda _: list(range(6)),
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    frozen: bool = False,
) -> nn.Module:
    made = Layers(order, list(dtypes))
    for layer in made.layers[::2] if frozen else ():
        layer.requires_grad_(False)
    return made


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


SCRAMBLED = [3, 0, 5, 1, 2, 4]
KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "in order": (layers, {}),
    "one bucket": (layers, {"bucket_cap_mb": 25}),
    "in another order": (lambda: layers(lambda _: SCRAMBLED), {}),
    "views": (layers, {"gradient_as_bucket_view": True}),
    "static": (lambda: layers(lambda _: [0, 1, 3, 5]), {"static_graph": True}),
    "unused": (lambda: layers(lambda step: [0, 2 + step % 3, 5]), {"find_unused_parameters": True}),
    "types": (lambda: layers(dtypes=(torch.float32, torch.float64, torch.bfloat16)), {}),
    "frozen": (lambda: layers(frozen=True), {}),
}


def wrap(kind: str) -> DistributedDataParallel:
    torch.manual_seed(1)
    make, options = KINDS[kind]
    return DistributedDataParallel(make(), **{"bucket_cap_mb": FEW_LAYERS_A_BUCKET} | options)


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(8, WIDTH, generator=generator) * 3


def train(
    kind: str, steps: range, stored: Stored | None = None, *, settled: bool = True
) -> tuple[list[Stored], DistributedDataParallel]:
    """One life of a training: a module that is wrapped anew sums like one in a new process."""
    model = wrap(kind)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    if stored is not None:
        model.module.load_state_dict(stored[0])
        optimizer.load_state_dict(stored[1])
    if settled:
        assert settle_buckets(find_ddp({"optimizer": optimizer})) == []
    states = []
    for step in steps:
        optimizer.zero_grad()
        x = batch(step)
        (model(x, step) - x.sin()).square().mean().backward()
        optimizer.step()
        states.append(copy.deepcopy((model.module.state_dict(), optimizer.state_dict())))
    return states, model


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(item)


def same(some: Any, others: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(some), tensors(others), strict=True))


def is_same_after_a_resume(kind: str, *, settled: bool = True) -> bool:
    undisturbed, _ = train(kind, range(3), settled=settled)
    resumed, _ = train(kind, range(2, 3), undisturbed[1], settled=settled)
    return same(undisturbed[2], resumed[0])


def goes_on_to_the_same_bits() -> None:
    for kind in KINDS:
        assert is_same_after_a_resume(kind), kind
    # Or it would show nothing:
    assert not is_same_after_a_resume("in order", settled=False)


def last_layers_are_sent_first() -> None:
    """Else no bucket is full before the backward pass is over."""
    for kind in ("in order", "in another order", "static"):
        _, model = train(kind, range(4))
        log = model._get_ddp_logging_data()
        buckets = log["rebuilt_per_bucket_param_indices"].split(", ")
        order = [int(number) for bucket in buckets for number in bucket.split()]
        assert order == list(range(11, -1, -1)), order
        assert len(buckets) > 2, buckets


def settles_once_a_life() -> None:
    """Whoever has trained already has learned an order, and keeps it."""
    _, model = train("in another order", range(3), settled=False)
    before = model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
    assert settle_buckets([model]) == []
    model(batch(3), 3).sum().backward()
    model(batch(4), 4).sum().backward()
    assert model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"] == before


def finds_what_wraps_the_state() -> None:
    bare = norms()
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW(model.parameters())
    other = DistributedDataParallel(nn.Linear(2, 2))
    states: list[dict[str, Any]] = [
        {"model": model},
        {"model": bare},
        {"optimizer": optimizer},
        {"all": [{"optimizer": (optimizer,)}]},
        {"part": bare[0]},
    ]
    for state in states:
        assert [*map(id, find_ddp(state))] == [id(model)], state
    both = nn.ModuleList([other, model])
    assert [*map(id, find_ddp({"both": both}))] == [id(other), id(model)]
    assert find_ddp({"step": 3, "model": nn.Linear(2, 2)}) == []


def wrappers_thrown_away_are_not_found() -> None:
    bare = nn.Linear(2, 2)
    old, new = DistributedDataParallel(bare), DistributedDataParallel(bare)
    old.itself = [old]
    gc.disable()
    del old
    assert [*map(id, find_ddp({"model": bare}))] == [id(new)]
    gc.enable()


def replicated_is_what_all_ranks_have_alike() -> None:
    model = DistributedDataParallel(norms())
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model.module, "optimizer": optimizer}
    keys = replicated_keys(state, find_ddp(state))
    assert len(keys) == 6
    assert keys.is_current()
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
        assert not keys.is_current()
    keys = replicated_keys(state, find_ddp(state))
    stored = model.module.state_dict()
    buffers = {name for name, _ in model.module.named_buffers()}
    assert {
        name for name, value in stored.items() if ADAPTER.alias_key(value) not in keys
    } == buffers
    moments = list(tensors(optimizer.state_dict()))
    assert len(moments) == 18
    assert all(ADAPTER.alias_key(value) in keys for value in moments)
    mine = [*(stored[name] for name in sorted(stored.keys() - buffers)), *moments]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, (mine, [stored[name] for name in sorted(buffers)]))
    assert all(same(mine, theirs) for theirs, _ in of_all)
    assert not all(same(of_all[0][1], theirs) for _, theirs in of_all)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not keys.is_current()
    assert not any(ADAPTER.alias_key(value) in keys for value in tensors(optimizer.state_dict()))


def memory_that_was_freed_is_not_replicated() -> None:
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    keys = replicated_keys({"model": model}, [model])
    old = ADAPTER.alias_key(model.module.weight)
    assert old in keys
    assert None not in keys
    with torch.no_grad():
        model.module.weight.data = torch.zeros(WIDTH, WIDTH)
    assert old not in keys
    assert not keys.is_current()


def _replicated(**options: Any) -> int:
    model = DistributedDataParallel(nn.Linear(2, 2), **options)
    return len(replicated_keys({"model": model}, [model]))


def _hooked(hook: Any, memory: Any = None) -> tuple[int, list[str]]:
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(memory, hook)
    return len(replicated_keys({"model": model}, [model])), settle_buckets([model])


def what_is_not_replicated() -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    assert _replicated() == 2
    assert _replicated(process_group=dist.new_group(range(dist.get_world_size()))) == 2
    assert _replicated(process_group=alone[dist.get_rank()]) == 0
    ignoring = nn.Linear(2, 2)
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(ignoring, ["bias"])
    model = DistributedDataParallel(ignoring)
    assert len(replicated_keys({"model": model}, [model])) == 1
    thawed = nn.Linear(2, 2)
    thawed.bias.requires_grad_(False)
    model = DistributedDataParallel(thawed)
    assert len(replicated_keys({"model": model}, [model])) == 2
    thawed.bias.requires_grad_(True)  # and DDP does not know
    assert len(replicated_keys({"model": model}, [model])) == 0
    averager = PeriodicModelAverager(period=2)
    assert _replicated() == 0
    del averager
    model = DistributedDataParallel(nn.Linear(2, 2))
    keys = replicated_keys({"model": model}, [model])
    with model.join():
        assert not keys.is_current()
        assert len(replicated_keys({"model": model}, [model])) == 0


def hooks_that_keep_ranks_alike_are_known() -> None:
    assert _hooked(default_hooks.fp16_compress_hook) == (2, [])
    wrapped = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    count, (said,) = _hooked(wrapped, powerSGD_hook.PowerSGDState(None))
    assert count == 2
    assert "a PowerSGDState, which no checkpoint has" in said
    assert _hooked(debugging_hooks.noop_hook) == (0, [])
    assert _hooked(default_hooks.fp16_compress_wrapper(debugging_hooks.noop_hook)) == (0, [])


def parts_of_an_optimizer_are_not_replicated() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    model(torch.ones(1, 2)).sum().backward()
    zero.step()
    keys = replicated_keys({"whole": zero, "part": zero.optim}, [model])
    assert len(keys) == 2
    assert not any(ADAPTER.alias_key(value) in keys for value in tensors(dict(zero.optim.state)))
    said = refuse(zero)
    assert said is not None
    assert said.startswith("a ZeroRedundancyOptimizer cannot be stored")
    assert refuse(zero.optim) is None


def meter_leaves_no_trace() -> None:
    own = DistributedDataParallel._sync_buffers
    model = DistributedDataParallel(norms())
    meter = WaitMeter([model])
    assert DistributedDataParallel._sync_buffers is not own
    model(batch(0)).sum().backward()
    torch.save(model, io.BytesIO())
    meter.close()
    assert DistributedDataParallel._sync_buffers is own
    model(batch(0)).sum().backward()


ACTS: dict[str, list[Callable[[], None]]] = {
    "bits": [goes_on_to_the_same_bits],
    "buckets": [last_layers_are_sent_first, settles_once_a_life],
    "state": [
        finds_what_wraps_the_state,
        wrappers_thrown_away_are_not_found,
        replicated_is_what_all_ranks_have_alike,
        memory_that_was_freed_is_not_replicated,
        what_is_not_replicated,
        hooks_that_keep_ranks_alike_are_known,
        parts_of_an_optimizer_are_not_replicated,
        meter_leaves_no_trace,
    ],
}


def train_and_wait(folder: Path, late: int, where: str) -> None:
    """Forty steps, of which one rank sleeps through 50 ms each."""
    model = DistributedDataParallel(norms())
    settle_buckets([model])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    is_late = dist.get_rank() == late
    if is_late and where == "backward":
        model.module[2].weight.register_hook(lambda _: time.sleep(0.05))
    meter, waits, step_seconds = WaitMeter([model]), [], 0.0
    for step in range(40):
        if is_late and where == "data":
            time.sleep(0.05)
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
        read = meter.read()
        if read is not None:
            _, waited, step_seconds = read
            waits.append(waited)
    meter.close()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps([waits, step_seconds]))


def train_in_a_run(folder: Path, late: int) -> None:
    """Sixty steps of a run, of which one rank sleeps through 50 ms each."""
    model = DistributedDataParallel(norms())
    with holdfast.Run(folder / "run", model=model) as run:
        for step in run.steps(60):
            if dist.get_rank() == late:
                time.sleep(0.05)
            loss = model(batch(step)).square().mean()
            loss.backward()
            run.log(loss=loss, rank=dist.get_rank())


def main(act: str, folder: str, meeting: str, number: str, world: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("ignore")  # torch warns of its own hooks and optimizers
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(meeting, int(world)),
        rank=int(number),
        world_size=int(world),
        timeout=datetime.timedelta(seconds=40),
    )
    name, _, detail = act.partition(":")
    if name == "run":
        train_in_a_run(Path(folder), int(detail))
    elif name == "late":
        late, where = detail.split(" in ")
        train_and_wait(Path(folder), int(late), where)
    else:
        for each in ACTS[name]:
            each()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
