"""A state that two ranks left in memory: read from both arenas, and checked."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from holdfast._errors import DamagedCheckpoint

if sys.platform != "linux":
    pytest.skip("only Linux has arenas", allow_module_level=True)

from holdfast._keeper.storage import HeldArena
from holdfast._run.saving.snapshots import Snapshots
from holdfast._state.capture import capture, capture_generators
from holdfast._store.read.find import Candidate, Leftover, held_by_ranks, read_candidate

RUN_ID = "5" * 32


@pytest.fixture
def leftovers():
    made, all_snapshots, backings = [], [], []
    for rank in range(2):
        announced = []
        snapshots = Snapshots(
            run_id=RUN_ID,
            attempt=1,
            rank=rank,
            announce=lambda arena, backing, to=announced: to.append((arena, backing)),
            say=print,
        )
        captured = capture(
            {"weights": np.full(700, float(rank))}, {"generators": capture_generators()}
        )
        assert snapshots.take(captured, {"attempt": 1, "metrics": {}, "world": 2}, 16) is not None
        arena, backing = announced[0]
        for record in arena.whole():
            HeldArena(arena, None).digests(record)
        made.append(Leftover(arena, backing.path, rank))
        all_snapshots.append(snapshots)
        backings.append(backing)
    yield made
    made.clear()
    for snapshots, backing in zip(all_snapshots, backings, strict=True):
        snapshots.close()
        backing.remove()


def _candidate(leftovers: list[Leftover]) -> Candidate:
    peers = held_by_ranks(leftovers)[1, 16]
    return Candidate(1, 8, None, *peers[0], peers=tuple(peers))


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_gets_its_own_part_of_what_all_left(leftovers, rank):
    peers = held_by_ranks(leftovers)[1, 16]
    found = read_candidate(Candidate(1, 8, None, *peers[rank], peers=tuple(peers)), rank)
    assert found.loaded.world == 2
    number = [spec.name for spec in found.loaded.plan.specs].index("weights")
    assert np.frombuffer(found.loaded.data(number)).tolist() == [float(rank)] * 700


def test_a_slot_of_another_rank_with_a_damaged_header_is_refused(leftovers):
    candidate = _candidate(leftovers)
    other, record = candidate.peers[1]
    other.arena.image(record.slot)[20] ^= 1
    with pytest.raises(DamagedCheckpoint, match="rank 1"):
        read_candidate(candidate, 0)
