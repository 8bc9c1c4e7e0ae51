"""The keeper's writing threads: one checkpoint at a time, so that the loop stays awake.

`write_queue` decides what is written next and what is dropped. For the last state a second thread
begins at once, since a flush of the first one cannot be interrupted.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast._errors import SaveFailed
from holdfast._store.commit.chunks import PRIORITY, CommitThreads
from holdfast._store.commit.dedup import PreviousCheckpoint, newest_former
from holdfast._store.commit.retention import Kept
from holdfast._store.commit.source import Source
from holdfast._store.commit.write import (
    Fenced,
    Policy,
    State,
    explain,
    keep_checkpoint,
    keep_parts,
    remove_old,
    write_part,
)
from holdfast._store.commit.write_queue import (
    Key,
    PublishOrder,
    Superseded,
    Urgency,
    expected_seconds,
    gives_way,
    sort_out,
)
from holdfast._store.folder.layout import rank_file
from holdfast._store.format.image import decode_head
from holdfast._store.format.manifest import DataFile
from holdfast._store.format.threads import start_thread
from holdfast._store.memory.arena import SlotRecord

if TYPE_CHECKING:
    from holdfast._keeper.storage import HeldArena


@dataclass(frozen=True)
class WriteJob:
    """One slot to write as a checkpoint, or as one rank's part of it."""

    held: HeldArena
    record: SlotRecord
    reason: str
    order: int | None = None  # the trainer's number for it
    leave_status: int | None = None  # tell the trainer to leave when it is durable
    partial: Path | None = None  # the folder, for a part of a checkpoint of several ranks
    is_last: bool = False  # only the newest state counts now
    is_pinned: bool = True  # else the newest slot is written when its turn comes

    @property
    def key(self) -> Key:
        return self.held.arena.attempt, self.record.mark

    @property
    def urgency(self) -> Urgency:
        return Urgency.of(self.reason, is_last=self.is_last)

    @property
    def is_kept(self) -> bool:
        return self.leave_status is not None

    @property
    def is_part(self) -> bool:
        return self.partial is not None


@dataclass(frozen=True)
class Closing:
    """A checkpoint whose parts are durable: only the manifest is missing."""

    state: State
    partial: Path
    files: list[DataFile]
    began: float
    urgency: Urgency = Urgency.ASKED
    is_kept: bool = True
    is_part: bool = False

    @property
    def key(self) -> Key:
        return self.state.key


@dataclass(frozen=True)
class WriteOutcome:
    """The result of a job."""

    job: WriteJob
    error: str | None
    is_fenced: bool
    seconds: float
    file: DataFile | None = None  # the part of a checkpoint
    head: dict[str, Any] = field(default_factory=dict)  # the values that are not tensors
    is_dropped: bool = False  # a newer state is, or will be, durable in its place


_Result = TypeVar("_Result")
_PATIENCE_SECONDS = 1.0  # that the last state waits for saves that were asked for before it


@dataclass(frozen=True)
class _UnderWay:
    job: WriteJob | Closing
    threads: CommitThreads
    began: float


