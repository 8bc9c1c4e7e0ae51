"""The keeper's writing thread: one checkpoint at a time, so that the loop stays awake."""

from __future__ import annotations

import functools
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast._errors import SaveFailed
from holdfast._keeper.held import HeldArena
from holdfast._keeper.keep import Policy, State, keep_checkpoint, keep_parts, remove_old
from holdfast._keeper.persist import Fenced, explain, write_part
from holdfast._record.image import ImagePlan, decode_scalars
from holdfast._record.layout import rank_file
from holdfast._record.manifest import DataFile
from holdfast._save.arena import SlotRecord


@dataclass(frozen=True)
class Job:
    """One pinned slot that is to become a checkpoint."""

    held: HeldArena
    record: SlotRecord
    reason: str
    order: int | None = None  # the trainer's number for it
    leave_status: int | None = None  # tell the trainer to leave when it is durable
    partial: Path | None = None  # where it is a part of a checkpoint of several ranks


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
        self.bytes_per_second: float | None = None
        threading.Thread(target=self._work, name="writer", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return self._open == 0

    def submit(self, job: Job | Closing) -> None:
        with self._idle:
            self._open += 1
        self._jobs.put(job)

    def wait_idle(self) -> None:
        with self._idle:
            while self._open:
                self._idle.wait()

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
                    remove_old(self._policy)
                except OSError as failed:  # they stay for now; the thread must live
                    print(f"old checkpoints could not be removed: {failed}", flush=True)
            with self._idle:
                self._open -= 1
                self._idle.notify_all()

    def _write(self, job: Job) -> str | None:
        began = time.monotonic()
        results: list[tuple[DataFile | None, dict[str, Any]]] = []
        error, fenced = self._try(lambda: results.append(self._commit(job)))
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
        plan = arena.plan(record.slot)
        image = arena.image(record.slot)
        scalars = image[plan.scalars.offset : plan.scalars.offset + plan.scalars.size_bytes]
        head = decode_scalars(scalars)
        metrics, at_turn = head.get("metrics", {}), bool(head.get("at_turn"))
        digests = functools.partial(job.held.digests, record)
        if job.partial is not None:
            return self._write_part(job.partial, image, plan, digests), head
        seconds = keep_checkpoint(
            self._policy,
            State(arena.attempt, record.step, job.reason, metrics, at_turn),
            [image],
            plan.extents(),
            digests,
        )
        if seconds > 0:
            self.bytes_per_second = len(image) / seconds
        return None, head

    def _write_part(
        self,
        partial: Path,
        image: memoryview,
        plan: ImagePlan,
        digests: Callable[[], Sequence[bytes]],
    ) -> DataFile:
        began = time.monotonic()
        partial.mkdir(exist_ok=True)  # a network file system shows another host's late
        # Of a keeper of this rank that was killed in the middle of it.
        (partial / rank_file(self._policy.rank)).unlink(missing_ok=True)
        try:
            file = write_part(partial, self._policy.rank, [image], plan.extents(), digests)
        except OSError as error:
            raise SaveFailed(explain(self._policy.layout, error, image.nbytes)) from error
        self.bytes_per_second = image.nbytes / max(1e-6, time.monotonic() - began)
        return file

    def _close(self, job: Closing) -> None:
        keep_parts(self._policy, job.state, job.partial, job.files, job.began)
