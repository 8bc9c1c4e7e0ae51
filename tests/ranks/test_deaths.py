"""A rank that dies or fails: what all hold becomes durable, and the others leave and say why."""

from __future__ import annotations

import json
import signal
import time

import pytest

from holdfast._store.folder.layout import RunLayout
from tests.support import checkpoint_steps, journal_events, keepers, wait_until

_TOTAL = 400  # so many that it is still at it when a test acts, however slow the machine is
_SOON_SECONDS = 5.0


def _check_goes_on(jobs, undisturbed, step, *, world=2, **plan) -> None:
    jobs.check_nothing_left()
    again = jobs.start(world, pauses=0.0, total=_TOTAL, **plan)
    assert again.hashes() == undisturbed(world, total=_TOTAL, **plan)
    assert set(again.started_at()) == {step}
    jobs.check_nothing_left()


@pytest.mark.parametrize(
    ("meets", "world", "killed"),
    [
        ("files", 2, 1),
        pytest.param("group", 4, 2, marks=pytest.mark.nightly),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)  # as those above
            for each in (
                *(("group", 2, 0), ("group", 2, 1), ("files", 2, 0)),
                *(("group", 4, rank) for rank in (0, 1, 3)),
            )
        ),
    ],
)
def test_kill_9_of_a_rank_ends_the_others_with_a_line_that_names_it(
    jobs, undisturbed, meets, world, killed
):
    held = [(killed, 11, "gate", str(jobs.gate))]
    job = jobs.start(world, meets=meets, total=_TOTAL, pauses=0.03, events=held)
    job.wait_for("holding", killed)
    wait_until(job.common_step, what="a snapshot that all hold")
    began = time.monotonic()
    job.send(signal.SIGKILL, killed)
    statuses = job.statuses()
    assert time.monotonic() - began < _SOON_SECONDS
    jobs.open_gate()  # for its next life
    assert statuses == [-9 if rank == killed else 75 for rank in range(world)], job.outputs
    assert f"rank {killed} on " in job.said
    assert "was killed by SIGKILL" in job.said
    (died,) = jobs.events("rank-died")
    assert (died["rank"], died["how"]) == (killed, "was killed by SIGKILL")
    (step,) = checkpoint_steps(jobs.folder)
    assert 0 < step <= 11
    jobs.check_checkpoint(step, world)
    assert f"step {step} is durable" in job.said
    _check_goes_on(jobs, undisturbed, step, world=world, meets=meets)
    found = {rank: death for rank in range(world) if (death := jobs.post_mortem(rank))}
    assert list(found) == [killed]
    assert (found[killed]["status"], found[killed]["durable_step"]) == (-9, step)
    assert found[killed]["pid"] == job.lives[killed].pid


def test_kill_9_of_all_ranks_at_once(jobs, undisturbed):
    job = jobs.start(total=_TOTAL, pauses=0.03)
    job.wait_for_step(10)
    wait_until(job.common_step, what="a snapshot that all hold")
    watching = keepers(jobs.folder)
    for keeper in watching:  # else the first death makes the other rank leave
        keeper.suspend()
    job.send(signal.SIGKILL)
    assert job.statuses() == [-9, -9]
    for keeper in watching:
        keeper.resume()
    step = wait_until(lambda: checkpoint_steps(jobs.folder), 10, "the checkpoint")[-1]
    _check_goes_on(jobs, undisturbed, step)
    found = [jobs.post_mortem(rank).get("status") for rank in range(2)]
    assert found == [-9, -9], journal_events(jobs.folder)


def test_a_rank_that_is_killed_once_it_was_told_to_leave_has_not_left(jobs):
    """As where a person kills all ranks in one command, and the first death is heard at once."""
    job = jobs.start(total=_TOTAL, pauses=0.03)
    job.wait_for_step(3)
    job.send(signal.SIGSTOP, 0)
    job.send(signal.SIGKILL, 1)
    wait_until(lambda: jobs.events("end"), what="an order to leave")
    job.send(signal.SIGKILL, 0)
    assert job.statuses() == [-9, -9]
    jobs.check_nothing_left(may_leave_arena=True)
    left = json.loads(RunLayout(jobs.folder).exit(1).read_text())
    assert (left["status"], left["how"]) == (None, "was killed by SIGKILL")
    assert [jobs.post_mortem(rank)["status"] for rank in range(2)] == [-9, -9]


