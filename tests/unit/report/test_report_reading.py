"""Files that grow are read on, never twice, whatever becomes of them meanwhile."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._report import json_lines
from holdfast._report.events import MOST_SAMPLES, SampledEvents
from holdfast._report.json_lines import Lines, parse
from holdfast._report.model import RunModel
from tests.unit.report_folder import Book


def take(lines: Lines) -> list[object]:
    return [each["n"] for piece in lines.read() for each in parse(piece)]


def test_what_was_read_is_not_read_again(tmp_path):
    path = tmp_path / "journal.jsonl"
    lines = Lines(path)
    assert take(lines) == []
    path.write_text('{"n": 1}\n{"n": 2}\n')
    assert take(lines) == [1, 2]
    assert take(lines) == []
    with path.open("a") as file:
        file.write('{"n": 3}\n')
    assert take(lines) == [3]
    assert lines.share == 1.0
    assert not lines.has_started_over


def test_half_a_line_waits_for_its_other_half(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"n": 1}\n{"n"')
    lines = Lines(path)
    assert take(lines) == [1]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert take(lines) == [2]


def test_what_does_not_parse_is_passed_over(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": \n\xff\xfe\n[1]\nnull\n\n{"n": 2}\n' + b"[" * 5000 + b"\n")
    assert take(Lines(path)) == [1, 2]


@pytest.mark.parametrize("text", ['{"n": 7}\n', '{"n": 7}\n{"n": 8}\n{"n": 9}\n'])
def test_a_file_that_was_replaced_starts_over(tmp_path, text):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n')
    lines = Lines(path)
    take(lines)
    other = tmp_path / "other"
    other.write_text(text)
    other.replace(path)
    assert take(lines) == [json.loads(line)["n"] for line in text.splitlines()]
    assert lines.has_started_over


def test_a_file_that_was_written_anew_in_place_starts_over(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"n": 1}\n')
    lines = Lines(path)
    take(lines)
    path.write_text('{"n": 5, "more": 1}\n{"n": 6}\n')
    assert take(lines) == [5, 6]
    assert lines.has_started_over


def test_a_line_that_is_longer_than_a_piece_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_PIECE_BYTES", 64)
    path = tmp_path / "journal.jsonl"
    path.write_text(json.dumps({"n": 1, "text": "x" * 1000}) + '\n{"n": 2}\n')
    assert take(Lines(path)) == [1, 2]


@pytest.mark.parametrize("count", [0, 7, 201, 20_000])
def test_frequent_events_are_few_and_stand_for_all(count):
    frequent = SampledEvents()
    for step in range(count):
        frequent.add({"time": 1e9 + step, "event": "checkpoint", "step": step, "attempt": 1})
    found = frequent.events()
    assert len(found) <= MOST_SAMPLES
    assert sum(number for _, number in found) == count
    assert sum(mark.get("count", 1) for mark in frequent.marks()) == count
    steps = [event["step"] for event, _ in found]
    assert steps == sorted(steps)
    assert steps[-100:] == list(range(max(0, count - 100), count))
    assert max((b - a for a, b in itertools.pairwise(steps)), default=0) <= max(1, count // 100)


_KINDS = ["checkpoint", "save", "stop", "start", "torn", ""]


@given(st.lists(st.sampled_from(_KINDS), max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_no_event_is_lost_however_the_lines_come(tmp_path_factory, kinds, cuts):
    lines = {
        "checkpoint": event("checkpoint", step=7, name="step-000000000007-a0001"),
        "save": event("request", kind="save"),
        "stop": event("request", kind="stop"),
        "start": event("start", step=0),
        "torn": '{"time": 1, "event": "checkpoint", "step',
        "": "",
    }
    folder = Book(tmp_path_factory.mktemp("run")).folder
    model = RunModel(folder)
    edges = sorted({0, *(min(cut, len(kinds)) for cut in cuts), len(kinds)})
    for low, high in itertools.pairwise(edges):
        with (folder / "journal.jsonl").open("a") as file:
            file.write("".join(lines[kind] + "\n" for kind in kinds[low:high]))
        model.update()
    view = model.view()
    assert len(view["checkpoints"]) == kinds.count("checkpoint")
    told = [mark["kind"] for mark in view["events"]]
    assert told.count("checkpoint") == kinds.count("checkpoint")
    assert told.count("request") == kinds.count("save") + kinds.count("stop")
    assert told.count("start") == kinds.count("start")


def event(kind: str, /, **fields: object) -> str:
    return json.dumps({"time": 1.5, "event": kind, "attempt": 1, **fields})
