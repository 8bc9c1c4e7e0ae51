"""What a thread of the trainer records and says after a run has been opened."""

from __future__ import annotations

import threading

import pytest

from holdfast._run import attempt
from holdfast._run.attempt import LateLines


@pytest.fixture
def said(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(attempt, "say", lines.append)
    return lines


def test_the_record_is_written_at_once_and_lines_come_at_the_end_at_the_latest(said, monkeypatch):
    monkeypatch.setattr(attempt, "_QUIET_SECONDS", 600.0)
    written = threading.Event()
    late = LateLines()
    late.finders += [lambda: "first", lambda: "", lambda: "second"]
    late.write(written.set)
    late.begin()
    assert written.wait(30)
    assert said == []
    late.finish()
    assert said == ["first", "second"]


def test_what_fails_stops_nothing_else(said):
    def fail() -> str:
        raise OSError("gone")

    late = LateLines()
    late.finders += [fail, lambda: "second"]
    late.write(lambda: fail() and None)
    late.begin()
    late.finish()
    assert said == ["second"]
