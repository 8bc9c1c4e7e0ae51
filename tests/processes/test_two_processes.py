"""One run folder, one training: who has it, who may take it, who must let go."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest

import holdfast
from tests.cli.command import succeed
from tests.crash.stages import has_snapshot
from tests.processes.conftest import EAGER
from tests.support import (
    arena_files,
    checkpoint_steps,
    copy_living,
    journal_events,
    kill_both,
    run_id,
    wait_for_keeper_gone,
    wait_until,
)

_HELD = ("--total", 40, "--hold-at", 8, "--sleep", 0.06, "--settings", EAGER)


def test_a_second_process_is_refused_and_the_first_is_not_disturbed(
    folder, gate, light, light_reference
):
    first = light(folder, *_HELD)
    first.wait_for("holding")
    arenas = arena_files(folder)
    second = light(folder, "--total", 40)
    assert second.wait() == 1
    said = f"another process trains here, pid {first.pid} on {socket.gethostname()}.\n"
    assert f"holdfast: {folder}: {said}Stop it first (holdfast stop " in second.output
    assert "Traceback" not in second.output
    with pytest.raises(holdfast.RunIsLive) as refused:
        holdfast.Run(folder, number=1).__enter__()
    assert (refused.value.pid, refused.value.host) == (first.pid, socket.gethostname())
    assert arena_files(folder) == arenas != []
    assert len(list((folder / "attempts").iterdir())) == 1
    gate.touch()
    assert first.state_hash() == light_reference(40)


def test_a_run_that_was_moved_or_whose_end_could_not_be_noted_goes_on_in_the_same_process(
    folder, start, tmp_path
):
    script = tmp_path / "again.py"
    script.write_text(
        f"""
import pathlib
import numpy as np
import holdfast
from holdfast._run.exit import leaving as record

def refuse(*_, **__):
    raise OSError("no room")

def train(folder, last, then):
    weights = np.zeros(4)
    with holdfast.Run(folder, weights=weights) as run:
        for step in run.steps(last):
            weights += 1
        then()
    print("sum", weights.sum(), flush=True)

