"""Wherever the ranks are when a stop is asked for, they leave at one step."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support import checkpoint_steps

_TOTAL = 400  # so many that it is still at it when a test acts, however slow the machine is
# Whichever rank is signalled, its keeper passes it on: in a long step that is shown for both.
ONE_OF_TWO = [1, pytest.param(0, marks=pytest.mark.nightly)]


def _check_stop(jobs, job, *, world=2) -> int:
    """All have left at one step, with its checkpoint and nothing else."""
    assert job.statuses() == [143] * world, job.outputs
    (step,) = set(job.steps_at_the_end())
    jobs.check_checkpoint(step, world)
    jobs.check_nothing_left()
    return step


def _check(jobs, job, undisturbed, *, world=2, **plan) -> int:
    """And the next life goes on from there to the same bits."""
    step = _check_stop(jobs, job, world=world)
    again = jobs.start(world, pauses=0.0, **plan)
    assert again.hashes() == undisturbed(world, **plan)
    assert set(again.started_at()) == {step}
    return step


# -- in a long step ---------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("meets", "call", "signalled"),
    [
        ("group", "sleep", 0),
        ("group", "call", 1),
        ("files", "call", 0),
        pytest.param("group", "sleep", 1, marks=pytest.mark.nightly),
        pytest.param("group", "call", 0, marks=pytest.mark.nightly),
        pytest.param("files", "sleep", 0, marks=pytest.mark.nightly),
        pytest.param("files", "sleep", 1, marks=pytest.mark.nightly),
        pytest.param("files", "call", 1, marks=pytest.mark.nightly),
    ],
)
def test_a_rank_in_a_long_step_is_waited_for_and_the_decision_is_not(
    jobs, undisturbed, meets, call, signalled
):
    """`call` holds the interpreter, so that no thread of that rank could answer."""
    job = jobs.start(meets=meets, total=_TOTAL, events=[(1, 8, call, 3.0)])
    job.wait_for("holding", 1)
    began = time.monotonic()
    job.send(signal.SIGTERM, signalled)
    line = job.wait_for("SIGTERM (rank", 0)
    assert time.monotonic() - began < 2.5  # it is in that step still
    step = int(line.split("finish step ")[1].split()[0])
    if meets == "group":
        assert step in (
            9,
            10,
        )  # the other may wait in the next step already
    assert _check(jobs, job, undisturbed, meets=meets, total=_TOTAL) == step


def test_one_of_four_ranks_is_in_a_long_step(jobs):
    job = jobs.start(4, total=_TOTAL, events=[(2, 8, "gate", str(jobs.gate))])
    job.wait_for("holding", 2)
    job.send(signal.SIGTERM, 3)
    job.wait_for("all ranks finish step", 0)
    jobs.open_gate()
    assert _check_stop(jobs, job, world=4) in (9, 10)


def test_a_slow_rank_is_waited_for(jobs):
    job = jobs.start(total=_TOTAL, pauses=[0.0, 0.15])
    job.wait_for_step(4)
    job.send(signal.SIGTERM, 0)
    _check_stop(jobs, job)


# -- ranks that run free of each other ------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("pauses", "signalled"),
    [
        ([0.002, 0.05], 1),
        ([0.05, 0.002], 1),
        pytest.param([0.002, 0.05], 0, marks=pytest.mark.nightly),
        pytest.param([0.05, 0.002], 0, marks=pytest.mark.nightly),
    ],
)
def test_ranks_that_run_free_stop_at_the_step_of_the_quickest(jobs, undisturbed, pauses, signalled):
    plan = {"meets": "files", "total": 3000}
    job = jobs.start(**plan, pauses=pauses)
    job.wait_for_step(30, pauses.index(0.002))
    job.send(signal.SIGTERM, signalled)
    step = _check(jobs, job, undisturbed, **plan)
    assert step >= 30


@pytest.mark.nightly  # above with two ranks
def test_four_ranks_that_run_free_with_very_different_speeds(jobs, undisturbed):
    plan = {"meets": "files", "total": 3000}
    job = jobs.start(4, **plan, pauses=[0.02, 0.002, 0.06, 0.01])
    job.wait_for_step(30, 1)
    job.send(signal.SIGTERM, 2)
    _check(jobs, job, undisturbed, world=4, **plan)


def test_when_a_rank_has_finished_the_others_train_to_the_end(jobs, undisturbed):
    plan = {"meets": "files", "total": 20}
    job = jobs.start(**plan, pauses=[0.06, 0.0])
    job.wait_for_step(20, 1)
    job.wait_for_step(1, 0)
    job.send(signal.SIGTERM, 0)
    assert job.statuses() == [0, 0], job.outputs
    assert job.hashes() == undisturbed(**plan)
    jobs.check_checkpoint(20, 2)
    jobs.check_nothing_left()


def test_a_signal_to_the_rank_that_has_finished_waits_for_the_others(jobs, undisturbed):
    plan = {"meets": "files", "total": 20}
    job = jobs.start(**plan, pauses=[0.06, 0.0])
    job.wait_for_step(20, 1)
    job.send(signal.SIGTERM, 1)
    assert job.hashes() == undisturbed(**plan)
    assert checkpoint_steps(jobs.folder) == [20]


# -- at the beginning ---------------------------------------------------------------------


@pytest.mark.parametrize("signalled", ONE_OF_TWO)
def test_a_rank_in_its_first_step(jobs, signalled):
    job = jobs.start(total=_TOTAL, events=[(1, 0, "gate", str(jobs.gate))])
    job.wait_for("holding", 1)
    job.send(signal.SIGTERM, signalled)
    job.wait_for("all ranks finish step", 0)
    jobs.open_gate()
    assert _check_stop(jobs, job) in (1, 2)


@pytest.mark.parametrize("meets", ["group", "files"])
def test_a_rank_that_has_not_come_to_its_loop(jobs, meets):
    job = jobs.start(meets=meets, total=_TOTAL, events=[(1, 0, "before:sleep", 0.6)])
    job.wait_for("holding", 1)
    if meets == "files":
        job.wait_for_step(1, 0)
    else:
        job.wait_for("in its loop", 0)
    job.send(signal.SIGTERM, 0)
    _check_stop(jobs, job)


# -- in an evaluation ---------------------------------------------------------------------


@pytest.mark.parametrize("signalled", ONE_OF_TWO)
def test_an_evaluation_on_all_ranks_is_left_at_once(jobs, undisturbed, signalled):
    plan = {"loop": "eval", "total": 3}
    job = jobs.start(**plan, events=[(None, 24, "eval:sleep", 20.0)])
    job.wait_for("holding")
    job.send(signal.SIGTERM, signalled)
    assert _check(jobs, job, undisturbed, **plan) == 24


@pytest.mark.nightly  # above: an evaluation that can be left
def test_an_evaluation_in_a_call_that_holds_the_interpreter_holds_up_nobody_else(jobs):
    events = [(0, 24, "eval:sleep", 30.0), (1, 24, "eval:call", 6.0)]
    job = jobs.start(loop="eval", total=3, events=events)
    job.wait_for("holding")
    job.send(signal.SIGTERM, 0)
    assert job.lives[0].wait(5.5) == 143, job.outputs
    assert checkpoint_steps(jobs.folder) == [24]
    assert not job.lives[1].is_over
    assert _check_stop(jobs, job) == 24


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("meets", "signalled"),
    [
        ("group", 1),
        ("files", 0),
        pytest.param("group", 0, marks=pytest.mark.nightly),
        pytest.param("files", 1, marks=pytest.mark.nightly),
    ],
)
def test_an_evaluation_on_rank_0_only_is_waited_for(jobs, undisturbed, meets, signalled):
    """The others are in the next step already, and that one needs all of them."""
    plan = {"loop": "eval", "total": 3, "meets": meets}
    job = jobs.start(**plan, events=[(0, 12, "eval:sleep", 0.7)], evaluates=[0])
    job.wait_for("holding", 0)
    job.wait_for_step(12, 1)
    job.send(signal.SIGTERM, signalled)
    assert _check(jobs, job, undisturbed, **plan) >= 12


# -- in accumulation ----------------------------------------------------------------------


@pytest.mark.parametrize("signalled", ONE_OF_TWO)
def test_no_rank_stops_amid_the_batches_of_one_step(jobs, undisturbed, signalled):
    plan = {"loop": "accumulate", "total": 4}
    job = jobs.start(**plan, events=[(1, 6, "micro:gate", str(jobs.gate))])
    job.wait_for("holding", 1)
    job.send(signal.SIGTERM, signalled)
    job.wait_for("all ranks finish step", 0)
    jobs.open_gate()
    assert _check(jobs, job, undisturbed, **plan) == 7


@pytest.mark.nightly  # below: at the turn of an epoch
@pytest.mark.parametrize("signalled", ONE_OF_TWO)
def test_in_the_last_step_of_a_loop_that_another_follows(jobs, undisturbed, signalled):
    plan = {"loop": "twice", "total": 40}
    job = jobs.start(**plan, events=[(1, 19, "gate", str(jobs.gate))])
    job.wait_for("holding", 1)
    job.send(signal.SIGTERM, signalled)
    job.wait_for("all ranks finish step", 0)
    jobs.open_gate()
    assert _check(jobs, job, undisturbed, **plan) in (20, 21, 22)


@pytest.mark.nightly
def test_at_the_turn_of_an_epoch(jobs, undisturbed):
    plan = {"loop": "batches", "total": 4}
    job = jobs.start(**plan, events=[(1, 11, "gate", str(jobs.gate))])
    job.wait_for("holding", 1)
    job.send(signal.SIGTERM, 0)
    job.wait_for("all ranks finish step", 0)
    jobs.open_gate()
    assert _check(jobs, job, undisturbed, **plan) == 12
