"""On two cores that forty others want too, everything takes longer, and nothing else changes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from holdfast._diagnose.deaths.judge import judge
from holdfast._diagnose.evidence.gather import gather_run
from holdfast._diagnose.verdict import Cause, Sure
from tests.cli.command import PROGRAM
from tests.hangs.stage import check
from tests.hangs.table import HANGS
from tests.support import (
    SCRIPTS,
    checkpoint_steps,
    journal_events,
    wait_for_keeper_gone,
    wait_until,
)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

LIGHT = SCRIPTS / "light.py"
COMPUTING = SCRIPTS.parent / "load" / "computing.py"
LOCK = HANGS[0]
EAGER = '{"max_overhead": 1.0}'
LONG_SECONDS = 120.0


@pytest.mark.parametrize("who", ["itself", "worker"])
def test_a_training_that_only_waits_for_a_processor_gets_no_hang_report(who, folder, start, load):
    """Its steps take several times the second that was given, since it hardly runs."""
    trainer = start(folder, who, 45, script=COMPUTING)
    trainer.wait_for("ready", LONG_SECONDS)
    waited, step_seconds = map(float, trainer.wait_for("waited", LONG_SECONDS).split()[1:])
    assert trainer.wait(LONG_SECONDS) == 0, trainer.output
    assert waited > 0.7, "the machine was not crowded"
    assert step_seconds > 2.0
    assert not (folder / "attempts/0001/hang.json").exists(), trainer.output
    assert journal_events(folder, "hang") == []
    wait_for_keeper_gone(folder, LONG_SECONDS)


def test_a_true_hang_is_found_with_the_same_cause(stage, load):
    stage.start(LOCK.how, "--timeout", LOCK.timeout)
    assert stage.step >= 0
    found = stage.found(LONG_SECONDS)
    assert found["cause"] == LOCK.cause.value, found["sentence"]
    check(stage.why(), LOCK)


def _verdict_on_a_kill(folder, gate, start):
    trainer = start(
        *(folder, "--total", 40, "--hold-at", 8, "--sleep", 0.06, "--gate", gate),
        *("--settings", EAGER),
        script=LIGHT,
    )
    in_memory = int(trainer.wait_for("holding", LONG_SECONDS).split()[1])
    trainer.kill()
    assert trainer.wait() == -signal.SIGKILL
    at_once = judge(gather_run(folder))
    wait_for_keeper_gone(folder, LONG_SECONDS)
    assert checkpoint_steps(folder) == [in_memory]
    later = judge(gather_run(folder))
    assert (later.cause, later.sure) == (at_once.cause, at_once.sure)
    assert later.durable_step == in_memory
    return later.cause, later.sure


def test_the_verdict_on_a_kill_is_the_same_and_the_last_snapshot_durable(tmp_path, start, crowd):
    alone = _verdict_on_a_kill(tmp_path / "alone", tmp_path / "gate", start)
    assert alone == (Cause.KILLED, Sure.BY_EXCLUSION)
    with crowd():
        assert _verdict_on_a_kill(tmp_path / "crowded", tmp_path / "gate", start) == alone


def test_sigterm_with_the_usual_grace_is_durable_at_the_last_step(folder, start, load):
    trainer = start(folder, "--total", 100_000, "--sleep", 0.05, script=LIGHT)
    trainer.ready()
    beat = folder / "attempts/0001/heartbeat.json"
    wait_until(lambda: beat.exists() and json.loads(beat.read_text()).get("step"), LONG_SECONDS)
    began = time.monotonic()
    trainer.send(signal.SIGTERM)
    assert trainer.wait(LONG_SECONDS) == 143, trainer.output
    took = time.monotonic() - began
    record = json.loads((folder / "attempts/0001/exit.json").read_text())
    assert record["durable_step"] == record["step"] == checkpoint_steps(folder)[-1]
    assert took < 10, "what SIGTERM usually leaves"
    wait_for_keeper_gone(folder, LONG_SECONDS)


def test_doctor_calls_nothing_broken_that_is_only_slow(tmp_path, crowd):
    """A check that is still late says "slow"."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.sh").write_text(f"exec '{sys.executable}' train.py\n")

    def failed() -> dict[str, str]:
        done = subprocess.run(
            [PROGRAM, "doctor", "--json", "runs", "--", "bash", "job.sh"],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=500,
        )
        checks = json.loads(done.stdout)["checks"]
        assert "signal SIGTERM" in [each["name"] for each in checks], done.stdout
        return {each["name"]: each["found"] for each in checks if each["state"] == "fail"}

    alone = failed()
    with crowd():
        found = failed()
    assert found.keys() <= alone.keys(), found


_TWO_ORDERS = """
import sys
import numpy as np
import holdfast

weights = np.zeros(4_000_000)
with holdfast.Run(sys.argv[1], settings=holdfast.Settings(max_overhead=1.0), w=weights) as run:
    handles = []
    for step in run.steps(8):
        weights += 1
        if step in (3, 4, 5):
            handles.append(run.save())
    print("saved", *(handle.wait() for handle in handles), flush=True)
"""


def test_no_checkpoint_that_was_ordered_is_lost(folder, start, tmp_path, load):
    """Each is ordered while the one before is being written by a keeper that hardly runs."""
    script = tmp_path / "orders.py"
    script.write_text(_TWO_ORDERS)
    trainer = start(folder, script=script)
    assert trainer.wait(LONG_SECONDS) == 0, trainer.output
    assert "saved 4 5 6\n" in trainer.lines
    asked = [e["step"] for e in journal_events(folder, "checkpoint") if e["reason"] == "asked"]
    assert asked == [4, 5, 6]
    wait_for_keeper_gone(folder, LONG_SECONDS)
