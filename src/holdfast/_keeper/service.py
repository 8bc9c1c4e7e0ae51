"""The keeper's loop: hears the trainer, its signals and its death.

It lives as long as the trainer's run and no longer. Death is learned from a
pidfd: the end of a pipe would not come while a data-loader worker holds a copy
of the other end.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from holdfast._keeper import messages
from holdfast._keeper.beat import held_of, is_looked_at, standing_of
from holdfast._keeper.held import Hasher, HeldArena, Holdings
from holdfast._keeper.keep import Policy
from holdfast._keeper.writer import Closing, Job, Outcome, Writer
from holdfast._leave import statuses
from holdfast._record import journal
from holdfast._record.attempts import BEAT_SECONDS, write_json
from holdfast._record.identity import of_process
from holdfast._save import control
from holdfast._save.control import ControlPage
from holdfast._stop.request import SAME_PRESS_SECONDS, stop_from_file, take_requests

_REQUEST_SECONDS = 0.25
_EARLY_BEATS = 8
_TERM_GRACE_SECONDS = 10.0
_WARNING_GRACE_SECONDS = 30.0
_GUESSED_BYTES_PER_SECOND = 100e6
_KILL_AFTER_SECONDS = 5.0
_LEAVE_NOW_SECONDS = 60.0
_GONE_AFTER_SECONDS = 5.0
_HEAR_SECONDS = 3.0  # for a phase to hear of a stop: a long call in C does not


@dataclass(frozen=True)
class Ends:
    """What connects the keeper to its trainer."""

    link: socket.socket
    signals: int
    control: ControlPage
    pidfd: int | None
    trainer_pid: int


class Keeper:
    """One keeper, for one attempt of one run."""

    def __init__(
        self, policy: Policy, ends: Ends, numbers: frozenset[int], grace: float | None
    ) -> None:
        self._policy = policy
        self._ends = ends
        self._numbers = numbers
        self._grace = grace
        self._hasher = Hasher()
        self._writer = Writer(policy, self._outcome, self._closed)
        self._holdings = Holdings(policy.attempt)
        self._durable_sequence = 0
        self._durable_step: int | None = None
        self._failed = False
        self._beat = 0
        self._interrupted_at: float | None = None
        self._insure_at: float | None = None  # when the last slot must be on its way to disk
        self._kill_at: float | None = None
        self._away_at: float | None = None  # when a phase that heard nothing is left for it
        self._away: tuple[str, int] = ("", 0)
        self._has_nudged = False  # the next SIGINT is the trainer's own
        self._phase: str | None = None
        self._bury_at: float | None = None
        self._is_leaving = False
        self._leave_status: int | None = None
        self._done = False
        self._identity = asdict(of_process())

    def run(self) -> None:
        self._selector = selector = selectors.DefaultSelector()
        selector.register(self._ends.link, selectors.EVENT_READ, self._hear)
        selector.register(self._ends.signals, selectors.EVENT_READ, self._hear_signals)
        if self._ends.pidfd is not None:
            selector.register(self._ends.pidfd, selectors.EVENT_READ, self._bury)
        self._begin()
        next_beat = next_look = 0.0
        while not self._done:
            now = time.monotonic()
            self._tick(now)
            if now >= next_beat:
                self._beat_now()
                # Often at first: somebody looks at `status` as soon as a run has started.
                next_beat = now + (BEAT_SECONDS if self._beat > _EARLY_BEATS else _REQUEST_SECONDS)
            if now >= next_look:
                self._look_for_requests()
                next_look = now + _REQUEST_SECONDS
            if self._insure_at is not None and now >= self._insure_at:
                self._insure_at = None
                self._persist_newest("deadline")
            if self._away_at is not None and now >= self._away_at:
                self._away_at = None
                if self._ends.control.words[control.REST] == control.RESTS:
                    self._leave_now(*self._away)
            if self._kill_at is not None and now >= self._kill_at:
                self._kill_at = None
                self._kill_trainer()
            if self._bury_at is not None and now >= self._bury_at:
                self._bury_at = None
                self._bury()
                continue
            timers = [next_beat, next_look, self._insure_at, self._kill_at, self._bury_at]
            timers += [self._away_at, self._next_tick()]
            wait = min(at for at in timers if at is not None) - time.monotonic()
            for key, _ in selector.select(max(0.0, wait)):
                key.data()
            if self._ends.pidfd is None and os.getppid() != self._ends.trainer_pid:
                self._bury()

    # What a keeper that is one of several has to do besides:

    def _begin(self) -> None:
        """The loop begins."""

    def _tick(self, now: float) -> None:
        """Another turn of the loop."""

    def _next_tick(self) -> float | None:
        """When there is something to do in a turn of the loop."""
        return None

    # -- from the trainer -----------------------------------------------------

    def _hear(self) -> None:
        received = messages.receive(self._ends.link)
        if received is None:
            # The trainer's end is closed: it has died, as the pidfd will tell, or has
            # become another program by exec, which says no goodbye either.
            self._selector.unregister(self._ends.link)
            self._bury_at = time.monotonic() + _GONE_AFTER_SECONDS
            return
        self._take_in(*received)

    def _take_in(self, message: dict[str, Any], descriptors: list[int]) -> None:
        kind = message["kind"]
        if kind == "arena":
            self._holdings.hold(descriptors[0], message.get("path"))
        elif kind == "snapshot":
            self._snapshot_taken(message["generation"], message["sequence"])
        elif kind == "persist":
            self._persist_ordered(message)
        elif kind == "salvage":
            self._salvage(descriptors[0], message)
        elif kind == "phase":
            self._phase = message["name"]
        elif kind == "leaving":
            self._kill_at = time.monotonic() + message["seconds"] + _KILL_AFTER_SECONDS
            self._leave_status = message["status"]
            self._is_leaving = True
            self._away_at = None
            self._let_go_when_idle()
        elif kind == "goodbye":
            self._let_go_when_idle()
            self._done = True

    def _let_go_when_idle(self) -> None:
        self._writer.wait_idle()
        self._let_go()

    def _snapshot_taken(self, generation: int, sequence: int) -> None:
        self._holdings.drop_before(generation)
        held = self._holdings.of(generation)
        record = None if held is None else held.find(sequence)
        if held is not None and record is not None:
            self._hasher.want(held, record)

    def _persist_ordered(self, message: dict[str, Any]) -> None:
        held = self._holdings.of(message["generation"])
        record = None if held is None else held.find(message["sequence"])
        if held is None or record is None or not held.pin(record):
            self._tell("failed", order=message["order"], error="the slot is gone")
            return
        self._insure_at = None
        self._writer.submit(Job(held, record, message["reason"], order=message["order"]))

    def _salvage(self, descriptor: int, message: dict[str, Any]) -> None:
        """Make durable what an earlier attempt left in memory, and then remove that."""
        held = self._holdings.hold(descriptor, message["path"])
        if held is None:
            return
        record = held.find(message["sequence"])
        if record is not None and held.pin(record):
            self._holdings.salvage(held)
            self._writer.submit(Job(held, record, "salvaged"))
            threading.Thread(target=self._retire_when_idle, args=(held,), daemon=True).start()

    def _retire_when_idle(self, held: HeldArena) -> None:
        self._writer.wait_idle()
        held.retire(remove=not self._failed)

    # -- signals and requests ---------------------------------------------------

    def _hear_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._ends.signals, 256):
                if number in self._numbers:
                    self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if not self._ends.control.words[control.IN_LOOP]:
            return  # outside the loop the trainer acts at once, by itself
        if number == signal.SIGINT and self._has_nudged:
            self._has_nudged = False
            return
        name = signal.Signals(number).name
        if number == signal.SIGINT and self._interrupted_at is not None:
            if now - self._interrupted_at > SAME_PRESS_SECONDS:
                journal.append(self._policy.layout.journal, "signal", name=name, count=2)
                if self._ends.control.words[control.STAYS]:
                    self._persist_newest("second Ctrl-C")  # the trainer ends its step by itself
                else:
                    self._leave_now("second Ctrl-C", 130)
            return
        if number == signal.SIGINT:
            self._interrupted_at = now
        journal.append(self._policy.layout.journal, "signal", name=name)
        grace = self._grace_of(number)
        # The trainer may have heard of it already.
        rests = self._ends.control.words[control.REST] in (control.RESTS, control.HEARD)
        self._tell("noted", signal=number, grace=grace, rests=rests)
        if rests:
            self._leave_rest(name, statuses.of_signal(number))
        if grace is not None:
            at = now + max(0.0, grace - self._write_seconds() - 1.0)
            self._insure_at = at if self._insure_at is None else min(at, self._insure_at)

    def _grace_of(self, number: int) -> float | None:
        """The seconds that a signal leaves; a person waits."""
        if self._grace is not None or number == signal.SIGINT:
            return self._grace
        return _TERM_GRACE_SECONDS if number == signal.SIGTERM else _WARNING_GRACE_SECONDS

    def _leave_rest(self, reason: str, status: int) -> None:
        """A stop within a phase: its boundary is in memory, and the phase is repeated anyway."""
        self._persist_newest(f"stop: {reason}")
        self._away_at = time.monotonic() + _HEAR_SECONDS
        self._away = (reason, status)

    def _write_seconds(self) -> float:
        """How long a write may take, on the safe side."""
        speed = (self._writer.bytes_per_second or 2 * _GUESSED_BYTES_PER_SECOND) / 2
        return self._holdings.slot_bytes() / speed

    def _look_for_requests(self) -> None:
        for kind, details in take_requests(self._policy.layout, self._policy.attempt):
            journal.append(self._policy.layout.journal, "request", kind=kind, **details)
            if kind == "stop" and details.get("now"):
                self._leave_now(f"stop --now: {stop_from_file(details).reason}", 130)
                continue
            if kind == "stop" and self._ends.control.words[control.REST] == control.RESTS:
                self._has_nudged = True
                self._leave_rest(stop_from_file(details).reason, statuses.PERSON)
            self._tell("request", request=kind, details=details)

    def _leave_now(self, reason: str, status: int) -> None:
        self._leave_status = status
        # A disk that hangs must not hold a person who wants to leave.
        self._kill_at = time.monotonic() + _LEAVE_NOW_SECONDS
        if not self._persist_newest(reason, leave_status=status):
            self._send_away(reason, status)

    def _send_away(self, reason: str, status: int, **details: bool) -> None:
        """Tell the trainer to leave; one that holds its interpreter cannot, and is killed."""
        self._leave_status = status
        self._kill_at = time.monotonic() + _KILL_AFTER_SECONDS
        self._tell("leave", status=status, reason=reason, step=self._durable_step, **details)

    # -- making durable ---------------------------------------------------------

    def _persist_newest(self, reason: str, leave_status: int | None = None) -> bool:
        """Write the newest whole slot unless it is durable already; False if there is none."""
        for _ in range(100):
            newest = self._holdings.newest()
            if newest is None or newest[1].sequence <= self._durable_sequence:
                return False
            held, record = newest
            if held.pin(record):
                self._writer.submit(Job(held, record, reason, leave_status=leave_status))
                return True
            time.sleep(0.01)  # the trainer has just made a newer one whole
        return False

    def _outcome(self, outcome: Outcome) -> None:
        job, record = outcome.job, outcome.job.record
        if outcome.error is None:
            self._failed = False
            if job.held.arena.attempt == self._policy.attempt:
                self._durable_sequence = max(self._durable_sequence, record.sequence)
                self._durable_step = record.step
            self._tell("durable", order=job.order, step=record.step, seconds=outcome.seconds)
        else:
            self._failed = not outcome.is_fenced  # then nobody will ever need the slot
            journal.append(
                self._policy.layout.journal, "save-failed", step=record.step, error=outcome.error
            )
            kind = "fenced" if outcome.is_fenced else "failed"
            self._tell(kind, order=job.order, step=record.step, error=outcome.error)
        if job.leave_status is not None:
            self._send_away(job.reason, job.leave_status)

    def _closed(self, closing: Closing, error: str | None, is_fenced: bool) -> None:
        """The manifest of a checkpoint of several ranks is written, or could not be."""

    # -- the end ------------------------------------------------------------------

    def _bury(self) -> None:
        """The trainer is dead without a goodbye: save what it left, and say so."""
        self._hear_the_rest()
        self._writer.wait_idle()
        self._persist_newest("death")
        self._writer.wait_idle()
        self._record_death()
        self._let_go()
        self._done = True

    def _hear_the_rest(self) -> None:
        """What a trainer had sent before it died."""
        self._ends.link.setblocking(False)
        while (received := messages.receive(self._ends.link)) is not None:
            message, descriptors = received
            if message["kind"] == "arena":
                self._holdings.hold(descriptors[0], message.get("path"))

    def _record_death(self) -> None:
        layout, attempt = self._policy.layout, self._policy.attempt
        step = int(self._ends.control.words[control.STEP])
        record = {
            "status": self._leave_status,
            "how": "left" if self._leave_status is not None else "died",
            "step": step,
            "durable_step": self._durable_step,
        }
        if not layout.exit(attempt).exists():
            journal.append(layout.journal, "death", attempt=attempt, **record)
            with contextlib.suppress(OSError):
                write_json(layout.exit(attempt), record)

    def _let_go(self) -> None:
        """Remove the arenas; one that the disk would not take stays for the next start."""
        # Where the run folder was deleted there is no next start: its id went with it.
        remove = not self._failed or not self._policy.layout.identity.exists()
        if not remove:
            self._holdings.hash_newest()
        self._holdings.let_go(remove=remove)

    def _kill_trainer(self) -> None:
        """The trainer said that it was leaving, or was told to, and is still there."""
        if self._ends.control.words[control.STAYS]:
            return  # a kernel holds more than our run
        if is_looked_at(self._ends.trainer_pid):
            return  # a debugger has it: never kill what a person looks at
        journal.append(self._policy.layout.journal, "killed-by-keeper", status=self._leave_status)
        if self._ends.pidfd is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._ends.pidfd, signal.SIGKILL)

    def _beat_now(self) -> None:
        self._beat += 1
        words = self._ends.control.words
        newest = self._holdings.newest()
        beat = {
            "beat": self._beat,
            "keeper": self._identity,
            "time": time.time(),
            **standing_of(words),
            **held_of(newest),
            "durable_step": self._durable_step,
            "phase": self._phase,
        }
        self._publish_beat(beat)
        numbers: list[int] = []
        with contextlib.suppress(OSError):
            numbers = self._policy.layout.attempt_numbers()
        if numbers and numbers[-1] > self._policy.attempt and not self._is_leaving:
            self._tell("fenced", order=None, step=None, error=f"attempt {numbers[-1]} took over")

    def _publish_beat(self, beat: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            write_json(self._policy.layout.heartbeat(self._policy.attempt), beat, durable=False)

    def _tell(self, kind: str, **fields: Any) -> None:
        messages.send(self._ends.link, kind, **fields)
