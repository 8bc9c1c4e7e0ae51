"""Many interruptions at moments that nobody has chosen, and a keeper that falls silent."""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.support import checkpoint_steps

_TOTAL = 600
_ASKED = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 75}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("meets", ["group", "files"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_random_interruptions_of_random_ranks(jobs, undisturbed, meets, world, seed):
    """Some kill, and some ask, of which some come just when a keeper was killed."""
    rng = random.Random(f"{meets} {world} {seed}")
    reached = 0
    for _ in range(12):
        pauses = [rng.choice([0.0, 0.002, 0.01]) for _ in range(world)]
        job = jobs.start(world, meets=meets, total=_TOTAL, pauses=pauses)
        for rank in range(world):
            job.wait_for("step ", rank)
        time.sleep(rng.uniform(0.0, 0.4))
        number = rng.choice([*_ASKED, *_ASKED, *[signal.SIGKILL] * 4])
        if number in _ASKED and rng.random() < 0.5:
            job.keeper(rng.randrange(world)).kill()
            time.sleep(rng.choice([0.0, 0.02, 0.3]))
        ranks = rng.sample(range(world), rng.randint(1, world))
        job.send(number, *ranks)
        statuses = job.statuses(60.0)
        if number in _ASKED and 0 not in statuses:
            assert set(statuses) == {_ASKED[number]}, job.outputs
            (step,) = set(job.steps_at_the_end())
            jobs.check_checkpoint(step, world)
        # One that is killed while it makes its arena has told nobody of it: the next life has it.
        jobs.check_nothing_left(may_leave_arena=number == signal.SIGKILL)
        (began,) = set(job.started_at())
        assert began >= reached
        reached = began
        if 0 in statuses or checkpoint_steps(jobs.folder)[-1:] == [_TOTAL]:
            break
    again = jobs.start(world, meets=meets, total=_TOTAL, pauses=0.0)
    assert again.hashes() == undisturbed(world, meets=meets, total=_TOTAL)
    jobs.check_nothing_left()


@pytest.mark.nightly
@pytest.mark.parametrize("meets", ["group", "files"])
def test_a_keeper_that_does_not_answer_holds_up_nobody_for_ever(jobs, undisturbed, meets):
    """It comes back when the others have decided without it."""
    job = jobs.start(meets=meets, total=4000, pauses=0.01)
    job.wait_for_step(20)
    silent = job.keeper(1)
    silent.suspend()
    job.send(signal.SIGINT, 0)
    job.wait_for("SIGINT (rank 0)", 0)
    silent.resume()
    statuses = job.statuses(60.0)
    assert 0 not in statuses, job.outputs
    jobs.check_nothing_left()
    again = jobs.start(meets=meets, total=4000, pauses=0.0)
    assert again.hashes() == undisturbed(meets=meets, total=4000)
