"""Ranks that torch.multiprocessing has started: their parent is who would have to end them."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.support import checkpoint_steps, wait_until

_TOTAL = 400  # so many that it is still at it when a test acts, however slow the machine is


def _check_goes_on(jobs, undisturbed, step) -> None:
    jobs.check_nothing_left()
    jobs.check_checkpoint(step, 2)
    again = jobs.spawn(total=_TOTAL, pauses=0.0)
    assert again.statuses() == [0, 0], again.outputs
    assert again.hashes() == undisturbed(total=_TOTAL)
    assert set(again.started_at()) == {step}
    jobs.check_nothing_left()


@pytest.mark.nightly  # test_one_stop.py
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all(jobs, undisturbed, rank):
    """Their parent ends the others as soon as one has left: by then all is durable."""
    job = jobs.spawn(total=_TOTAL, pauses=0.02)
    job.wait_for_step(8)
    os.kill(job.record(rank)["trainer_pid"], signal.SIGTERM)
    assert job.statuses() == [1, 1], job.outputs
    step = checkpoint_steps(jobs.folder)[-1]
    assert f"SIGTERM (rank {rank}): all ranks finish step {step}" in job.said
    _check_goes_on(jobs, undisturbed, step)


# Over 5 s: spawned ranks import torch.
def test_when_their_parent_is_killed_the_ranks_save_and_leave(jobs, undisturbed):
    """Nobody else would end them."""
    job = jobs.spawn(total=_TOTAL, pauses=0.05)
    job.wait_for_step(8)
    ranks = [psutil.Process(job.record(rank)["trainer_pid"]) for rank in range(2)]
    job.send(signal.SIGKILL, 0)
    assert job.statuses() == [-9, -9]
    wait_until(lambda: not any(rank.is_running() for rank in ranks), 20, "the end of the ranks")
    assert "the process that started it" in job.said
    assert "leaving with status 75" in job.said
    _check_goes_on(jobs, undisturbed, checkpoint_steps(jobs.folder)[-1])


def test_kill_9_of_a_rank_ends_the_others(jobs, undisturbed):
    job = jobs.spawn(total=_TOTAL, pauses=0.03)
    job.wait_for_step(10)
    wait_until(job.common_step, what="a snapshot that all hold")
    os.kill(job.record(1)["trainer_pid"], signal.SIGKILL)
    assert job.statuses() == [1, 1], job.outputs
    wait_until(lambda: checkpoint_steps(jobs.folder), 10, "the checkpoint")
    _check_goes_on(jobs, undisturbed, checkpoint_steps(jobs.folder)[-1])
