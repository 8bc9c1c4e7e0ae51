"""The run's own line: what led to today, and nothing beyond where it was left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast._store.folder.lineage import is_on_line, trace_line


@st.composite
def histories(draw):
    """Origins of attempts, each from an earlier one (or afresh), some that never began."""
    count = draw(st.integers(1, 8))
    origins = {}
    for attempt in range(1, count + 1):
        if draw(st.integers(0, 3)) == 0:
            continue  # this one never began to train
        earlier = sorted(origins)
        if not earlier or draw(st.integers(0, 5)) == 0:
            origins[attempt] = None
        else:
            origins[attempt] = (draw(st.sampled_from(earlier)), draw(st.integers(0, 30)))
    return origins, count


def ancestry(origins, newest):
    """The same by another way: the set of all (attempt, step ≤ 30) that led to `newest`."""
    begun = [a for a in origins if a <= newest]
    if not begun:
        return set()
    attempt, limit = max(begun), 31
    reached = set()
    while True:
        reached |= {(attempt, step) for step in range(limit + 1)}
        if origins[attempt] is None:
            return reached
        attempt, limit = origins[attempt]


@given(histories())
def test_exactly_what_led_to_the_newest_attempt_is_on_the_line(history):
    origins, newest = history
    line = trace_line(origins, newest)
    expected = ancestry(origins, newest)
    for attempt in range(newest + 2):
        for step in range(32):
            assert is_on_line(line, attempt, step) == ((attempt, step) in expected)


@given(histories())
def test_the_line_never_includes_a_step_beyond_an_origin(history):
    origins, newest = history
    line = trace_line(origins, newest)
    for attempt in line:
        origin = origins[attempt]
        if origin is not None:
            assert is_on_line(line, *origin)
            assert not is_on_line(line, origin[0], origin[1] + 1)


@given(histories())
def test_only_the_newest_attempt_that_began_counts_without_end(history):
    origins, newest = history
    line = trace_line(origins, newest)
    endless = [attempt for attempt, last in line.items() if last is None]
    assert endless == ([max(origins)] if origins else [])


def test_an_attempt_that_never_began_to_train_is_passed_over():
    assert trace_line({1: None, 2: (1, 50)}, newest=4) == {2: None, 1: 50}


def test_an_attempt_after_the_one_that_is_asked_about_does_not_count():
    assert trace_line({1: None, 2: (1, 50), 3: (2, 70)}, newest=2) == {2: None, 1: 50}


def test_a_run_without_attempts_has_no_line():
    assert trace_line({}, newest=3) == {}
    assert not is_on_line({}, 1, 0)


def test_an_origin_that_points_forward_does_not_make_an_endless_loop():
    assert trace_line({1: (2, 5), 2: (1, 5)}, newest=2) == {2: None, 1: 5}
    assert trace_line({1: (1, 5)}, newest=1) == {1: None}
