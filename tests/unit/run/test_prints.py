"""Batches that are alike have one print, and others have others."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest

from holdfast._run.witness.observer import batch_print, digest_of, state_items

torch = pytest.importorskip("torch", reason="pip install torch")

Pair = collections.namedtuple("Pair", "inputs labels")


@dataclasses.dataclass
class Graph:
    nodes: Any
    edges: Any


class Bag:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


def kinds(seed: int) -> list[Any]:
    """Batches of all shapes, each the same for one seed."""
    noise = np.random.default_rng(seed)
    array = noise.random((4, 3))
    tensor = torch.from_numpy(noise.random((4, 3)))
    return [
        array,
        tensor,
        tensor.T,
        tensor.to(torch.bfloat16),
        [tensor, torch.ones(4)],
        (array, 3),
        {"input_ids": tensor, "mask": torch.ones(4, 3)},
        collections.UserDict(pixels=array),
        Pair(tensor, None),
        Graph([tensor], {}),
        Bag(x=tensor, ptr=None),
        [{"a": [(tensor,)]}],
        torch.from_numpy(noise.random((2, 1 << 19))).float(),
        torch.from_numpy(noise.random((1, 1, 1 << 18))).expand(3, -1, -1),
    ]


@pytest.mark.parametrize("number", range(len(kinds(0))))
def test_a_batch_is_told_from_others_and_not_from_itself(number):
    prints = [batch_print(kinds(seed)[number]) for seed in (1, 1, 2)]
    assert prints[0] is not None
    assert prints[0] == prints[1] != prints[2]


def test_what_differs_beside_the_arrays_counts_too():
    tensor = torch.arange(4)
    different = [
        [tensor, "a"],
        [tensor, "b"],
        [tensor, 1],
        [tensor, 2.0],
        [tensor],
        (tensor,),
        tensor.view(2, 2),
        tensor.int(),
    ]
    assert len({batch_print(batch) for batch in different}) == len(different)


@pytest.mark.parametrize(
    "batch",
    [
        None,
        3,
        "text",
        [1, 2, 3],
        torch.tensor(5),
        np.float32(2),
        torch.zeros(8, 8),
        {"mask": np.ones(4)},
        torch.empty(0),
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        np.array([object(), object()]),
    ],
    ids=[
        *("none", "number", "text", "numbers", "scalar", "NumPy scalar", "zeros", "ones", "empty"),
        *("meta", "sparse", "objects"),
    ],
)
def test_what_tells_nothing_has_no_print(batch):
    assert batch_print(batch) is None


def test_a_batch_that_holds_itself_comes_to_an_end():
    batch: list[Any] = [torch.arange(3)]
    batch.append(batch)
    assert batch_print(batch) is not None


def test_only_the_beginning_of_a_large_batch_is_read():
    row = torch.rand(1 << 20)
    terabytes = row.expand(1 << 20, -1)  # nobody could put this into order
    first = batch_print(terabytes)
    assert first is not None
    assert batch_print(terabytes.T) != first
    row[-1] += 1
    assert batch_print(terabytes) == first
    row[0] += 1
    assert batch_print(terabytes) != first


def test_a_long_list_of_plain_values_is_compared_as_a_whole():
    losses = [(0.1 * number, None) for number in range(3000)]
    items = state_items({"losses": losses, "short": [1.5, 2.5], "grid": {"rows": [0.5] * 100}})
    names = ["state/losses", "state/short[0]", "state/short[1]", "state/grid.rows"]
    assert sorted(items) == sorted(names)
    other = state_items({"losses": [*losses[:-1], (0.0, None)]})
    assert items["state/losses"] != other["state/losses"]
    assert items["state/losses"] == state_items({"losses": list(losses)})["state/losses"]


def test_tensors_in_a_long_list_are_compared_one_by_one():
    arrays = [np.full(2, number) for number in range(100)]
    assert len(state_items({"all": arrays})) == 100
    assert digest_of(arrays) != digest_of([*arrays[:-1], np.full(2, 7)])
