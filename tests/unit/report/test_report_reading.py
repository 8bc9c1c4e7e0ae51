"""Files that grow are read on, never twice, whatever becomes of them meanwhile."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._report import json_lines
from holdfast._report.checkpoints import MOST, Frequent
from holdfast._report.json_lines import Lines, parse


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


def checkpoint(step: int) -> str:
    event = {"time": 1e9 + step, "event": "checkpoint", "step": step, "attempt": 1}
    return json.dumps({**event, "name": f"step-{step:012d}-a0001", "reason": "cadence"})


def request(kind: str, at: float) -> str:
    return json.dumps({"time": at, "event": "request", "attempt": 1, "kind": kind})


@pytest.mark.parametrize("bulk_bytes", [1, 1 << 30])
def test_frequent_lines_are_few_and_stand_for_all(monkeypatch, bulk_bytes):
    monkeypatch.setattr("holdfast._report.checkpoints._BULK_BYTES", bulk_bytes)
    frequent = Frequent()
    count = 20_000
    left = []
    for begin in range(0, count, 5000):
        lines = [checkpoint(step) for step in range(begin, begin + 5000)]
        lines += [request("save", 1.5), request("stop", 2.5), '{"time": 1, "event": "start"}']
        left += parse(frequent.sort_out(("\n".join(lines) + "\n").encode()))
    assert [each["event"] for each in left] == ["request", "start"] * 4
    assert {each.get("kind") for each in left} == {"stop", None}
    found = frequent.checkpoints.events()
    assert len(found) <= MOST
    assert sum(number for _, number in found) == count
    steps = [event["step"] for event, _ in found]
    assert steps == sorted(steps)
    assert steps[-100:] == list(range(count - 100, count))
    assert max(b - a for a, b in itertools.pairwise(steps)) <= count // 100
    assert sum(number for _, number in frequent.requests.events()) == 4


@given(
    st.lists(st.sampled_from(["checkpoint", "save", "stop", "start", "torn", ""]), max_size=60),
    st.lists(st.integers(0, 60), max_size=5),
)
def test_no_event_is_lost_however_the_lines_come(kinds, cuts):
    lines = {
        "checkpoint": checkpoint(7),
        "save": request("save", 1.0),
        "stop": request("stop", 1.0),
        "start": '{"time": 1, "event": "start"}',
        "torn": '{"time": 1, "event": "checkpoint", "step',
        "": "",
    }
    frequent, rest = Frequent(), []
    edges = sorted({0, *(min(cut, len(kinds)) for cut in cuts), len(kinds)})
    for low, high in itertools.pairwise(edges):
        piece = "".join(lines[kind] + "\n" for kind in kinds[low:high]).encode()
        rest += parse(frequent.sort_out(piece))
    assert len(frequent.checkpoints.events()) == kinds.count("checkpoint")
    assert len(frequent.requests.events()) == kinds.count("save")
    assert len(rest) == kinds.count("stop") + kinds.count("start")
