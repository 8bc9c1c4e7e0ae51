"""The run folders that the pages are tested with are what a run leaves: its readers read them."""

from __future__ import annotations

import time

import pytest

from holdfast._diagnose.deaths.judge import judge
from holdfast._diagnose.evidence.gather import gather_run
from holdfast._report.status.gather import summarize
from holdfast._store.folder import journal, series
from holdfast._store.folder.layout import RunLayout
from tests.report_ends import ENDS
from tests.report_runs import make_live, make_long_journal, make_many_attempts
from tests.report_story import Story

_CAUSES = {
    "preempted": "time-limit",
    "killed": "killed",
    "terminated": "asked",
    "hung": "hang-lock",
    "out-of-memory": "oom-cgroup",
    "failed": "python-exception",
    "asked": "asked",
    "bad": "bad-training",
    "full-disk": "not-durable",
    "crashed": "segfault",
}


@pytest.mark.parametrize("name", _CAUSES)
def test_an_end_is_judged_as_the_real_one(name, tmp_path):
    story = Story(tmp_path, time.time() - 86400, job="7")
    story.begin()
    story.train(4000)
    ENDS[name](story)
    folder = story.close()
    assert judge(gather_run(folder)).cause.value == _CAUSES[name]
    assert not summarize(folder).is_live


def test_forty_attempts_end_well(tmp_path):
    folder = make_many_attempts(tmp_path)
    found = summarize(folder)
    assert (found.state, found.attempt, found.step) == ("finished", 40, 400_000)
    layout = RunLayout(folder)
    rows = list(series.read(layout.series(40)))
    assert rows[-1]["s"] == 400_000
    times = [event["time"] for event in journal.read(layout.journal)]
    assert times == sorted(times)
    assert times[-1] < time.time()


def test_one_that_lives_is_seen_to_live(tmp_path):
    found = summarize(make_live(tmp_path))
    assert (found.state, found.is_live) == ("training", True)
    assert found.job is not None


def test_a_long_journal_has_its_lines(tmp_path):
    folder = make_long_journal(tmp_path, lines=10_000)
    assert 10_000 <= sum(1 for _ in journal.read(RunLayout(folder).journal)) < 10_400
    assert summarize(folder).attempt == 40
