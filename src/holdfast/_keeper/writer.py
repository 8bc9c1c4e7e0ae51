"""The keeper's writing thread: one checkpoint at a time, so that the loop stays awake."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from holdfast._errors import SaveFailed
from holdfast._keeper.held import HeldArena
from holdfast._keeper.keep import Policy, State, keep_checkpoint, remove_old
from holdfast._keeper.persist import Fenced
from holdfast._record.image import decode_scalars
from holdfast._save.arena import SlotRecord


@dataclass(frozen=True)
class Job:
    """One pinned slot that is to become a checkpoint."""

    held: HeldArena
    record: SlotRecord
    reason: str
    order: int | None = None  # the trainer's number for it
    leave_status: int | None = None  # tell the trainer to leave when it is durable


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    job: Job
    error: str | None
    is_fenced: bool
    seconds: float


class Writer:
    """Writes jobs in the order they come and hands each outcome to `done`."""

    def __init__(self, policy: Policy, done: Callable[[Outcome], None]) -> None:
        self._policy = policy
        self._done = done
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._open = 0
        self._idle = threading.Condition()
        self.bytes_per_second: float | None = None
        threading.Thread(target=self._work, name="writer", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return self._open == 0

    def submit(self, job: Job) -> None:
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
            outcome = self._write(job)
            job.held.unpin(job.record.slot)
            self._done(outcome)
            if outcome.error is None:
                # After the trainer was told: removing a large file takes as long as a step.
                try:
                    remove_old(self._policy)
                except OSError as error:  # they stay for now; the thread must live
                    print(f"old checkpoints could not be removed: {error}", flush=True)
            with self._idle:
                self._open -= 1
                self._idle.notify_all()

    def _write(self, job: Job) -> Outcome:
        began = time.monotonic()
        error, fenced = None, False
        try:
            self._commit(job)
        except Fenced as refused:
            error, fenced = str(refused), True
        except SaveFailed as failed:
            error = str(failed)
        except Exception as unexpected:  # noqa: BLE001  the thread must live to try again
            traceback.print_exc()
            error = f"{type(unexpected).__name__}: {unexpected}"
        return Outcome(job, error, fenced, time.monotonic() - began)

    def _commit(self, job: Job) -> None:
        arena, record = job.held.arena, job.record
        plan = arena.plan(record.slot)
        image = arena.image(record.slot)
        scalars = image[plan.scalars.offset : plan.scalars.offset + plan.scalars.size_bytes]
        head = decode_scalars(scalars)
        metrics, at_turn = head.get("metrics", {}), bool(head.get("at_turn"))
        seconds = keep_checkpoint(
            self._policy,
            State(arena.attempt, record.step, job.reason, metrics, at_turn),
            [image],
            plan.extents(),
            lambda: job.held.digests(record),
        )
        if seconds > 0:
            self.bytes_per_second = len(image) / seconds
