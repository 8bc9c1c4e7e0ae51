"""`holdfast stacks`: where every process of a run stands now."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.cli.command import holdfast, succeed
from tests.hangs.stage import Stage
from tests.hangs.table import place_of
from tests.support import keepers, wait_until


@pytest.fixture
def stage(tmp_path):
    found = Stage(tmp_path)
    yield found
    found.end()


def test_a_run_that_hangs_and_its_children(stage):
    trainer = stage.start("pool-stuck")
    trainer.wait_for("hanging")
    wait_until(lambda: len(_lines(stage)) == 3, 20, "the two workers")
    own, *children = _lines(stage)
    assert place_of("hanging.py", "pool") in own
    (stuck,) = (line for line in children if place_of("hanging.py", "lock") in line)
    assert re.match(r"1 child \(pid \d+\) in ", stuck)
    shown = succeed("stacks", stage.folder)
    first, *rest = shown.splitlines()
    assert first.startswith(f"{stage.folder}: attempt 1, step {stage.step}, 3 processes, ")
    assert rest[-1] == f"Every process and thread: holdfast stacks {stage.folder} --all"


def _lines(stage: Stage) -> list[str]:
    found = json.loads(succeed("stacks", stage.folder, "--json"))
    assert (found["by"], found["missing"], found["attempt"]) == ("keeper", [], 1)
    return list(found["lines"])


def test_all_of_it_has_every_thread_with_its_frames(stage):
    trainer = stage.start("queue")
    trainer.wait_for("hanging")
    shown = succeed("stacks", stage.folder, "--all")
    assert f"pid {trainer.pid} on {os.uname().nodename}" in shown
    assert re.search(r"thread \d+ feeder: sleeps", shown)
    line = place_of("hanging.py", "queue").partition(":")[2]
    assert re.search(rf"wait_for_an_empty_queue \(/.*hanging\.py:{line}\)", shown)
    assert "(holdfast-" not in shown.partition("\n\n")[0]


def test_without_a_keeper_the_processes_here_are_looked_at(stage):
    trainer = stage.start("call")
    trainer.wait_for("hanging")
    for keeper in keepers(stage.folder):
        keeper.kill()
    wait_until(lambda: not keepers(stage.folder), 20, "its end")
    found = json.loads(succeed("stacks", stage.folder, "--json"))
    assert found["by"] == "here"
    assert place_of("hanging.py", "call") in found["lines"][0]
    assert not list(stage.layout.requests.iterdir())


def test_any_python_process():
    program = "import time\ndef rest():\n    time.sleep(60)\nprint('up', flush=True)\nrest()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            shown = succeed("stacks", process.pid, "--all")
        finally:
            process.kill()
    assert shown.startswith(f"process {process.pid}, 1 thread\n")
    assert "rest (<string>:3)" in shown


def test_what_is_no_run_and_no_process(tmp_path):
    for word, says in (
        ("nothing", "there is no such folder, and it is not the number of a process."),
        (str(tmp_path), "there is no run here"),
        ("999999999", "there is no such process on"),
    ):
        done = holdfast("stacks", word)
        assert (done.returncode, done.stdout) == (2, "")
        first, second = done.stderr.splitlines()
        assert says in first
        assert "holdfast" in second


def test_a_run_that_has_ended_says_where_to_look_instead(stage):
    trainer = stage.start("waits", "--total", 3)
    assert trainer.wait() == 0
    stage.layout.hang_text(1).write_text("as it hung")
    done = holdfast("stacks", stage.folder)
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert lines[0].endswith("no process trains here now, so there are no stacks to see.")
    assert lines[1].endswith("attempts/0001/hang.txt")
    assert lines[2] == f"How it ended: holdfast why {stage.folder}"


def test_a_run_on_another_machine_whose_keeper_does_not_answer(stage, monkeypatch):
    from holdfast._report.status import ask

    trainer = stage.start("lock")
    trainer.wait_for("hanging")
    lease = json.loads(stage.layout.lease(1).read_text())
    lease["process"] |= {"host": "node7", "boot": "another"}
    for keeper in keepers(stage.folder):
        keeper.suspend()  # it cannot answer, and its heart does not beat
    try:
        stage.layout.lease(1).write_text(json.dumps(lease))
        monkeypatch.setattr(ask, "is_live", lambda *_: True)
        monkeypatch.setattr("holdfast._store.folder.requests.is_live", lambda *_: True)
        assert ask.ask_look(stage.folder, 0.5) is None
        assert not list(stage.layout.requests.iterdir())
    finally:
        for keeper in keepers(stage.folder):
            keeper.resume()
