"""The trainer as its keeper sees it: what it shares, its signals, how it is made to leave."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast import _errors
from holdfast._environment.processes.proc import FairDeadline
from holdfast._keeper import protocol
from holdfast._keeper.heartbeat import is_looked_at, state_of
from holdfast._keeper.timers import Timers
from holdfast._store.folder.requests import SAME_PRESS_SECONDS
from holdfast._store.memory import control
from holdfast._store.memory.control import ControlPage

_KILL_AFTER_SECONDS = 5.0
_LEAVE_NOW_SECONDS = 60.0
_GONE_AFTER_SECONDS = 5.0
_SURVIVES_SECONDS = 20.0  # a SIGKILL: a large memory takes time, a dead disk takes all of it


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


class Trainer:
    """The connection to one trainer, and the deadlines for its exit."""

    def __init__(
        self,
        ends: Ends,
        timers: Timers,
        journal: Callable[..., Any],
        *,
        is_paused: Callable[[], bool],
        gone: Callable[[], None],
    ) -> None:
        self._ends = ends
        self._timers = timers
        self._journal = journal
        self._is_paused = is_paused
        self._gone = gone  # it counts as dead, though no pidfd says so
        self.pid = ends.trainer_pid
        self.words = ends.control.words
        self.phase: str | None = None
        self.leave_status: int | None = None  # the one it was told to leave with, or leaves with
        self.is_leaving = False  # as it said itself
        self.was_killed = False  # by this keeper

    def send(self, message: protocol.ToTrainer) -> None:
        protocol.send(self._ends.link, message.kind, **message.values())

    @property
    def step(self) -> int:
        return int(self.words[control.STEP])

    @property
    def boundary_id(self) -> int:
        return int(self.words[control.MARK])

    @property
    def rests(self) -> bool:
        """True within a phase, such as an evaluation."""
        return bool(self.words[control.REST] == control.RESTS)

    @property
    def stays(self) -> bool:
        """True in a notebook's kernel, which holds more than this run: it is never ended."""
        return bool(self.words[control.STAYS])

    # -- its exit ---------------------------------------------------------------

    def order_to_leave(self, reason: str, status: int, step: int | None, **details: Any) -> None:
        """One that holds its interpreter cannot obey, and is killed. `step` is durable."""
        self.leave_status = status
        self.kill_after(_KILL_AFTER_SECONDS)
        if status == _errors.HUNG:
            details["asked"] = False  # the supervisor is to start it again
        self.send(protocol.LeaveOrder(status=status, reason=reason, step=step, **details))

    def expect_exit_after_save(self, status: int) -> None:
        """It is told to leave when a state is durable; a disk that hangs must not hold it."""
        self.leave_status = status
        deadline = FairDeadline(_LEAVE_NOW_SECONDS, lambda: [os.getpid()])
        self._timers.on_deadline(deadline, self._kill, "kill")

    def leaves(self, status: int, seconds: float) -> None:
        """It says that it leaves within so many seconds."""
        # The trainer's own timeout comes first, and may have to wait for the interpreter.
        self.kill_after(seconds + max(_KILL_AFTER_SECONDS, seconds / 2))
        self.leave_status = status
        self.is_leaving = True

    def kill_after(self, seconds: float) -> None:
        self._timers.on_deadline(self._deadline(seconds), self._kill, "kill")

    def is_gone_without_goodbye(self) -> None:
        """Its end of the link is closed: wait a moment for the pidfd to report its death."""
        self._timers.on_deadline(self._deadline(_GONE_AFTER_SECONDS), self._gone, "gone")

    def state_after_kill(self) -> str:
        """The kernel's letter for a trainer that has survived SIGKILL; empty for any other."""
        state = state_of(self.pid) if self.was_killed else ""
        return "" if state == "Z" else state

    def _deadline(self, seconds: float) -> FairDeadline:
        return FairDeadline(seconds, lambda: [self.pid])

    def _kill(self) -> None:
        if self.stays or is_looked_at(self.pid) or self._is_paused():
            return  # a person has it in a debugger
        self.was_killed = True
        self._journal("killed-by-keeper", status=self.leave_status)
        if self._ends.pidfd is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._ends.pidfd, signal.SIGKILL)
        self._timers.on_deadline(self._deadline(_SURVIVES_SECONDS), self._gone, "gone")


_KEPT = 32
_OF_CHILDREN = (signal.SIGCHLD,)  # data loaders cause it: no evidence in a post-mortem


@dataclass(frozen=True)
class SignalArrival:
    """A signal that asks the run to stop."""

    number: int
    is_final: bool  # a second Ctrl-C, or SIGQUIT: leave without another step

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    @property
    def reason(self) -> str:
        is_second = self.is_final and self.number == signal.SIGINT
        return "second Ctrl-C" if is_second else self.name

    @property
    def status(self) -> int:
        if self.number == signal.SIGQUIT:
            return 128 + self.number
        return _errors.of_signal(self.number)


class SignalReader:
    """Reads the numbers and drops what asks for nothing."""

    def __init__(self, descriptor: int, numbers: Collection[int], words: Any) -> None:
        self.recent: deque[dict[str, Any]] = deque(maxlen=_KEPT)  # for a post-mortem
        self._descriptor = descriptor
        self._numbers = frozenset(numbers)
        self._words = words
        self._interrupted_at: float | None = None  # the first Ctrl-C
        self._expects_nudge = False

    def expect_nudge(self) -> None:
        """The trainer will interrupt its own main thread: the next SIGINT is no request."""
        self._expects_nudge = True

    def read(self) -> Iterator[SignalArrival]:
        """The stop requests that have arrived; EOFError when none can come any more."""
        try:
            numbers = os.read(self._descriptor, 256)
        except BlockingIOError:
            return
        if not numbers:
            raise EOFError
        for number in numbers:
            if number not in _OF_CHILDREN:
                self.recent.append({"time": time.time(), "name": _name_of(number)})
            if number in self._numbers and (found := self._classify(number)) is not None:
                yield found

    def _classify(self, number: int) -> SignalArrival | None:
        if not self._words[control.IN_LOOP]:
            return None  # outside the loop the trainer acts at once, by itself
        if number != signal.SIGINT:
            # SIGQUIT arrives here only if the trainer is process 1; it ends any other.
            return SignalArrival(number, is_final=number == signal.SIGQUIT)
        if self._expects_nudge:
            self._expects_nudge = False
            return None
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
            return SignalArrival(number, is_final=False)
        if now - self._interrupted_at <= SAME_PRESS_SECONDS:
            return None
        return SignalArrival(number, is_final=True)


def _name_of(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
