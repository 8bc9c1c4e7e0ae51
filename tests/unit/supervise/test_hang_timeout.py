"""`holdfast run --hang-timeout`: what it takes, and what it means."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from holdfast._store.folder.supervised import led_hang
from holdfast._supervise.hangs import CommandHangs, Timeout, WatchedCommand
from holdfast._supervise.record import SupervisionRecord
from holdfast._tools.cli import _led_command


@pytest.mark.parametrize(
    ("text", "seconds", "told"),
    [
        ("auto", None, "auto"),
        ("90", 90.0, "90"),
        ("0.5", 0.5, "0.5"),
        ("5min", 300.0, "300"),
        ("2 h", 7200.0, "7200"),
    ],
)
def test_seconds_durations_and_auto_are_taken(text, seconds, told):
    timeout = Timeout.parse(text)
    assert timeout.seconds == seconds
    assert timeout.for_child() == told


@pytest.mark.parametrize("text", ["", "few", "0", "-1", "inf", "nan", "5 apples", "automatic"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="is n"):
        Timeout.parse(text)


def test_what_it_means_for_a_command_without_a_run():
    assert Timeout.parse("60").without_run(has_ranks=False) == 60
    assert Timeout.parse("60").without_run(has_ranks=True) == 600
    assert Timeout.parse("auto").without_run(has_ranks=False) == 1800


def test_whoever_is_told_to_end_has_some_seconds_for_it():
    assert [Timeout.parse(text).from_term_to_kill() for text in ("1", "12", "auto")] == [2, 12, 20]


@pytest.mark.parametrize(
    ("words", "command", "options"),
    [
        (["--hang-timeout", "60", "--", "true"], ["true"], {"--hang-timeout": "60"}),
        (["--hang-timeout=auto", "true", "-x"], ["true", "-x"], {"--hang-timeout": "auto"}),
        (
            ["--hang-timeout", "1", "--max-restarts=2", "--", "a"],
            ["a"],
            {"--hang-timeout": "1", "--max-restarts": "2"},
        ),
        (["--hang-timeout", "few", "--", "true"], [], {}),  # which click explains
        (["--hang-timeout"], [], {}),
    ],
)
def test_the_quick_way_past_click_knows_it(words, command, options):
    assert _led_command(["run", *words]) == (command, options)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is known of processes")
def test_a_hang_that_was_ended_between_two_looks_counts_and_what_is_left_is_told_to_end(tmp_path):
    book = SupervisionRecord(tmp_path, 1, ["train"])
    assert book.folder is not None
    led_hang(book.folder).write_text(json.dumps({"policy": "restart", "found": 1.0, "ended": None}))
    gone = subprocess.Popen(["true"])
    gone.wait()
    with subprocess.Popen(["sleep", "60"]) as left:
        command = WatchedCommand(
            *(gone.pid, os.getpid(), book, Timeout(2.0)),
            say=lambda text: None,
            rest=lambda: [] if left.poll() is not None else [left.pid],
            is_held_up=lambda: False,
            has_keys=False,
        )
        standstill = CommandHangs(command)
        assert not standstill.has_hung
        standstill.end_the_rest(lambda seconds: left.wait(20))
        assert standstill.has_hung
        assert left.wait(20) == -15  # it may be a zombie at once
        standstill.close()
