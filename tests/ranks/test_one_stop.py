"""Whoever asks for a stop, all ranks leave at one step, with one status and one checkpoint."""

from __future__ import annotations

import signal
import time

import pytest

import holdfast
from tests.support import wait_until

_TOTAL = 400  # so many that it is still at it when a test acts, however slow the machine is


def _check_stop(jobs, job, status, *, world=2) -> int:
    """All have left together, with one checkpoint and one journal."""
    assert job.statuses() == [status] * world, job.outputs
    (step,) = set(job.steps_at_the_end())
    jobs.check_checkpoint(step, world)
    assert [each["step"] for each in jobs.events("stop")] == [step]
    assert len(jobs.events("exit")) == 1
    jobs.check_nothing_left()
    return step


def _check(jobs, job, undisturbed, status, *, world=2, meets="group") -> int:
    """And the next life goes on from there to the same bits."""
    step = _check_stop(jobs, job, status, world=world)
    again = jobs.start(world, meets=meets, total=_TOTAL, pauses=0.0)
    assert again.hashes() == undisturbed(world, meets=meets, total=_TOTAL)
    assert set(again.started_at()) == {step}
    jobs.check_nothing_left()
    return step


@pytest.mark.parametrize(
    ("meets", "world"),
    [
        ("group", 2),
        ("files", 2),
        pytest.param("group", 4, marks=pytest.mark.nightly),
        pytest.param("files", 4, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_to_one_rank_stops_all(jobs, undisturbed, meets, world):
    job = jobs.start(world, meets=meets, total=_TOTAL)
    job.wait_for_step(8)
    job.send(signal.SIGTERM, world - 1)
    _check(jobs, job, undisturbed, 143, world=world, meets=meets)
    assert f"SIGTERM (rank {world - 1}): all ranks finish step" in job.said
    asked = jobs.events("stop-asked")
    assert [(each["rank"], each["reason"]) for each in asked] == [(world - 1, "SIGTERM")]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_signal_to_all_ranks_at_once_is_one_stop(jobs, undisturbed, world):
    job = jobs.start(world, total=_TOTAL)
    job.wait_for_step(8)
    job.send(signal.SIGINT)
    _check(jobs, job, undisturbed, 130, world=world)
    assert len(jobs.events("stop-asked")) == 1


@pytest.mark.nightly  # above: one signal to all is one stop
def test_different_signals_to_two_ranks_are_one_stop_with_one_status(jobs):
    job = jobs.start(total=_TOTAL)
    job.wait_for_step(8)
    job.send(signal.SIGUSR1, 1)
    job.send(signal.SIGTERM, 0)
    status = job.statuses()[0]
    assert status in (75, 143)
    _check_stop(jobs, job, status)


@pytest.mark.nightly  # above: signals at once to ranks that run
def test_a_signal_to_a_rank_that_waits_for_the_decision_of_another_changes_nothing(jobs):
    job = jobs.start(total=_TOTAL, events=[(1, 8, "gate", str(jobs.gate))])
    job.wait_for("holding", 1)
    job.send(signal.SIGTERM, 0)
    job.wait_for("all ranks finish step 9", 0)
    job.send(signal.SIGTERM, 1, 0)
    jobs.open_gate()
    # The other may have passed that boundary before, and waits in the next step.
    assert _check_stop(jobs, job, 143) in (9, 10)


@pytest.mark.parametrize("meets", ["group", "files"])
def test_holdfast_stop_stops_all_ranks(jobs, meets):
    job = jobs.start(meets=meets, total=_TOTAL, events=[(None, 8, "gate", str(jobs.gate))])
    job.wait_for("holding")
    holdfast.stop(jobs.folder, "lunch")
    job.wait_for("all ranks finish step 9", 0)
    jobs.open_gate()
    assert _check_stop(jobs, job, 130) == 9
    assert "lunch" in job.said


@pytest.mark.parametrize("rank", [0, 1])
def test_run_stop_on_one_rank_stops_all(jobs, rank):
    job = jobs.start(total=_TOTAL, events=[(rank, 8, "stop", None)])
    assert _check_stop(jobs, job, 130) in (9, 10)
    assert "enough" in job.said


# Over 5 s: a step that does not end is waited for.
def test_a_second_ctrl_c_does_not_wait_for_the_step(jobs, undisturbed):
    job = jobs.start(total=_TOTAL, events=[(1, 10, "gate", str(jobs.gate))], pauses=0.03)
    job.wait_for("holding", 1)
    common = wait_until(job.common_step, what="a snapshot that all hold")
    job.send(signal.SIGINT)
    job.wait_for("all ranks finish step 1", 0)  # 11; or 12, which rank 0 may have begun
    time.sleep(0.15)  # what comes sooner counts as the same press
    began = time.monotonic()
    job.send(signal.SIGINT, 0)
    assert job.statuses() == [130, 130], job.outputs
    assert time.monotonic() - began < 15.0
    jobs.check_checkpoint(common, 2)
    jobs.check_nothing_left()
    again = jobs.start(total=_TOTAL, pauses=0.0)
    assert again.hashes() == undisturbed(total=_TOTAL)
    assert set(again.started_at()) == {common}


def test_stop_now_ends_all_ranks_in_mid_step(jobs):
    job = jobs.start(total=_TOTAL, events=[(1, 10, "gate", str(jobs.gate))], pauses=0.03)
    job.wait_for("holding", 1)
    common = wait_until(job.common_step, what="a snapshot that all hold")
    holdfast.stop(jobs.folder, now=True)
    assert job.statuses(5.0) == [130, 130], job.outputs
    jobs.check_checkpoint(common, 2)
    jobs.check_nothing_left()
