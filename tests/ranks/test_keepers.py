"""A keeper that dies is replaced, be it that of rank 0, and the ranks go on and still agree."""

from __future__ import annotations

import signal

import pytest

import holdfast
from tests.support import arena_files, checkpoint_steps, keepers, wait_until

_TOTAL = 400  # with pauses it is still at it when a keeper has been replaced, however slow that is


def _kill_keeper(job, rank) -> None:
    """End the keeper of a rank, and wait until there is another."""
    before = job.keeper(rank)
    before.kill()
    if rank == 0:
        job.wait_for("was killed by SIGKILL; started another", rank)  # the others say nothing
    wait_until(lambda: job.record(rank)["keeper"]["pid"] != before.pid, what="the new one's record")


def _check(jobs, job, undisturbed, *, world=2, status=143, **plan) -> None:
    assert job.statuses() == [status] * world, job.outputs
    (step,) = set(job.steps_at_the_end())
    jobs.check_checkpoint(step, world)
    jobs.check_nothing_left()
    again = jobs.start(world, total=_TOTAL, pauses=0.0, **plan)
    assert again.hashes() == undisturbed(world, total=_TOTAL, **plan)
    assert set(again.started_at()) == {step}


@pytest.mark.parametrize(
    ("meets", "world", "rank"),
    [
        ("group", 2, 0),
        ("group", 2, 1),
        pytest.param("group", 4, 2, marks=pytest.mark.nightly),
        pytest.param("files", 2, 0, marks=pytest.mark.nightly),
        pytest.param("group", 4, 0, marks=pytest.mark.nightly),
    ],
)
def test_kill_9_of_a_keeper_holds_nothing_up_and_a_stop_works_afterwards(
    jobs, undisturbed, meets, world, rank
):
    job = jobs.start(world, meets=meets, total=_TOTAL, pauses=0.05)
    job.wait_for_step(4)
    _kill_keeper(job, rank)
    job.send(signal.SIGTERM, world - 1)
    _check(jobs, job, undisturbed, world=world, meets=meets)


@pytest.mark.nightly  # above: a stop after a keeper was replaced
@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_keeper_was_replaced_all_hold_snapshots_in_common_again(jobs, undisturbed, rank):
    job = jobs.start(total=_TOTAL, pauses=0.05)
    job.wait_for_step(4)
    _kill_keeper(job, rank)
    before = wait_until(job.common_step, what="a snapshot that all hold")
    wait_until(lambda: (job.common_step() or 0) > before, what="a newer snapshot that all hold")
    job.send(signal.SIGKILL, 1)
    assert job.statuses() == [75, -9], job.outputs
    assert checkpoint_steps(jobs.folder)[-1] > before
    jobs.check_nothing_left()
    assert jobs.start(total=_TOTAL, pauses=0.0).hashes() == undisturbed(total=_TOTAL)


@pytest.mark.nightly
def test_kill_9_of_the_hub_after_an_agreement(jobs, undisturbed):
    """The new one begins to count its agreements anew."""
    job = jobs.start(total=_TOTAL, pauses=0.05)
    job.wait_for_step(2)
    holdfast.save(jobs.folder)
    wait_until(lambda: checkpoint_steps(jobs.folder), what="the checkpoint")
    _kill_keeper(job, 0)
    job.send(signal.SIGTERM, 1)
    _check(jobs, job, undisturbed)


@pytest.mark.nightly  # above: a stop after the kill; below: a kill amid the last checkpoint
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_at_the_very_moment_a_keeper_is_killed(jobs, undisturbed, rank):
    job = jobs.start(total=_TOTAL, pauses=0.05)
    job.wait_for_step(4)
    job.keeper(rank).kill()
    job.send(signal.SIGTERM, 0)
    _check(jobs, job, undisturbed)


# Over 5 s: a step lasts longer than the pulse, which replaces the keeper, and a second run follows.
def test_a_keeper_that_dies_while_its_rank_is_in_a_collective_is_replaced(jobs, undisturbed):
    """Rank 1 waits for rank 0 in a collective; rank 0 then waits for rank 1's keeper to answer."""
    job = jobs.start(total=_TOTAL, pauses=0.0, events=[(0, 4, "sleep", 4.0), (1, 5, "sleep", 0.0)])
    job.wait_for("holding", 0)
    job.wait_for("step 5", 1)  # it is behind the boundary at which rank 0 will stop
    job.keeper(1).kill()
    job.send(signal.SIGTERM, 0)
    _check(jobs, job, undisturbed)


@pytest.mark.parametrize(
    ("rank", "stage"),
    [
        (1, "half-written"),
        (0, "before-publish"),
        pytest.param(1, "synced", marks=pytest.mark.nightly),
        pytest.param(0, "begun", marks=pytest.mark.nightly),
        pytest.param(0, "half-written", marks=pytest.mark.nightly),
    ],
)
def test_kill_9_of_a_keeper_in_the_middle_of_the_last_checkpoint(
    jobs, undisturbed, rank, stage, tmp_path
):
    marker = tmp_path / "marker"
    fault = {rank: {"HOLDFAST_FAULT": f"{stage}@{marker}"}}
    job = jobs.start(total=_TOTAL, pauses=0.03, environment=fault)
    job.wait_for_step(6)
    job.send(signal.SIGTERM, 1)
    assert job.statuses() == [143, 143], job.outputs
    assert marker.exists()
    _check(jobs, job, undisturbed)


@pytest.mark.nightly  # tests/processes/test_two_processes.py fences one process
def test_a_late_keeper_of_an_older_attempt_neither_commits_nor_deletes(jobs, undisturbed):
    """It was stopped when its rank died, and goes on when the next life has come far."""
    job = jobs.start(total=_TOTAL, pauses=0.02)
    job.wait_for_step(10)
    holdfast.save(jobs.folder)
    (saved,) = wait_until(lambda: checkpoint_steps(jobs.folder), what="the checkpoint")
    job.wait_for_step(saved + 6)
    old = [job.keeper(rank) for rank in range(2)]
    for keeper in old:
        keeper.suspend()
    job.send(signal.SIGKILL)
    assert job.statuses() == [-9, -9]
    # Else the next life would wait for the keeper, or end it.
    (jobs.folder / "attempts/0001/exit.json").write_text("{}")
    again = jobs.start(total=_TOTAL, events=[(None, _TOTAL - 2, "gate", str(jobs.gate))])
    began = again.wait_for("ready", 0)
    again.wait_for("holding")
    before = sorted(path.name for path in (jobs.folder / "checkpoints").iterdir())
    arenas = [path for path in arena_files(jobs.folder) if "-a2-" in path.name]
    for keeper in old:
        keeper.resume()
    wait_until(lambda: not set(old) & set(keepers(jobs.folder)), 30, "the end of the old keepers")
    assert sorted(path.name for path in (jobs.folder / "checkpoints").iterdir()) == before
    assert [path for path in arena_files(jobs.folder) if "-a2-" in path.name] == arenas
    assert int(began.split()[1]) >= saved
    jobs.open_gate()
    assert again.hashes() == undisturbed(total=_TOTAL)
    jobs.check_nothing_left()