@pytest.mark.nightly  # test_where_ranks_are.py: a stop of ranks that run free
@pytest.mark.parametrize("pauses", [[0.004, 0.02], [0.02, 0.004]])
def test_ranks_that_run_free_hold_a_step_in_common_that_a_kill_leaves(jobs, undisturbed, pauses):
    """It is set ahead of the quick one, and the slow one comes there later."""
    plan = {"meets": "files", "total": 4000}
    job = jobs.start(**plan, pauses=pauses)
    slow = pauses.index(0.02)
    common = wait_until(job.common_step, 20, "a snapshot that all hold")
    job.send(signal.SIGKILL, slow)
    assert job.statuses()[1 - slow] == 75, job.outputs
    (step,) = checkpoint_steps(jobs.folder)
    assert step >= common
    jobs.check_nothing_left()
    assert jobs.start(**plan, pauses=0.0).hashes() == undisturbed(**plan)


def test_a_kill_before_the_first_snapshot_ends_the_others_too(jobs, undisturbed):
    job = jobs.start(total=_TOTAL, events=[(1, 0, "gate", str(jobs.gate))])
    job.wait_for("holding", 1)
    began = time.monotonic()
    job.send(signal.SIGKILL, 1)
    assert job.statuses() == [75, -9], job.outputs
    assert time.monotonic() - began < _SOON_SECONDS
    assert "rank 1 on" in job.said
    assert checkpoint_steps(jobs.folder) == []
    _check_goes_on(jobs, undisturbed, 0)


def test_a_stop_when_a_rank_is_dead_leaves_with_the_status_of_the_stop(jobs, undisturbed):
    job = jobs.start(total=_TOTAL, pauses=0.03, events=[(1, 12, "sleep", 5.0)])
    job.wait_for("holding", 1)
    wait_until(job.common_step, what="a snapshot that all hold")
    job.send(signal.SIGTERM, 0)
    job.wait_for("SIGTERM (rank 0)", 0)
    job.send(signal.SIGKILL, 1)
    began = time.monotonic()
    assert job.statuses() == [143, -9], job.outputs
    assert time.monotonic() - began < _SOON_SECONDS
    (step,) = checkpoint_steps(jobs.folder)
    _check_goes_on(jobs, undisturbed, step)


# Over 5 s: the other rank waits in a collective until it hears of it.
@pytest.mark.parametrize(
    ("meets", "failing"),
    [
        ("group", 0),
        ("files", 1),
        pytest.param("group", 1, marks=pytest.mark.nightly),
        pytest.param("files", 0, marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_raises_shows_its_traceback_and_the_others_a_sentence(
    jobs, undisturbed, meets, failing
):
    events = [(failing, 12, "raise", "a bad sample")]
    job = jobs.start(meets=meets, total=_TOTAL, pauses=0.02, events=events)
    assert job.statuses() == [1, 1], job.outputs
    assert "Traceback (most recent call last)" in job.output(failing)
    assert "ValueError: a bad sample" in job.output(failing)
    other = 1 - failing
    assert "Traceback" not in job.output(other), job.outputs
    assert f"rank {failing} on " in job.output(other)
    assert "ValueError: a bad sample" in job.output(other)
    (step,) = checkpoint_steps(jobs.folder)
    assert 0 < step <= 12
    _check_goes_on(jobs, undisturbed, step, meets=meets)


@pytest.mark.parametrize("meets", ["group", pytest.param("files", marks=pytest.mark.nightly)])
def test_a_signal_to_a_rank_before_its_loop_ends_all(jobs, meets):
    """It leaves at once, as any script does, and the others cannot go on without it."""
    events = [(1, 0, "before:sleep", 20.0)]
    job = jobs.start(meets=meets, total=_TOTAL, events=events, pauses=0.02)
    job.wait_for("holding", 1)
    job.wait_for("ready", 0)
    began = time.monotonic()
    job.send(signal.SIGTERM, 1)
    assert job.statuses() == [143, 143], job.outputs
    assert time.monotonic() - began < _SOON_SECONDS
    jobs.check_nothing_left()


def test_ranks_whose_loops_have_different_lengths_do_not_wait_for_ever(jobs):
    job = jobs.start(meets="files", total=30, events=[(1, 10, "leave", None)], pauses=0.01)
    statuses = job.statuses()
    assert statuses[0] != 0, job.outputs
    assert "rank 1" in job.output(0)
    jobs.check_nothing_left()
