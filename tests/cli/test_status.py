"""`holdfast status`: how a run does, and what of it is safe."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from holdfast._environment.processes.identity import of_process
from tests.cli.command import TRAIN_NUMPY, environment, holdfast, status_of, succeed
from tests.cli.screen import Picture
from tests.crash.stages import has_snapshot
from tests.many_runs import make_one
from tests.support import kill_both, wait_for_keeper_gone, wait_until
from tests.unit.report_folder import BEGIN, Book

MIB = 1 << 20
_SAFE = ("memory", "disk", "age")


def training(start, folder, *arguments):
    trainer = start(folder, "--sleep", 0.01, *arguments, script=TRAIN_NUMPY)
    trainer.ready()
    return trainer


def test_a_training_run_says_what_is_in_memory_and_on_disk(folder, start):
    trainer = training(start, folder, "--total", 90_000, "--settings", '{"checkpoint_every": 20}')
    wait_until(lambda: status_of(folder)["memory_step"] and status_of(folder)["disk_step"])
    found = status_of(folder)
    assert found["state"] == "training"
    assert found["is_live"]
    assert (found["total"], found["attempt"], found["pid"]) == (90_000, 1, trainer.pid)
    assert found["slots"] == 3
    shown = succeed("status", folder)
    assert "training, step" in shown
    assert "of 90000 (attempt 1)" in shown
    assert "in memory, step" in shown
    assert "three slots" in shown
    assert f"pid {trainer.pid} on" in shown


def test_two_slots_and_what_they_mean_are_told(folder, start):
    training(start, folder, "--room", 32 * MIB + 90_000)
    wait_until(lambda: status_of(folder)["slots"] == 2)
    assert "no newer snapshot is taken" in succeed("status", folder)


def test_snapshots_outside_dev_shm_say_when_they_are_lost(folder, start):
    training(start, folder, "--no-shm")
    wait_until(lambda: status_of(folder)["in_shm"] is False)
    assert "if trainer and keeper are both killed" in succeed("status", folder)


def test_a_run_without_snapshots_says_so(folder, start):
    training(start, folder, "--room", 1)
    wait_until(lambda: status_of(folder)["step"])
    assert "a kill would cost" in succeed("status", folder)


def test_a_finished_run_is_finished(folder, start):
    trainer = start(folder, "--total", 5, script=TRAIN_NUMPY)
    assert trainer.wait() == 0
    found = status_of(folder)
    assert (found["state"], found["step"], found["disk_step"]) == ("finished", 5, 5)
    again = start(folder, "--total", 5, script=TRAIN_NUMPY)
    assert again.wait() == 0
    found = status_of(folder)
    assert (found["state"], found["attempt"]) == ("finished", 2)


def test_a_finished_run_that_goes_on_is_not_finished(folder, start):
    assert start(folder, "--total", 5, script=TRAIN_NUMPY).wait() == 0
    longer = training(start, folder, "--total", 90_000)
    wait_until(lambda: status_of(folder)["step"] > 5)
    assert status_of(folder)["state"] == "training"
    longer.kill()
    longer.wait()
    wait_for_keeper_gone(folder)
    assert status_of(folder)["state"] == "died"


def test_a_killed_run_died_and_says_where_it_goes_on(folder, start):
    trainer = training(start, folder)
    wait_until(lambda: status_of(folder)["memory_step"])
    trainer.kill()
    trainer.wait()
    wait_for_keeper_gone(folder)
    found = status_of(folder)
    assert found["state"] == "died"
    assert found["last_exit"]["status"] is None
    assert f"goes on at step {found['disk_step']}" in succeed("status", folder)


def test_what_trainer_and_keeper_left_in_memory_is_told(folder, start):
    trainer = training(start, folder)
    wait_until(lambda: has_snapshot(folder, hashed=True, after=0))
    kill_both(folder, trainer)
    found = status_of(folder)
    assert found["state"] == "died"
    assert found["disk_step"] is None
    assert found["memory_step"] > 0
    assert f"step {found['memory_step']} in memory, nothing on disk" in succeed("status", folder)
    second = start(folder, script=TRAIN_NUMPY)
    assert second.ready() == found["memory_step"]


def test_an_exception_and_a_stop_are_told_apart(folder, tmp_path, start):
    assert start(folder, "--raise-at", 3, script=TRAIN_NUMPY).wait() == 1
    assert status_of(folder)["state"] == "failed"
    assert "ValueError: planted (status 1)" in succeed("status", folder)
    stopped = training(start, tmp_path / "stopped")
    stopped.send(signal.SIGTERM)
    assert stopped.wait() == 143
    found = status_of(tmp_path / "stopped")
    assert (found["state"], found["last_exit"]["how"]) == ("stopped", "SIGTERM")


def test_a_run_that_is_asked_to_stop_in_a_long_step_is_stopping(folder, start):
    trainer = start(folder, "--sleep", 4, script=TRAIN_NUMPY)
    trainer.ready()
    wait_until(lambda: status_of(folder)["state"] == "training")
    trainer.send(signal.SIGTERM)
    wait_until(lambda: status_of(folder)["state"] == "stopping")


def test_a_bare_loop_that_ends_is_closed(folder, start):
    assert start(folder, "--total", 5, "--bare-loop", script=TRAIN_NUMPY).wait() == 0
    found = status_of(folder)
    assert (found["state"], found["total"]) == ("closed", None)


def test_a_state_that_does_not_fit_could_not_start(folder, start):
    assert start(folder, "--total", 5, script=TRAIN_NUMPY).wait() == 0
    script = folder.parent / "other.py"
    script.write_text(
        f"import numpy, holdfast\nwith holdfast.Run({str(folder)!r}, other=numpy.ones(3)): pass\n"
    )
    assert start(script=script).wait() == 1
    found = status_of(folder)
    assert (found["state"], found["attempt"], found["disk_step"]) == ("could not start", 2, 5)
    assert found["step"] == 5
    shown = succeed("status", folder)
    assert "could not start, step 5 of 5" in shown
    assert "put right what kept it from starting; it goes on at step 5" in shown
    assert "the same command" not in shown


def test_a_folder_of_runs_is_a_table_with_names_as_they_are(tmp_path, start):
    names = ["a/one", "[red]two[/red]", "deep/er/three", "a\nb", ":smile:"]
    for name in names:
        assert start(tmp_path / name, "--total", 2, script=TRAIN_NUMPY).wait() == 0
    shown = succeed("status", cwd=tmp_path)
    assert "\x1b" not in shown
    for name in ("a/one", "[red]two[/red]", "deep/er/three", "a\\nb", ":smile:"):
        assert sum(line.startswith(f"{name} ") for line in shown.splitlines()) == 1, shown
    assert len(shown.splitlines()) == len(names) + 1
    assert shown.count("finished") == len(names)
    found = json.loads(succeed("status", "--json", cwd=tmp_path))
    assert sorted(run["folder"] for run in found) == sorted(names)
    assert "[red]two[/red]: finished" in succeed("status", "[red]two[/red]", cwd=tmp_path)


def test_no_line_is_wider_than_the_terminal(tmp_path, start):
    for name in ("one", "a-rather-long-name-of-a-run-that-does-not-fit-in-its-column"):
        assert start(tmp_path / name, "--total", 2, script=TRAIN_NUMPY).wait() == 0
    for arguments in (["status"], ["status", "one"], ["ls", "one"]):
        shown = succeed(*arguments, cwd=tmp_path, env=environment(COLUMNS="60"))
        assert max(map(len, shown.splitlines())) <= 60, shown


@pytest.mark.parametrize(("extra", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_gets_colours_unless_told_otherwise(folder, start, extra, coloured):
    assert start(folder, "--total", 2, script=TRAIN_NUMPY).wait() == 0
    picture = Picture("status", folder, env=environment(TERM="xterm", COLUMNS="80", **extra))
    assert picture.returncode == 0
    shown = picture.raw.decode()
    assert "finished" in shown
    assert ("\x1b[1;32m" in shown) == coloured


def test_status_changes_nothing_in_the_folder(folder, start):
    assert start(folder, "--total", 2, script=TRAIN_NUMPY).wait() == 0
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    for command in ("status", "ls", "verify"):
        succeed(command, folder)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_a_run_that_was_never_trained_is_new(folder):
    folder.mkdir()
    (folder / "run.json").write_text('{"run_id": "0"}')
    assert status_of(folder)["state"] == "new"
    assert "no training has begun" in succeed("status", folder)


def test_a_garbled_folder_is_shown_as_far_as_it_can_be_read(folder, start):
    assert start(folder, "--total", 5, script=TRAIN_NUMPY).wait() == 0
    for name in ("lease.json", "heartbeat.json", "origin.json", "exit.json"):
        (folder / "attempts" / "0001" / name).write_bytes(b'{"torn')
    with (folder / "journal.jsonl").open("ab") as file:
        file.write(b"\xff\xfe{torn\n[1]\n")
    done = holdfast("status", folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Traceback" not in done.stdout


def test_looking_needs_neither_numpy_nor_a_framework(folder, start):
    assert start(folder, "--total", 2, script=TRAIN_NUMPY).wait() == 0
    program = (
        "import sys; from pathlib import Path\n"
        "from holdfast._report.status.gather import summarize\n"
        f"summarize(Path({str(folder)!r}))\n"
        "print([m for m in ('click', 'rich', 'numpy', 'torch', 'psutil') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.fixture
def half_way(folder):
    """A run that seems to train in this process, at two steps a second."""
    book, now = Book(folder), time.time() - BEGIN
    book.begin(1, now - 102)
    lease = {"process": asdict(of_process(os.getpid())), "since": time.time() - 102}
    book.layout.lease(1).write_text(json.dumps(lease))
    book.rows(1, now - 250, 0, 500, 0.5)
    beat = {"beat": 1, "time": time.time(), "step": 500, "slots": 3, "in_shm": True}
    book.layout.heartbeat(1).write_text(json.dumps(beat))
    return folder


def test_a_live_run_tells_its_progress_the_time_left_and_its_newest_loss(half_way):
    lines = succeed("status", half_way).splitlines()
    progress = next(line for line in lines if "progress" in line)
    assert "[##########..........] 50%, about 4 min left, 2 steps/s" in progress
    assert any(line.split() == ["newest", "loss", "-399.9"] for line in lines)


def test_the_table_has_columns_of_live_runs_as_far_as_there_is_room(half_way, tmp_path):
    make_one(tmp_path / "ended", 1)
    wide = succeed("status", tmp_path, env=environment(COLUMNS="140"))
    head, *rows = wide.splitlines()
    assert head.split() == ["run", "state", "step", "progress", "left", "newest", *_SAFE]
    live = next(row for row in rows if "training" in row)
    assert "[#####.....]  50%" in live
    assert "loss -399.9" in live
    narrow = succeed("status", tmp_path, env=environment(COLUMNS="80"))
    assert narrow.splitlines()[0].split() == ["run", "state", "step", "done", "left", *_SAFE]
    shutil.rmtree(half_way)
    make_one(tmp_path / "other", 2)
    assert "left" not in succeed("status", tmp_path)
