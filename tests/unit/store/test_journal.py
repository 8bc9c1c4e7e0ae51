"""The journal: whole lines, whoever writes and however it ends."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._store.folder import journal

APPEND = """
import sys
from pathlib import Path
from holdfast._store.folder import journal
path, who, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
sys.stdin.readline()
for number in range(count):
    assert journal.append(path, "noted", who=who, number=number, filler="x" * (number % 700))
"""


def test_events_come_back_in_order_with_their_fields(tmp_path):
    path = tmp_path / "journal.jsonl"
    assert journal.append(path, "start", step=1)
    assert journal.append(path, "stop", reason="Ctrl-C", metrics={"loss": None})
    first, second = journal.read(path)
    assert (first["event"], first["step"]) == ("start", 1)
    assert (second["reason"], second["metrics"]) == ("Ctrl-C", {"loss": None})
    assert first["time"] <= second["time"]


def test_a_journal_that_is_not_there_is_empty(tmp_path):
    assert list(journal.read(tmp_path / "journal.jsonl")) == []


@given(cut=st.integers(1, 60))
def test_a_torn_last_line_hides_neither_what_was_before_nor_what_comes_after(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    journal.append(path, "whole", number=1)
    whole = path.stat().st_size
    journal.append(path, "torn", filler="y" * 40)
    with path.open("r+b") as file:
        file.truncate(max(whole + 1, path.stat().st_size - cut))
    assert next(e["event"] for e in journal.read(path)) == "whole"
    journal.append(path, "after", number=3)
    events = [e["event"] for e in journal.read(path)]
    assert events[0] == "whole"
    assert events[-1] == "after"
    # Cut by its line end alone, the torn one is whole after all.
    assert events[1:-1] == (["torn"] if cut == 1 else [])


@given(lengths=st.lists(st.integers(0, 90), max_size=40), block=st.integers(1, 64))
def test_the_lines_come_newest_first_from_the_end(tmp_path_factory, lengths, block):
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    lines = [b"%d %s" % (number, b"x" * length) for number, length in enumerate(lengths)]
    path.write_bytes(b"".join(line + b"\n" for line in lines) + b"torn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "_BLOCK_BYTES", block)
        assert list(journal.read_back(path)) == [b"torn", *reversed(lines)]


def test_of_a_missing_journal_there_is_no_line(tmp_path):
    assert list(journal.read_back(tmp_path / "journal.jsonl")) == []


def test_what_is_no_object_is_passed_over(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'\xff\xfe\n[1]\nnull\n\n{"event": "good"}\n"text"\n{"event"')
    assert [e["event"] for e in journal.read(path)] == ["good"]


def test_two_processes_that_write_at_once_keep_their_lines_whole(tmp_path):
    path, count = tmp_path / "journal.jsonl", 400
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", APPEND, str(path), who, str(count)],
            stdin=subprocess.PIPE,
            text=True,
        )
        for who in "ab"
    ]
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=30)
        assert writer.returncode == 0
    lines = [line for line in path.read_text().splitlines() if line]
    events = [json.loads(line) for line in lines]  # every line parses
    for who in "ab":
        assert [e["number"] for e in events if e["who"] == who] == list(range(count))


def test_a_file_system_that_refuses_is_told_and_stops_nothing(tmp_path):
    assert journal.append(tmp_path / "no" / "journal.jsonl", "start") is False
