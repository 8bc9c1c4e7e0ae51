"""`holdfast why` on these deaths: as whoever ran them, elsewhere, and by what is left of them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess

import pytest

from holdfast._diagnose.verdict import Cause, Sure
from holdfast._store.folder.layout import RunLayout
from tests.deaths.stage import die
from tests.deaths.table import DEATHS

_OOM = next(d for d in DEATHS if d.how == "oom")
_KILL = next(d for d in DEATHS if d.sent == signal.SIGKILL)
_RAISES = next(d for d in DEATHS if d.how == "exception")


def _asked(found):
    return found["cause"], found["sure"]


def _expected(death, sure):
    return death.cause.value, sure.value


# As root: test_one_process.py has the same death.
@pytest.mark.nightly
def test_asked_by_an_ordinary_user_it_says_the_same(on_users_stage):
    stage = on_users_stage(_OOM)
    die(stage, _OOM, is_run=True, is_led=True)
    found = stage.ask_why(stage.folder)
    assert _asked(found) == _expected(_OOM, _OOM.alone)
    assert found["evidence"]
    assert found["advice"]


# Every record of tests/unit/diagnose/test_recorded_deaths.py is of another machine.
@pytest.mark.nightly
@pytest.mark.parametrize("death", [_OOM, _RAISES], ids=lambda d: d.name)
def test_a_run_folder_that_was_copied_from_another_machine(death, on_stage, tmp_path):
    stage = on_stage(death)
    die(stage, death, is_run=True, is_led=False)
    here = stage.judge_run()
    elsewhere = tmp_path / "copied"
    shutil.move(stage.folder, elsewhere)
    layout = RunLayout(elsewhere)
    for path in (layout.lease(1), layout.heartbeat(1), layout.death(1), layout.error(1)):
        if path.exists():
            record = json.loads(path.read_text())
            record["host"] = "node7"
            path.write_text(json.dumps(record))
    found = stage.ask_why(elsewhere)
    assert _asked(found) == (here.cause.value, here.sure.value)
    assert found["host"] == "node7"
    assert found["step"] == here.step


def test_a_log_file_alone_tells_an_exception(on_stage, tmp_path):
    stage = on_stage(_RAISES)
    trainer = die(stage, _RAISES, is_run=False, is_led=False)
    log = tmp_path / "job.log"
    log.write_text(trainer.output)
    found = stage.ask_why(log)
    assert found["cause"] == Cause.PYTHON_EXCEPTION.value
    assert "KeyError" in found["sentence"]


def test_what_a_shell_says_of_a_kill_is_all_that_a_log_can_tell(on_stage, tmp_path):
    stage = on_stage(_KILL)
    log = tmp_path / "job.log"
    with log.open("w") as file:
        subprocess.run(["bash", "-c", "bash -c 'kill -9 $$'; true"], stderr=file, check=True)
    assert "Killed" in log.read_text()
    found = stage.ask_why(log)
    assert found["cause"] in (Cause.KILLED.value, Cause.OOM_MACHINE.value, Cause.UNKNOWN.value)
    assert found["sure"] != Sure.CERTAIN.value


def test_a_process_that_lives(on_stage):
    stage = on_stage(_KILL)
    trainer = stage.start("dying.py", "waits", is_run=False, is_led=False)
    trainer.wait_for("dying")
    assert stage.ask_why(trainer.pid)["cause"] == Cause.RUNNING.value
    trainer.kill()


def test_the_pid_of_one_that_was_led_and_is_gone(on_stage):
    stage = on_stage(_RAISES)
    trainer = die(stage, _RAISES, is_run=False, is_led=True)
    pid = int(trainer.wait_for("ready").split()[1])
    found = stage.ask_why(pid)
    assert _asked(found) == _expected(_RAISES, _RAISES.led)
