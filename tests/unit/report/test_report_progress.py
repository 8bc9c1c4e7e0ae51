"""How far a run is: its speed, the time left and its newest metrics, by the end of its series."""

from __future__ import annotations

import json
import time

import pytest

from holdfast._report.status.gather import summarize
from holdfast._report.status.parts import main_metric, read_progress, share_done
from tests.unit.report_folder import BEGIN, Book


def test_a_live_run_has_a_speed_a_time_left_and_its_newest_loss(folder):
    book = Book(folder)
    now = time.time() - BEGIN
    book.begin(1, now - 102)
    book.rows(1, now - 100, 0, 200, 0.5)
    beat = {"beat": 1, "time": time.time(), "step": 200}
    book.layout.heartbeat(1).write_text(json.dumps(beat))
    run = summarize(folder, look=lambda layout, attempt: True)
    assert run.outlook.rate_per_second == pytest.approx(2.0)
    assert run.outlook.eta_seconds == pytest.approx((1000 - 200) / 2)
    assert run.outlook.metrics == {"loss": pytest.approx(100.0 - 200 + 0.1)}
    ended = summarize(folder, look=lambda layout, attempt: False)
    assert (ended.outlook.rate_per_second, ended.outlook.eta_seconds) == (None, None)
    assert "loss" in ended.outlook.metrics


def test_a_run_that_makes_no_step_any_more_has_no_speed(folder):
    book = Book(folder)
    book.begin(1, 0)
    book.rows(1, 2, 0, 20)
    path = book.layout.series(1)
    assert read_progress(path, BEGIN + 30)[0] == pytest.approx(1.0)
    assert read_progress(path, BEGIN + 400)[0] is None


def test_only_the_end_of_a_long_series_is_read(folder):
    book = Book(folder)
    book.begin(1, 0)
    book.rows(1, 2, 0, 2000)
    rate, metrics = read_progress(book.layout.series(1), BEGIN + 2003)
    assert metrics["loss"] == pytest.approx(100.0 - 2000 + 0.1)
    assert rate == pytest.approx(1.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "{",
        '{"t": NaN, "s": 1, "n": 1}\n{"t": 1e400, "s": 2, "n": 1}\n',
        '{"t": 1, "s": 1, "n": 1, "m": {"loss": []}}\n',
        '{"t": 1, "s": 1, "n": 1, "m": {"loss": [null]}}\n',
        '{"t": 1, "s": 1, "n": 1, "m": {"loss": ["x"], "y": 7}}\n',
        '{"t": 1, "s": 1, "n": 1, "m": [7]}\n',
    ],
)
def test_strange_rows_have_no_progress(folder, text):
    book = Book(folder)
    book.begin(1, 0)
    book.layout.series(1).write_text(text)
    assert read_progress(book.layout.series(1), BEGIN) == (None, {})


def test_the_main_metric_is_the_training_loss():
    assert main_metric(["lr", "val_loss", "loss"]) == "loss"
    assert main_metric(["val_loss", "train_loss"]) == "train_loss"
    assert main_metric(["accuracy", "eval/loss"]) == "eval/loss"
    assert main_metric(["val_acc", "acc"]) == "acc"
    assert main_metric([]) is None


def test_a_share_is_between_nothing_and_all():
    assert share_done(5, 10) == 0.5
    assert share_done(15, 10) == 1.0
    assert share_done(None, 10) is share_done(5, None) is share_done(5, 0) is None
