"""What snapshots of a larger state take of the memory, and what a bound on it costs."""

from __future__ import annotations

import json

import pytest

from holdfast._store.memory.arena import used_bytes
from tests.cli.command import status_of, succeed
from tests.support import (
    arena_files,
    checkpoint_steps,
    wait_for_keeper_gone,
    wait_until,
)

SIZE = 1_600_000
STATE_BYTES = 8 * SIZE
HELD = ("--total", 40, "--size", SIZE, "--hold-at", 30, "--sleep", 0.02)


def settings(**chosen) -> tuple[str, str]:
    return "--settings", json.dumps({"max_overhead": 1.0, **chosen})


def test_two_slots_take_twice_the_state_and_the_status_says_so(folder, light):
    trainer = light(folder, *HELD, *settings())
    trainer.wait_for("holding")
    (path,) = arena_files(folder)
    wait_until(lambda: used_bytes(path) > 2.0 * STATE_BYTES)
    assert used_bytes(path) < 2.1 * STATE_BYTES
    found = wait_until(lambda: (s := status_of(folder))["slots"] == 2 and s)
    assert 2.0 * STATE_BYTES < found["slots_bytes"] < 2.1 * STATE_BYTES
    assert "two slots in memory, 26 MB" in succeed("status", folder)


@pytest.mark.nightly
def test_with_a_small_bound_there_is_one_slot_and_a_kill_between_copies_loses_nothing(
    folder, light, light_reference
):
    trainer = light(folder, *HELD, *settings(memory=int(1.5 * STATE_BYTES)))
    in_memory = int(trainer.wait_for("holding").split()[1])
    assert in_memory > 0
    said = (
        "memory=19 MB allows one snapshot in memory, not two: a kill while it is being replaced "
        "costs the work since the last checkpoint."
    )
    assert trainer.output.count(said) == 1
    (path,) = arena_files(folder)
    assert used_bytes(path) < 1.1 * STATE_BYTES
    wait_until(lambda: status_of(folder)["slots"] == 1)
    assert "one slot in memory" in succeed("status", folder)
    trainer.kill()
    trainer.wait()
    wait_for_keeper_gone(folder)
    assert checkpoint_steps(folder) == [in_memory]
    again = light(folder, "--total", 40, "--size", SIZE)
    assert again.ready() == in_memory
    assert again.state_hash() == light_reference(40, SIZE)
