"""A step that takes longer than the time there is: the newest step that all hold is durable."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support import checkpoint_steps, wait_until

_TOTAL = 400  # so many that it is still at it when a test acts, however slow the machine is
_GRACE_SECONDS = 2.5


@pytest.mark.parametrize(
    ("meets", "call", "signalled"),
    [
        ("group", "gate", 0),
        pytest.param("group", "call", 1, marks=pytest.mark.nightly),
        ("files", "call", 0),
        pytest.param("files", "gate", 1, marks=pytest.mark.nightly),
    ],
)
def test_what_all_hold_is_durable_before_the_grace_time_ends(
    jobs, undisturbed, meets, call, signalled
):
    """Nobody's main thread is asked: one rank holds its interpreter, the others wait for it."""
    value = str(jobs.gate) if call == "gate" else 30.0
    job = jobs.start(
        meets=meets,
        total=_TOTAL,
        pauses=0.03,
        events=[(1, 12, call, value)],
        settings={"grace_seconds": _GRACE_SECONDS},
    )
    job.wait_for("holding", 1)
    if meets == "files":
        job.wait_for_step(18, 0)
    assert checkpoint_steps(jobs.folder) == []
    began = time.monotonic()
    job.send(signal.SIGTERM, signalled)
    wait_until(lambda: checkpoint_steps(jobs.folder), 10, f"a checkpoint in\n{job.outputs}\n")
    assert time.monotonic() - began < _GRACE_SECONDS
    common = job.common_step()
    assert common is not None
    assert 0 < common <= 12
    jobs.check_checkpoint(common, 2)
    (made,) = wait_until(lambda: jobs.events("checkpoint"))
    assert (made["reason"], made["step"]) == ("deadline", common)
    assert not any(life.is_over for life in job.lives)
    job.send(signal.SIGSTOP)  # else one leaves by itself as soon as it learns of the other's end
    job.send(signal.SIGKILL)  # as a scheduler does when the time is up
    assert job.statuses() == [-9, -9]
    jobs.check_nothing_left()
    again = jobs.start(meets=meets, total=_TOTAL, pauses=0.0)
    assert again.hashes() == undisturbed(meets=meets, total=_TOTAL)
    assert set(again.started_at()) == {common}


def test_when_all_get_there_in_time_the_step_of_the_stop_is_durable(jobs):
    job = jobs.start(
        total=_TOTAL, events=[(1, 12, "sleep", 0.5)], settings={"grace_seconds": _GRACE_SECONDS}
    )
    job.wait_for("holding", 1)
    job.send(signal.SIGTERM, 0)
    assert job.statuses() == [143, 143], job.outputs
    (step,) = set(job.steps_at_the_end())
    assert step in (13, 14)  # the other rank may have passed that boundary, and waits in the next
    assert checkpoint_steps(jobs.folder) == [step]
    jobs.check_nothing_left()
