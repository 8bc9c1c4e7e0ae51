"""Copies to the host end at the edges of the pieces that are registered with a driver."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast._store.format.image import plan_image
from holdfast.torch import device
from holdfast.torch.adapter import ADAPTER as adapter


@given(start=st.integers(0, 10 << 27), size=st.integers(0, 5 << 27))
def test_the_parts_of_a_range_are_all_of_it_and_none_crosses_an_edge(start, size):
    parts = list(device._between_edges(start, size))
    assert sum(each for _, each in parts) == size
    at = start
    for first, length in parts:
        assert first == at
        assert length > 0
        assert first // device.PIECE_BYTES == (first + length - 1) // device.PIECE_BYTES
        at += length


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.complex64])
def test_a_tensor_that_crosses_edges_is_copied_to_the_bit(monkeypatch, dtype):
    monkeypatch.setattr(device, "PIECE_BYTES", 4096)
    values = [torch.randn(3000).to(dtype), torch.randn(50, 70).to(dtype).T, torch.ones(7).to(dtype)]
    plan = plan_image([adapter.spec(f"t{i}", each) for i, each in enumerate(values)], 100)
    places = list(zip(plan.specs, plan.offsets, strict=True))
    home = torch.zeros(plan.size_bytes, dtype=torch.uint8)
    copier = device.HeldBack.__new__(device.HeldBack)
    copier._places = places
    copier._cuts = device._find_cuts(places)
    assert copier._cuts
    targets = [device._typed(home, at, spec) for spec, at in places]
    copier._copy([0, 1, 2], targets, values)
    for value, (spec, at) in zip(values, places, strict=True):
        stored = home[at : at + spec.size_bytes].view(value.dtype).view(spec.shape)
        assert torch.equal(stored, value)


class _Event:
    """The end of a burst that the test's device has done, or will have when it is waited for."""

    def __init__(self, is_done: bool) -> None:
        self.is_done = is_done

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


@pytest.mark.parametrize("is_idle", [False, True])
def test_few_pieces_are_queued_ahead_of_the_device_unless_it_is_idle(is_idle):
    bursts, events, waiting = [], [], []

    def queue(pieces):
        bursts.append(pieces)
        events.append(_Event(is_idle))
        return events[-1]

    for _ in device.queue_in_bursts(range(100), queue):
        waiting.append(sum(not each.is_done for each in events))
    assert [piece for burst in bursts for piece in burst] == list(range(100))
    if is_idle:
        assert list(map(len, bursts[:6])) == [1, 2, 4, 8, 16, 16]
    else:
        assert set(map(len, bursts)) == {1}
        assert max(waiting) == 3
