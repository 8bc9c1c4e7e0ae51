"""The series: what rows say, how they are written, and what of a run gets into them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._keeper.series import SeriesWriter, Steps, waits_of
from holdfast._store.folder import series
from holdfast._store.memory import control
from holdfast._store.memory.control import ControlPage

seconds = st.floats(min_value=1e-6, max_value=1e6)


@pytest.fixture
def page() -> Iterator[ControlPage]:
    page = ControlPage.create()
    yield page
    page.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "series.jsonl"


def pass_boundary(words: Any, now: float) -> None:
    """As a run does it."""
    step = words[control.STEP] + 1
    words[control.RING + (step & control.RING_MASK)] = int(now * 1e9)
    words[control.STEP] = step


def begin(words: Any, now: float, step: int = 0) -> None:
    words[control.STEP] = step
    control.begin_loop(words)
    words[control.LOOP_NS] = int(now * 1e9)


def write(writer: SeriesWriter, now: float, **facts: Any) -> None:
    writer.poll(now, lambda: facts)


def rows(path: Path) -> list[series.Row]:
    return list(series.read(path))


# -- the format ---------------------------------------------------------------------


@given(seconds)
def test_a_bucket_is_at_most_five_percent_off(time_seconds):
    assert 0.95 < series.seconds_of(series.bucket_of(time_seconds)) / time_seconds < 1.05


@given(st.lists(seconds, min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_is_near_that_of_the_values(values, share):
    histogram: dict[int, int] = {}
    series.add_buckets(histogram, [[series.bucket_of(each), 1] for each in values])
    expected = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    found = series.quantile(histogram, share)
    assert found is not None
    assert 0.95 < found / expected < 1.05


def test_of_no_steps_there_is_no_quantile():
    assert series.quantile({}, 0.5) is None


def test_a_week_is_less_than_thirteen_thousand_rows_and_a_long_row_comes_less_often():
    age, count = 0.0, 0
    while age < 7 * 86400:
        age += series.period_seconds(age)
        count += 1
    assert count < 13_000
    assert series.period_seconds(0, 20 * 2048) == 20.0


def test_half_a_row_is_passed_over_and_the_next_one_begins_a_line(path):
    series.append(path, {"t": 1.0, "s": 1, "n": 1})
    with path.open("ab") as file:
        file.write(b'{"t":2.0,"s":2,"n"')
    series.append(path, {"t": 3.0, "s": 3, "n": 1})
    assert [row["s"] for row in rows(path)] == [1, 3]
    found = series.first_and_last(path)
    assert found is not None
    assert [row["s"] for row in found] == [1, 3]


def test_what_is_no_row_is_passed_over(path):
    path.write_text('[1]\n{"t": "x", "s": 1, "n": 1}\n{"s": 1}\nnull\n{"t": 1, "s": 2, "n": 2}\n')
    assert [row["s"] for row in rows(path)] == [2]
    assert series.first_and_last(path.with_name("none")) is None


def test_a_row_that_the_disk_does_not_take_is_not_written(tmp_path):
    assert series.append(tmp_path / "no folder" / "series.jsonl", {"t": 1.0, "s": 1, "n": 1}) == 0


@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=254), st.integers(0, 1000))
def test_every_step_is_counted_with_its_time(times, first):
    words = control.private_words()
    now = 100.0
    begin(words, now, first)
    steps = Steps(words)
    for each in times:
        now += each
        pass_boundary(words, now)
    steps.poll()
    expected: dict[int, int] = {}
    series.add_buckets(expected, [[series.bucket_of(each), 1] for each in times])
    assert steps.step == first + len(times)
    assert sum(steps.histogram.values()) == len(times)
    off = {b: steps.histogram.get(b, 0) - expected.get(b, 0) for b in steps.histogram | expected}
    # A time on the edge of a bucket may be in the one beside it.
    assert sum(abs(each) for each in off.values()) <= 2 * max(1, len(times) // 50)


def test_of_very_short_steps_the_last_ones_are_timed_and_all_are_counted(page, path):
    begin(page.words, 100.0)
    for number in range(1000):
        pass_boundary(page.words, 100.0 + 1e-5 * (number + 1))
    writer = SeriesWriter(path, page.words)
    write(writer, 1.0)
    (row,) = rows(path)
    assert row["n"] == 1000
    assert sum(count for _, count in row["h"]) == 254


def test_time_in_a_phase_is_none_of_a_step(page):
    words = page.words
    now = time.monotonic()
    begin(words, now - 0.010)
    pass_boundary(words, now)
    control.begin_rest(words)
    time.sleep(0.05)  # what is measured, not what is waited for
    control.end_rest(words)
    rested = words[control.RESTED_NS] / 1e9
    assert rested >= 0.05
    pass_boundary(words, now + rested + 0.010)
    steps = Steps(words)
    steps.step = 0
    steps.poll()
    assert steps.histogram == {series.bucket_of(0.010): 2}


def test_time_before_a_turn_is_none_of_the_step_after_it(page):
    words = page.words
    begin(words, 100.0)
    pass_boundary(words, 101.0)
    control.pass_epoch_end(words, int(150e9))
    assert words[control.BOUNDARY_NS] == int(150e9)
    pass_boundary(words, 151.0)
    steps = Steps(words)
    steps.step = 0
    steps.poll()
    assert steps.histogram == {series.bucket_of(1.0): 2}


def test_what_is_counted_while_a_run_is_opened_are_no_steps(page, path):
    page.words[control.WORK] = control.OPENS
    writer = SeriesWriter(path, page.words)
    write(writer, 0.0)
    page.words[control.STEP] = 500  # resumed from there
    write(writer, 0.25)
    assert rows(path) == []
    page.words[control.WORK] = 0
    begin(page.words, 100.0, 500)
    pass_boundary(page.words, 101.0)
    write(writer, 0.5)
    assert [(row["s"], row["n"]) for row in rows(path)] == [(501, 1)]


# -- rows -------------------------------------------------------------------------------


def test_rows_add_up_and_say_what_was_told_since_the_last_one(page, path):
    words = page.words
    begin(words, 100.0)
    writer = SeriesWriter(path, words)
    write(writer, 0.0)
    pass_boundary(words, 100.5)
    words[control.SAVED_NS] += 250_000_000
    words[control.SNAPSHOTS] += 2
    words[control.EPOCH] = 3
    writer.take({"loss": [0.5, 0.5, 1.0, 2, 0, 0]})
    writer.take({"loss": [None, None, None, 1, 1, 1]})
    sample = {"t": 7.0, "rss": 10, "limit": None, "swap": 5}
    write(writer, 0.5, mem_step=1, disk_step=None, memory=sample)  # not due yet
    write(writer, 1.5, mem_step=1, disk_step=None, memory=sample, waits={0: [0.1, 0.3], 1: [0.2]})
    write(writer, 3.0, memory=sample)
    first, row, last = rows(path)
    assert (first["s"], first["n"]) == (0, 0)
    assert (row["s"], row["n"], row["save"], row["snaps"], row["epoch"]) == (1, 1, 0.25, 2, 3)
    assert row["m"] == {"loss": [0.5, 0.5, 1.0, 3, 1, 1]}
    assert row["mem"] == {"rss": 10}
    assert row["mem_step"] == 1
    assert "disk_step" not in row
    assert row["waits"] == {"0": 0.2, "1": 0.2}
    assert set(last) == {"t", "s", "n", "epoch"}


def test_a_wait_is_told_while_it_lasts_and_once(page, path):
    begin(page.words, 100.0)
    writer = SeriesWriter(path, page.words)
    with control.at_work(page.words, control.AGREES):
        page.words[control.WORK_NS] -= 3_000_000_000
        write(writer, 0.0)
        with control.at_work(page.words, control.SAVES):
            pass  # within a wait it is that wait
    page.words[control.AGREED_NS] += 3_000_000_000
    write(writer, 2.0)
    first, last = rows(path)
    assert first["agree"] == pytest.approx(3.0, abs=0.5)
    assert first.get("save") is None
    assert last.get("agree", 0.0) < 0.5
    assert page.words[control.WORK_NS] == 0
    assert page.words[control.SAVED_NS] == 0


def test_time_in_phases_is_told_by_name(page, path):
    words = page.words
    begin(words, 100.0)
    writer = SeriesWriter(path, words)
    for name, took in (("validate", 2), ("sample", 1)):
        writer.see_phase(name)
        words[control.RESTED_NS] += took * 1_000_000_000
        writer.see_phase(None)
    writer.see_phase("last")
    write(writer, 1.0)
    (row,) = rows(path)
    assert row["phases"] == {"validate": 2.0, "sample": 1.0}
    assert row["rest"] == 3.0
    assert row["phase"] == "last"


def test_on_a_full_disk_nothing_is_lost_but_rows(page, tmp_path):
    path = tmp_path / "later" / "series.jsonl"
    begin(page.words, 100.0)
    writer = SeriesWriter(path, page.words)
    writer.take({"loss": [1.0, 1.0, 1.0, 1, 0, 0]})
    pass_boundary(page.words, 101.0)
    write(writer, 0.0)
    path.parent.mkdir()
    writer.take({"loss": [2.0, 2.0, 2.0, 1, 0, 1]})
    pass_boundary(page.words, 102.0)
    write(writer, 5.0)
    (row,) = rows(path)
    assert row["n"] == 2
    assert row["m"] == {"loss": [2.0, 1.0, 2.0, 2, 0, 1]}
    assert sum(count for _, count in row["h"]) == 2


def test_a_short_write_counts_as_none(path, monkeypatch):
    monkeypatch.setattr(os, "write", lambda *_: 3)
    assert series.append(path, {"t": 1.0, "s": 1, "n": 1}) == 0


def test_another_keeper_goes_on_where_the_one_before_was(page, path):
    begin(page.words, 100.0)
    write(SeriesWriter(path, page.words), 0.0)
    for number in range(3):
        pass_boundary(page.words, 101.0 + number)
    page.words[control.SAVED_NS] = 9_000_000_000
    write(SeriesWriter(path, page.words), 0.0)
    assert [(row["s"], row["n"]) for row in rows(path)] == [(0, 0), (3, 3)]
    assert "save" not in rows(path)[1]


def test_the_last_row_is_written_once_unless_there_is_more_to_say(page, path):
    begin(page.words, 100.0)
    writer = SeriesWriter(path, page.words)
    write(writer, 0.0)
    writer.end(dict)
    writer.end(dict)
    assert len(rows(path)) == 2
    writer.take({"loss": [1.0, 1.0, 1.0, 1, 0, 0]})
    writer.end(dict)
    assert len(rows(path)) == 3


def test_what_fails_there_does_not_end_a_keeper(page, path, capsys):
    begin(page.words, 100.0)
    writer = SeriesWriter(path, page.words)
    writer.poll(0.0, lambda: {"memory": 3})
    assert "Traceback" in capsys.readouterr().err
    write(writer, 9.0)
    assert rows(path) == []


def test_of_very_many_ranks_those_at_both_ends_are_told():
    waits = {rank: [rank / 1000] for rank in range(5000)}
    found = waits_of(waits)
    assert len(found) == 256
    assert {"0", "127", "4999"} <= set(found)
    assert "2500" not in found
    assert waits_of({0: [], 1: [0.5]}) == {"1": 0.5}


class Leaving:
    """Words of a trainer that is done with what it did between two looks."""

    def __init__(self, words: Any, *fleeting: int) -> None:
        self._words = words
        self._fleeting = set(fleeting)

    def __getitem__(self, index: int) -> int:
        value = int(self._words[index])
        if index in self._fleeting:
            self._words[index] = 0
        return value


def test_a_save_that_ends_while_it_is_looked_at_is_not_as_old_as_the_machine(page, path):
    now = time.monotonic_ns()
    page.words[control.WORK] = control.SAVES
    page.words[control.WORK_NS] = page.words[control.REST_NS] = now
    words = Leaving(page.words, control.WORK_NS, control.REST_NS)
    totals = SeriesWriter(path, words)._totals()
    assert totals["save"] < 60e9
    assert totals["rest"] < 60e9


def test_a_new_keeper_goes_on_behind_a_first_row_that_is_half_a_one(page, path):
    path.write_bytes(b'{"t":1.0,"s":1\n{"t":2.0,"s":90,"n":90}\n')
    begin(page.words, 100.0)
    page.words[control.STEP] = 100
    writer = SeriesWriter(path, page.words)
    write(writer, 1.0)
    assert [row["n"] for row in rows(path)] == [90, 10]


def test_phases_after_many_short_steps_are_none_of_them(page):
    words = page.words
    begin(words, now := 100.0)
    for _ in range(60):  # between two looks
        now += 0.010
        pass_boundary(words, now)
        control.begin_rest(words)
        control.end_rest(words)
        pair = control.ASIDE + 2 * (words[control.STEP] & 63)
        words[pair + 1] = 50_000_000
        now += 0.050
    steps = Steps(words)
    steps.step = 0
    steps.poll()
    assert steps.histogram == {series.bucket_of(0.010): 60}
