"""A run folder that is removed while its run trains: the state in memory is not lost."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import _errors
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.memory.arena import Arena
from holdfast._store.memory.backing import open_leftover
from tests.cli.command import holdfast, succeed
from tests.processes.conftest import EAGER
from tests.support import arena_files, checkpoint_steps, run_id, wait_for_keeper_gone, wait_until

_HELD = ("--total", 40, "--hold-at", 8, "--sleep", 0.06, "--settings", EAGER)
_HOW = re.compile(r"To go on there, within a day: holdfast adopt (\S+) --from (\S+)\n")


@pytest.fixture
def removed(folder, light) -> Iterator:
    """A run in step 8 whose folder is gone, with the step and the arena that are in memory."""
    trainer = light(folder, *_HELD)
    step = int(trainer.wait_for("holding").split()[1])
    (arena,) = arena_files(folder)
    # A keeper that starts late has not got the arena yet.
    beat = RunLayout(folder).heartbeat(1)
    wait_until(lambda: read_json(beat).get("memory_step") == step, what="the keeper")
    gone = folder.with_name("gone")
    folder.rename(gone)  # first: its keeper writes into it all the time
    shutil.rmtree(gone)
    yield trainer, step, arena
    trainer.kill()
    wait_for_keeper_gone(folder)
    arena.unlink(missing_ok=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_the_next_start_says_what_is_in_memory_and_the_run_goes_on_exactly_there(
    number, removed, folder, gate, light, light_reference
):
    first, step, _ = removed
    first.send(number)
    gate.touch()
    status = first.wait()
    if number == signal.SIGTERM:
        assert status == _errors.NOT_DURABLE
        assert "The run folder was removed or moved. Start the same command again" in first.output
        step = int(re.search(r"step (\d+) stays in the memory", first.output)[1])
    # At once: its keeper is perhaps at work still.
    second = light(folder, "--total", 40)
    assert second.ready() == 0
    assert second.state_hash() == light_reference(40)
    assert f"Step {step} of that run is in the memory of this machine." in second.output
    into, arena = _HOW.search(second.output).groups()
    assert into == f"{folder}-step-{step}"
    assert f"step {step}, in the memory" in succeed("adopt", into, "--from", arena)
    again = light(Path(into), "--total", 40)
    assert again.ready() == step
    assert f"resumed at step {step} from memory" in again.output
    assert again.state_hash() == light_reference(40)
    wait_for_keeper_gone(Path(into))
    assert arena_files(Path(into)) == []
    assert run_id(Path(into)) != run_id(folder)


def test_one_that_still_trains_is_told_and_writes_nothing_into_the_folder_of_the_other(
    removed, folder, gate, light
):
    first, _, arena = removed
    second = light(folder, "--total", 10)
    assert second.wait() == 0
    assert f"the run that trained here goes on without it (pid {first.pid})" in second.output
    refused = holdfast("adopt", f"{folder}-x", "--from", arena)
    assert refused.returncode == 1
    assert "a process has it open (pid" in refused.stderr
    assert not Path(f"{folder}-x").exists()
    files = [RunLayout(folder).exit(1), RunLayout(folder).heartbeat(1)]
    before = [path.read_bytes() for path in files]
    gate.touch()
    assert first.wait() == 74
    assert "The run folder was removed or moved. Start the same command again" in first.output
    assert f"{folder} was removed, and is the folder of another run now" in first.output
    wait_for_keeper_gone(folder)
    assert checkpoint_steps(folder) == [10]
    assert [path.read_bytes() for path in files] == before


def test_after_a_day_it_is_removed(removed, folder, light):
    first, _, arena = removed
    first.kill()
    first.wait()
    wait_for_keeper_gone(folder)
    _make_old(arena)
    second = light(folder, "--total", 10)
    assert second.wait() == 0
    assert "adopt" not in second.output
    assert not arena.exists()


def test_a_folder_that_is_removed_after_the_end_leaves_nothing_in_memory(folder, light):
    trainer = light(folder, "--total", 10)
    assert trainer.wait() == 0
    left = arena_files(folder)
    shutil.rmtree(folder)
    wait_for_keeper_gone(folder)
    assert not any(path.exists() for path in left)
    second = light(folder, "--total", 10)
    assert second.wait() == 0
    assert "the folder was removed" not in second.output


def _make_old(path: Path) -> None:
    long_ago = int((time.time() - 90_000) * 1e9)
    with Arena(open_leftover(path)) as arena:
        for record in arena.whole():
            arena._set(record.slot, 3, long_ago)
