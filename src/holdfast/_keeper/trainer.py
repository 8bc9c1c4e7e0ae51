"""The trainer as its keeper sees it: what it shares, its signals, its exit and its death."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import _errors
from holdfast._environment.processes.ended import exit_code, how_it_died
from holdfast._environment.processes.identity import host_name
from holdfast._environment.processes.proc import FairDeadline, field, read_bytes, stat_fields
from holdfast._environment.processes.tree import parent
from holdfast._keeper import protocol
from holdfast._keeper.memory_alarm import MemoryWatch
from holdfast._keeper.timers import Timers
from holdfast._store.folder.attempts import write_json
from holdfast._store.folder.requests import SAME_PRESS_SECONDS
from holdfast._store.memory import control
from holdfast._store.memory.control import ControlPage
from holdfast._text import signal_name

_KILL_AFTER_SECONDS = 5.0
_LEAVE_NOW_SECONDS = 60.0
_GONE_AFTER_SECONDS = 5.0
_SURVIVES_SECONDS = 20.0  # a SIGKILL: a large memory takes time, a dead disk takes all of it


@dataclass(eq=False)
class Trainer:
    """The connection to one trainer, and the deadlines for its exit."""

    _config: protocol.KeeperConfig
    _timers: Timers
    _journal: Callable[..., Any]
    is_paused: Callable[[], bool]
    gone: Callable[[], None]  # it counts as dead, though no pidfd says so
    phase: str | None = None
    leave_status: int | None = None  # the one it was told to leave with, or leaves with
    is_leaving: bool = False  # as it said itself
    was_killed: bool = False  # by this keeper

    def __post_init__(self) -> None:
        self.pid = self._config.trainer_pid
        self.messages = socket.socket(fileno=self._config.link)
        self._page = ControlPage(self._config.control)
        self.words = self._page.words
        self.tell: protocol.ToTrainer = protocol.sender(self.post)

    def post(self, kind: str, /, **fields: Any) -> None:
        protocol.send(self.messages, kind, **fields)

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
        """Tell the trainer to exit. If a C call holds the GIL it cannot: killed after 5 s."""
        self.leave_status = status  # `step` is the newest durable one
        self.kill_after(_KILL_AFTER_SECONDS)
        if status == _errors.HUNG:
            details["asked"] = False  # the supervisor is to start it again
        self.tell.leave(status=status, reason=reason, step=step, **details)

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
        self._timers.on_deadline(self._deadline(_GONE_AFTER_SECONDS), self.gone, "gone")

    def state_after_kill(self) -> str:
        """The kernel's letter for a trainer that has survived SIGKILL; empty for any other."""
        state = state_of(self.pid) if self.was_killed else ""
        return "" if state == "Z" else state

    def _deadline(self, seconds: float) -> FairDeadline:
        return FairDeadline(seconds, lambda: [self.pid])

    def _kill(self) -> None:
        if self.stays or is_stopped_or_traced(self.pid) or self.is_paused():
            return  # a person has it in a debugger
        self.was_killed = True
        self._journal("killed-by-keeper", status=self.leave_status)
        if self._config.pidfd is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._config.pidfd, signal.SIGKILL)
        self._timers.on_deadline(self._deadline(_SURVIVES_SECONDS), self.gone, "gone")


# -- Signals that the trainer receives, as its wakeup descriptor passes them on --------------------

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
        return _errors.status_of_signal(self.number)


class SignalReader:
    """Reads signal numbers and ignores those that do not request a stop."""

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
                self.recent.append({"time": time.time(), "name": signal_name(-number)})
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


def is_stopped_or_traced(pid: int) -> bool:
    tracer = field(read_bytes(f"/proc/{pid}/status") or b"", b"TracerPid:")
    return bool(tracer) or state_of(pid) in ("T", "t")


def state_of(pid: int) -> str:
    """The kernel's letter for the state of a process; empty if it is gone."""
    fields = stat_fields(pid)
    return fields[0].decode(errors="replace") if fields else ""


def age_of(monotonic_ns: int) -> float | None:
    """The seconds since a time of the monotonic clock; None if it was not set."""
    return None if not monotonic_ns else round((time.monotonic_ns() - monotonic_ns) / 1e9, 2)


# -- Its death -------------------------------------------------------------------------------------

_ASK_SECONDS = 0.6  # for its parent to collect the status: the kernel may report it then
_GONE_SECONDS = 0.05  # after that an older kernel has nothing left to report
_ASK_AGAIN_SECONDS = 0.01


class PostMortem:
    """The record of one death, for `holdfast why`.

    It is written twice: at once, since what killed the trainer may kill the keeper next, and again
    when all is saved and the kernel has reported the exit status.
    """

    def __init__(
        self,
        config: protocol.KeeperConfig,
        watch: MemoryWatch,
        signals: Iterable[dict[str, Any]],
    ) -> None:
        policy = config.policy
        self._path = policy.layout.death(policy.attempt, policy.rank)
        self._dead = (config.pidfd, config.trainer_pid)
        self._watch = watch
        # Its parent must collect the status, and may have to wait for a processor first.
        self._heard = FairDeadline(_ASK_SECONDS, lambda: [parent(config.trainer_pid)])
        self._began = time.monotonic()
        self.status: int | None = None  # as subprocess gives it
        self.how: str | None = None  # in words
        self._record: dict[str, Any] = {
            "time": time.time(),
            "host": host_name(),
            "pid": config.trainer_pid,
            "rank": policy.rank,
            "attempt": policy.attempt,
            "status": None,
            **watch.at_death(),
            "signals": list(signals),
        }
        self.ask()

    def ask(self) -> bool:
        """Ask the kernel for the exit status; True if it is known, or never will be."""
        is_there = self._is_there()
        if self.status is None:
            self.status, self.how = exit_code(*self._dead), how_it_died(*self._dead)
        if self.status is not None:
            return True
        gone_seconds = time.monotonic() - self._began
        return self._heard.is_over() if is_there else gone_seconds > _GONE_SECONDS

    def _is_there(self) -> bool:
        return Path(f"/proc/{self._dead[1]}").exists()

    def wait_for_status(self) -> None:
        """Ask until the kernel reports the exit status, for a moment."""
        while not self.ask():
            time.sleep(_ASK_AGAIN_SECONDS)

    def is_as_told(self, left_status: int | None) -> bool:
        """True if the trainer only left with the status that it had been told."""
        if left_status is None:
            return False
        by_signal = 128 - left_status
        return self.status in (None, left_status, by_signal)

    def note(self, **facts: Any) -> None:
        """Add what the keeper knows."""
        self._record |= facts

    def write(self, *, durable: bool = True, **facts: Any) -> None:
        """Write what is known so far."""
        # A process that became another program by exec has said no goodbye either.
        alive = self.status is None and self._is_there()
        self.note(status=self.status, alive=alive, children=self._watch.ended(), **facts)
        with contextlib.suppress(OSError):
            write_json(self._path, self._record, durable=durable)
