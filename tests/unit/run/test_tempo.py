"""checkpoint_every="auto", on a simulated clock."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._run.saving.cadence import (
    AutoInterval,
    Cadence,
    PastAttempts,
    WriteTiming,
    expected_mtbf,
    facts_of,
    live_interval,
    read_past_attempts,
    sentence_of,
)
from holdfast._settings import Settings
from holdfast._store.folder.layout import RunLayout

DAY = 86_400.0
AUTO = Settings(checkpoint_every="auto")


@given(
    cost=st.floats(0, 1e4), write=st.floats(0, 1e4), deaths=st.integers(0, 10**5),
    seconds=st.floats(0, 1e9),
)  # fmt: skip
def test_the_interval_has_bounds_but_for_what_the_disk_needs(cost, write, deaths, seconds):
    found = live_interval(cost, write, expected_mtbf(deaths, seconds))
    assert 30.0 <= found <= max(3600.0, 2 * write)
    assert found >= 2 * write


@given(deaths=st.integers(0, 1000), seconds=st.floats(0, 1e8), more=st.floats(1, 1e6))
def test_each_death_makes_the_next_more_likely_and_time_without_one_less(deaths, seconds, more):
    now = expected_mtbf(deaths, seconds)
    assert expected_mtbf(deaths + 1, seconds) < now < expected_mtbf(deaths, seconds + more)


def test_before_anything_is_known_a_checkpoint_of_half_a_second_comes_as_by_default():
    assert expected_mtbf(0, 0.0) == DAY
    assert live_interval(0.5, 1.0, DAY) == pytest.approx(300, rel=0.03)


def test_what_a_run_shows_soon_counts_for_more_than_what_was_assumed():
    every_hour = expected_mtbf(24, DAY)
    assert 3600 < every_hour < 1.5 * 3600 * 1.1
    assert expected_mtbf(0, 7 * DAY) == pytest.approx(15 * DAY)


def test_a_cadence_finds_its_interval_with_the_first_checkpoint():
    told = []
    tempo = AutoInterval(PastAttempts(), 0.0, lambda each: told.append(each.seconds))
    cadence = Cadence(AUTO, 0.0, 0, tempo)
    assert not cadence.checkpoint_due(59.0, 10)
    assert cadence.checkpoint_due(60.0, 10)  # to know what one costs
    cadence.took_snapshot(60.0, 0.5)
    cadence.took_checkpoint(60.0, 10)
    assert told == [tempo.seconds]
    assert tempo.seconds == pytest.approx(294, rel=0.03)
    cadence.forget_snapshots()
    assert cadence.next_due() == 60.0 + tempo.seconds
    assert not cadence.checkpoint_due(60.0 + tempo.seconds - 1, 20)
    assert cadence.checkpoint_due(60.0 + tempo.seconds, 20)
    assert not cadence.counts_steps


def test_boundaries_without_a_checkpoint_calculate_nothing():
    tempo = AutoInterval(PastAttempts(), 0.0)
    cadence = Cadence(AUTO, 0.0, 0, tempo)
    tempo.next_interval = None  # would raise
    for step in range(1000):
        cadence.checkpoint_due(step / 100, step)
        cadence.next_due()
        cadence.took_snapshot(step / 100, 0.001)


def test_deaths_before_make_the_interval_shorter():
    found = []
    for deaths in (0, 1, 4, 20):
        tempo = AutoInterval(PastAttempts(deaths, 3600.0 * deaths), 0.0)
        found.append(tempo.next_interval(60.0, 2.0))
    assert found == sorted(found, reverse=True)
    assert found[0] > 3 * found[-1]


def test_a_long_time_without_a_death_makes_it_longer_up_to_an_hour():
    tempo = AutoInterval(PastAttempts(), 0.0)
    now, found = 0.0, []
    for _ in range(3000):
        now += tempo.next_interval(now, 0.5)
        found.append(tempo.seconds)
    assert found == sorted(found)
    assert found[-1] > 4 * found[0]
    assert max(found) <= 3600


def test_only_large_changes_are_told():
    told = []
    tempo = AutoInterval(PastAttempts(), 0.0, lambda each: told.append(each.seconds))
    for number in range(50):
        tempo.next_interval(60.0 + number, 0.5 + 0.001 * number)
    assert len(told) == 1
    tempo.next_interval(200.0, 1.0)
    assert len(told) == 2
    assert told[1] > 1.25 * told[0]


def test_what_writing_slows_down_is_seen_in_the_steps():
    # 50 steps in the 10 s of writing, and 100 in each 10 s since: half of the time was lost.
    writing = WriteTiming(began=100.0, began_step=0, ended=110.0, ended_step=50)
    assert writing.slowed_seconds(now=130.0, step=250) == pytest.approx(5.0)
    # As many as since: nothing.
    assert writing.slowed_seconds(now=150.0, step=250) == 0.0
    # Too few steps to tell.
    assert WriteTiming(100.0, 0, 110.0, 3).slowed_seconds(130.0, 20) == 0.0


@given(
    length=st.floats(0.01, 100), during=st.integers(0, 10**5), rest=st.floats(0.01, 1e4),
    since=st.integers(0, 10**6),
)  # fmt: skip
def test_no_more_is_lost_by_writing_than_it_took(length, during, rest, since):
    writing = WriteTiming(0.0, 0, length, during)
    assert 0.0 <= writing.slowed_seconds(length + rest, during + since) <= length


def test_slow_writing_counts_as_cost_and_one_odd_measurement_does_not():
    tempo = AutoInterval(PastAttempts(), 0.0)
    before = tempo.next_interval(0.0, 0.01)
    for slowed in (0.0, 0.0, 9.0):
        ended_step = 1000 if not slowed else 100
        tempo.note_written(WriteTiming(0.0, 0, 10.0, ended_step), 20.0, ended_step + 1000)
    assert tempo.next_interval(0.0, 0.01) == before
    for _ in range(4):
        tempo.note_written(WriteTiming(0.0, 0, 10.0, 100), 20.0, 1100)
    assert tempo.next_interval(0.0, 0.01) > 5 * before


def test_a_disk_that_is_slow_is_not_asked_more_often_than_it_can():
    tempo = AutoInterval(PastAttempts(1000, DAY), 0.0)
    tempo.note_written(WriteTiming(0.0, 0, 600.0, 10**6), 1200.0, 2 * 10**6)
    assert tempo.next_interval(1200.0, 0.001) == 1200.0


def test_a_trainer_that_writes_by_itself_counts_the_whole_wait():
    tempo = AutoInterval(PastAttempts(), 0.0)
    cadence = Cadence(AUTO, 0.0, 0, tempo)
    cadence.took_checkpoint(100.0, 5, 2.0)
    assert tempo.cost_seconds == 2.0


def test_the_sentence_says_why():
    tempo = AutoInterval(PastAttempts(2, 7200.0), 0.0)
    tempo.next_interval(0.0, 0.5)
    said = sentence_of(tempo)
    assert said.startswith("a checkpoint every ")
    assert "one takes 500 ms from training" in said
    assert said.endswith("a death is expected every 5.6 h after 2 deaths so far.")
    assert facts_of(tempo)["deaths"] == 2


def _life(layout, number, lived_seconds, **exit_record):
    layout.attempt(number).mkdir(parents=True)
    layout.lease(number).write_text(json.dumps({"since": 1000.0}))
    layout.heartbeat(number).write_text(json.dumps({"time": 1000.0 + lived_seconds}))
    if exit_record:
        layout.exit(number).write_text(json.dumps(exit_record))


def test_deaths_are_counted_and_stops_are_not(tmp_path):
    layout = RunLayout(tmp_path)
    _life(layout, 1, 100.0, status=None, how="died")  # its keeper has seen it
    _life(layout, 2, 200.0)  # with its host
    _life(layout, 3, 300.0, status=143, how="SIGTERM")
    _life(layout, 4, 400.0, status=0, how="closed")
    _life(layout, 5, 500.0, status=1, how="ValueError")  # which saves
    _life(layout, 6, 600.0, status=77, how="hung")
    _life(layout, 7, 10.0)  # this one
    assert read_past_attempts(layout, 7) == PastAttempts(3, 2100.0)
    assert read_past_attempts(layout, 1) == PastAttempts(0, 0.0)


def test_damaged_records_of_old_lives_stop_nobody(tmp_path):
    layout = RunLayout(tmp_path)
    for number, text in enumerate(("", "{", "[]", '{"since": "x"}', '{"since": 1e400}'), 1):
        layout.attempt(number).mkdir(parents=True)
        for path in (layout.lease(number), layout.heartbeat(number), layout.exit(number)):
            path.write_text(text)
    assert read_past_attempts(layout, 9).deaths == 5
