"""The pace of the steps, by a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._run.progress.line import ShownPace, Standing


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pace(clock):
    return ShownPace(clock)


def train(pace, clock, seconds, *, per_second, step, every=0.25):
    """Steps at an even pace, seen every quarter of a second; returns the last step."""
    for _ in range(int(seconds / every)):
        clock.now += every
        step += per_second * every
        pace.observe(Standing(step=int(step)))
    return int(step)


def stay(pace, clock, seconds, *, step, phase=None, every=0.25):
    for _ in range(int(seconds / every)):
        clock.now += every
        pace.observe(Standing(step=step, phase=phase))


def test_there_is_no_rate_before_two_steps_were_seen(pace, clock):
    assert pace.rate is None
    pace.observe(Standing(step=5))
    stay(pace, clock, 2, step=5)
    pace.observe(Standing(step=6))
    assert pace.rate is None


def test_an_even_pace_is_found(pace, clock):
    pace.observe(Standing(step=0))
    train(pace, clock, 10, per_second=20, step=0)
    assert pace.rate == pytest.approx(20, rel=0.02)


def test_a_slow_first_step_does_not_count(pace, clock):
    pace.observe(Standing(step=0))
    stay(pace, clock, 90, step=0)
    train(pace, clock, 2, per_second=20, step=0)
    assert pace.rate == pytest.approx(20, rel=0.1)


def test_steps_of_a_former_life_do_not_count(pace, clock):
    pace.observe(Standing(step=100_000))
    train(pace, clock, 5, per_second=4, step=100_000)
    assert pace.rate == pytest.approx(4, rel=0.1)


def test_a_phase_without_steps_takes_no_time(pace, clock):
    pace.observe(Standing(step=0))
    step = train(pace, clock, 10, per_second=20, step=0)
    stay(pace, clock, 120, step=step, phase="eval")
    assert pace.rate == pytest.approx(20, rel=0.02)
    assert pace.idle_seconds is None
    train(pace, clock, 1, per_second=20, step=step)
    assert pace.rate == pytest.approx(20, rel=0.1)


def test_a_new_pace_is_known_after_the_window(pace, clock):
    pace.observe(Standing(step=0))
    step = train(pace, clock, 60, per_second=100, step=0)
    train(pace, clock, 31, per_second=10, step=step)
    assert pace.rate == pytest.approx(10, rel=0.1)


def test_steps_that_are_slower_than_the_window_have_a_pace_too(pace, clock):
    pace.observe(Standing(step=0))
    for step in range(1, 6):
        stay(pace, clock, 120, step=step)
    assert pace.rate == pytest.approx(1 / 120, rel=0.01)
    assert pace.idle_seconds is None


def test_standing_still_is_noticed_and_over_with_the_next_step(pace, clock):
    pace.observe(Standing(step=0))
    step = train(pace, clock, 10, per_second=20, step=0)
    stay(pace, clock, 9, step=step)
    assert pace.idle_seconds is None
    stay(pace, clock, 40, step=step)
    assert pace.idle_seconds == pytest.approx(49, abs=0.5)
    pace.observe(Standing(step=step + 1))
    assert pace.idle_seconds is None


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 1000), st.booleans()), max_size=60))
def test_whatever_is_seen_the_rate_is_a_number_and_positive(seen):
    clock = Clock()
    pace = ShownPace(clock)
    for seconds, step, in_phase in seen:
        clock.now += seconds
        pace.observe(Standing(step=step, phase="eval" if in_phase else None))
        assert pace.rate is None or pace.rate > 0
        assert pace.idle_seconds is None or pace.idle_seconds > 0
