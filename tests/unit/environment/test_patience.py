"""How long a run may stand: learned from its own steps and phases, and never from other time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._environment.processes.patience import (
    FIRST,
    FRESH,
    OUTSIDE,
    PHASE,
    STEP,
    UNJUDGED,
    WORK,
    Patience,
    Sight,
)

_LOOK = 0.25


class Course:
    """A trainer as its keeper sees it, four times a second."""

    def __init__(self, given_seconds: float | None = None) -> None:
        self.patience = Patience(given_seconds)
        self.sight = Sight(now=100.0, step=0, boundary=0.0, in_loop=False)
        self.patience.see(self.sight)

    @property
    def now(self) -> float:
        return self.sight.now

    def look(self, seconds: float = _LOOK, **change: Any) -> None:
        self.sight = replace(self.sight, now=self.now + seconds, **change)
        self.patience.see(self.sight)

    def stand(self, seconds: float, **change: Any) -> None:
        for _ in range(int(seconds / _LOOK)):
            self.look(**change)

    def train(self, seconds: float, step_seconds: float, **change: Any) -> None:
        until, due = self.now + seconds, self.now + step_seconds
        while self.now < until:
            step, boundary = self.sight.step, self.sight.boundary
            while due <= self.now + _LOOK:
                step, boundary, due = step + 1, due, due + step_seconds
            self.look(step=step, boundary=boundary, in_loop=True, **change)

    def over_after(self) -> float:
        """The seconds that it may stand from now on."""
        began = self.now
        while not self.patience.is_over(self.now):
            self.look()
            assert self.now - began < 100_000
        return self.now - began


def test_quick_steps_are_waited_for_twenty_seconds():
    course = Course()
    course.train(10, 0.05)
    assert course.patience.kind == STEP
    assert course.patience.usual == pytest.approx(0.05, rel=0.3)
    assert 19 < course.over_after() < 21.5


@pytest.mark.parametrize(("step_seconds", "limit"), [(5.0, 50.0), (60.0, 600.0)])
def test_slow_steps_get_ten_times_what_is_usual(step_seconds, limit):
    course = Course()
    course.train(20 * step_seconds, step_seconds)
    assert course.patience.limit() == pytest.approx(limit, rel=0.1)


def test_one_long_step_among_quick_ones_is_remembered_for_a_while():
    course = Course()
    course.train(10, 0.05)
    course.stand(40)  # an evaluation that nobody announced
    course.train(10, 0.05)
    assert course.patience.limit() == pytest.approx(120, rel=0.1)
    course.train(4 * 3600, 0.05)
    assert course.patience.limit() < 30


def test_the_first_step_may_compile_for_long():
    course = Course()
    course.stand(1700, in_loop=True)
    assert (course.patience.kind, course.patience.is_over(course.now)) == (FIRST, False)
    course.stand(200)
    assert course.patience.is_over(course.now)


def test_outside_of_the_loop_half_an_hour():
    course = Course()
    course.train(10, 0.05)
    course.look(in_loop=False)
    assert (course.patience.kind, course.patience.limit()) == (OUTSIDE, 1800)


def test_a_phase_has_a_measure_of_its_own():
    course = Course()
    course.train(10, 0.05)
    course.stand(400, rests=True, phase="eval")
    assert (course.patience.kind, course.patience.limit()) == (PHASE, 600)
    course.train(10, 0.05, rests=False, phase=None)
    assert course.patience.limit() == 20, "what a phase takes is no step's time"
    course.look(rests=True, phase="eval")
    assert course.patience.limit() == pytest.approx(2000, rel=0.05)
    course.look(phase="sample")
    assert course.patience.limit() == 600


def test_a_loop_that_begins_again_may_start_its_workers():
    course = Course()
    course.train(10, 0.05)
    course.look(in_loop=False)
    course.look(in_loop=True)
    assert (course.patience.kind, course.patience.limit()) == (FRESH, 60)
    course.train(5, 0.05)
    course.look(epoch=2)
    assert course.patience.kind == FRESH


def test_what_holdfast_does_itself_has_half_an_hour():
    course = Course()
    course.train(10, 0.05)
    course.stand(1200, is_ours=True)
    assert (course.patience.kind, course.patience.is_over(course.now)) == (WORK, False)
    course.train(5, 0.05, is_ours=False)
    assert course.patience.limit() == 20


def test_one_that_leaves_is_not_judged():
    course = Course(given_seconds=1.0)
    course.train(10, 0.05)
    course.stand(3600, is_judged=False)
    assert (course.patience.kind, course.patience.is_over(course.now)) == (UNJUDGED, False)


def test_many_steps_in_the_first_look_are_a_measure():
    course = Course()
    course.look(in_loop=True)
    course.look(seconds=1.0, step=75, boundary=course.now + 0.9)
    assert course.patience.usual == pytest.approx(0.012, rel=0.1)
    assert 19 < course.over_after() < 21.5


def test_time_in_a_debugger_is_neither_learned_nor_counted_after():
    course = Course()
    course.train(10, 0.05)
    course.stand(3600, is_held=True)
    assert course.patience.is_over(course.now), "so that it can be said once"
    course.look(is_held=False)
    assert not course.patience.is_over(course.now)
    assert 19 < course.over_after() < 21.5
    course.train(5, 0.05)
    assert course.patience.limit() == 20


def test_who_was_away_himself_counts_anew():
    course = Course()
    course.train(10, 0.05)
    course.stand(15)
    course.look(seconds=3600.0)  # a laptop that slept, or both were stopped
    assert not course.patience.is_over(course.now)
    assert 19 < course.over_after() < 21.5


def test_time_for_which_it_waited_for_a_processor_does_not_count():
    course = Course(given_seconds=1.0)
    course.train(10, 0.05)
    waited = 500.0  # in all its life, most of it long ago
    for _ in range(int(60 / _LOOK)):
        waited += 0.95 * _LOOK
        course.look(waited=waited)
    assert course.patience.is_over(course.now)
    assert course.patience.stood(course.now) == pytest.approx(3.0, abs=0.5)
    course = Course(given_seconds=5.0)
    course.train(10, 0.05)
    for _ in range(int(60 / _LOOK)):
        waited += 0.95 * _LOOK
        course.look(waited=waited)
    assert not course.patience.is_over(course.now)
    assert 1.5 < course.over_after() < 2.5, "when nobody is in its way any more"


def test_what_it_waited_before_its_last_step_is_not_set_off_against_a_hang():
    course = Course()
    course.train(10, 0.05)
    course.look(waited=10.0)
    course.train(600, 0.05, waited=None)  # in the calm nobody looks
    course.look(waited=400.0)
    assert 19 < course.over_after() < 21.5


def test_a_profiler_gives_it_thirty_times_as_long():
    course = Course()
    course.train(10, 0.05)
    course.train(30, 1.0, is_slowed=True)
    assert course.patience.limit() >= 600
    assert course.patience.usual == pytest.approx(0.05, rel=0.3), "as it is undisturbed"
    assert course.patience.newest == pytest.approx(1.0, rel=0.3)


def test_a_keeper_that_takes_over_does_not_know_how_long_it_stood_before():
    patience = Patience()
    sight = Sight(now=100_000.0, step=50, boundary=10.0, in_loop=True)
    patience.see(sight)
    patience.see(replace(sight, now=100_000.25))
    assert patience.kind == FIRST
    assert not patience.is_over(100_001.0)


def test_what_is_given_is_for_a_step_and_ten_times_that_for_the_rest():
    course = Course(given_seconds=3.0)
    course.look(in_loop=True)
    assert course.patience.limit() == 30
    course.train(5, 0.05)
    assert course.patience.limit() == 3
    course.look(rests=True, phase="eval")
    assert course.patience.limit() == 30


@given(
    steps=st.lists(st.floats(0.01, 30.0), min_size=12, max_size=40),
    factor=st.floats(0.5, 2.9),
)
def test_no_step_that_is_like_the_others_is_ever_over(steps, factor):
    """Whatever the steps take: one of less than three times the longest of late is waited for."""
    course = Course()
    course.look(in_loop=True)
    for seconds in steps:
        course.train(seconds + _LOOK, seconds)
        course.look(step=course.sight.step + 1, boundary=course.now)
    course.stand(factor * max(steps[-3:]) * 0.9)
    assert not course.patience.is_over(course.now)


def test_steps_that_nobody_saw_are_a_measure_as_well():
    # A keeper that starts late on a busy machine, or one that takes the place of another.
    sight = Sight(now=100.0, step=60, boundary=99.5, in_loop=True, loop_began=96.5)
    late = Patience()
    late.see(sight)
    assert late.kind == STEP
    assert late.limit() == 20.0
    assert not late.is_over(100.0)
    late.see(replace(sight, step=400, loop_step=397, loop_began=39.5, boundary=99.5))
    assert late.limit() == 200.0
    first = Patience()
    first.see(replace(sight, step=42, loop_step=41, loop_began=96.5))
    assert first.kind == FIRST
