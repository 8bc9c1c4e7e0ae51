"""After every kind of end: no process, no shared memory, no live lease, and a record of how."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import psutil
import pytest

import holdfast
from holdfast._store.folder.attempts import is_live
from holdfast._store.folder.layout import RunLayout
from tests.crash.stages import has_snapshot
from tests.support import (
    SCRIPTS,
    arena_files,
    checkpoint_steps,
    keepers,
    kill_both,
    wait_for_keeper_gone,
    wait_until,
)

LIGHT = SCRIPTS / "light.py"
LONG = ("--total", 100_000, "--sleep", 0.005)


def check_nothing_left(folder, attempt: int = 1) -> dict:
    """No trace of the run but its folder; returns what exit.json says of the attempt."""
    layout = RunLayout(folder)
    wait_for_keeper_gone(folder)
    logs = [path.read_text() for path in sorted(layout.attempts.glob("*/keeper*.log"))]
    assert arena_files(folder) == [], [*logs, layout.journal.read_text()]
    assert not is_live(layout, attempt)
    assert layout.partial_folders() == []
    assert list(layout.requests.iterdir()) == []
    claims = [path.name for path in layout.attempts.iterdir() if path.name.startswith(".")]
    assert claims == []
    with pytest.raises(holdfast.FolderError, match="no process trains here"):
        holdfast.stop(folder)
    return json.loads(layout.exit(attempt).read_text())


def begin(folder, start):
    """A training that has taken a snapshot."""
    trainer = start(folder, *LONG, script=LIGHT)
    trainer.ready()
    heartbeat = RunLayout(folder).heartbeat(1)
    wait_until(lambda: has_snapshot(folder) and heartbeat.exists(), what="a snapshot")
    return trainer


def test_a_finished_run_leaves_nothing(folder, start):
    trainer = start(folder, "--total", 50, script=LIGHT)
    trainer.state_hash()
    found = check_nothing_left(folder)
    assert (found["status"], found["how"], found["step"]) == (0, "closed", 50)
    assert found["durable_step"] == 50


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_leaves_nothing(number, status, folder, start):
    trainer = begin(folder, start)
    trainer.send(number)
    assert trainer.wait() == status
    found = check_nothing_left(folder)
    assert (found["status"], found["how"]) == (status, signal.Signals(number).name)
    assert found["durable_step"] == found["step"] == max(checkpoint_steps(folder))


def test_a_killed_trainer_leaves_nothing(folder, start):
    trainer = begin(folder, start)
    trainer.kill()
    assert trainer.wait() == -signal.SIGKILL
    found = check_nothing_left(folder)
    assert found["status"] is None
    assert found["how"] in ("was killed by SIGKILL", "died")  # an older kernel does not say
    assert found["durable_step"] == max(checkpoint_steps(folder))
    assert found["durable_step"] <= found["step"]


def test_a_killed_keeper_leaves_nothing_when_the_run_ends(folder, start):
    trainer = begin(folder, start)
    killed = keepers(folder)[0]
    killed.kill()
    trainer.wait_for("started another")
    trainer.send(signal.SIGTERM)
    assert trainer.wait() == 143
    found = check_nothing_left(folder)
    assert (found["status"], found["durable_step"]) == (143, max(checkpoint_steps(folder)))


def test_trainer_and_keeper_both_killed_leave_nothing_after_the_next_start(folder, start):
    trainer = begin(folder, start)
    wait_until(lambda: has_snapshot(folder, hashed=True), what="a hashed snapshot")
    kill_both(folder, trainer)
    assert arena_files(folder) != []
    assert not is_live(RunLayout(folder), 1)
    after = start(folder, *LONG, script=LIGHT)
    assert after.ready() > 0
    assert "from memory" in after.output
    after.send(signal.SIGTERM)
    assert after.wait() == 143
    assert check_nothing_left(folder, 2)["status"] == 143
    assert not RunLayout(folder).exit(1).exists()  # nobody was left to write it


_LOCK = """
import fcntl, sys, time
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX, 3, 0)
print("locked", flush=True)
time.sleep(1.5)
"""


def test_a_slot_that_a_dying_keeper_still_locks_is_salvaged_too(folder, start):
    trainer = begin(folder, start)
    wait_until(lambda: has_snapshot(folder, hashed=True), what="a hashed snapshot")
    kill_both(folder, trainer)
    (arena,) = arena_files(folder)
    dying = subprocess.Popen([sys.executable, "-c", _LOCK, arena], stdout=subprocess.PIPE)
    with dying:
        assert dying.stdout.readline() == b"locked\n"
        resumed = start(folder, "--total", 0, script=LIGHT)
        resumed.state_hash()
    assert resumed.wait() == 0
    check_nothing_left(folder, 2)
    assert len(RunLayout(folder).checkpoint_folders()) == 1


@pytest.mark.parametrize("steps", [0, 1])
def test_what_was_salvaged_is_gone_even_after_the_shortest_of_runs(steps, folder, start):
    trainer = begin(folder, start)
    wait_until(lambda: has_snapshot(folder, hashed=True), what="a hashed snapshot")
    kill_both(folder, trainer)
    # Ends while the keeper may still be writing what it found in memory.
    resumed = start(folder, "--total", steps, script=LIGHT)
    resumed.state_hash()
    check_nothing_left(folder, 2)
    assert max(checkpoint_steps(folder)) > 0


def test_what_was_left_in_memory_goes_even_if_the_next_keeper_is_killed_at_once(folder, start):
    trainer = begin(folder, start)
    wait_until(lambda: has_snapshot(folder, hashed=True), what="a hashed snapshot")
    kill_both(folder, trainer)
    after = start(folder, *LONG, script=LIGHT)
    wait_until(lambda: psutil.Process(after.pid).children(), what="the next keeper")[0].kill()
    after.wait_for("started another")
    after.send(signal.SIGTERM)
    assert after.wait() == 143
    check_nothing_left(folder, 2)


def test_an_error_in_a_step_leaves_nothing(folder, start):
    trainer = start(folder, "--total", 100, "--raise-at", 40, "--sleep", 0.002)
    assert trainer.wait() == 1
    assert "planted" in trainer.output
    found = check_nothing_left(folder)
    assert (found["status"], found["how"]) == (1, "ValueError: planted")
    assert found["durable_step"] == max(checkpoint_steps(folder)) <= 40
