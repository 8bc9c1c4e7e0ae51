"""checkpoint_every="auto": a run that dies often saves more often."""

from __future__ import annotations

import math
import signal
import time

import numpy as np
import pytest

import holdfast
from holdfast._run.saving import cadence
from tests.support import SCRIPTS, Trainer, journal_events, wait_for_keeper_gone, wait_until

SCRIPT = SCRIPTS / "auto_cadence.py"


@pytest.mark.nightly  # tests/unit/run/test_cadence.py
def test_each_kill_shortens_the_interval_and_a_stop_does_not(tmp_path):
    folder = tmp_path / "run"
    for life in range(4):
        trainer = Trainer(folder, script=SCRIPT)
        try:
            said = trainer.wait_for("a checkpoint every ")
            assert ("deaths so far" in said or "death so far" in said) == (life > 0)
            wait_until(lambda n=life: len(journal_events(folder, "cadence")) > n, what="the note")
            if life < 3:
                trainer.kill()
            else:
                trainer.send(signal.SIGTERM)
            trainer.wait()
        finally:
            trainer.end()
        wait_for_keeper_gone(folder)
    found = journal_events(folder, "cadence")
    assert [each["deaths"] for each in found] == [0, 1, 2, 3]
    seconds = [each["seconds"] for each in found]
    assert seconds == sorted(seconds, reverse=True)
    # By the root of the rate: half a death a day has become three and a half, in half a day.
    costs = [each["cost_seconds"] for each in found]
    assert all(cost > 0.15 for cost in costs)
    expected = math.sqrt(7) * math.sqrt(costs[0] / costs[-1])
    assert seconds[0] / seconds[-1] == pytest.approx(expected, rel=0.05)

    trainer = Trainer(folder, script=SCRIPT)
    try:
        trainer.wait_for("a checkpoint every ")
        wait_until(lambda: len(journal_events(folder, "cadence")) > 4, what="the note")
        assert journal_events(folder, "cadence")[-1]["deaths"] == 3
        trainer.send(signal.SIGTERM)
        trainer.wait()
    finally:
        trainer.end()
    wait_for_keeper_gone(folder)


def test_how_long_the_writing_takes_is_measured_as_training_goes_on(tmp_path, monkeypatch):
    asked = []

    def soon(cost_seconds, write_seconds, mtbf_seconds):
        asked.append((cost_seconds, write_seconds, mtbf_seconds))
        return 0.02

    monkeypatch.setattr(cadence, "FIRST_SECONDS", 0.02)
    monkeypatch.setattr(cadence, "live_interval", soon)
    settings = holdfast.Settings(checkpoint_every="auto")
    with holdfast.Run(tmp_path / "run", settings=settings, weights=np.zeros(1000)) as run:
        deadline = time.monotonic() + 60
        for _ in run.steps(10**7):
            time.sleep(0.001)
            if (asked and asked[-1][1] > 0) or time.monotonic() > deadline:
                break
    costs, writes, mtbfs = zip(*asked, strict=True)
    assert writes[0] == 0  # nothing was written yet
    assert 0 < writes[-1] < 60
    assert all(cost > 0 for cost in costs)
    assert all(mtbf >= 86_400 for mtbf in mtbfs)
