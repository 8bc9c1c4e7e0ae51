"""The parts of a run: trainers use one door, and a stop request has one owner."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import holdfast
from holdfast import _errors
from holdfast._run.boundary import StopState
from holdfast._run.signals.handlers import _is_uninterruptible, uninterruptible
from holdfast._store.folder.requests import StopRequest

_PACKAGE = Path(holdfast.__file__).parent


def test_nothing_outside_of_the_run_reaches_into_it():
    private = re.compile(r"(?<!holdfast\.)\b_?run\._[a-z]")
    outside = [path for path in _PACKAGE.rglob("*.py") if _PACKAGE / "_run" not in path.parents]
    found = [str(path) for path in outside if private.search(path.read_text())]
    assert found == []


def test_a_request_stays_unless_it_is_only_a_deadline():
    stops = StopState()
    by_clock = StopRequest("time limit", _errors.REQUEUE)
    by_person = StopRequest("asked", _errors.PERSON)
    stops.ask(by_clock)
    stops.ask(by_person)
    assert stops.asked is by_person
    stops.ask(StopRequest("asked again", _errors.PERSON))
    assert stops.asked is by_person


def test_of_several_errors_the_first_is_raised():
    stops, cause = StopState(), _errors.RanksError("14 and 12 batches in epoch 0")
    stops.fail(cause)
    stops.fail(_errors.RanksError("14 and 12 batches in epoch 1"))
    assert stops.error is cause


def test_a_stop_in_the_last_step_waits_for_another_loop():
    stops, asked = StopState(), StopRequest("asked", _errors.PERSON)
    stops.watch(SimpleNamespace(noted=[signal.SIGTERM], request=lambda asked: asked))
    stops.ask(asked)
    stops.postpone()
    assert stops.request() is None
    assert stops.signals == []
    stops.resume_postponed()
    assert stops.request() is asked


@uninterruptible
def protected(work):
    return work()


def test_what_an_uninterruptible_function_calls_is_uninterruptible_too():
    assert protected(lambda: _is_uninterruptible(sys._getframe()))
    assert not _is_uninterruptible(sys._getframe())
