"""The verdict on every death of the table, by what the real one has left.

tests/deaths makes them; the first of each kind also in `make test`.
"""

from __future__ import annotations

import dataclasses
import json

import pytest

from holdfast._diagnose.deaths.judge import judge
from holdfast._diagnose.evidence.gather import gather_led, gather_run
from holdfast._diagnose.verdict import Cause, Restart, Sure, Verdict
from holdfast._store.folder.layout import RunLayout
from tests.deaths.stage import LIMIT_BYTES, check, text_of
from tests.deaths.table import DEATHS, GPU, RANKS, TORCH
from tests.unit.restored import restore

_DEATHS = [
    pytest.param(death, way, id=f"{death.name}, {way}")
    for death in (*DEATHS, *TORCH, *RANKS, *GPU)
    for way in ("alone", "led")
    if getattr(death, way) is not None
]
_OOM = next(death for death in DEATHS if death.how == "oom")
_KILL = next(death for death in DEATHS if death.cause is Cause.KILLED)
_RANK_KILLED = next(death for death in RANKS if death.how == "killed")


def _judge_led(home) -> Verdict:
    (life,) = (home / "state/led").glob("*/life-0001")
    return judge(gather_led(life))


@pytest.mark.parametrize(("death", "way"), _DEATHS)
def test_it_is_told_by_what_it_left(death, way, tmp_path):
    home = restore(tmp_path, "deaths", death.name, way, needs=death.needs)
    if way == "alone":
        verdict = judge(gather_run(home / "run"))
        check(verdict, death, death.alone)
        assert (death.rank is None) or "rank 0" in verdict.others[0]
    else:
        # Ranks that a script forks itself have no number that a leader could see.
        check(_judge_led(home), dataclasses.replace(death, rank=None), death.led)


def test_the_rank_that_was_killed_below_torchrun_is_named(tmp_path):
    home = restore(tmp_path, "deaths", _RANK_KILLED.name, "torchrun")
    check(_judge_led(home), _RANK_KILLED, _RANK_KILLED.led)


def test_a_record_of_another_machine_keeps_its_host_and_its_steps(tmp_path):
    home = restore(tmp_path, "deaths", _KILL.name, "alone")
    verdict = judge(gather_run(home / "run"))
    ((durable, _, _), *_) = reversed(RunLayout(home / "run").checkpoint_folders())
    assert (verdict.host, verdict.durable_step) == ("node1", durable)
    assert verdict.restart is Restart.FREE


def test_keeper_and_leader_tell_the_same_of_an_oom_kill_with_the_figures(tmp_path):
    of_run = judge(gather_run(restore(tmp_path / "a", "deaths", _OOM.name, "alone") / "run"))
    of_leader = _judge_led(restore(tmp_path / "b", "deaths", _OOM.name, "led"))
    assert of_run.restart is of_leader.restart is Restart.ONCE
    assert f"of {LIMIT_BYTES / 1e6:.0f} MB" in of_run.sentence


def test_an_oom_kill_of_the_machine_by_its_counters(tmp_path):
    """The whole machine would have to run out of memory: so a kill gets the counters of one."""
    home = restore(tmp_path, "deaths", _KILL.name, "alone")
    path = RunLayout(home / "run").death(1)
    death = json.loads(path.read_text())
    quiet = {"version": 2, "path": "/job", "limit": 64 << 30, "oom": 0, "oom_kill": 0, "max": 0}
    before = {"cgroup": quiet, "vmstat_oom_kill": 3}
    after = {"cgroup": {**quiet, "oom_kill": 1}, "vmstat_oom_kill": 4}
    death["counters"] = {"start": before, "before": before, "death": after}
    path.write_text(json.dumps(death))
    verdict = judge(gather_run(home / "run"))
    assert (verdict.cause, verdict.sure) == (Cause.OOM_MACHINE, Sure.CERTAIN), text_of(verdict)
