"""The words of the progress line: they fit, and they say what is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wcwidth import wcswidth

from holdfast._run.progress.line import (
    Standing,
    cells,
    draw_bar,
    plain_line,
    say_safe,
    terminal_line,
)
from holdfast._text import minutes, short_number, stopwatch

FULL = Standing(
    step=1240,
    steps=5000,
    epoch=2,
    epochs=10,
    metrics={"loss": 0.2312, "accuracy": 0.91},
    memory_step=1240,
    disk_step=1200,
)
RATE = 24.1

steps = st.integers(min_value=0, max_value=10**12)
maybe = st.none() | steps
values = st.none() | st.floats() | st.floats(allow_nan=False, allow_infinity=False)
standings = st.builds(
    Standing,
    step=steps,
    steps=maybe,
    epoch=maybe,
    epochs=maybe,
    batch=maybe,
    batches=maybe,
    phase=st.none() | st.text(),
    metrics=st.dictionaries(st.text(), values, max_size=12),
    memory_step=maybe,
    disk_step=maybe,
)
rates = st.none() | st.floats(min_value=0, allow_infinity=False, allow_nan=False)
idle = st.none() | st.floats(min_value=0, max_value=1e9)


@given(standings, rates, idle, st.integers(min_value=0, max_value=300))
def test_the_line_is_never_wider_than_asked_and_stays_one_line(standing, rate, wait, width):
    line = terminal_line(standing, rate, wait, width)
    assert cells(line) <= width
    assert line.isprintable()
    assert wcswidth(line) <= width


@given(standings, rates, idle)
def test_a_plain_line_has_no_control_character_and_no_line_break(standing, rate, wait):
    line = plain_line(standing, rate, wait)
    assert line.isprintable()
    assert len(line.splitlines()) == 1


def test_a_wide_terminal_shows_everything_in_its_order():
    line = terminal_line(FULL, RATE, None, 150)
    words = [
        "epoch 3/10  ━",
        "step 1240/5000",
        "24.1/s",
        "2:36 left",
        "loss 0.231",
        "accuracy 0.910",
        "safe: step 1240 in memory, 1200 on disk",
    ]
    places = [line.index(word) for word in words]
    assert places == sorted(places)
    assert line.endswith(words[-1])


def test_what_matters_least_goes_first_and_what_is_safe_last():
    marks = ["━", "accuracy", "in memory", "24.1/s", "loss", "left", "epoch", "/5000", "step"]
    lost_at = {}
    for width in range(150, 9, -1):
        line = terminal_line(FULL, RATE, None, width)
        assert "safe: 1240" in line or "safe: step 1240 in memory, 1200 on disk" in line
        for mark in marks:
            if mark not in line:
                lost_at.setdefault(mark, width)
    order = [lost_at[mark] for mark in marks]
    assert order == sorted(order, reverse=True)


def test_an_ordinary_terminal_of_80_columns_shows_what_people_look_at():
    assert terminal_line(FULL, RATE, None, 79) == (
        "epoch 3/10  step 1240/5000  2:36 left  loss 0.231  safe: 1240 (disk 1200)"
    )


def test_a_phase_is_shown_as_long_as_there_is_room_for_a_step():
    standing = Standing(step=7, phase="eval", disk_step=5)
    assert terminal_line(standing, None, None, 100) == "eval  step 7  safe: step 5 on disk"
    assert plain_line(standing, None, None) == "eval, step 7; safe: step 5 on disk"


def test_the_plain_line_is_a_sentence():
    assert plain_line(FULL, RATE, None) == (
        "epoch 3/10, step 1240/5000, 24.1 steps/s, 2 min 36 s left, loss 0.231, accuracy 0.910; "
        "safe: step 1240 in memory, 1200 on disk"
    )


def test_unknown_totals_leave_out_what_they_would_tell():
    line = terminal_line(Standing(step=12, epoch=0, batch=3), RATE, None, 120)
    assert line == "epoch 1  step 12  batch 3  24.1/s  nothing safe yet"
    assert plain_line(Standing(step=12), None, None) == "step 12; nothing safe yet"


def test_slow_steps_are_told_by_the_seconds_that_one_takes():
    assert "4.00 s/step  " in terminal_line(Standing(step=3), 0.25, None, 100)
    assert "4.00 s per step" in plain_line(Standing(step=3), 0.25, None)


def test_a_run_that_stands_still_says_so_in_place_of_a_rate():
    assert "no step for 1:15  " in terminal_line(FULL, RATE, 75.0, 150)
    assert "no step for 1 min 15 s," in plain_line(FULL, RATE, 75.0)
    assert "left" not in plain_line(FULL, RATE, 75.0)


@pytest.mark.parametrize(
    ("memory", "disk", "said"),
    [
        (None, None, "nothing safe yet"),
        (7, None, "safe: step 7 in memory"),
        (None, 5, "safe: step 5 on disk"),
        (7, 5, "safe: step 7 in memory, 5 on disk"),
        (5, 5, "safe: step 5 on disk"),
        (0, 5, "safe: step 5 on disk"),
        (7, 0, "safe: step 7 in memory, 0 on disk"),
    ],
)
def test_what_is_safe_is_said_with_its_place(memory, disk, said):
    assert say_safe(Standing(step=9, memory_step=memory, disk_step=disk)) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "nan"),
        (math.nan, "nan"),
        (0.0, "0"),
        (0.23123, "0.231"),
        (-1.5, "-1.50"),
        (99.99, "100"),
        (1234.5, "1234"),
        (1e-5, "1.00e-05"),
        (2.5e7, "2.50e+07"),
        (math.inf, "inf"),
    ],
)
def test_a_number_has_three_digits_that_matter(value, said):
    assert short_number(value) == said


def test_times_are_said_as_people_say_them():
    assert [stopwatch(s) for s in (0, 59.6, 156, 3756, 300_000)] == [
        *("0:00", "1:00", "2:36", "1:02:36", "3 d 11 h"),
    ]
    assert [minutes(s) for s in (0, 59.6, 156, 3756, 300_000)] == [
        *("0 s", "1 min 0 s", "2 min 36 s", "1 h 2 min", "3 d 11 h"),
    ]


@given(st.floats(allow_nan=False), st.integers(min_value=2, max_value=80))
def test_a_bar_is_as_long_as_asked(fraction, width):
    assert len(draw_bar(fraction, width)) == width


def test_a_bar_fills_from_empty_to_full():
    assert draw_bar(0, 4) == "────"
    assert draw_bar(0.4, 4) == "━╸──"
    assert draw_bar(1, 4) == "━━━━"


def test_after_the_last_epoch_there_is_no_next_one():
    standing = Standing(step=12, epoch=3, epochs=3)
    assert "epoch 3/3" in terminal_line(standing, RATE, None, 120)
    assert "epoch 3/3" in plain_line(standing, RATE, None)
