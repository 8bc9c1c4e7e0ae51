"""Signals that a run answers: it was asked to stop, and a leader can tell by whom."""

from __future__ import annotations

import os
import signal

import pytest

from holdfast._diagnose.verdict import Cause, Restart, Sure
from tests.deaths.stage import text_of
from tests.deaths.table import DEATHS
from tests.often import few
from tests.support import checkpoint_steps

_WAITS = next(d for d in DEATHS if d.how == "waits")
_STATUSES = {"TERM": 143, "INT": 130, "HUP": 129}


@pytest.fixture
def stage(on_stage):
    return on_stage(_WAITS)


def _start(stage, **how):
    return stage.start("dying.py", "waits", "--place", stage.place, is_run=True, **how)


# Without a leader it is told in tests/cli/test_why.py too.
@pytest.mark.parametrize(
    "is_led", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["alone", "led"]
)
@pytest.mark.parametrize("name", few(_STATUSES, ["TERM", "HUP"]))
def test_a_run_that_was_asked_to_stop(stage, name, is_led):
    trainer = _start(stage, is_led=is_led)
    stage.send(getattr(signal, f"SIG{name}"))
    trainer.wait_for("step 6")  # it has heard it
    (stage.place / "gate").touch()
    assert trainer.wait() == _STATUSES[name]
    verdict = stage.judge_run()
    assert (verdict.cause, verdict.sure) == (Cause.ASKED, Sure.CERTAIN), text_of(verdict)
    assert verdict.restart is Restart.DONE
    assert (verdict.step, verdict.durable_step) == (6, 6)
    assert (f"pid {os.getpid()}" in text_of(verdict)) == is_led


def test_a_run_that_a_signal_ended_at_once(stage):
    trainer = _start(stage)
    stage.send(signal.SIGQUIT)
    assert trainer.wait() == -signal.SIGQUIT
    verdict = stage.judge_run()
    assert (verdict.cause, verdict.sure) == (Cause.TERMINATED, Sure.CERTAIN), text_of(verdict)
    assert "SIGQUIT" in verdict.sentence
    assert verdict.durable_step in checkpoint_steps(stage.folder)
    assert "holdfast run" in text_of(verdict)  # which would have seen who sent it


@pytest.mark.nightly  # of a run alone it is in tests/cli/test_why.py
def test_a_run_that_finished(stage):
    trainer = stage.start("dying.py", "ends", is_run=True, is_led=True)
    assert trainer.wait() == 0
    for verdict in (stage.judge_run(), stage.judge_led()):
        assert verdict.cause is Cause.FINISHED, text_of(verdict)


@pytest.mark.nightly  # test_why.py has a process that lives, tests/hangs/test_one_process.py a run
def test_a_run_that_goes_on(stage):
    trainer = _start(stage)
    trainer.wait_for("dying")
    assert stage.judge_live().cause is Cause.RUNNING
    trainer.kill()
