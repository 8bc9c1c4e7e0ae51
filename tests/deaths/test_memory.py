"""Out of memory in a cgroup: who was killed, what it cost, and the figures that are told."""

from __future__ import annotations

import json
import re

import pytest

from holdfast._diagnose.verdict import Restart, Sure
from holdfast._store.folder.layout import RunLayout
from tests.deaths.stage import LIMIT_BYTES, check, die
from tests.deaths.table import DEATHS
from tests.support import checkpoint_steps

_OOM = next(d for d in DEATHS if d.how == "oom")


# The figures of each by itself are in tests/unit/diagnose/test_recorded_deaths.py.
@pytest.mark.nightly
def test_the_keeper_outlives_it_and_leader_and_keeper_tell_the_same(on_stage):
    stage = on_stage(_OOM)
    die(stage, _OOM, is_run=True, is_led=True)
    of_run, of_leader = stage.judge_run(), stage.judge_led()
    check(of_run, _OOM, Sure.CERTAIN)
    check(of_leader, _OOM, Sure.CERTAIN)
    assert of_run.restart is of_leader.restart is Restart.ONCE
    assert of_run.durable_step in checkpoint_steps(stage.folder)
    death = json.loads(RunLayout(stage.folder).death(1).read_text())
    assert death["counters"]["death"]["cgroup"]["limit"] == LIMIT_BYTES
    # A look a second does not see it coming, at 200 MB in a second; the kernel counts the peak.
    assert death["counters"]["death"]["cgroup"]["peak"] > 0.9 * LIMIT_BYTES
    assert re.search(r"13\d of 134 MB", of_run.sentence), of_run.sentence
