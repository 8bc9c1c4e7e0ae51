"""The keeper's writing thread: one checkpoint at a time, so that the loop stays awake."""

from __future__ import annotations

import functools
import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast._errors import SaveFailed
from holdfast._keeper.former import Former, newest_former
from holdfast._keeper.held import HeldArena
from holdfast._keeper.keep import Policy, State, keep_checkpoint, keep_parts, remove_old
from holdfast._keeper.persist import Fenced, explain, write_part
from holdfast._keeper.pieces import Labour
from holdfast._keeper.retention import Kept
from holdfast._keeper.source import Source
from holdfast._record.image import decode_head
from holdfast._record.layout import rank_file
from holdfast._record.manifest import DataFile
from holdfast._save.arena import SlotRecord

CADENCE = "cadence"  # why a checkpoint is made that nobody has asked for


@dataclass(frozen=True)
class Job:
    """One pinned slot that is to become a checkpoint."""

    held: HeldArena
    record: SlotRecord
    reason: str
    order: int | None = None  # the trainer's number for it
    leave_status: int | None = None  # tell the trainer to leave when it is durable
    partial: Path | None = None  # where it is a part of a checkpoint of several ranks

    @property
    def is_background(self) -> bool:
        """Whether nobody waits for it."""
        return self.reason == CADENCE


@dataclass(frozen=True)
class Closing:
    """A checkpoint whose parts are durable: what is missing is the manifest."""

    state: State
    partial: Path
    files: list[DataFile]
    began: float


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    job: Job
    error: str | None
    is_fenced: bool
    seconds: float
    file: DataFile | None = None  # the part of a checkpoint
    head: dict[str, Any] = field(default_factory=dict)  # what stands beside the tensors


class Writer:
    """Writes jobs in the order they come and hands each outcome to `done`."""

    def __init__(
        self,
        policy: Policy,
        done: Callable[[Outcome], None],
        closed: Callable[[Closing, str | None, bool], None] = lambda *_: None,
    ) -> None:
        self._policy = policy
        self._done = done
        self._closed = closed
        self._jobs: queue.SimpleQueue[Job | Closing] = queue.SimpleQueue()
        self._open = 0
        self._idle = threading.Condition()
        self._labour = Labour(is_background=False)
        self._hurries = 0  # jobs, and others, that wait for what is open
        self._formers: list[Former] = []  # the newest last
        self._has_looked = False  # for one on disk
        self._known: dict[Path, Kept] = {}
        self.bytes_per_second: float | None = None
        threading.Thread(target=self._work, name="writer", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return self._open == 0

    def submit(self, job: Job | Closing) -> None:
        with self._idle:
            self._open += 1
            if _is_waited_for(job):
                self._hurries += 1
                self._labour.hurry()  # what is before it is waited for as well
        self._jobs.put(job)

    def hurry(self) -> None:
        """Somebody begins to wait for what is under way."""
        with self._idle:
            self._labour.hurry()

    def wait_idle(self) -> None:
        with self._idle:
            self._hurries += 1
            self._labour.hurry()
            while self._open:
                self._idle.wait()
            self._hurries -= 1

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if isinstance(job, Closing):
                error, fenced = self._try(functools.partial(self._close, job))
                self._closed(job, error, fenced)
            else:
                error = self._write(job)
            if error is None and not (isinstance(job, Job) and job.partial is not None):
                # After the trainer was told: removing a large file takes as long as a step.
                try:
                    remove_old(self._policy, self._known)
                except OSError as failed:  # they stay for now; the thread must live
                    print(f"old checkpoints could not be removed: {failed}", flush=True)
            with self._idle:
                self._open -= 1
                self._hurries -= _is_waited_for(job)
                self._idle.notify_all()

    def _write(self, job: Job) -> str | None:
        began = time.monotonic()
        results: list[tuple[DataFile | None, dict[str, Any]]] = []
        error, fenced = self._try(lambda: results.append(self._commit(job)))
        self._labour.over()
        job.held.unpin(job.record.slot)
        file, head = results[0] if results else (None, {})
        self._done(Outcome(job, error, fenced, time.monotonic() - began, file, head))
        return error

    def _try(self, act: Callable[[], None]) -> tuple[str | None, bool]:
        """Do it; returns what went wrong in words, and whether a newer attempt forbade it."""
        try:
            act()
        except Fenced as refused:
            return str(refused), True
        except SaveFailed as failed:
            return str(failed), False
        except Exception as unexpected:  # noqa: BLE001  the thread must live to try again
            traceback.print_exc()
            return f"{type(unexpected).__name__}: {unexpected}", False
        return None, False

    def _commit(self, job: Job) -> tuple[DataFile | None, dict[str, Any]]:
        arena, record = job.held.arena, job.record
        source = job.held.source(record)
        head = decode_head(source.view(len(source.ranges.names) - 1))
        metrics, at_turn = head.get("metrics", {}), bool(head.get("at_turn"))
        with self._idle:
            self._labour = Labour(is_background=job.is_background and not self._hurries)
        former = self._former()
        began = time.monotonic()
        if job.partial is not None:
            final = self._policy.layout.checkpoint(record.step, arena.attempt, at_turn)
            file = self._write_part(job.partial, source, former)
            self._formers.append(Former.written(final, job.partial, file, source, former))
        else:
            state = State(arena.attempt, record.step, job.reason, metrics, at_turn)
            durable = keep_checkpoint(self._policy, state, source, self._labour, former)
            if durable is None:
                return None, head
            file = None
            self._formers.append(durable.former)
        self._formers = self._formers[-2:]
        self._note_speed(job, self._formers[-1].own_bytes, source, time.monotonic() - began)
        return file, head

    def _former(self) -> Former | None:
        """The checkpoint before: of this life, or the newest on disk."""
        if not self._has_looked:
            self._has_looked = True
            found = newest_former(self._policy.layout, self._policy.line, self._policy.rank)
            self._formers += [] if found is None else [found]
        # The newest part may be of one that failed on another rank.
        return next((each for each in reversed(self._formers) if each.folder.exists()), None)

    def _note_speed(self, job: Job, written: int, source: Source, seconds: float) -> None:
        """How fast a whole one is written: what a deadline is reckoned with."""
        if 2 * written < source.size_bytes:
            return  # most was linked: the time went into hashing
        if self.bytes_per_second is None or not job.is_background:
            self.bytes_per_second = written / max(1e-6, seconds)

    def _write_part(self, partial: Path, source: Source, former: Former | None) -> DataFile:
        partial.mkdir(exist_ok=True)  # a network file system shows another host's late
        # Of a keeper of this rank that was killed in the middle of it.
        (partial / rank_file(self._policy.rank)).unlink(missing_ok=True)
        try:
            return write_part(partial, self._policy.rank, source, self._labour, former)
        except OSError as error:
            raise SaveFailed(explain(self._policy.layout, error, source.size_bytes)) from error

    def _close(self, job: Closing) -> None:
        keep_parts(self._policy, job.state, job.partial, job.files, job.began)


def _is_waited_for(job: Job | Closing) -> bool:
    return isinstance(job, Closing) or not job.is_background
