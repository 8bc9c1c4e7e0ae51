"""Hangs of one process: each is found, and the verdict names the line that it stands on."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from tests.cli.command import status_of, succeed
from tests.hangs.dead_disk import dead_disk, why_not
from tests.hangs.stage import Stage, check
from tests.hangs.table import DISK, HANGS, SCRIPTS, cases
from tests.support import journal_events, wait_until

_LOCK = HANGS[0]


def _selected(request):
    """Of the hangs those whose test is to run in this session."""
    items = (item for item in request.session.items if item.path == request.path)
    return [item.callspec.params["hang"] for item in items if "stages" in item.fixturenames]


@pytest.fixture(scope="module")
def stages(tmp_path_factory, request):
    """All of them at once: most of a hang is waiting."""
    found = {}
    try:
        for hang in _selected(request):
            found[hang] = Stage(tmp_path_factory.mktemp("hang"))
            found[hang].start(hang.how, "--timeout", hang.timeout)
        yield found
    finally:
        for stage in found.values():
            stage.end()


# Over 5 s: a hang is called one after its time and two looks.
@pytest.mark.parametrize("hang", cases(HANGS))
def test_it_is_found_and_named(hang, stages, keep_evidence):
    stage = stages[hang]
    record = stage.found()
    assert record["cause"] == hang.cause.value, json.dumps(record, indent=1)
    assert record["how"] == "given"
    verdict = stage.why()
    check(verdict, hang)
    assert (verdict["step"], verdict["host"]) == (stage.step, os.uname().nodename)
    (event,) = journal_events(stage.folder, "hang")
    assert event["cause"] == hang.cause.value
    keep_evidence("hangs", hang.name, "live", stage.home, SCRIPTS / hang.script)
    # Without a supervisor that was told to, nothing is ended.
    assert stage.is_alive
    stage.end()


@pytest.mark.nightly  # its evidence is judged in tests/unit/diagnose/test_recorded_hangs.py
def test_a_file_system_that_does_not_answer_holds_nobody_else(stage, keep_evidence):
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with dead_disk(stage.home / "nfs") as place:
        trainer = stage.start(DISK.how, "--timeout", DISK.timeout, "--place", place)
        trainer.wait_for("hanging")
        stage.found()
        check(stage.why(), DISK)
        keep_evidence("hangs", DISK.name, "live", stage.home, SCRIPTS / DISK.script)
        trainer.kill()
        # It survives even that, until the file system answers.
        time.sleep(0.5)
        assert trainer.process.poll() is None
        began = time.monotonic()
        check(stage.why(), DISK)
        assert time.monotonic() - began < 30
    assert trainer.wait(20) == -signal.SIGKILL


# The lock is found above; what is learned is in tests/unit/environment/test_patience.py.
@pytest.mark.nightly
def test_with_steps_of_50_ms_a_hang_is_found_within_30_s_without_being_told_how_long(stage):
    trainer = stage.start(_LOCK.how, "--sleep", 0.05, "--at", 60)
    trainer.wait_for("hanging")
    began = time.monotonic()
    record = stage.found(30.0)
    assert time.monotonic() - began < 30
    assert record["how"] == "learned"
    assert record["usual_step_seconds"] == pytest.approx(0.05, rel=0.8)
    check(stage.why(), _LOCK)


# tests/unit/keeper/test_hang_watch.py: test_the_first_step_is_as_old_as_its_loop
@pytest.mark.nightly
@pytest.mark.parametrize("words", [(), ("--timeout", 1)], ids=["learned", "given"])
def test_a_hang_in_the_first_step_gets_a_verdict(stage, words):
    trainer = stage.start(_LOCK.how, "--at", 0, *words)
    assert trainer.wait_for("hanging").split() == ["hanging", "0"]
    check(stage.why_until(_LOCK.cause), _LOCK)
    if words:
        stage.found()
        check(stage.why(), _LOCK)
    assert stage.is_alive


@pytest.mark.nightly  # tests/unit/keeper/test_hang_judge.py
def test_a_hang_that_ends_by_itself_is_forgotten(stage):
    """Nobody knows how long a call of the user's may take; when a step is made, all is well."""
    trainer = stage.start("waits", "--timeout", 1)
    trainer.wait_for("hanging")
    stage.found()
    wait_until(lambda: stage.beat.get("hang"), 20, "a heartbeat that says so")
    found = status_of(stage.folder)
    assert (found["state"], found["stuck"]["cause"]) == ("stuck", stage.found()["cause"])
    shown = succeed("status", stage.folder)
    assert f"stuck, step {stage.step} of" in shown
    assert re.search(r"\n  stuck +No step for .* s: .*More: holdfast why ", shown)
    assert f"holdfast stacks {stage.folder}" in shown
    (stage.home / "gate").touch()
    wait_until(lambda: stage.found()["ended"], 20, "the end of the hang")
    wait_until(lambda: stage.beat.get("hang") is None, 20, "a heartbeat without it")
    assert stage.why()["cause"] == "running"
    assert (status_of(stage.folder)["state"], stage.is_alive) == ("training", True)
