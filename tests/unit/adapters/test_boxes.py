"""Parts of an array, stored by several processes, make any part that is wanted."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._adapters import numpy as shared
from holdfast._adapters.adapter import StoredArray
from holdfast._adapters.numpy import Box
from holdfast._errors import DamagedCheckpoint


@dataclass(frozen=True)
class Part:
    description: dict[str, Any]
    data: memoryview


def cut(size: int, draw: Any) -> list[tuple[int, int]]:
    """A dimension in pieces, each with its start and length."""
    ends = sorted({*draw(st.lists(st.integers(1, size), max_size=3)), size})
    return [(a, b - a) for a, b in itertools.pairwise([0, *ends])]


def part(whole: Any, boxes: list[Box]) -> Part:
    pieces = [whole[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))] for box in boxes]
    data = b"".join(np.ascontiguousarray(piece).tobytes() for piece in pieces)
    return Part(
        {"boxes": [[list(corner), list(sizes)] for corner, sizes in boxes]}, memoryview(data)
    )


def stored(whole: Any, parts: list[Part], own: Part | None = None) -> StoredArray:
    about = {"size": list(whole.shape), "item_bytes": whole.itemsize}
    return StoredArray(about, own, lambda: parts, is_whole=False)


@given(st.data())
def test_any_cut_gives_any_part(data: Any) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from(["u1", "f4", "c16"]))
    whole = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    cuts = [cut(size, data.draw) for size in shape]
    boxes = [
        (tuple(a for a, _ in each), tuple(n for _, n in each)) for each in itertools.product(*cuts)
    ]
    ranks = data.draw(st.integers(1, 3))
    parts = [part(whole, boxes[rank::ranks]) for rank in range(ranks)]
    ranges = [data.draw(st.sampled_from(each)) for each in [cut(size, data.draw) for size in shape]]
    wanted = tuple(a for a, _ in ranges), tuple(n for _, n in ranges)
    found = shared.read_box(stored(whole, parts, parts[0]), wanted, "w")
    expected = whole[tuple(slice(a, a + n) for a, n in ranges)]
    assert found.tobytes() == expected.tobytes()
    everything = shared.read_box(stored(whole, parts), shared.whole_box(shape), "w")
    assert everything.tobytes() == whole.tobytes()


@pytest.mark.parametrize("boxes", [[((0,), (2,))], [((0,), (3,)), ((2,), (2,))]])
def test_what_is_missing_or_there_twice_is_damage(boxes: list[Box]) -> None:
    whole = np.arange(4)
    with pytest.raises(DamagedCheckpoint, match="weights: the stored parts"):
        shared.read_box(stored(whole, [part(whole, boxes)]), ((0,), (4,)), "weights")


def test_a_number_is_a_box_without_dimensions() -> None:
    whole = np.array(7.5)
    found = shared.read_box(stored(whole, [part(whole, [((), ())])]), ((), ()), "count")
    assert found.tobytes() == whole.tobytes()