before, after = pathlib.Path({str(folder)!r}), pathlib.Path({str(folder) + "-moved"!r})
write_json, record.write_json = record.write_json, refuse
train(before, 3, lambda: None)
record.write_json = write_json
train(before, 5, lambda: before.rename(after))
train(after, 7, lambda: None)
"""
    )
    trainer = start(script=script)
    assert trainer.wait() == 0, trainer.output
    assert [line for line in trainer.output.splitlines() if line.startswith("sum")] == [
        "sum 12.0",
        "sum 20.0",
        "sum 28.0",
    ]


def test_a_copy_trains_beside_its_original_with_an_arena_and_an_id_of_its_own(
    folder, gate, light, light_reference, tmp_path
):
    settings = '{"max_overhead": 1.0, "checkpoint_every": 5}'
    held = ("--total", 40, "--sleep", 0.06, "--settings", settings, "--hold-at")
    original = light(folder, *held, 8)
    original.wait_for("holding")
    wait_until(lambda: checkpoint_steps(folder) == [5], what="the checkpoint")
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", folder, copy], check=True)
    copied = light(copy, *held, 12)
    assert copied.ready() == 5  # the snapshots are those of the original
    copied.wait_for("holding")
    assert "no room" not in original.output + copied.output
    arenas = arena_files(folder), arena_files(copy)
    assert all(arenas), arenas
    assert not set(arenas[0]) & set(arenas[1])
    shown = re.findall(r'^holdfast_run_info\{.*\bid="(.+?)"', succeed("metrics", tmp_path), re.M)
    assert sorted(shown) == sorted([run_id(folder), run_id(copy)])
    gate.touch()
    assert original.state_hash() == copied.state_hash() == light_reference(40)


def test_of_two_that_start_at_once_one_trains(folder, gate, light, light_reference):
    both = [light(folder, "--total", 40, "--hold-at", 8) for _ in range(2)]
    wait_until(lambda: any(one.process.poll() is not None for one in both), 60, "the refusal")
    refused, other = sorted(both, key=lambda one: one.process.poll() is None)
    assert refused.wait() == 1
    assert f"pid {other.pid} on" in refused.output
    gate.touch()
    assert other.state_hash() == light_reference(40)
    assert len(journal_events(folder, "start")) == 1


def test_the_lease_of_a_dead_process_of_this_host_is_taken_over_at_once(
    folder, light, light_reference
):
    first = light(folder, *_HELD)
    first.wait_for("holding")
    wait_until(lambda: has_snapshot(folder, hashed=True), what="a snapshot that can be checked")
    kill_both(folder, first)
    assert not (folder / "attempts/0001/exit.json").exists()
    second = light(folder, "--total", 40)
    assert second.ready() > 0
    assert "watching" not in second.output
    assert second.state_hash() == light_reference(40)


def _move_elsewhere(folder: Path) -> None:
    """Make the last attempt one of another machine that did not say goodbye."""
    path = folder / "attempts/0001/lease.json"
    lease = json.loads(path.read_text())
    lease["process"].update(host="elsewhere", boot="another")
    path.write_text(json.dumps(lease))
    (folder / "attempts/0001/exit.json").unlink()


def _killed_at_8(folder: Path, light) -> int:
    first = light(folder, *_HELD)
    in_memory = int(first.wait_for("holding").split()[1])
    first.kill()
    first.wait()
    wait_for_keeper_gone(folder)
    return in_memory


@pytest.mark.nightly  # tests/unit/store/test_attempts.py has the judgement
def test_a_silent_process_of_another_host_is_taken_over_after_a_bounded_watch(
    folder, light, light_reference
):
    in_memory = _killed_at_8(folder, light)
    _move_elsewhere(folder)
    second = light(folder, "--total", 40)
    second.wait_for("was last used on elsewhere")
    assert "watching up to 15 s whether it is still alive" in second.output
    assert second.ready() == in_memory
    assert second.state_hash() == light_reference(40)


def test_a_live_process_of_another_host_is_refused(folder, light):
    _killed_at_8(folder, light)
    _move_elsewhere(folder)
    heartbeat = folder / "attempts/0001/heartbeat.json"
    record = json.loads(heartbeat.read_text())
    done = threading.Event()

    def beat() -> None:
        while not done.wait(1.0):
            record["beat"] += 1
            part = heartbeat.with_suffix(".part")
            part.write_text(json.dumps(record))
            part.replace(heartbeat)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        second = light(folder, "--total", 40)
        assert second.wait() == 1
    finally:
        done.set()
        beating.join()
    assert "another process trains here, pid " in second.output
    assert " on elsewhere." in second.output
    assert len(list((folder / "attempts").iterdir())) == 1


def test_a_finished_run_started_again_says_so_and_trains_nothing(folder, light, light_reference):
    assert light(folder, "--total", 20).wait() == 0
    again = light(folder, "--total", 20, "--hold-at", 0)
    assert again.state_hash() == light_reference(20)
    assert "finished at step 20 of 20; nothing left to train" in again.output
    assert "holding" not in again.output
    assert checkpoint_steps(folder) == [20]


def test_a_larger_total_goes_on_from_the_end(folder, light, light_reference):
    assert light(folder, "--total", 20).wait() == 0
    again = light(folder, "--total", 40)
    assert again.ready() == 20
    assert again.state_hash() == light_reference(40)


def test_a_folder_that_was_deleted_and_made_again_never_meets_the_old_arena(
    folder, light, light_reference
):
    first = light(folder, *_HELD)
    first.wait_for("holding")
    kill_both(folder, first)
    left = arena_files(folder)
    assert left != []
    former = run_id(folder)
    try:
        shutil.rmtree(folder)
        second = light(folder, "--total", 40)
        assert second.ready() == 0
        assert second.state_hash() == light_reference(40)
        assert run_id(folder) != former
    finally:
        for path in left:
            path.unlink(missing_ok=True)


def test_a_process_whose_run_was_taken_over_writes_nothing_more_and_leaves(folder, gate, light):
    # Each step waits for the checkpoint before it, and only checkpoints take slots: one is free.
    settings = '{"checkpoint_every": 1, "max_overhead": 0}'
    arguments = ("--hold-at", 8, "--patience", 5, "--settings", settings)
    trainer = light(folder, "--total", 400, *arguments)
    in_memory = int(trainer.wait_for("holding").split()[1])
    wait_until(lambda: checkpoint_steps(folder)[2:] == [in_memory], what="the last three")
    before = checkpoint_steps(folder)
    copy_living(folder / "attempts/0001", folder / ".newer")
    (folder / ".newer").rename(folder / "attempts/0002")
    gate.touch()
    assert trainer.wait() == 1
    assert f"holdfast: {folder}: attempt 2 " in trainer.output
    assert "This process writes nothing any more.\n" in trainer.lines
    assert "Traceback" not in trainer.output
    wait_for_keeper_gone(folder)
    assert checkpoint_steps(folder) == before
    assert not list((folder / "checkpoints").glob(".partial-*"))
    assert arena_files(folder) == []


def test_a_process_in_a_long_step_hears_of_the_takeover_too(folder, gate, light):
    """It has nothing to save, so it learns it from its keeper's heartbeat."""
    trainer = light(folder, "--total", 40, "--hold-at", 8, "--settings", '{"max_overhead": 0}')
    trainer.wait_for("holding")
    heartbeat = folder / "attempts/0001/heartbeat.json"

    def beats() -> int:
        found = json.loads(heartbeat.read_text())["beat"] if heartbeat.exists() else 0
        return found if isinstance(found, int) else 0  # else it has no keeper yet

    wait_until(beats)
    copy_living(folder / "attempts/0001", folder / ".newer")
    (folder / ".newer").rename(folder / "attempts/0002")
    first = beats()
    wait_until(lambda: beats() > first + 1)
    gate.touch()
    assert trainer.wait() == 1
    assert f"holdfast: {folder}: attempt 2 took over" in trainer.output
    assert checkpoint_steps(folder) == []
