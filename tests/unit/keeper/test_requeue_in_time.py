"""The job is requeued before its end, also where the disk is slower than that."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace

import pytest

from holdfast import _errors
from holdfast._environment.slurm import controller
from holdfast._environment.slurm.controller import JobFacts
from holdfast._environment.slurm.job import Job
from holdfast._keeper.decider import Alone
from holdfast._keeper.job import JobWatch
from holdfast._keeper.time_limit import TimeLimit
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.requests import StopRequest
from tests.support import wait_until

USR2 = StopRequest("SIGUSR2", _errors.REQUEUE, signal.SIGUSR2)
TERM = StopRequest("SIGTERM", _errors.TERMINATED, signal.SIGTERM)
PERSON = StopRequest("holdfast stop", _errors.PERSON)


@pytest.fixture
def requeued(monkeypatch):
    """The jobs that SLURM was asked to requeue."""
    asked: list[str] = []
    monkeypatch.setattr(controller, "requeue", lambda job, _seconds: asked.append(job))
    return asked


def _keeper(tmp_path, monkeypatch, stop, left, *, reason="None", kill_wait=30.0):
    """A keeper whose commit goes on and on, so many seconds before the end of its job."""
    (tmp_path / "attempts/0001").mkdir(parents=True)
    facts = JobFacts("12", "RUNNING", reason, 0, time.time() + left, False, True, True)
    monkeypatch.setattr(controller, "show_job", lambda *_: facts)
    monkeypatch.setattr(controller, "warning_seconds", lambda _: None)
    monkeypatch.setattr(controller, "kill_wait_seconds", lambda: kill_wait)
    job = JobWatch(Job("12", "12", 0), RunLayout(tmp_path), 1, 3)
    job._polling.acquire()
    job._learn()
    job._learn_cause()
    trainer = SimpleNamespace(words=[0] * 512, is_leaving=False, stays=False)
    storage = SimpleNamespace(save_seconds=16.0, durable_step=40)
    limit = TimeLimit(job, None, trainer, storage, lambda *_, **__: True)
    decider = Alone()
    decider.stop, decider._timers = stop, SimpleNamespace(due_at=lambda _: None)
    return job, lambda: limit.poll(time.monotonic(), decider)


@pytest.mark.parametrize(
    ("stop", "reason"), [(USR2, "None"), (TERM, "TimeLimit")], ids=["warning", "time limit"]
)
def test_a_slow_commit_does_not_cost_the_job(tmp_path, monkeypatch, requeued, stop, reason):
    job, poll = _keeper(tmp_path, monkeypatch, stop, 9.0, reason=reason)
    poll()
    wait_until(lambda: requeued == ["12"], 10, "the requeue")
    poll()
    assert job.requeue(41).said == "job 12 is requeued and goes on by itself."
    assert requeued == ["12"]


@pytest.mark.parametrize(
    ("stop", "left", "kill_wait"),
    [(USR2, 20.0, 30.0), (USR2, 8.0, 2.0), (PERSON, 2.0, 30.0), (TERM, 2.0, 30.0)],
    ids=["there is time", "KillWait is short", "a person", "no scheduler"],
)
def test_it_is_not_asked_for_too_early_nor_against_a_wish(
    tmp_path, monkeypatch, requeued, stop, left, kill_wait
):
    job, poll = _keeper(tmp_path, monkeypatch, stop, left, kill_wait=kill_wait)
    poll()
    assert not job._is_asked_in_time
    assert requeued == []
