"""The timeline has no hole and no overlap, and the parts of goodput are the whole."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast._report.attempts import AttemptHistory, Point, Stretch, at_step
from holdfast._report.goodput import Layer, SpreadSeconds, account, paint, simplify, tile
from holdfast._report.view import SegmentKind

moments = st.floats(0, 1000)
stretches = st.tuples(moments, moments).map(lambda pair: Stretch(min(pair), max(pair)))
kinds = st.sampled_from(get_args(SegmentKind))


@given(st.lists(st.tuples(kinds, moments, moments), max_size=20), moments, st.floats(0.001, 1000))
def test_paint_shows_the_last_layer_everywhere(found, start, length):
    end = start + length
    layers = [Layer("training", start, end), *(Layer(kind, a, b) for kind, a, b in found)]
    pieces = paint(start, end, layers)
    assert_tiles([(piece.start, piece.end) for piece in pieces], start, end)
    for piece in pieces:
        middle = (piece.start + piece.end) / 2
        if not piece.start < middle < piece.end:
            continue
        seen = [each for each in layers[1:] if each.start <= middle < each.end]
        assert piece.kind == (seen[-1].kind if seen else "training")
    for one, other in itertools.pairwise(pieces):
        assert one.kind != other.kind


def assert_tiles(spans, start, end):
    assert spans[0][0] == start
    assert spans[-1][1] == end
    for one, other in itertools.pairwise(spans):
        assert one[1] == other[0]
        assert one[0] < one[1]


maybe = st.none() | moments


@st.composite
def lives(draw):
    found = []
    for number in range(1, draw(st.integers(1, 6)) + 1):
        life = AttemptHistory(number)
        life.began, life.started, life.ended = draw(maybe), draw(maybe), draw(maybe)
        life.left_loop, life.died_at, life.last_seen = (
            draw(maybe),
            draw(maybe),
            draw(moments),
        )
        life.process.job = draw(st.none() | st.just("7"))
        life.process.job_started = draw(maybe)
        life.is_requeued = draw(st.booleans())
        steps = sorted(draw(st.lists(st.integers(0, 100), max_size=6)))
        times = sorted(draw(st.lists(moments, min_size=len(steps), max_size=len(steps))))
        for t, step in zip(times, steps, strict=True):
            row = {"save": draw(st.floats(0, 50)), "agree": draw(st.floats(0, 50))}
            row["rest"] = draw(st.floats(0, 50))
            life.take_row(t, step, row)
        life.timeline.stuck = sorted(draw(st.lists(stretches, max_size=2)))
        if life.timeline.stuck and draw(st.booleans()):
            life.timeline.stuck[-1] = life.timeline.stuck[-1]._replace(end=math.inf)
        life.timeline.paused = sorted(draw(st.lists(stretches, max_size=2)))
        found.append(life)
    return found


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(lives(), st.data())
def test_segments_tile_the_time_and_goodput_is_all_of_it(found, data):
    cuts = {life.number: data.draw(st.none() | st.integers(0, 100)) for life in found}
    for number in data.draw(st.sets(st.sampled_from(sorted(cuts)))):
        del cuts[number]
    live = data.draw(st.none() | st.just(found[-1].number))
    segments, held = tile(found, cuts, 1500.0, live)
    if segments:
        start, end = segments[0]["start"], segments[-1]["end"]
        assert_tiles([(each["start"], each["end"]) for each in segments], start, end)
        if live:
            assert end == 1500.0
    goodput = account(segments, held)
    wall = segments[-1]["end"] - segments[0]["start"] if segments else 0.0
    assert goodput["wall_seconds"] == pytest.approx(wall, abs=1e-6)
    assert sum(part["seconds"] for part in goodput["parts"]) == pytest.approx(wall, abs=1e-6)
    assert all(part["seconds"] > 0 for part in goodput["parts"])
    assert 0 <= goodput["share"] <= 1 + 1e-9
    assert goodput["sentence"]
    few = simplify(segments, 3)
    assert len(few) <= 3
    if segments:
        assert_tiles([(each["start"], each["end"]) for each in few], start, end)


def story() -> list[AttemptHistory]:
    """Trained 100 s at a step a second, lost 20 of them, was down, and made them again."""
    first = AttemptHistory(1, began=0.0, started=10.0, died_at=110.0, ended=112.0, last_step=100)
    first.timeline.points = [Point(10.0 + step, step) for step in range(101)]
    second = AttemptHistory(2, began=200.0, started=205.0, ended=306.0, last_step=180)
    second.left_loop = 305.0
    second.timeline.points = [Point(205.0 + step, 80 + step) for step in range(101)]
    return [first, second]


def test_work_that_was_made_again_is_lost():
    segments, held = tile(story(), {1: 80, 2: None}, 1000.0, None)
    told = [(each["kind"], each["start"], each["end"]) for each in segments]
    assert told == [
        ("starting", 0.0, 10.0),
        ("training", 10.0, 90.0),
        ("lost", 90.0, 110.0),
        ("leaving", 110.0, 112.0),
        ("down", 112.0, 200.0),
        ("starting", 200.0, 205.0),
        ("training", 205.0, 305.0),
        ("leaving", 305.0, 306.0),
    ]
    goodput = account(segments, held)
    assert goodput["share"] == pytest.approx(180 / 306)
    assert goodput["sentence"] == (
        "lost 2 min: 70% down, 16% repeated work, 12% starting, 2% leaving"
    )
    assert [part["kind"] for part in goodput["parts"]] == [
        *("progress", "lost", "starting", "leaving", "down")
    ]


def test_an_attempt_of_another_history_is_lost_as_a_whole():
    segments, _ = tile(story(), {2: None}, 1000.0, None)
    assert ("lost", 10.0, 110.0) in [(e["kind"], e["start"], e["end"]) for e in segments]


def test_the_queue_is_told_from_being_down():
    first, second = story()
    second.process.job, second.process.job_started = "7", 190.0
    segments, held = tile([first, second], {1: None, 2: None}, 1000.0, None)
    told = [(each["kind"], each["end"] - each["start"], each["attempt"]) for each in segments]
    assert ("queue", 78.0, None) in told
    assert ("starting", 15.0, 2) in told  # from the job's start on
    assert "waiting for the queue" in account(segments, held)["sentence"]


def test_stalls_that_are_too_short_to_draw_are_accounted_for():
    life = AttemptHistory(1, began=0.0, started=0.0, ended=100.0, last_step=100)
    for second in range(1, 101):
        life.take_row(float(second), second, {"save": 0.1, "agree": 0.2, "rest": 0.0})
    goodput = account(*tile([life], {1: None}, 100.0, None))
    found = {part["kind"]: part["seconds"] for part in goodput["parts"]}
    assert found == pytest.approx({"progress": 70.0, "saving": 10.0, "waiting": 20.0})
    assert goodput["sentence"] == "lost 30 s: 67% waiting for other ranks, 33% saving"


def test_a_long_save_and_a_phase_are_drawn():
    life = AttemptHistory(1, began=0.0, started=0.0, ended=100.0, last_step=3)
    life.take_row(20.0, 1, {"save": 8.0})
    life.take_row(40.0, 2, {"rest": 5.0, "phases": {"eval": 5.0}})
    life.take_row(100.0, 3, {"rest": 10.0, "phase": "eval", "phases": {"eval": 10.0}})
    segments, held = tile([life], {1: None}, 100.0, None)
    told = [(e["kind"], e["start"], e["end"], e.get("text", "")) for e in segments]
    assert ("saving", 12.0, 20.0, "") in told
    assert ("phase", 20.0, 25.0, "eval") in told
    assert ("phase", 90.0, 100.0, "eval") in told
    assert held == SpreadSeconds()
    assert account(segments, held)["progress_seconds"] == pytest.approx(92.0)


@given(
    st.lists(st.tuples(moments, st.integers(0, 50)), min_size=1, max_size=20), st.integers(0, 60)
)
def test_a_step_is_found_between_what_is_known(found, step):
    times, steps = (sorted(column) for column in zip(*found, strict=True))
    course = [Point(t, s) for t, s in zip(times, steps, strict=True)]
    point = at_step(course, step)
    assert course[0].t <= point.t <= course[-1].t
    if step in steps:
        assert point.t == max(t for t, s in zip(times, steps, strict=True) if s == step)


def test_very_many_short_segments_become_few():
    segments = [
        {"kind": kind, "start": float(at), "end": float(at + 1), "attempt": 1}
        for at, kind in enumerate(["training", "phase"] * 6000)
    ]
    few = simplify(segments)
    assert len(few) <= 4000
    assert_tiles([(each["start"], each["end"]) for each in few], 0.0, 12000.0)
