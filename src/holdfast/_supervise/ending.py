"""The end of a command that hangs: SIGTERM, then SIGKILL, and no wait without a limit.

A process that waits for a file system that does not answer survives a kill. It is left behind:
the leader must not hang with it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from typing import TYPE_CHECKING

from holdfast._environment.processes.proc import FairDeadline
from holdfast._supervise import children

if TYPE_CHECKING:
    from holdfast._supervise.hangs import WatchedCommand

AUTO = "auto"
# For what has not been measured: the first step of a run, or a command without a run.
_UNKNOWN_SECONDS = 1800.0
# For what may take longer than a step: phases, the first step, ranks that wait for each other.
_LONGER = 10.0


class Timeout:
    """`--hang-timeout`: after how long something counts as a hang; None: the run learns it."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    @classmethod
    def parse(cls, text: str) -> Timeout:
        """From "auto", "90" or "5min"; ValueError says what is wrong with any other."""
        text = text.strip()
        if text == AUTO:
            return cls(None)
        try:
            seconds = float(text)
        except ValueError:
            seconds = _duration(text)
        if not math.isfinite(seconds) or seconds <= 0:
            raise ValueError(f"{text!r} is no time above 0")
        return cls(seconds)

    @property
    def how(self) -> str:
        """Where it comes from, for hang.json."""
        return "learned" if self.seconds is None else "given"

    def for_child(self) -> str:
        """For the environment variable that the keeper of a run reads."""
        return AUTO if self.seconds is None else f"{self.seconds:g}"

    def without_run(self, *, has_ranks: bool) -> float:
        """For a command of which only its output and its processor time are known."""
        if self.seconds is None:
            return _UNKNOWN_SECONDS
        return self.seconds * (_LONGER if has_ranks else 1.0)

    def for_disk(self) -> float:
        """For a process that saves to a file system that does not answer."""
        return _UNKNOWN_SECONDS if self.seconds is None else max(60.0, self.seconds * _LONGER)

    def from_term_to_kill(self) -> float:
        """For a process that saves something at SIGTERM."""
        return self._within(20.0)

    def after_kill(self) -> float:
        """For the system, to remove a process with much memory."""
        return self._within(30.0)

    def _within(self, most: float) -> float:
        return most if self.seconds is None else min(most, max(2.0, self.seconds))


def _duration(text: str) -> float:
    from holdfast._errors import SettingsError
    from holdfast._settings import parse_seconds  # slow to import, and rarely needed

    try:
        return parse_seconds(text, "--hang-timeout")
    except SettingsError:
        raise ValueError(f"{text!r} is neither a number of seconds, nor 5min, nor auto") from None


class HangEnding:
    """From SIGTERM to SIGKILL, for all processes of the command."""

    def __init__(self, command: WatchedCommand, timeout: Timeout, *, is_killed: bool) -> None:
        """`is_killed`: its keeper has killed it."""
        self._command = command
        self._timeout = timeout
        seconds = 0.0 if is_killed else timeout.from_term_to_kill()
        # A process that saves meanwhile may have to wait for a processor.
        self._kill = FairDeadline(seconds, command.processes)
        self._lost_at: float | None = None
        self.lost: list[int] = []  # those that cannot be killed
        if not is_killed:
            child = command.child
            for pid in (child,) if children.is_there(child) else command.rest():
                _send(pid, signal.SIGTERM)

    def poll(self) -> None:
        now = time.monotonic()
        if not self._kill.is_over():
            return
        left = self._left()
        if any(map(children.is_traced, left)):
            return  # a debugger is attached now
        for pid in left:
            if not children.is_doomed(pid):
                _send(pid, signal.SIGKILL)
        if self._lost_at is None:
            self._lost_at = now + self._timeout.after_kill()
        elif now >= self._lost_at:
            self.lost = left

    @property
    def is_over(self) -> bool:
        """Whether all are gone, or those that are left cannot be killed."""
        return bool(self.lost) or not self._left()

    def _left(self) -> list[int]:
        return [pid for pid in dict.fromkeys(self._command.processes()) if children.is_there(pid)]


class KeeperWait:
    """Keepers that are waited for, as long as they make progress."""

    def __init__(self, timeout: Timeout) -> None:
        self._seconds = timeout.for_disk()
        self._seen: object = None
        self._since = time.monotonic()

    def moves(self, pids: list[int]) -> bool:
        """Whether one of them has done anything recently, or could."""
        seen = [children.work_of(pid) for pid in pids]
        now = time.monotonic()
        # Not in state D, the wait for a disk: all other waits of a keeper have a limit.
        if seen != self._seen or any(state != b"D" for state, *_ in seen):
            self._seen, self._since = seen, now
        return now - self._since < self._seconds


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)
