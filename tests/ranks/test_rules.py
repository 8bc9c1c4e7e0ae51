"""What a rule of one rank finds, all ranks do: they end together, or leave what is bad unsaved."""

from __future__ import annotations

import math

import pytest

from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import void_steps
from tests.support import checkpoint_steps, wait_until

NOT_FINITE = ["NotFinite", [], {}]
EACH = {"checkpoint_every": 1}
BAD = {"loss": math.nan}


@pytest.mark.parametrize(
    ("meets", "rank"),
    [
        pytest.param("group", 1, marks=pytest.mark.nightly),
        ("files", 1),
        pytest.param("group", 0, marks=pytest.mark.nightly),
    ],
)
def test_bad_on_one_rank_is_bad_on_all_and_is_never_resumed(jobs, undisturbed, meets, rank):
    plan = {"meets": meets, "total": 20, "stop_when": NOT_FINITE, "settings": EACH}
    # Without a group nothing holds the ranks together: both must have saved step 11 before one of
    # them is bad, and the other must hear of it before it is through.
    known = jobs.folder.with_name("step 11 is durable")
    gates = [(rank, 11, "gate", str(known)), (1 - rank, 12, "gate", str(jobs.gate))]
    job = jobs.start(**plan, events=[*(gates if meets == "files" else []), (rank, 11, "log", BAD)])
    if meets == "files":
        wait_until(lambda: 11 in checkpoint_steps(jobs.folder), what="step 11 on disk")
        known.touch()
        wait_until(lambda: void_steps(RunLayout(jobs.folder)), what="the word that it is bad")
        jobs.open_gate()
    assert job.statuses() == [65, 65], job.outputs
    jobs.check_nothing_left()
    assert max(checkpoint_steps(jobs.folder)) == 11
    assert void_steps(RunLayout(jobs.folder)) == {1: 12}
    (stop,) = jobs.events("stop")
    assert stop["status"] == 65
    assert "NotFinite: loss is nan (step 12)" in stop["reason"]
    assert "NotFinite: loss is nan (step 12)" in jobs.events("rule")[0]["reason"]
    again = jobs.start(**plan)
    assert again.hashes() == undisturbed(meets=meets, total=20)
    assert again.started_at() == [11, 11]


@pytest.mark.nightly
def test_a_step_that_only_the_bad_rank_has_saved_keeps_no_memory(jobs, undisturbed):
    """The other rank is far behind when it hears that step 12 is bad, and never saves step 10."""
    plan = {"meets": "files", "total": 20, "stop_when": NOT_FINITE}
    plan["settings"] = {"checkpoint_every": 5}
    job = jobs.start(**plan, events=[(1, 11, "log", BAD), (0, 7, "until_bad", None)])
    assert job.statuses() == [65, 65], job.outputs
    jobs.check_nothing_left()
    assert checkpoint_steps(jobs.folder) == [5]
    again = jobs.start(**plan)
    assert again.hashes() == undisturbed(meets="files", total=20)
    assert again.started_at() == [5, 5]


@pytest.mark.nightly  # tests/processes/test_rules.py
def test_killed_in_the_bad_step_or_right_after_it_nothing_of_it_is_resumed(jobs, undisturbed):
    """The evaluation of a state that all ranks hold, and have on disk, finds it bad."""
    plan = {"loop": "eval", "total": 2, "stop_when": NOT_FINITE, "settings": EACH}
    job = jobs.start(**plan, events=[(1, 12, "eval:log", BAD), (1, 12, "step:die", None)])
    statuses = job.statuses()
    assert statuses[0] == 65, job.outputs
    assert statuses[1] in (65, -9)  # if all were to leave a step later, it has died on the way
    assert max(checkpoint_steps(jobs.folder)) == 11
    again = jobs.start(**plan)
    assert again.hashes() == undisturbed(loop="eval", total=2)
    assert again.started_at() == [11, 11]
    jobs.check_nothing_left()


@pytest.mark.parametrize("meets", ["group", "files"])
def test_a_rule_of_one_rank_ends_the_training_of_all_at_one_step(jobs, meets):
    plan = {"meets": meets, "stop_when": ["Threshold", ["score"], {"above": 0.9}]}
    job = jobs.start(**plan, events=[(1, 9, "log", {"score": 0.95})])
    assert len(set(job.hashes())) <= 2
    (step,) = checkpoint_steps(jobs.folder)
    assert 10 <= step < 30
    jobs.check_checkpoint(step, 2)
    assert "score is 0.95, above 0.9" in jobs.events("rule")[0]["reason"]
    again = jobs.start(**plan)
    assert again.hashes() == job.hashes()
    assert "ended at step" in again.output(0)
    jobs.check_nothing_left()


def test_another_rank_that_has_finished_does_not_keep_the_bad_last_step(jobs):
    plan = {"meets": "files", "total": 12, "stop_when": NOT_FINITE, "pauses": [0.0, 0.03]}
    job = jobs.start(**plan, events=[(1, 11, "log", BAD)])
    assert job.statuses() == [65, 65], job.outputs
    assert all(step < 12 for step in checkpoint_steps(jobs.folder))
    jobs.check_nothing_left()
