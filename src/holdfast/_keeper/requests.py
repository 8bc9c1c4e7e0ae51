"""What is asked of a keeper: by signals, by files in the run folder, and by the clock of a job."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from holdfast import _errors
from holdfast._environment.processes.identity import of_process
from holdfast._environment.processes.proc import FairDeadline
from holdfast._environment.slurm.controller import Cause
from holdfast._keeper import messages
from holdfast._keeper.cloud_notices import Noticed
from holdfast._keeper.hangs.keeper_part import Hangs
from holdfast._keeper.heartbeat import Pace
from holdfast._keeper.job import JobWatch, in_background
from holdfast._keeper.mapped_arenas import Hasher, Holdings
from holdfast._keeper.writer import Closing, Job, Outcome, Writer
from holdfast._store.commit.checkpoint import Policy
from holdfast._store.commit.chunks import QUIET
from holdfast._store.folder import journal
from holdfast._store.folder.requests import SAME_PRESS_SECONDS, stop_from_file, take_requests
from holdfast._store.memory import control
from holdfast._store.memory.control import ControlPage

_TERM_GRACE_SECONDS = 10.0
_WARNING_GRACE_SECONDS = 30.0
_GUESSED_BYTES_PER_SECOND = 100e6
_KILL_AFTER_SECONDS = 5.0
_LEAVE_NOW_SECONDS = 60.0
_HEAR_SECONDS = 3.0  # for a phase to hear of a stop: a long call in C does not
# What a stop by the clock leaves besides step and save: for agreement, leaving and the requeue.
_LEAVING_SECONDS = 10.0
_LEAST_SECONDS = 20.0
_SIGNALS_KEPT = 32
_MOST_PENDING = 1000
_OF_CHILDREN = (signal.SIGCHLD,)  # loaders handle it; it is no news of the run


@dataclass(frozen=True)
class Ends:
    """What connects the keeper to its trainer."""

    link: socket.socket
    signals: int
    control: ControlPage
    pidfd: int | None
    trainer_pid: int
    stacks: int | None = None  # the file that the trainer writes its stacks into when asked
    counters: dict[str, Any] | None = None  # of OOM kills, when the keeper was started


class Asked:
    """One keeper, as far as it is asked for something."""

    def __init__(
        self,
        policy: Policy,
        ends: Ends,
        numbers: frozenset[int],
        grace: float | None,
        job: JobWatch | None = None,
    ) -> None:
        self._policy = policy
        self._ends = ends
        self._numbers = numbers
        self._grace = grace
        self._job = job
        self._hasher = Hasher()
        self._holdings = Holdings(policy.attempt)
        self._writer = Writer(policy, self._outcome, self._closed, self._holdings.newest)
        self._pace = Pace()
        self._save_seconds: float | None = None  # of the slowest checkpoint of late
        self._durable_sequence = 0
        self._durable_step: int | None = None
        self._failed_step: int | None = None  # which the disk did not take
        self._void_step: float = math.inf  # from which on a rule has called everything bad
        self._beat = 0
        self._interrupted_at: float | None = None
        self._stop: tuple[str, int, int] | None = None  # reason, status, signal of what was asked
        self._insure_at: float | None = None  # when the last slot must be on its way to disk
        self._kill: FairDeadline | None = None  # when a trainer that is still there is killed
        self._away_at: float | None = None  # when a phase that heard nothing is left for it
        self._away: tuple[str, int] = ("", 0)
        self._is_urgent = False
        self._has_nudged = False  # the next SIGINT is the trainer's own
        self._has_warned = False
        self._phase: str | None = None
        self._gone: FairDeadline | None = None  # when one without a goodbye counts as dead
        self._is_leaving = False
        self._has_killed = False  # a trainer that did not leave
        self._leave_status: int | None = None
        self._done = False
        self._hangs: Hangs  # from the beginning of the loop on
        self._noticed: Noticed | None = None  # on a machine of a cloud
        self._selector: selectors.BaseSelector  # likewise
        self._identity = asdict(of_process())
        self._signals: deque[dict[str, Any]] = deque(maxlen=_SIGNALS_KEPT)  # for a post-mortem

    # -- signals and requests ---------------------------------------------------

    def _hear_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self._ends.signals, 256)
            if not numbers:  # closed, while the trainer lives on: no signal comes any more
                self._selector.unregister(self._ends.signals)
            for number in numbers:
                if number not in _OF_CHILDREN:
                    self._signals.append({"time": time.time(), "name": _name_of(number)})
                if number in self._numbers and not self._is_past_requeue():
                    self._on_signal(number)

    def _is_past_requeue(self) -> bool:
        """Whether the job is requeued: SLURM then ends what is left of this life."""
        return self._job is not None and self._job.is_requeued()

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if not self._ends.control.words[control.IN_LOOP]:
            return  # outside the loop the trainer acts at once, by itself
        if number == signal.SIGINT and self._has_nudged:
            self._has_nudged = False
            return
        name = signal.Signals(number).name
        if number == signal.SIGQUIT:  # of a process 1; any other is dead already
            self._leave_now(name, 128 + number)
            return
        if number == signal.SIGINT and self._interrupted_at is not None:
            if now - self._interrupted_at > SAME_PRESS_SECONDS:
                self._journal("signal", name=name, count=2)
                if self._ends.control.words[control.STAYS]:
                    self._persist_newest("second Ctrl-C")  # the trainer ends its step by itself
                else:
                    self._leave_now("second Ctrl-C", 130)
            return
        if number == signal.SIGINT:
            self._interrupted_at = now
        self._make_way()
        self._journal("signal", name=name)
        grace, status = self._grace_of(number), _errors.of_signal(number)
        self._stop = self._stop or (name, status, number)
        if self._job is not None:
            self._job.heard(number)
        # The trainer may have heard of it already.
        rests = self._ends.control.words[control.REST] in (control.RESTS, control.HEARD)
        needed = self._writer.seconds_of_a_write()
        self._tell("noted", signal=number, grace=grace, rests=rests, needed=needed)
        if rests:
            self._leave_rest(name, status)
        if grace is not None:
            self._insure_within(grace)

    def _make_way(self) -> None:
        """The run is about to end: from now on nothing in this process gives way to others."""
        if not self._is_urgent:
            self._is_urgent = True
            QUIET.end()
            self._hasher.rest()
            self._writer.hurry()

    def _insure_within(self, seconds: float) -> None:
        """Have the newest slot on disk before this time is over, even if the step goes on."""
        now = time.monotonic()
        self._writer.deadline = now + seconds
        at = now + max(0.0, seconds - self._write_seconds() - 1.0)
        self._insure_at = at if self._insure_at is None else min(at, self._insure_at)

    def _insure(self) -> None:
        """The step has not ended in time."""
        by_person = self._stop is None or self._stop[1] == _errors.PERSON
        if self._stop is not None and not by_person and self._hangs.is_hung:
            self._leave_now(*self._stop[:2])  # no boundary will come at which it could
        elif self._job is None or by_person or self._job.cause is Cause.NOT_SLURM:
            self._persist_newest("deadline")
        else:
            # The job ends for certain, and then nobody is left who could requeue it.
            assert self._stop is not None
            self._leave_now(*self._stop[:2])

    def _grace_of(self, number: int) -> float | None:
        """The seconds that a signal leaves; a person waits."""
        if self._grace is not None or number == signal.SIGINT:
            return self._grace
        known = self._job.grace_of(number) if self._job is not None else None
        if known is not None:
            return known
        is_end = number in (signal.SIGTERM, signal.SIGHUP)
        return _TERM_GRACE_SECONDS if is_end else _WARNING_GRACE_SECONDS

    def _leave_rest(self, reason: str, status: int) -> None:
        """A stop within a phase: its boundary is in memory, and the phase is repeated anyway."""
        self._persist_newest(f"stop: {reason}")
        self._away_at = time.monotonic() + _HEAR_SECONDS
        self._away = (reason, status)

    def _write_seconds(self) -> float:
        """How long a write may take, on the safe side."""
        speed = self._writer.bytes_per_second or 2 * _GUESSED_BYTES_PER_SECOND
        by_size = self._holdings.slot_bytes() / speed
        return 2 * max(by_size, self._writer.seconds_of_a_write() or 0.0)

    def _look_for_requests(self) -> None:
        for kind, details in take_requests(self._policy.layout, self._policy.attempt):
            self._journal("request", kind=kind, **details)
            if kind == "stacks":
                self._hangs.ask_stacks(details)
                continue
            if kind == "stop":
                self._make_way()
            if kind == "stop" and details.get("now"):
                self._leave_now(f"stop --now: {stop_from_file(details).reason}", 130)
                continue
            if kind == "stop":  # of a person, which a warning after it does not undo
                self._stop = (stop_from_file(details).reason, _errors.PERSON, 0)
            if kind == "stop" and self._ends.control.words[control.REST] == control.RESTS:
                self._has_nudged = True
                self._leave_rest(stop_from_file(details).reason, _errors.PERSON)
            self._tell("request", request=kind, details=details)

    def _leave_now(self, reason: str, status: int) -> None:
        self._make_way()
        self._leave_status = status
        # A disk that hangs must not hold a person who wants to leave.
        self._kill = FairDeadline(_LEAVE_NOW_SECONDS, lambda: [os.getpid()])
        if not self._persist_newest(reason, leave_status=status):
            self._send_away(reason, status)

    def _send_away(self, reason: str, status: int, **details: Any) -> None:
        """Tell the trainer to leave; one that holds its interpreter cannot, and is killed."""
        is_settled = self._is_past_requeue() or status in (_errors.PERSON, _errors.HUNG)
        if self._job is None or is_settled or self._ends.control.words[control.STAYS]:
            self._tell_to_leave(reason, status, **details)
            return
        job, number = self._job, self._stop[2] if self._stop is not None else 0

        def settle_and_tell() -> None:
            settled = job.settle(reason, status, number)
            if settled.status == _errors.REQUEUE:
                found = job.requeue(self._durable_step)
                self._tell_to_leave(settled.reason, found.status, said=found.said, **details)
            else:
                self._tell_to_leave(settled.reason, settled.status, **details)

        in_background(settle_and_tell)

    def _tell_to_leave(self, reason: str, status: int, **details: Any) -> None:
        self._leave_status = status
        self._kill = self._deadline(_KILL_AFTER_SECONDS)
        if status == _errors.HUNG:
            details["asked"] = False  # by nobody: whoever leads it is to start it again
        self._tell("leave", status=status, reason=reason, step=self._durable_step, **details)

    def _deadline(self, seconds: float) -> FairDeadline:
        """For the trainer, which may have to wait for a processor."""
        return FairDeadline(seconds, lambda: [self._ends.trainer_pid])

    def _leave_hung(self, rank: int | None) -> None:  # noqa: ARG002  of several, which
        """It makes no step any more, and whoever leads it wants it to be started again."""
        self._leave_now("it hangs", _errors.HUNG)

    def _save_hung(self) -> None:
        self._persist_newest("hang")

    def _is_gone(self) -> bool:
        """Whether the trainer is known to be dead."""
        return self._done

    # -- the job's end ----------------------------------------------------------

    def _settle_stop(self, message: dict[str, Any]) -> None:
        """The trainer has stopped, durably: say why that was, and have the job come back."""
        job = self._job
        if job is None:
            self._tell("settled", reason=message["reason"], status=message["status"])
            return

        def settle() -> None:
            settled = job.settle(message["reason"], message["status"], message["signal"])
            # First this: once the job is requeued, little is left of its log.
            self._tell("settled", reason=settled.reason, status=settled.status)
            if settled.status == _errors.REQUEUE:
                found = job.requeue(message["step"])
                self._tell("requeued", said=found.said, status=found.status)

        in_background(settle)

    def _watch_clock(self, now: float) -> None:
        """Besides the warning, which can be lost: the end of the job is known."""
        words = self._ends.control.words
        if words[control.IN_LOOP] and not words[control.REST]:
            self._pace.see(now, int(words[control.STEP]), int(words[control.BOUNDARY_NS]))
        else:
            self._pace.rest()
        if self._job is None or self._is_leaving:
            return
        self._job.look(now)
        left = self._job.seconds_left()
        is_over = self._stop is None and self._job.is_at_its_end(self._needed_seconds())
        if left is not None and is_over:
            self._stop = (Cause.TIME_LIMIT.value, _errors.REQUEUE, 0)
            self._journal("job-ends", seconds_left=round(left, 1))
            self._stop_for_time(left)
        elif left is not None and self._stop is not None and self._insure_at is not None:
            grace = self._job.preemption_seconds()
            if grace is not None:
                self._insure_at = None  # set for what SIGTERM usually leaves
            self._insure_within(left if grace is None else grace)  # the end may have been moved
        status = self._stop_status()
        if status is not None and not words[control.STAYS]:
            self._job.requeue_in_time(status, self._durable_step)
        self._warn_of_short_warning()

    def _stop_status(self) -> int | None:
        """With which status the run would leave, if it was asked to."""
        return None if self._stop is None else self._stop[1]

    def _needed_seconds(self) -> float:
        """For the step at hand, its save, and all that comes after."""
        needed = (self._pace.step_seconds or 0.0) + 2 * (self._save_seconds or 0.0)
        return max(_LEAST_SECONDS, needed + _LEAVING_SECONDS)

    def _stop_for_time(self, left: float) -> None:
        assert self._stop is not None
        self._make_way()
        reason, status, _ = self._stop
        if self._ends.control.words[control.REST] == control.RESTS:
            self._has_nudged = True
            self._leave_rest(reason, status)
        self._tell("ending", reason=reason, status=status, seconds=left)
        self._insure_within(left)

    def _tell_notice(self, **told: Any) -> None:
        """The cloud has announced something for this machine."""
        journal.append(self._policy.layout.journal, "notice", **told)
        self._tell("notice", **told)
        if told["acts"] == "save":
            self._tell("request", request="save", reason=f"notice: {told['what']}")

    def _stop_for_notice(self, reason: str, left: float) -> None:
        """This machine ends soon: stop in time, and have whoever started it start it again."""
        if self._stop is None:
            self._stop = (reason, _errors.REQUEUE, 0)
            self._stop_for_time(left)
        else:
            self._insure_within(left)

    def _warn_of_short_warning(self) -> None:
        """Once it is measured: does a save fit into the time that SLURM's warning leaves?"""
        warning = None if self._job is None else self._job.warning
        if self._has_warned or warning is None or self._save_seconds is None:
            return
        needed = (self._pace.step_seconds or 0.0) + self._save_seconds
        if needed > warning:
            self._has_warned = True
            self._tell("short-warning", warning=warning, needed=needed)

    def _note_save(self, seconds: float) -> None:
        self._save_seconds = max(seconds, 0.8 * (self._save_seconds or 0.0))
        self._writer.measured_seconds = self._save_seconds

    # -- making durable ---------------------------------------------------------

    def _persist_newest(self, reason: str, leave_status: int | None = None) -> bool:
        """Write the newest whole slot unless it is durable already; False if there is none."""
        self._hear_pending()
        for _ in range(100):
            newest = self._holdings.newest()
            if newest is None or newest[1].sequence <= self._durable_sequence:
                return False
            held, record = newest
            if held.pin(record):
                job = Job(held, record, reason, leave_status=leave_status, is_last=True)
                self._writer.submit(job)
                return True
            time.sleep(0.01)  # the trainer has just made a newer one whole
        return False

    def _hear_pending(self) -> None:
        """Hear all that the trainer has sent: a keeper that starts late knows no arena yet."""
        for _ in range(_MOST_PENDING):
            if not any(key.fileobj is self._ends.link for key, _ in self._selector.select(0)):
                return
            self._hear()

    def _hear(self) -> None:
        """Take in one message of the trainer."""
        raise NotImplementedError

    def _outcome(self, outcome: Outcome) -> None:
        """A write has ended, well or not."""
        raise NotImplementedError

    def _closed(self, closing: Closing, error: str | None, is_fenced: bool) -> None:
        """The manifest of a checkpoint of several ranks is written, or could not be."""

    def _journal(self, event: str, /, **fields: Any) -> None:
        layout, attempt = self._policy.layout, self._policy.attempt
        journal.append(layout.journal, event, attempt=attempt, **fields)

    def _tell(self, kind: str, **fields: Any) -> None:
        messages.send(self._ends.link, kind, **fields)


def _name_of(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
