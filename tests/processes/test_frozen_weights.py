"""Frozen weights are held once, and a run that is killed goes on to the same bits."""

from __future__ import annotations

import json
import random
import time

import pytest

from holdfast._store.memory.arena import Arena, used_bytes
from holdfast._store.memory.backing import open_leftover
from tests.often import few
from tests.support import SCRIPTS, arena_files, wait_for_keeper_gone, wait_until

pytest.importorskip("torch")

SCRIPT = SCRIPTS / "train_frozen.py"
STATE_BYTES = 12_004_000
TOTAL = 300
SETTINGS = json.dumps({"max_overhead": 0.5, "keep_memory": "1min"})


def slots_of(folder) -> tuple[int, bool, int]:
    """How many slots are whole, whether they have memory in common, and what they take."""
    for path in arena_files(folder):
        with Arena(open_leftover(path)) as arena:
            return len(arena.whole()), bool(arena.shared), used_bytes(arena.descriptor)
    return 0, False, 0


@pytest.fixture(autouse=True)
def _no_memory_stays(folder):
    yield
    wait_for_keeper_gone(folder)
    for path in arena_files(folder):
        path.unlink()


@pytest.mark.parametrize("unfreeze_at", few([TOTAL, 150], [150]))
def test_a_run_with_frozen_weights_goes_on_to_the_same_bits(folder, start, unfreeze_at):
    undisturbed = start(
        folder.with_name("undisturbed"), TOTAL, unfreeze_at, 0, SETTINGS, script=SCRIPT
    )
    expected = undisturbed.state_hash()
    chance = random.Random(unfreeze_at)
    for _ in range(3):
        trainer = start(folder, TOTAL, unfreeze_at, 0.01, SETTINGS, script=SCRIPT)
        if trainer.ready() < 100:
            wait_until(lambda: slots_of(folder)[0] >= 2, what="two slots")
            _, is_shared, used = slots_of(folder)
            assert is_shared
            assert used <= 1.1 * STATE_BYTES
        time.sleep(chance.uniform(0.1, 0.8))  # a kill at any time
        trainer.kill()
        trainer.wait()
        wait_for_keeper_gone(folder)
    last = start(folder, TOTAL, unfreeze_at, 0, SETTINGS, script=SCRIPT)
    assert last.state_hash() == expected
    assert "from memory" in last.output
