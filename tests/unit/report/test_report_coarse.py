"""Columns stay short, and keep what an eye looks for."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from holdfast._report.events import EventMarks
from holdfast._report.series import Curve, Levels, Times
from holdfast._store.folder.series import bucket_of

numbers = st.floats(-1e6, 1e6)
rows = st.lists(st.tuples(st.integers(1, 4), numbers), max_size=300)


@given(rows, st.integers(4, 40))
def test_a_curve_keeps_lowest_highest_and_last(found, most):
    found.sort(key=lambda row: row[0])
    curve = Curve(most)
    for step, (attempt, value) in enumerate(found):
        curve.add(attempt, step, [value, value - 1, value + 1, 1])
    steps = [point.step for point in curve.points]
    assert len(steps) <= max(most, 2 * len({attempt for attempt, _ in found}) + most // 2)
    assert steps == sorted(steps)
    for attempt in {attempt for attempt, _ in found}:
        values = [value for of, value in found if of == attempt]
        points = [point for point in curve.points if point.attempt == attempt]
        assert min(point.low for point in points) == min(values) - 1
        assert max(point.high for point in points) == max(values) + 1
        assert points[-1].value == values[-1]


def test_a_curve_of_very_many_rows_is_short():
    curve = Curve(100)
    for step in range(100_000):
        curve.add(1, step, [step, step, step, 1])
    steps = [point.step for point in curve.points]
    assert 50 <= len(steps) <= 100
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert max(gaps) <= 2 * 100_000 / 50


def test_what_is_not_finite_is_a_gap_with_its_step():
    curve = Curve()
    curve.add(1, 5, [None, None, None, 1], is_bad=True)
    curve.add(1, 6, [math.nan, math.inf, "x", 1], is_bad=True)
    curve.add(1, 7, [1, 1, 1, 1])
    assert [point.value for point in curve.points] == [None, None, 1.0]
    assert [point.low for point in curve.points] == [None, None, 1.0]
    assert curve.bad == [(1, 5), (1, 6)]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 200), st.integers(1, 9)), max_size=900))
def test_no_step_is_lost_from_the_times(found):
    found.sort(key=lambda row: row[0])
    times = Times()
    for t, (attempt, bucket, count) in enumerate(found):
        times.add(attempt, float(t), [[bucket, count]])
    assert sum(sum(each.values()) for each in times.of.values()) == sum(row[2] for row in found)
    t, p50, p99, most = times.columns()
    assert len(t) == len(p50) == len(p99) == len(most) <= 610
    assert t == sorted(t)
    assert p50.count(None) == max(0, len(times.of) - 1)
    for low, high, highest in zip(p50, p99, most, strict=True):
        assert low is None or low <= high <= highest


def test_odd_histograms_are_passed_over():
    times = Times()
    times.add(1, 1.0, [[1], [None, 2], ["a", 1], [5, -1], [10**9, 1], 7, [bucket_of(0.25), 3]])
    assert times.of == {1: {bucket_of(0.25): 3}}


@given(st.lists(st.integers(0, 10**12), max_size=300))
def test_memory_keeps_its_peak(found):
    levels = Levels(10)
    for t, used in enumerate(found):
        levels.put((float(t), used, None))
    t, values, _ = levels.columns(3)
    assert len(t) <= 10
    assert max(values, default=None) == max(found, default=None)


@given(st.lists(st.integers(1, 50), max_size=2000))
def test_marks_of_snapshots_count_all_of_them(found):
    marks = EventMarks()
    for t, count in enumerate(found):
        marks.add({"t": float(t), "kind": "snapshot", "level": "info", "count": count})
    events = marks.all()
    assert len(events) <= 400
    assert sum(each["count"] for each in events) == sum(found)
