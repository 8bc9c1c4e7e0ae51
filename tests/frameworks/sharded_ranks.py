"""Ranks that train a small model in parts, store them, and take them back on another mesh.

The acts of tests/frameworks/test_torch_shards.py: each rank is a process, forked from one that
has imported torch. What is checked here fails the process, and its output tells why.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from holdfast._state.capture import Captured, capture
from holdfast._state.restore import restore_state
from holdfast._store.format.checksum import digest_all
from holdfast._store.format.image import encode_scalars, parse_header, plan_image
from holdfast._store.format.tree import tensor_leaves
from holdfast._store.read.merge_ranks import join
from holdfast._store.read.verify import Loaded, StoredShard, verify_image
from holdfast.torch.adapter import ADAPTER as adapter

State = dict[str, Any]


class Scale(nn.Module):
    """A parameter of another type: FSDP wants one type in a group, so it is one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(7).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor.float()


class Uneven(nn.Module):
    """Nothing in it can be divided by four: some ranks hold less, some nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()
        self.first = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.again = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.again.weight
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(self.scale(x)))
        return self.last(self.tied(torch.tanh(self.again(x))))


class Wide(nn.Module):
    """What tensor parallel is made for: columns, then rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 10)
        self.down = nn.Linear(10, 7)
        self.out = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.down(torch.tanh(self.up(x))))


def _over_data(model: nn.Module, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    if isinstance(model, Uneven):
        fully_shard(model.scale, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _over_data_and_columns(model: nn.Module, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh["dp"])


def _hybrid(model: nn.Module, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copy", "dp"))
    fully_shard(model, mesh=mesh)


KINDS: dict[str, tuple[type[nn.Module], Callable[[nn.Module, int], None]]] = {
    "plain": (Uneven, lambda *_: None),
    "fsdp": (Uneven, _over_data),
    "wide-plain": (Wide, lambda *_: None),
    "wide": (Wide, _over_data),
    "wide-2d": (Wide, _over_data_and_columns),
    "wide-hybrid": (Wide, _hybrid),
}


@dataclass
class Rank:
    """One rank of one world, with a model and its optimizer."""

    number: int
    world: int
    kind: str
    seed: int

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        make, shard = KINDS[self.kind]
        self.model = make()
        shard(self.model, self.world)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    @property
    def state(self) -> State:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, *steps: int) -> None:
        for step in steps:
            # The ranks of a tensor-parallel group must see the same batch.
            ranks_alike = 2 if self.kind == "wide-2d" else 1
            generator = torch.Generator().manual_seed(100 * step + self.number // ranks_alike)
            self.model(torch.randn(4, 7, generator=generator)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def whole(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state, unsharded: all ranks must ask for it."""
        tensors = dict(self.model.state_dict())
        for number, entries in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{number}.{key}": value for key, value in entries.items()}
        return {key: _whole(value) for key, value in tensors.items()}

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """One rank at a time: whatever waits for another one never ends."""
        for _ in range(self.number):
            dist.barrier()
        yield
        for _ in range(self.world - self.number):
            dist.barrier()


def _whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def assert_same(now: dict[str, torch.Tensor], then: dict[str, torch.Tensor]) -> None:
    """Names, types and bits."""
    assert list(now) == list(then), (list(now), list(then))
    for key, value in now.items():
        assert value.dtype == then[key].dtype, key
        assert bytes(adapter.bytes_of(value)) == bytes(adapter.bytes_of(then[key])), key


# -- images, as the keeper would write them --------------------------------------


def image_of(captured: Captured) -> bytearray:
    scalars = encode_scalars({"step": 2, "tree": captured.tree})
    plan = plan_image(captured.specs, len(scalars))
    image = bytearray(plan.size_bytes)
    image[: len(plan.header)] = plan.header
    places = list(zip(plan.specs, plan.offsets, strict=True))
    adapter.copy_all(adapter.destinations(image, places, 0), captured.values)
    image[plan.scalars.offset :] = scalars.ljust(plan.scalars.size_bytes)
    return image


def read_image(data: bytearray) -> Loaded:
    image = memoryview(data)
    plan = parse_header(bytes(image[: 8 + int.from_bytes(image[:8], "little")]))
    views = [image[e.offset : e.offset + e.size_bytes] for e in plan.extents()]
    return verify_image(image, plan, digest_all(views), "image")


def read_all(folder: Path, number: int, asked: list[str]) -> tuple[Loaded, int]:
    """What a rank resumes from, and whose image it is; `asked` gets what it wants of others."""
    files = sorted(folder.glob("rank-*"))
    images = [read_image(bytearray(path.read_bytes())) for path in files]
    own = number % len(images)
    loaded = join(images, own, [f"image {n}" for n in range(len(images))])

    def find(path: str) -> list[StoredShard]:
        asked.append(path)
        return loaded.shards(path)

    return replace(loaded, find_shards=find), own


# -- acts ------------------------------------------------------------------------


def save(rank: Rank, folder: Path) -> None:
    """Train, store what this rank holds, and tell what the whole is now and a step later."""
    rank.train(1, 2)
    with rank.in_turn():
        (folder / f"rank-{rank.number:05}").write_bytes(image_of(capture(rank.state)))
    torch.save(rank.whole(), folder / f"whole-{rank.number}")
    rank.train(3)
    torch.save(rank.whole(), folder / f"later-{rank.number}")


def resume(rank: Rank, folder: Path, *, goes_on: bool) -> None:
    """Take the state back; with `goes_on`, train a step and compare with the undisturbed."""
    asked: list[str] = []
    loaded, own = read_all(folder, rank.number, asked)
    with rank.in_turn():
        changed = restore_state(rank.state, loaded)
    assert changed == [], changed
    assert_same(rank.whole(), torch.load(folder / f"whole-{own}"))
    rank.train(3)  # on another mesh it sums in another order, but it goes on
    if goes_on:
        # Of the others' parts, only those that this rank holds alike and did not store.
        assert set(asked) <= _not_stored(loaded), asked
        assert_same(rank.whole(), torch.load(folder / f"later-{own}"))


def _not_stored(loaded: Loaded) -> set[str]:
    trees = loaded.head["tree"]["state"].items()
    leaves = [leaf for name, encoded in trees for leaf in tensor_leaves(encoded, name)]
    return {path for path, leaf in leaves if leaf.get("$shard", {"t": 0})["t"] is None}


def act(name: str, kind: str, folder: Path, number: int, world: int) -> None:
    """What one rank does."""
    if name == "corners":
        from tests.frameworks.sharded_corners import CORNERS

        for corner in CORNERS[world]:
            corner(number, world)
    elif name == "save":
        save(Rank(number, world, kind, seed=1), folder)
    else:
        resume(Rank(number, world, kind, seed=2), folder, goes_on=name == "go on")


def main(name: str, kind: str, folder: str, meeting: str, number: str, world: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(meeting, int(world)),
        rank=int(number),
        world_size=int(world),
        timeout=datetime.timedelta(seconds=40),
    )
    act(name, kind, Path(folder), int(number), int(world))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
