"""Where /dev/shm or the memory is too small: less is promised, it is said, and it is kept."""

from __future__ import annotations

import signal
import subprocess
import time

from tests.small_shm import needs_namespace, small_shm
from tests.support import (
    arena_files,
    checkpoint_steps,
    journal_events,
    keepers,
    wait_for_keeper_gone,
    wait_until,
)

_HELD = ("--total", 40, "--hold-at", 8, "--sleep", 0.06)
_SIZE = 100_000  # three slots of 0.8 MB do not fit into 1 MB
_SMALL_SHM = small_shm("1m")


@needs_namespace
def test_with_a_small_shm_a_kill_is_survived_exactly_and_what_is_lost_is_said(
    folder, light, light_reference
):
    trainer = light(
        folder, *_HELD, "--size", _SIZE, "--settings", '{"max_overhead": 1.0}', prefix=_SMALL_SHM
    )
    in_memory = int(trainer.wait_for("holding").split()[1])
    assert in_memory > 0
    assert "/dev/shm has no room for the snapshots" in trainer.output
    assert "if both are killed, only the last checkpoint is left" in trainer.output
    assert arena_files(folder) == []
    trainer.kill()
    trainer.wait()
    wait_for_keeper_gone(folder)
    assert checkpoint_steps(folder) == [in_memory]
    again = light(folder, "--total", 40, "--size", _SIZE, prefix=_SMALL_SHM)
    assert again.ready() == in_memory
    assert again.state_hash() == light_reference(40, _SIZE)


@needs_namespace
def test_with_a_small_shm_a_replaced_keeper_still_has_the_snapshots(folder, light):
    trainer = light(
        folder,
        *("--total", 200, "--hold-at", 60, "--sleep", 0.03, "--size", _SIZE),
        *("--settings", '{"max_overhead": 1.0}'),
        prefix=_SMALL_SHM,
    )
    trainer.wait_for("/dev/shm has no room")
    keepers(folder)[0].kill()
    trainer.wait_for("started another")
    in_memory = int(trainer.wait_for("holding").split()[1])
    trainer.kill()
    trainer.wait()
    wait_for_keeper_gone(folder)
    assert checkpoint_steps(folder) == [in_memory]


@needs_namespace
def test_what_fits_into_a_small_shm_stays_there(folder, light):
    trainer = light(folder, *_HELD, prefix=_SMALL_SHM)
    trainer.wait_for("holding")
    assert "no room" not in trainer.output
    held = subprocess.run(
        ["nsenter", "--mount", "--target", str(trainer.pid), "ls", "/dev/shm"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert held.startswith("holdfast-")


def test_without_memory_for_slots_checkpoints_go_on_and_sigterm_is_still_exact(
    folder, gate, light, light_reference
):
    trainer = light(folder, *_HELD, "--room", 1 << 20, "--settings", '{"checkpoint_every": 5}')
    trainer.wait_for("holding")
    assert trainer.output.count("no snapshots in memory: too little memory") == 1
    assert "Only checkpoints on disk are kept" in trainer.output
    assert checkpoint_steps(folder) == [5]
    trainer.send(signal.SIGTERM)
    trainer.wait_for("SIGTERM: step 9")
    gate.touch()
    assert trainer.wait() == 143
    assert checkpoint_steps(folder) == [5, 9]
    again = light(folder, "--total", 40, "--room", 1 << 20)
    assert again.ready() == 9
    assert again.state_hash() == light_reference(40)


def test_without_memory_for_slots_a_kill_costs_the_work_since_the_last_checkpoint(
    folder, light, light_reference
):
    trainer = light(folder, *_HELD, "--room", 1 << 20, "--settings", '{"checkpoint_every": 5}')
    trainer.wait_for("holding")
    trainer.kill()
    trainer.wait()
    wait_for_keeper_gone(folder)
    assert checkpoint_steps(folder) == [5]
    again = light(folder, "--total", 40, "--room", 1 << 20)
    assert again.ready() == 5
    assert again.state_hash() == light_reference(40)


def test_without_memory_for_slots_a_second_ctrl_c_names_the_last_checkpoint(folder, light):
    trainer = light(folder, *_HELD, "--room", 1 << 20, "--settings", '{"checkpoint_every": 5}')
    trainer.wait_for("holding")
    trainer.send(signal.SIGINT)
    wait_until(lambda: journal_events(folder, "signal"))
    time.sleep(0.25)  # what comes sooner counts as the same press
    trainer.send(signal.SIGINT)
    assert trainer.wait(20) == 130
    assert "leaving at once (second Ctrl-C): step 5 is durable" in trainer.output
