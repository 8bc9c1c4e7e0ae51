"""A rank that stands still: found, named and left together; one that is held or busy is no hang."""

from __future__ import annotations

import json
import signal
import time

import pytest

from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.requests import ask
from tests.support import checkpoint_steps, wait_until

_TOTAL = 40


def _hang(jobs, attempt=1):
    return read_json(jobs.folder / f"attempts/{attempt:04d}/hang.json")


def _told_to_leave(world):
    """As `holdfast run --hang-timeout` does."""
    return {rank: {"HOLDFAST_HANG_TIMEOUT": "1.5"} for rank in range(world)}


@pytest.mark.nightly  # tests/hangs/test_torch.py
def test_a_hang_in_one_of_three_ranks_is_found_named_and_left_by_all(jobs, undisturbed):
    events = [(1, 20, "hang", None)]
    job = jobs.start(3, total=_TOTAL, pauses=0.03, events=events, environment=_told_to_leave(3))
    job.wait_for("holding", 1)
    began = time.monotonic()
    assert job.statuses() == [77, 77, 77], job.outputs
    assert time.monotonic() - began < 20
    (found,) = jobs.events("hang")
    assert (found["policy"], found["rank"]) == ("restart", 1)
    record = _hang(jobs)
    assert [look["rank"] for look in record["looks"]] == [0, 1, 2]
    assert (record["missing"], record["ended"], record["how"]) == ([], None, "given")
    assert record["sentence"] == found["sentence"]
    assert "_do_hang" in (jobs.folder / "attempts/0001/hang.txt").read_text()
    step = checkpoint_steps(jobs.folder)[-1]
    assert 0 < step <= 20
    jobs.check_nothing_left()
    again = jobs.start(3, total=_TOTAL, pauses=0.0)
    assert again.hashes() == undisturbed(3, total=_TOTAL)
    assert set(again.started_at()) == {step}


# Over 5 s: a hang timeout must pass with two ranks. No other test has a hang that several ranks
# do not leave.
def test_a_hang_of_one_rank_makes_the_newest_common_step_durable(jobs, undisturbed):
    events = [(1, 20, "gate", str(jobs.gate))]
    job = jobs.start(total=_TOTAL, pauses=0.03, events=events, settings={"hang_timeout": 1.0})
    job.wait_for("holding", 1)
    (saved,) = wait_until(lambda: jobs.events("checkpoint"), 30, "the checkpoint")
    (found,) = jobs.events("hang")
    assert (found["policy"], found["rank"]) == ("report", 1)
    assert (saved["step"], saved["reason"]) == (job.common_step(), "hang")
    jobs.check_checkpoint(saved["step"], 2)
    jobs.open_gate()
    assert job.hashes() == undisturbed(2, total=_TOTAL)


# Over 5 s: several times the hang timeout must pass without a report.
@pytest.mark.nightly
def test_a_rank_that_is_stopped_makes_the_others_wait_and_is_no_hang(jobs, undisturbed):
    job = jobs.start(total=100_000, pauses=0.05, environment=_told_to_leave(2))
    job.wait_for_step(10)
    job.send(signal.SIGSTOP, 1)
    (paused,) = wait_until(lambda: jobs.events("paused"), 20, "the note")
    assert (paused["rank"], paused["by"]) == (1, "SIGSTOP")
    job.wait_for("rank 1 is held by SIGSTOP", 0)
    beat = jobs.folder / "attempts/0001/heartbeat.json"
    wait_until(lambda: (read_json(beat).get("paused") or {}).get("rank") == 1, 10, "the heartbeat")
    job.send(signal.SIGCONT, 1)
    wait_until(lambda: jobs.events("resumed"), 20, "the end of it")
    job.send(signal.SIGTERM, 1)
    assert job.statuses() == [143, 143], job.outputs
    assert jobs.events("hang") == []
    total = checkpoint_steps(jobs.folder)[-1] + 10
    assert jobs.start(total=total, pauses=0.0).hashes() == undisturbed(2, total=total)


# tests/unit/keeper/test_hang_judge.py:
# test_a_rank_in_a_phase_is_waited_for_as_long_as_the_phase_may_take
@pytest.mark.nightly
def test_ranks_that_wait_for_an_evaluation_of_one_do_not_hang(jobs):
    plan = {"loop": "eval", "total": 2, "evaluates": [0]}
    events = [(0, 12, "eval:sleep", 7.0)]
    job = jobs.start(events=events, pauses=0.03, environment=_told_to_leave(2), **plan)
    job.hashes()
    assert jobs.events("hang") == []


@pytest.mark.nightly  # by `holdfast stacks` in tests/hangs/test_torch.py
def test_the_stacks_of_all_ranks_are_there_when_somebody_asks(jobs):
    events = [(1, 10, "gate", str(jobs.gate))]
    job = jobs.start(total=_TOTAL, pauses=0.01, events=events)
    job.wait_for("holding", 1)
    path = jobs.folder / "attempts/0001/look.json"
    ask(jobs.folder, "stacks", token="t1")
    wait_until(lambda: read_json(path).get("token") == "t1", 15, "the looks")
    found = json.loads(path.read_text())
    assert [look["rank"] for look in found["looks"]] == [0, 1]
    assert found["missing"] == []
    assert "_do_gate" in json.dumps(found["looks"][1])
    assert "_do_gate" not in json.dumps(found["looks"][0])
    jobs.open_gate()
    job.hashes()
