"""The keeper's writing thread: who waits, and what its speed is."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from holdfast._errors import SaveFailed
from holdfast._keeper import writer as writer_module
from holdfast._keeper.writer import CheckpointWriter, WriteJob
from holdfast._store.commit.source import Ranges, Source
from holdfast._store.commit.write import Policy
from holdfast._store.commit.write_queue import CADENCE
from holdfast._store.folder.layout import RunLayout
from holdfast._store.format.image import Extent

SIZE = 1000
SLOW = 4.0  # seconds of a write


class Writing:
    """A writer whose checkpoints are begun, and go on when they are told to."""

    def __init__(self, tmp_path, monkeypatch):
        self.hurried: list[bool] = []  # of each that was begun: whether somebody waited then
        self.labours = []
        self.written: list[int] = []
        self.outcomes = []
        self.unpinned: list[int] = []
        self.is_overwritten = False  # whether the trainer has taken the slots that nobody holds
        self.own_bytes = SIZE
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        monkeypatch.setattr(writer_module, "keep_checkpoint", self._keep)
        monkeypatch.setattr(writer_module, "remove_old", lambda *_: None)
        policy = Policy(RunLayout(tmp_path), "a", 1, {1: None}, 3, best=None, version="0")
        self.writer = CheckpointWriter(
            policy, self.outcomes.append, lambda *_: None, lambda: self._slot(99)
        )

    def _keep(self, _policy, state, _source, threads, _former, order):
        self.hurried.append(not threads._is_background)
        self.labours.append(threads)
        self.begun.release()
        assert self.may_end.acquire(timeout=30)
        with order.take("name", (state.attempt, 2 * state.step)):
            self.written.append(state.step)
        return SimpleNamespace(own_bytes=self.own_bytes, folder=None)  # what the writer asks of it

    def _slot(self, step):
        scalars = b'{"metrics":{}}'.ljust(SIZE)
        ranges = Ranges.of([Extent("holdfast.scalars", 0, SIZE)])
        held = SimpleNamespace(
            arena=SimpleNamespace(attempt=1),
            source=lambda _: Source([memoryview(scalars)], ranges),
            pin=lambda record: record.step == 99 or not self.is_overwritten,
            unpin=self.unpinned.append,
        )
        return held, SimpleNamespace(step=step, slot=step, mark=2 * step)

    def submit(self, reason, step=1, **more):
        return self.writer.submit(WriteJob(*self._slot(step), reason, **more))

    def end(self, count=1):
        for _ in range(count):
            self.may_end.release()


@pytest.fixture
def writing(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "newest_former", lambda *_: None)
    monkeypatch.setattr(CheckpointWriter, "_former", lambda _: None)
    return Writing(tmp_path, monkeypatch)


def test_what_is_before_one_that_is_waited_for_is_waited_for_as_well(writing):
    writing.submit(CADENCE, 1)
    assert writing.begun.acquire(timeout=30)
    writing.submit("asked", 2)  # not begun yet when the next one comes
    writing.submit("asked", 3)
    assert not writing.labours[0]._is_background
    writing.end(3)
    writing.writer.wait_idle()
    assert writing.hurried == [False, True, True]
    assert writing.written == [1, 2, 3]
    assert [writing.begun.acquire(timeout=30) for _ in range(2)] == [True, True]
    writing.submit(CADENCE, 4)
    assert writing.begun.acquire(timeout=30)
    writing.writer.hurry()
    assert not writing.labours[3]._is_background
    writing.end()
    writing.writer.wait_idle()
    assert writing.hurried[3:] == [False]


def test_the_last_state_does_not_wait_and_the_older_one_gets_no_name_after_it(writing):
    """The first write is in a flush, which nobody can cut short."""
    writing.writer.measured_seconds = SLOW
    writing.submit(CADENCE, 1)
    assert writing.begun.acquire(timeout=30)
    writing.submit("asked", 2)
    writing.submit("stop", 3, is_last=True)
    assert writing.begun.acquire(timeout=30)  # beside the first one
    assert [(o.job.record.step, o.is_dropped) for o in writing.outcomes] == [(2, True)]
    assert writing.unpinned == [2]
    writing.end(2)
    writing.writer.wait_idle()
    assert writing.written[-1] == 3
    dropped = {o.job.record.step for o in writing.outcomes if o.is_dropped}
    assert dropped | set(writing.written) == {1, 2, 3}


def test_what_waits_for_the_cadence_holds_no_slot_and_takes_the_newest(writing):
    writing.submit(CADENCE, 1)
    assert writing.begun.acquire(timeout=30)
    assert writing.submit(CADENCE, 2) is False
    assert writing.unpinned == [2]
    writing.is_overwritten = True
    writing.end(2)
    writing.writer.wait_idle()
    assert writing.written == [1, 99]


def test_a_part_of_a_checkpoint_keeps_its_slot(writing, tmp_path, monkeypatch):
    """Of another step it would not belong to the parts of the other ranks."""
    parts = []

    def write_part(partial, rank, source, threads, former):
        parts.append(partial)
        raise SaveFailed("only which one it is counts here")

    monkeypatch.setattr(writer_module, "write_part", write_part)
    writing.submit(CADENCE, 1)
    assert writing.begun.acquire(timeout=30)
    (tmp_path / "part").mkdir()
    assert writing.submit(CADENCE, 2, partial=tmp_path / "part") is True
    writing.is_overwritten = True
    writing.end()
    writing.writer.wait_idle()
    assert parts == [tmp_path / "part"]
    assert [each.job.record.step for each in writing.outcomes] == [1, 2]


def test_a_part_of_a_checkpoint_that_was_given_up_makes_no_folder(writing, tmp_path):
    """The hub has removed the folder while this part waited."""
    writing.submit("part", 1, partial=tmp_path / "part")
    writing.writer.wait_idle()
    (outcome,) = writing.outcomes
    assert outcome.is_dropped
    assert outcome.error == "its checkpoint was given up"
    assert not (tmp_path / "part").exists()


def test_what_was_asked_for_is_written_before_the_last_state_on_a_fast_disk(writing):
    writing.submit("best", 1)
    assert writing.begun.acquire(timeout=30)
    writing.submit("best", 2)
    writing.writer.drop_waiting()
    writing.submit("stop", 3, is_last=True)
    writing.end(3)
    writing.writer.wait_idle()
    assert writing.written == [1, 2, 3]


def test_the_last_state_waits_no_longer_than_a_second_for_what_was_asked_for(writing, monkeypatch):
    monkeypatch.setattr(writer_module, "_PATIENCE_SECONDS", 0.2)
    writing.submit("best", 1)
    assert writing.begun.acquire(timeout=30)
    writing.submit("best", 2)
    writing.submit("stop", 3, is_last=True)
    assert writing.begun.acquire(timeout=30)  # beside the first one, which does not end
    writing.end(2)
    writing.writer.wait_idle()
    assert writing.written[-1] == 3
    assert 2 not in writing.written


def test_the_trainer_may_have_the_slots_of_all_that_waits(writing):
    writing.writer.measured_seconds = SLOW
    writing.submit("asked", 1)
    assert writing.begun.acquire(timeout=30)
    assert writing.submit("asked", 2) is True
    writing.writer.drop_waiting()
    assert writing.unpinned == [2]
    writing.end()
    writing.writer.wait_idle()
    assert writing.written == [1]


def test_the_speed_is_not_that_of_one_that_was_linked(writing):
    writing.own_bytes = SIZE // 100
    writing.submit("save")
    writing.end()
    writing.writer.wait_idle()
    assert writing.writer.bytes_per_second is None
    writing.own_bytes = SIZE
    writing.submit(CADENCE, 2)
    writing.end()
    writing.writer.wait_idle()
    assert writing.writer.bytes_per_second is not None
