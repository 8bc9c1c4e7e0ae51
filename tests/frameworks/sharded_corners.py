"""Corners of sharded state, each an act of a small world of ranks; its name is the promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from holdfast._errors import DamagedCheckpoint, RestoreDiffers, StateMismatch, UnstorableState
from holdfast._state.capture import capture
from holdfast._state.restore import restore_state
from holdfast._store.read.merge_ranks import join
from holdfast._store.read.verify import Loaded
from tests.frameworks.sharded_ranks import image_of, read_image


def _mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes)


def _numbers(*size: int, **options: Any) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(size).numel(), **options).reshape(size)


def _sharded(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    return distribute_tensor(tensor, mesh, placements or [Shard(0)] * mesh.ndim)


def _stored(state: dict[str, Any], world: int) -> list[Loaded]:
    """What all ranks have stored, in the hands of each."""
    images: list[Any] = [None] * world
    dist.all_gather_object(images, bytes(image_of(capture(state))))
    return [read_image(bytearray(image)) for image in images]


def _joined(images: list[Loaded], number: int) -> Loaded:
    return join(images, number % len(images), [f"image {n}" for n in range(len(images))])


def _leaf(state: Any) -> dict[str, Any]:
    leaf = capture({"value": state}).tree["state"]["value"]["$shard"]
    assert isinstance(leaf, dict)
    return leaf


def tied_weights_are_stored_once(number: int, world: int) -> None:
    weight = _sharded(_numbers(5, 3), _mesh(world))
    captured = capture({"a": weight, "b": [weight.detach()]})
    first, second = captured.tree["state"]["a"], captured.tree["state"]["b"][0]
    assert first == second
    assert first["$shard"]["t"] == 0
    assert [spec.name for spec in captured.specs] == ["a"]
    assert captured.values[0] is weight._local_tensor


def one_of_the_ranks_that_hold_a_part_stores_it(number: int, world: int) -> None:
    mesh = _mesh(2, world // 2)
    leaf = _leaf(_sharded(_numbers(4, 3), mesh, Replicate(), Shard(0)))
    assert (leaf["t"] is None) == (number >= 2)
    assert leaf["offsets"] == [2 * (number % 2), 0]
    assert leaf["sizes"] == [2, 3]
    leaf = _leaf(_sharded(_numbers(4), mesh, Replicate(), Replicate()))
    assert (leaf["t"] is None) == (number > 0)


def an_empty_part_is_not_stored(number: int, world: int) -> None:
    leaf = _leaf(_sharded(_numbers(1, 3), _mesh(world)))
    assert (leaf["t"] is None) == (number > 0)
    assert leaf["size"] == [1, 3]


def ranks_outside_a_mesh_store_nothing(number: int, world: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    value = _sharded(_numbers(4, 3), mesh)
    leaf = _leaf(value)
    assert (leaf["t"] is None) == (number > 1)
    images = _stored({"value": value}, world)
    live = _sharded(torch.zeros(4, 3), mesh)
    assert restore_state({"value": live}, _joined(images, number)) == []
    assert torch.equal(live._local_tensor, value._local_tensor)


def one_name_on_two_meshes_is_two_tensors(number: int, world: int) -> None:
    """As in the stages of a pipeline, whose copies take the part of their own stage."""
    halves = (DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3]))
    stage = number // 2
    then = _sharded((stage + 1) * _numbers(3), halves[stage], Replicate())
    images = _stored({"value": then}, world)
    live = _sharded(torch.zeros(3), halves[stage], Replicate())
    restore_state({"value": live}, _joined(images, number))
    assert torch.equal(live._local_tensor, (stage + 1) * _numbers(3))


def containers_keep_their_tensors(number: int, world: int) -> None:
    mesh = _mesh(world)
    whole = {"a": _numbers(5, 2), "b": _numbers(3), "c": _numbers(4), "d": _numbers(2)}
    then = {key: _sharded(value, mesh) for key, value in whole.items()}
    images = _stored({"state": {**then, "d": whole["d"]}}, world)
    live: dict[str, Any] = {
        "a": _sharded(torch.zeros(5, 2), mesh),
        "b": torch.zeros(3),  # sharded then, whole now
        "c": None,  # nobody there
        "d": _sharded(torch.zeros(2), mesh),  # whole then, sharded now
    }
    before = dict(live)
    assert restore_state({"state": live}, _joined(images, number)) == []
    for key in ("a", "b", "d"):
        assert live[key] is before[key]
        now = live[key].full_tensor() if isinstance(live[key], DTensor) else live[key]
        assert torch.equal(now, whole[key]), key
    assert torch.equal(live["c"], whole["c"])


def moments_keep_their_type(number: int, world: int) -> None:
    """A bfloat16 parameter with float32 moments, which Optimizer.load_state_dict would cast."""

    def make() -> torch.optim.Optimizer:
        weight = nn.Parameter(_sharded(torch.zeros(5, 2, dtype=torch.bfloat16), _mesh(world)))
        return torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    then, now = make(), make()
    moment = _sharded(_numbers(5, 2) / 3, _mesh(world))
    factored = _sharded(_numbers(5) / 7, _mesh(world), Replicate())
    entries = {"momentum_buffer": moment, "row": factored, "step": torch.tensor(4.0)}
    then.state[then.param_groups[0]["params"][0]] = entries
    images = _stored({"optimizer": then}, world)
    assert restore_state({"optimizer": now}, _joined(images, number)) == []
    found = now.state[now.param_groups[0]["params"][0]]
    assert {type(found["momentum_buffer"]), type(found["row"])} == {DTensor}
    assert type(found["step"]) is torch.Tensor
    assert found["momentum_buffer"].dtype == torch.float32
    assert found["momentum_buffer"].placements == moment.placements
    assert torch.equal(found["momentum_buffer"]._local_tensor, moment._local_tensor)
    assert torch.equal(found["row"]._local_tensor, factored._local_tensor)


class _Halving(nn.Linear):
    """Changes what it is given."""

    def load_state_dict(self, state: Any, *more: Any, **options: Any) -> Any:
        changed = {key: value / 2 for key, value in state.items()}
        return super().load_state_dict(changed, *more, **options)


def what_did_not_take_the_state_is_named(number: int, world: int) -> None:
    model = _Halving(3, 4, bias=False)
    fully_shard(model, mesh=_mesh(world))
    images = _stored({"model": model}, world)
    with pytest.raises(RestoreDiffers, match=r"model\.weight \(other values\)"):
        restore_state({"model": model}, _joined(images, number))


def another_size_is_refused_before_anything_is_touched(number: int, world: int) -> None:
    def make(rows: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, rows))
        fully_shard(model, mesh=_mesh(world))
        return model

    images = _stored({"model": make(5)}, world)
    live = make(6)
    before = {key: value._local_tensor.clone() for key, value in live.state_dict().items()}
    with pytest.raises(StateMismatch) as caught:
        restore_state({"model": live}, _joined(images, number))
    assert caught.value.reshaped == (
        "model.1.weight (float32 [5, 4] → float32 [6, 4])",
        "model.1.bias (float32 [5] → float32 [6])",
    )
    for key, value in live.state_dict().items():
        assert torch.equal(value._local_tensor, before[key])


def a_missing_part_is_never_made_up(number: int, world: int) -> None:
    images = _stored({"value": _sharded(_numbers(6), _mesh(world))}, world)
    live = torch.zeros(6)
    there = "{} of the 6 values that are needed here are there"
    with pytest.raises(DamagedCheckpoint, match=f"value: .* {there.format(3)}"):
        restore_state({"value": live}, _joined(images[:1], 0))
    twice = [images[0], images[0], images[1]]
    with pytest.raises(DamagedCheckpoint, match=f" {there.format(6)}, 9 in all"):
        restore_state({"value": live}, _joined(twice, 0))


def what_has_no_value_of_its_own_is_refused(number: int, world: int) -> None:
    mesh = _mesh(world)
    unsummed = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    with pytest.raises(UnstorableState, match=r"^value: .*Partial.*redistribute"):
        capture({"value": unsummed})
    torn = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=(9,), stride=(1,))
    with pytest.raises(UnstorableState, match=r"^value: this rank holds \[3\] of .* \[9\]"):
        capture({"value": torn})


def rows_that_torch_cannot_describe_are_refused(number: int, world: int) -> None:
    """Seven rows over two, then three: torch's planner would give a rank the rows of another."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(3, 7))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    refused = [""] * world
    try:
        capture({"model": model})
        own = ""
    except UnstorableState as error:
        own = str(error)
    dist.all_gather_object(refused, own)
    assert any("Make the sharded sizes divisible" in line for line in refused), refused


# By the number of ranks that it takes.
CORNERS: dict[int, list[Callable[[int, int], None]]] = {
    2: [
        tied_weights_are_stored_once,
        an_empty_part_is_not_stored,
        containers_keep_their_tensors,
        moments_keep_their_type,
        what_did_not_take_the_state_is_named,
        another_size_is_refused_before_anything_is_touched,
        a_missing_part_is_never_made_up,
        what_has_no_value_of_its_own_is_refused,
    ],
    4: [
        one_of_the_ranks_that_hold_a_part_stores_it,
        ranks_outside_a_mesh_store_nothing,
        one_name_on_two_meshes_is_two_tensors,
    ],
    6: [rows_that_torch_cannot_describe_are_refused],
}
