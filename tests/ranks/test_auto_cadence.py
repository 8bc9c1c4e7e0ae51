"""checkpoint_every="auto" with several ranks: the first finds the interval, for all."""

from __future__ import annotations

from tests.support import checkpoint_steps

_TOTAL = 30


def test_of_several_ranks_the_first_finds_the_interval_and_says_it_once(jobs, undisturbed):
    events = [(1, 8, "save", None), (1, 12, "wait", None)]
    settings = {"checkpoint_every": "auto"}
    job = jobs.start(total=_TOTAL, events=events, pauses=0.01, settings=settings)
    assert job.hashes() == undisturbed(total=_TOTAL)
    assert checkpoint_steps(jobs.folder)[-1] == _TOTAL
    found = jobs.events("cadence")
    assert found
    assert all(30 <= each["seconds"] <= 3600 and each["deaths"] == 0 for each in found)
    assert [job.output(rank).count("a checkpoint every ") for rank in (0, 1)] == [1, 0]
    jobs.check_nothing_left()
