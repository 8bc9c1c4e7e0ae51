"""The SLURM job of the run: how long it has, why it ends, and its requeue.

Only the keeper of rank 0 has this. Asking SLURM takes milliseconds when all is well and seconds
when it is not, so every question is asked in a thread of its own.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast import _errors
from holdfast._environment.slurm import controller
from holdfast._environment.slurm.controller import EndingCause, why_terminated
from holdfast._environment.slurm.job import Job
from holdfast._keeper.timers import in_background
from holdfast._store.folder import journal
from holdfast._store.folder.attempts import read_json, write_json
from holdfast._store.folder.layout import RunLayout
from holdfast._text import count

# scontrol and a preemption can move the end. The interval between two questions is half of the time
# that is left, within these bounds: a controller has thousands of jobs to answer.
_POLL_SECONDS = (10.0, 300.0)
_MARGIN_SECONDS = 3.0
_FRESH_SECONDS = 15.0  # no run is stopped on older facts: the job may have been extended
_LEAST_SECONDS = 20.0  # before the end it is stopped anyway, if SLURM does not answer
_CLOCKS_SECONDS = 5.0  # by which the clocks of node and controller may differ
_OVER = ("COMPLETED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "DEADLINE")
# A controller that is restarted is away for seconds. The trainer waits for the answer.
_PATIENCE_SECONDS = 24.0
_AGAIN_SECONDS = 1.0
_REQUEUE_SECONDS = (5.0, 10.0)  # before the end: where KillWait is short, and where it is not


@dataclass(frozen=True)
class Requeued:
    """The result of a requeue: a sentence, and the exit status that fits."""

    said: str
    status: int = _errors.REQUEUE


class JobWatch:
    """What a keeper knows of its job, and asks SLURM to do."""

    def __init__(self, job: Job, layout: RunLayout, attempt: int, limit: int) -> None:
        self._job = job
        self._layout = layout
        self._attempt = attempt
        self._limit = limit
        self._id = job.id
        self._restarts = job.restarts
        self._grace_end: float | None = None  # of a preemption
        self._facts: controller.JobFacts | None = None
        self._facts_at = 0.0
        self._doubts_since: float | None = None
        self.warning: float | None = None  # is sent so many seconds before the job's end
        self._kill_wait: float | None = None
        self._lock = threading.Lock()
        self._cause: EndingCause | None = None
        self._requeued = _read_requeued(layout, attempt)  # by a keeper before this one
        self._is_requeueing = self._is_asked_in_time = False
        self._polling = threading.Lock()
        self._poll_at = 0.0

    # -- the time that is left ------------------------------------------------------

    def poll(self, now: float) -> None:
        """Ask for the end of the job, if it is time."""
        if now < self._poll_at or not self._polling.acquire(blocking=False):
            return
        self._poll_at = now + _POLL_SECONDS[1]
        in_background(self._learn)

    def _learn(self) -> None:
        try:
            is_first = self._facts is None
            facts = self._show()
            if facts is not None:
                left = _POLL_SECONDS[1] if facts.end is None else (facts.end - time.time()) / 2
                wait = min(max(left, _POLL_SECONDS[0]), _POLL_SECONDS[1])
                self._poll_at = time.monotonic() + wait
            if facts is not None and is_first:
                self.warning = controller.warning_seconds(self._id)
                self._kill_wait = controller.kill_wait_seconds()
        finally:
            self._polling.release()

    def _show(self, deadline: float = 0.0) -> controller.JobFacts | None:
        """The facts of this job; None if SLURM does not answer until the deadline."""
        while True:
            left = deadline - time.monotonic() if deadline else controller.ANSWER_SECONDS
            facts = controller.show_job(self._id, min(max(left, 0.1), controller.ANSWER_SECONDS))
            if facts is not None and facts.number != self._job.number and self._id == self._job.id:
                # A job that a task of an array has submitted inherits the array's variables.
                self._id = self._job.number
                continue
            is_late = time.monotonic() + _AGAIN_SECONDS > deadline
            if facts is not None or is_late or not controller.can_ask():
                break
            time.sleep(_AGAIN_SECONDS)
        if facts is None or facts.number != self._job.number:
            return None
        if self._facts is None:
            # Also the count of restarts, which SLURM does not set for a first start.
            self._restarts = min(self._restarts, facts.restarts)
        if facts.is_preempted and facts.state == "RUNNING":
            self._grace_end = facts.end
        self._facts, self._facts_at, self._doubts_since = facts, time.monotonic(), None
        return facts

    def seconds_left(self) -> float | None:
        """Until the job's end; None if it is unknown."""
        facts = self._facts
        if facts is None or facts.end is None or facts.state in _OVER:
            return None  # this process has outlived its job
        return facts.end - time.time()

    def is_at_its_end(self, needed_seconds: float) -> bool:
        """True if no more than this is left, by a recent answer of SLURM."""
        left, now = self.seconds_left(), time.monotonic()
        if left is None or left >= needed_seconds:
            return False
        if now - self._facts_at < _FRESH_SECONDS:
            return True
        if self._doubts_since is None:
            self._doubts_since, self._poll_at = now, 0.0
        return left < _LEAST_SECONDS or now - self._doubts_since > _FRESH_SECONDS

    def grace_of(self, number: int) -> float | None:
        """The seconds that a signal leaves."""
        if number == signal.SIGTERM:
            wait = self._kill_wait
            return None if wait is None else max(1.0, wait - _MARGIN_SECONDS)
        left = self.seconds_left()
        return None if left is None else max(1.0, left - _MARGIN_SECONDS)

    def preemption_seconds(self) -> float | None:
        """What is left of the grace of a preemption, which may be longer than KillWait."""
        if self._cause is not EndingCause.PREEMPTED or self._grace_end is None:
            return None
        return max(1.0, self._grace_end - time.time() - _MARGIN_SECONDS)

    def beat(self) -> dict[str, Any]:
        return {
            "job": self._id,
            "restarts": self._restarts,
            "end": None if self._facts is None else self._facts.end,
            "warning_seconds": self.warning,
        }

    # -- the end ------------------------------------------------------------------------

    def resolve_stop(self, reason: str, status: int, number: int) -> tuple[str, int]:
        """The reason and status of a stop; asks SLURM about a SIGTERM."""
        if number != signal.SIGTERM:
            return reason, status
        cause = self._learn_cause()
        return cause.value, _errors.REQUEUE if cause.interrupts else _errors.TERMINATED

    def heard(self, number: int) -> None:
        """Ask about a signal now: later SLURM may not know any more."""
        if number == signal.SIGTERM:
            in_background(self._learn_cause)
        self._poll_at = 0.0  # the time that is left may have changed

    def _learn_cause(self) -> EndingCause:
        with self._lock:
            if self._cause in (None, EndingCause.UNKNOWN):
                self._cause = self._cause_of(self._show())
                told = {"attempt": self._attempt, "cause": self._cause.value}
                journal.append(self._layout.journal, "job-ends", **told)
                if self._cause is EndingCause.UNKNOWN:
                    self._leave_marker("ask")
            assert self._cause is not None
            return self._cause

    def _cause_of(self, facts: controller.JobFacts | None) -> EndingCause:
        cause = why_terminated(self._restarts, facts)
        if cause is EndingCause.PREEMPTED and facts is not None and facts.state != "RUNNING":
            end = self._grace_end
            is_early = end is not None and time.time() < end - _CLOCKS_SECONDS
            return EndingCause.CANCELLED if is_early else cause  # in the grace, by a person
        return cause

    @property
    def is_elsewhere(self) -> bool:
        """True if the SIGTERM did not come from SLURM."""
        return self._cause is EndingCause.NOT_SLURM

    def is_requeued(self) -> bool:
        """True if a requeue is asked for: later signals of SLURM are part of it."""
        return self._is_requeueing or self._requeued is not None

    @property
    def answer(self) -> Requeued | None:
        """What came of the requeue, once that is known."""
        return self._requeued

    def requeue_in_time(self, status: int, step: int | None) -> None:
        """Requeue a job near its end even if a slow commit is not done.

        `status` is the one of the stop that was asked for. SLURM waits for KillWait before it
        kills, so little time is lost.
        """
        is_interrupted = self._cause is not None and self._cause.interrupts
        goes_on = status == _errors.REQUEUE or (status == _errors.TERMINATED and is_interrupted)
        ends = [None if self._facts is None else self._facts.end, self._grace_end]
        known = [end for end in ends if end is not None]
        if not goes_on or not known or self._is_asked_in_time or self.is_requeued():
            return
        is_long = self._kill_wait is None or self._kill_wait >= _REQUEUE_SECONDS[1]
        if min(known) - time.time() < _REQUEUE_SECONDS[is_long]:
            self._is_asked_in_time = True
            in_background(lambda: self.requeue(step))

    def requeue(self, step: int | None) -> Requeued:
        """Requeue the job, once; `step` is durable."""
        with self._lock:
            if self._requeued is None:
                deadline = time.monotonic() + _PATIENCE_SECONDS
                facts = self._show(deadline)
                cause = self._cause_of(facts)
                idle = self._idle_lives(step, cause)
                found = self._requeue(facts, cause, idle, deadline)
                self._requeued = Requeued(found) if isinstance(found, str) else found
                record = {"job": self._id, "restarts": self._restarts, "step": step}
                said = {**record, "idle": idle, **asdict(self._requeued)}
                journal.append(self._layout.journal, "requeue", attempt=self._attempt, **said)
                with contextlib.suppress(OSError):
                    write_json(self._layout.requeue(self._attempt), said)
            return self._requeued

    def _requeue(
        self, facts: controller.JobFacts | None, cause: EndingCause, idle: int, deadline: float
    ) -> str | Requeued:
        name = f"job {self._id}"
        if cause is EndingCause.REQUEUED:
            return f"{name} is requeued and goes on by itself."
        if EndingCause.CANCELLED in (cause, self._cause):
            return Requeued(f"{name} is cancelled, and stays so.", _errors.TERMINATED)
        if idle > self._limit:
            # Not with 75: some sites requeue every job that exits with it.
            return Requeued(
                f"{name} has come back {count(idle - 1, 'time')} without a new step, and is not "
                "requeued again.\nSee why no step is made in its time limit, then submit it again.",
                _errors.IDLE,
            )
        if facts is None and not controller.can_ask():
            if self._leave_marker("requeue"):
                return f"there is no scontrol here: the batch script's last lines requeue {name}."
            return f"there is no scontrol here: nothing requeues {name}. Submit it again to go on."
        trouble: str | None = "SLURM does not answer"  # and may know that the job was cancelled
        if facts is not None:
            if not facts.is_batch:
                return "Start the same command again to go on: only batch jobs can be requeued."
            if not facts.may_requeue:
                return f"{name} may not be requeued (--no-requeue). Submit it again to go on."
            if facts.state in _OVER:
                return f"{name} is over. Start the same command again to go on."
            trouble = self._ask_to_requeue(deadline)
        if trouble is None:
            return f"{name} is requeued and goes on by itself."
        if self._leave_marker("requeue"):
            return f"{name} could not be requeued ({trouble}); its script tries once more."
        return f"{name} could not be requeued ({trouble}). Submit it again to go on."

    def _ask_to_requeue(self, deadline: float) -> str | None:
        """Returns why it failed; None if it did not."""
        self._is_requeueing = True  # before the answer: SLURM sends its SIGTERM first
        while True:
            left = max(deadline - time.monotonic(), _AGAIN_SECONDS)
            trouble = controller.requeue(self._id, min(left, controller.ANSWER_SECONDS))
            if trouble is None or time.monotonic() + _AGAIN_SECONDS > deadline:
                return trouble
            time.sleep(_AGAIN_SECONDS)
            if self._cause_of(self._show(deadline)) is EndingCause.REQUEUED:
                return None  # the answer was lost

    def _idle_lives(self, step: int | None, cause: EndingCause) -> int:
        """How many attempts in a row, with this one, have made no step."""
        began = read_json(self._layout.origin(self._attempt)).get("step") or 0
        if (step or 0) > began:
            return 0
        before = read_json(self._layout.requeue(self._attempt - 1))
        known = before.get("idle") if before.get("job") == self._id else None
        # SLURM wanted the node: that does not mean that the job is broken.
        own = 0 if cause in (EndingCause.REQUEUED, EndingCause.PREEMPTED) else 1
        return own + (known if isinstance(known, int) else 0)

    def _leave_marker(self, word: str) -> bool:
        if not self._job.marker:
            return False
        try:
            Path(self._job.marker).write_text(f"{word}\n", encoding="ascii")
        except OSError:
            return False
        return True


def _read_requeued(layout: RunLayout, attempt: int) -> Requeued | None:
    found = read_json(layout.requeue(attempt))
    if not isinstance(found.get("said"), str) or not isinstance(found.get("status"), int):
        return None
    return Requeued(found["said"], found["status"])
