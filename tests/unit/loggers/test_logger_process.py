"""The process that logs, with a stand-in for what it logs to."""

from __future__ import annotations

import json
import os

import pytest

from holdfast.loggers import _child
from holdfast.loggers._child import Memory


def row(mark, **values):
    return {"m": mark, "s": mark // 2, "t": 0.0, "v": values}


class Sink:
    """Takes all rows, under names of its own; its disk may be full at first."""

    rewinds = False

    def __init__(self, *, is_full=False):
        self.rows, self.flushes, self.is_full = [], 0, is_full

    def name(self, given):
        return given.upper()

    def open(self, replayed):
        pass

    def write(self, rows):
        self.rows += rows

    def flush(self):
        self.flushes += 1
        if self.is_full and self.flushes == 1:
            raise OSError(28, "No space left on device")

    def finish(self, status):
        self.status = status


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Let rows go through the process that logs, to this sink."""

    def go(sink, *messages):
        monkeypatch.setitem(_child.SINKS, "stand_in", lambda plan, memory: sink)
        read, write = os.pipe()
        os.write(write, b"".join(json.dumps(each).encode() + b"\n" for each in messages))
        os.close(write)
        plan = {"kind": "stand_in", "target": "here", "state": str(tmp_path / "known.json")}
        _child._serve({**plan, "mark": 0, "pipe": read, "parent": os.getppid(), "told": -1})
        os.close(read)

    return go


def test_a_metric_is_known_by_the_name_that_it_has_there(serve, tmp_path):
    serve(sink := Sink(), [row(0, loss=1.0), row(2, loss=2.0)], {"end": 75})
    assert [each["v"] for each in sink.rows] == [{"LOSS": 1.0}, {"LOSS": 2.0}]
    assert Memory(tmp_path / "known.json", "here")._last == {"LOSS": [2, 1]}
    serve(sink := Sink(), [row(2, loss=2.0), row(4, loss=3.0)], {"end": 0})
    assert [each["v"] for each in sink.rows] == [{"LOSS": 3.0}]
    assert sink.status == 0


def test_a_disk_that_is_full_for_a_while_does_not_end_a_logger(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(_child, "_SAVE_SECONDS", 0.0)
    serve(sink := Sink(is_full=True), [row(0, loss=1.0)], [row(2, loss=2.0)], {"end": 0})
    assert len(sink.rows) == 2
    assert sink.flushes > 1
    assert Memory(tmp_path / "known.json", "here").is_whole


def test_all_rows_share_one_patience_after_the_end(monkeypatch, capfd):
    monkeypatch.setattr(_child, "_AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(_child, "_GIVE_UP_SECONDS", 0.2)
    plan = {"parent": -1, "pipe": -1, "told": -1}
    feed, sink, tries = _child.LogFeed(plan), Sink(), []

    def refuse(rows):
        tries.append(rows[0]["s"])
        raise ConnectionError

    monkeypatch.setattr(sink, "write", refuse)
    assert not _child._deliver(plan, sink, [row(0)], feed)
    assert not _child._deliver(plan, sink, [row(2)], feed)
    assert tries.count(0) > 1
    assert tries.count(1) == 1
    capfd.readouterr()  # what its log would have


@pytest.mark.parametrize("name", ["loss", "\udc80x", "é"])
def test_every_name_can_be_written(name):
    _child.encodable(name).encode()
    assert len(_child.encodable(name)) == len(name)
