"""Frozen weights are held once, and a run that is killed goes on to the same bits."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress

import pytest

from holdfast._store.memory.arena import Arena, NotAnArena, used_bytes
from holdfast._store.memory.backing import open_leftover
from tests.often import few
from tests.support import SCRIPTS, arena_files, wait_for_keeper_gone, wait_until

pytest.importorskip("torch")

SCRIPT = SCRIPTS / "train_frozen.py"
STATE_BYTES = 12_004_000
ENDLESS = 100_000
SETTINGS = json.dumps({"max_overhead": 0.5, "keep_memory": "1min"})


def slots_of(folder) -> tuple[int, bool, int]:
    """How many slots are whole, whether they have memory in common, and what they take."""
    for path in arena_files(folder):
        # Its head may not be written yet.
        with suppress(NotAnArena), Arena(open_leftover(path)) as arena:
            return len(arena.whole()), bool(arena.shared), used_bytes(arena.descriptor)
    return 0, False, 0


@pytest.fixture(autouse=True)
def _no_memory_stays(folder):
    yield
    wait_for_keeper_gone(folder)
    for path in arena_files(folder):
        path.unlink()


def newest_step(folder) -> int:
    """Of the snapshots in memory; -1 if none is whole."""
    for path in arena_files(folder):
        with suppress(NotAnArena), Arena(open_leftover(path)) as arena:
            newest = arena.newest()
            return -1 if newest is None else newest.step
    return -1


@pytest.mark.parametrize("unfreeze_at", few([ENDLESS, 150], [150]))
def test_a_run_with_frozen_weights_goes_on_to_the_same_bits(folder, start, unfreeze_at):
    gate = folder.with_name("gate")
    chance = random.Random(unfreeze_at)
    newest = -1
    for life in range(3):
        trainer = start(folder, ENDLESS, unfreeze_at, 0.01, SETTINGS, gate, script=SCRIPT)
        trainer.ready()
        if not gate.exists():
            wait_until(lambda: slots_of(folder)[0] >= 2, what="two slots")
            _, is_shared, used = slots_of(folder)
            assert is_shared
            assert used <= 1.1 * STATE_BYTES
            gate.touch()
        time.sleep(chance.uniform(0.1, 0.8))  # a kill at any time
        if life == 2:
            # A kill before the first snapshot of an attempt that has taken the memory over leaves
            # the state on disk only.
            wait_until(
                lambda before=newest: newest_step(folder) > before,
                what="a snapshot of this attempt",
            )
        trainer.kill()
        trainer.wait()
        wait_for_keeper_gone(folder)
        newest = newest_step(folder)
    total = newest + 150
    last = start(folder, total, unfreeze_at, 0, SETTINGS, gate, script=SCRIPT)
    ended = last.state_hash()
    assert "from memory" in last.output
    whole = (folder.with_name("undisturbed"), total, unfreeze_at, 0, SETTINGS, gate)
    assert ended == start(*whole, script=SCRIPT).state_hash()