@dataclass(eq=False)
class CheckpointWriter:
    """Writes jobs and passes each outcome to `done`."""

    _policy: Policy
    _done: Callable[[WriteOutcome], None]
    _closed: Callable[[Closing, str | None, bool], None]
    # The newest whole slot, for jobs that have none of their own.
    _newest: Callable[[], tuple[HeldArena, SlotRecord] | None]

    def __post_init__(self) -> None:
        self._waiting: list[WriteJob | Closing] = []
        self._under_way: list[_UnderWay] = []
        self._dropped: list[WriteJob] = []  # and not reported yet
        self._telling = 0
        self._change = threading.Condition(threading.RLock())
        self._hurries = 0  # how many jobs and threads wait for the write in progress
        self._durable: Key | None = None
        self._order = PublishOrder()
        self._last_since: float | None = None  # since when the last state waits
        self._formers: list[PreviousCheckpoint] = []  # the newest last
        self._has_searched = False  # for one on disk
        self._known: dict[Path, Kept] = {}
        self._removing = threading.Lock()
        self.measured_seconds: float | None = None  # of the slowest recent checkpoint
        self.deadline: float | None = None  # when all may be killed, by the monotonic clock
        self.bytes_per_second: float | None = None  # for the computation of deadlines
        threading.Thread(target=self._work, name="writer", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._under_way or self._dropped or self._telling)

    def submit(self, job: WriteJob | Closing) -> bool:
        """Queue a job; False if it does not keep its slot until its turn comes."""
        with self._change:
            keeps_its_slot = True
            # A part is of the step that the other ranks write, and of no other.
            may_write_newest = not _is_waited_for(job) and not job.is_part
            if isinstance(job, WriteJob) and self._under_way and may_write_newest:
                keeps_its_slot = False
                if job.is_pinned:
                    job.held.unpin(job.record.slot)
                    job = replace(job, is_pinned=False)
            self._waiting.append(job)
            if _is_waited_for(job):
                self._hurries += 1
            if job.urgency is Urgency.LAST:
                self._expect_last()
            self._advance()
            if _is_waited_for(job):
                self._hurry_all()  # the writes before it are waited for as well
        self._tell_dropped()
        return keeps_its_slot

    def drop_waiting(self) -> None:
        """The last state is about to be taken: waiting jobs would only keep a slot from it."""
        with self._change:
            self._expect_last()
            self._drop_for_last()
        self._tell_dropped()

    def hurry(self) -> None:
        """A caller begins to wait for the writes in progress."""
        with self._change:
            self._hurry_all()

    def forget_durable(self) -> None:
        """A rule has called the newest checkpoints bad: older ones count again."""
        with self._change:
            self._durable = None
            self._order.forget()

    def wait_idle(self) -> None:
        with self._change:
            self._hurries += 1
            self._hurry_all()
            while not self.is_idle:
                self._change.wait()
            self._hurries -= 1

    def seconds_of_a_write(self) -> float | None:
        """How long a write takes; a write in progress counts too. None if none was measured."""
        with self._change:
            elapsed = self._elapsed()
        found = expected_seconds(self.measured_seconds, elapsed)
        return found if self.measured_seconds is not None or elapsed else None

    def _elapsed(self) -> float:
        now = time.monotonic()
        return max((now - each.began for each in self._under_way), default=0.0)

    def _hurry_all(self) -> None:
        for each in self._under_way:
            each.threads.hurry()

    def _lose_patience(self) -> None:
        """In a thread of its own: the last state has waited long enough for earlier saves."""
        with self._change:
            if self._last_since is not None:
                self._drop_for_last()
                self._advance()
        self._tell_dropped()

    # -- the queue; all of this holds `_change` --------------------------------------

    def _expect_last(self) -> None:
        if self._last_since is None:
            self._last_since = time.monotonic()
            timer = threading.Timer(_PATIENCE_SECONDS, self._lose_patience)
            timer.daemon = True
            with contextlib.suppress(RuntimeError):  # the system has no more threads
                timer.start()

    def _is_patient(self) -> bool:
        """True if all saves that were asked for fit before the last state within a second."""
        under_way = [each.job for each in self._under_way]
        asked = sum(job.urgency is Urgency.ASKED for job in (*self._waiting, *under_way))
        needed = asked * expected_seconds(self.measured_seconds, self._elapsed())
        began = self._last_since
        waited = 0.0 if began is None else time.monotonic() - began
        return waited + needed < _PATIENCE_SECONDS

    def _drop_for_last(self) -> None:
        spared = (Urgency.ASKED, Urgency.LAST) if self._is_patient() else (Urgency.LAST,)
        jobs = [each for each in self._waiting if isinstance(each, WriteJob) and not each.is_kept]
        self._drop([each for each in jobs if each.urgency not in spared])

    def _advance(self) -> None:
        """Drop superseded jobs and begin the next one."""
        is_patient = self._is_patient()
        self._waiting, dropped = sort_out(self._waiting, self._durable, patient=is_patient)
        self._drop([each for each in dropped if isinstance(each, WriteJob)])
        if self._waiting and self._under_way and self._may_begin_at_once(self._waiting[0]):
            self._begin_at_once()
        self._change.notify_all()

    def _drop(self, jobs: list[WriteJob]) -> None:
        self._waiting = [each for each in self._waiting if each not in jobs]
        for job in jobs:
            self._hurries -= _is_waited_for(job)
            if job.is_pinned:
                job.held.unpin(job.record.slot)
        self._dropped += jobs

    def _may_begin_at_once(self, job: WriteJob | Closing) -> bool:
        """True if a job need not wait for the writes in progress."""
        if job.urgency is not Urgency.LAST:
            return False
        left = None if self.deadline is None else self.deadline - time.monotonic()
        elapsed = self._elapsed()
        return all(
            isinstance(each.job, Closing)
            or gives_way(
                each.job,
                job,
                elapsed_seconds=elapsed,
                needed_seconds=expected_seconds(self.measured_seconds, elapsed),
                left_seconds=left,
                patient=self._is_patient(),
            )
            for each in self._under_way
        )

    def _begin_at_once(self) -> None:
        for each in self._under_way:
            each.threads.give_up()
        under_way = self._take()
        if under_way is None:
            return
        if start_thread(self._do, under_way, name="writer-of-the-last") is None:
            # The system has no more threads: after the one that gives up.
            self._under_way.remove(under_way)
            self._waiting.insert(0, under_way.job)

    def _take(self) -> _UnderWay | None:
        """The next job, with its slot locked against the trainer."""
        while self._waiting:
            job = self._waiting.pop(0)
            if isinstance(job, WriteJob) and not job.is_pinned:
                pinned = self._pin(job)
                if pinned is None:
                    self._dropped.append(job)
                    continue
                job = pinned
            threads = CommitThreads(is_background=not _is_waited_for(job) and not self._hurries)
            under_way = _UnderWay(job, threads, time.monotonic())
            self._under_way.append(under_way)
            return under_way
        return None

    def _pin(self, job: WriteJob) -> WriteJob | None:
        """The job with its slot, or with the newest one if its own was overwritten."""
        if job.held.pin(job.record):
            return replace(job, is_pinned=True)
        found = self._newest()
        if found is None or not found[0].pin(found[1]):
            return None
        return replace(job, held=found[0], record=found[1], is_pinned=True)

    # -- the threads ---------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._change:
                while not self._waiting or self._under_way:
                    self._change.wait()
                under_way = self._take()
            if under_way is not None:
                self._do(under_way)
            self._tell_dropped()

    def _do(self, under_way: _UnderWay) -> None:
        job = under_way.job
        with contextlib.nullcontext() if not _is_waited_for(job) else PRIORITY.hurry():
            if isinstance(job, Closing):
                error = self._close(job)
            else:
                error = self._write(job, under_way.threads)
        if error is None and not job.is_part:
            # After the trainer was told: removing a large file can take as long as a step.
            try:
                with self._removing:
                    remove_old(self._policy, self._known)
            except OSError as failed:  # they stay for now; the thread must not end
                print(f"old checkpoints could not be removed: {failed}", flush=True)
        with self._change:
            self._under_way.remove(under_way)
            self._hurries -= _is_waited_for(job)
            if job.urgency is Urgency.LAST:
                self._last_since = None
            self._advance()
        self._tell_dropped()

    def _tell_dropped(self) -> None:
        while True:
            with self._change:
                if not self._dropped:
                    self._change.notify_all()
                    return
                job = self._dropped.pop(0)
                self._telling += 1
            error = "a newer step is durable, or is written in its place"
            self._done(WriteOutcome(job, error, is_fenced=False, seconds=0.0, is_dropped=True))
            with self._change:
                self._telling -= 1

    def _note_end(self, job: WriteJob | Closing, error: str | None) -> None:
        if error is None and not job.is_part:
            with self._change:
                self._durable = job.key if self._durable is None else max(self._durable, job.key)

    def _write(self, job: WriteJob, threads: CommitThreads) -> str | None:
        began = time.monotonic()
        found, error, failure = _try(lambda: self._commit(job, threads))
        threads.over()
        job.held.unpin(job.record.slot)
        self._note_end(job, error)
        file, head = found or (None, {})
        seconds = time.monotonic() - began
        is_fenced, is_dropped = failure is Fenced, failure is Superseded
        self._done(WriteOutcome(job, error, is_fenced, seconds, file, head, is_dropped))
        return error

    def _commit(
        self, job: WriteJob, threads: CommitThreads
    ) -> tuple[DataFile | None, dict[str, Any]]:
        arena, record = job.held.arena, job.record
        source = job.held.source(record)
        head = decode_head(source.view(len(source.ranges.names) - 1))
        metrics, at_epoch_end = head.get("metrics", {}), bool(head.get("at_turn"))
        former = self._former()
        began = time.monotonic()
        if job.partial is not None:
            final = self._policy.layout.checkpoint(record.step, arena.attempt, at_epoch_end)
            file = self._write_part(job.partial, source, former, threads)
            written = PreviousCheckpoint.written(final, job.partial, file, source, former)
        else:
            state = State(arena.attempt, record.step, job.reason, metrics, at_epoch_end)
            kept = keep_checkpoint(self._policy, state, source, threads, former, self._order)
            if kept is None:
                return None, head
            file, written = None, kept
        with self._change:
            self._formers = [*self._formers, written][-2:]
        # Unless most data was linked: then the time went into hashing.
        is_measured = 2 * written.own_bytes >= source.size_bytes
        if is_measured and (self.bytes_per_second is None or _is_waited_for(job)):
            self.bytes_per_second = written.own_bytes / max(1e-6, time.monotonic() - began)
        return file, head

    def _former(self) -> PreviousCheckpoint | None:
        """The previous checkpoint: of this attempt, or the newest on disk."""
        if not self._has_searched:
            self._has_searched = True
            found = newest_former(self._policy.layout, self._policy.line, self._policy.rank)
            self._formers += [] if found is None else [found]
        # The newest part may be of a checkpoint that failed on another rank.
        return next((each for each in reversed(self._formers) if each.folder.exists()), None)

    def _write_part(
        self,
        partial: Path,
        source: Source,
        former: PreviousCheckpoint | None,
        threads: CommitThreads,
    ) -> DataFile:
        try:
            partial.mkdir()  # a network file system may show another host's folder late
        except FileExistsError:
            pass
        else:
            partial.rmdir()
            raise Superseded("its checkpoint was given up")
        # A keeper of this rank may have been killed while it wrote the file.
        (partial / rank_file(self._policy.rank)).unlink(missing_ok=True)
        try:
            return write_part(partial, self._policy.rank, source, threads, former)
        except OSError as error:
            raise SaveFailed(explain(self._policy.layout, error, source.size_bytes)) from error

    def _close(self, job: Closing) -> str | None:
        parts = (job.state, job.partial, job.files, job.began)
        _, error, failure = _try(lambda: keep_parts(self._policy, *parts, self._order))
        self._note_end(job, error)
        self._closed(job, error, failure is Fenced)
        return error


def _try(act: Callable[[], _Result]) -> tuple[_Result | None, str | None, type[Exception] | None]:
    """The result, or the error as a text and its class.

    Not the error itself: its frames would keep the memory of a slot alive.
    """
    try:
        return act(), None, None
    except SaveFailed as failed:
        return None, str(failed), type(failed)
    except Exception as unexpected:  # noqa: BLE001  the thread must not end
        traceback.print_exc()
        return None, f"{type(unexpected).__name__}: {unexpected}", type(unexpected)


def _is_waited_for(job: WriteJob | Closing) -> bool:
    return job.urgency is not Urgency.BACKGROUND
