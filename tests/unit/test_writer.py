"""The keeper's writing thread: who waits, and what its speed is."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from holdfast._keeper import writer as writer_module
from holdfast._keeper.keep import Durable, Policy
from holdfast._keeper.source import Ranges, Source
from holdfast._keeper.writer import CADENCE, Job, Writer
from holdfast._record.image import Extent
from holdfast._record.layout import RunLayout

SIZE = 1000


class Writing:
    """A writer whose checkpoints are begun, and go on when they are told to."""

    def __init__(self, tmp_path, monkeypatch):
        self.hurried: list[bool] = []  # of each that was begun: whether somebody waited then
        self.own_bytes = SIZE
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        monkeypatch.setattr(writer_module, "keep_checkpoint", self._keep)
        monkeypatch.setattr(writer_module, "remove_old", lambda *_: None)
        policy = Policy(RunLayout(tmp_path), "a", 1, {1: None}, 3, best=None, version="0")
        self.writer = Writer(policy, lambda _: None)

    def _keep(self, _policy, _state, _source, labour, _former):
        self.hurried.append(not labour._is_background)
        self.begun.release()
        assert self.may_end.acquire(timeout=30)
        former = SimpleNamespace(own_bytes=self.own_bytes, folder=None)
        return Durable(former, 0.0)  # type: ignore[arg-type]  # only what the writer asks of it

    def submit(self, reason):
        scalars = b'{"metrics":{}}'.ljust(SIZE)
        ranges = Ranges.of([Extent("holdfast.scalars", 0, SIZE)])
        held = SimpleNamespace(
            arena=SimpleNamespace(attempt=1),
            source=lambda _: Source([memoryview(scalars)], ranges),
            unpin=lambda _: None,
        )
        self.writer.submit(Job(held, SimpleNamespace(step=1, slot=0), reason))  # type: ignore[arg-type]  # likewise

    def end(self, count=1):
        for _ in range(count):
            self.may_end.release()


@pytest.fixture
def writing(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "newest_former", lambda *_: None)
    monkeypatch.setattr(Writer, "_former", lambda _: None)
    return Writing(tmp_path, monkeypatch)


def test_what_is_before_one_that_is_waited_for_is_waited_for_as_well(writing):
    writing.submit(CADENCE)
    assert writing.begun.acquire(timeout=30)
    writing.submit(CADENCE)  # not begun yet when the next one comes
    writing.submit("stop")
    assert not writing.writer._labour._is_background
    writing.end(3)
    writing.writer.wait_idle()
    assert writing.hurried == [False, True, True]
    assert [writing.begun.acquire(timeout=30) for _ in range(2)] == [True, True]
    writing.submit(CADENCE)
    assert writing.begun.acquire(timeout=30)
    writing.writer.hurry()
    assert not writing.writer._labour._is_background
    writing.end()
    writing.writer.wait_idle()
    assert writing.hurried[3:] == [False]


def test_the_speed_is_not_that_of_one_that_was_linked(writing):
    writing.own_bytes = SIZE // 100
    writing.submit("save")
    writing.end()
    writing.writer.wait_idle()
    assert writing.writer.bytes_per_second is None
    writing.own_bytes = SIZE
    writing.submit(CADENCE)
    writing.end()
    writing.writer.wait_idle()
    assert writing.writer.bytes_per_second is not None
