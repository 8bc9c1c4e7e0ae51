"""The arena of a killed attempt waits for the next one, which goes on from it and keeps it."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast._store.memory.arena import Arena
from holdfast._store.memory.backing import open_leftover
from tests.crash.stages import has_snapshot
from tests.support import (
    SCRIPTS,
    Trainer,
    arena_files,
    checkpoint_steps,
    keepers,
    run_id,
    wait_for_keeper_gone,
    wait_until,
)

LIGHT = SCRIPTS / "light.py"
KEPT = ("--settings", json.dumps({"keep_memory": "5min", "max_overhead": 0.5}))
LONG = ("--total", 100_000, "--sleep", 0.002, *KEPT)


@pytest.fixture(autouse=True)
def _no_memory_stays(folder: Path) -> Iterator[None]:
    yield
    wait_for_keeper_gone(folder)
    for path in arena_files(folder):
        path.unlink()
    wait_until(lambda: not guards(folder), 10, "the guard's end")


def guards(folder: Path) -> list[psutil.Process]:
    """The processes that guard a waiting arena of this run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if "holdfast._store.memory.waiting" in words and run_id(folder) in words:
                found.append(process)
    return found


def waiting_arena(folder: Path) -> Arena:
    """The one arena of the run, which waits."""
    (path,) = arena_files(folder)
    descriptor = open_leftover(path)
    assert descriptor is not None
    arena = Arena(descriptor)
    assert arena.waits_until is not None
    return arena


def train_and_kill(folder: Path, start, *more, number: int = signal.SIGKILL) -> Trainer:
    """Train until there is a snapshot of this attempt, and end it."""
    trainer = start(folder, *LONG, *more, script=LIGHT)
    trainer.ready()
    attempt = int(trainer.wait_for("ready ").split()[3])
    wait_until(
        lambda: has_snapshot(folder) and all(f"-a{attempt}-" in p.name for p in arena_files(folder)),
        what="a snapshot of this attempt",
    )
    trainer.send(number)
    trainer.wait()
    wait_for_keeper_gone(folder)
    return trainer


def test_a_killed_run_goes_on_from_memory_to_the_same_bits_twice_in_a_row(folder, start):
    undisturbed = start(folder.with_name("undisturbed"), "--total", 3000, script=LIGHT)
    expected = undisturbed.state_hash()
    inodes = []
    for attempt in (1, 2):
        train_and_kill(folder, start)
        (path,) = arena_files(folder)
        assert f"-a{attempt}-" in path.name
        inodes.append(path.stat().st_ino)
        with waiting_arena(folder) as arena:
            newest = arena.newest()
            assert newest is not None
            assert newest.is_hashed
            assert newest.step == max(checkpoint_steps(folder)) < 3000
    assert inodes[0] == inodes[1]  # the second attempt has used the slots of the first
    last = start(folder, "--total", 3000, *KEPT, script=LIGHT)
    assert last.state_hash() == expected
    assert "from memory" in last.output
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []
    wait_until(lambda: not guards(folder), what="the guards' end")
