"""The end of a command that hangs: asked first, then killed, and never waited for without bound.

What waits for a file system that does not answer survives a kill. It is left where it is, and
so is the command: who leads it must not stand still with it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable

from holdfast._environment.processes.proc import FairDeadline
from holdfast._supervise import children

# -- `--hang-timeout`: how long a command may stand still, as it was given -------------------------


AUTO = "auto"
# Of what nobody has measured yet: the first step of a run, or all of a command without one.
_UNKNOWN_SECONDS = 1800.0
# For what may take longer than a step: phases, the first step, ranks that wait for each other.
_LONGER = 10.0


class Timeout:
    """How long it may be until something counts as a hang; learned by the run where it is auto."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    @classmethod
    def parse(cls, text: str) -> Timeout:
        """Of "auto", "90" or "5min"; ValueError says what is wrong with any other."""
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
        """Where it comes from, as hang.json has it."""
        return "learned" if self.seconds is None else "given"

    def for_child(self) -> str:
        """As the keeper of a run reads it."""
        return AUTO if self.seconds is None else f"{self.seconds:g}"

    def without_run(self, *, has_ranks: bool) -> float:
        """For a command of which nothing is known but what it prints and what it uses."""
        if self.seconds is None:
            return _UNKNOWN_SECONDS
        return self.seconds * (_LONGER if has_ranks else 1.0)

    def for_disk(self) -> float:
        """For somebody who saves, and whose file system does not answer."""
        return _UNKNOWN_SECONDS if self.seconds is None else max(60.0, self.seconds * _LONGER)

    def from_term_to_kill(self) -> float:
        """For whoever saves something when told to end."""
        return self._within(20.0)

    def after_kill(self) -> float:
        """For the system, to take away one that has much memory."""
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


class Ending:
    """From SIGTERM to SIGKILL, to all that the command has started."""

    def __init__(
        self,
        child: int,
        rest: Callable[[], list[int]],
        timeout: Timeout,
        *,
        is_killed: bool = False,
    ) -> None:
        """`rest` are those that it would leave behind; `is_killed`: by its keeper, in vain."""
        self._child = child
        self._rest = rest
        self._timeout = timeout
        seconds = 0.0 if is_killed else timeout.from_term_to_kill()
        # Who saves something meanwhile may have to wait for a processor.
        self._kill = FairDeadline(seconds, lambda: (child, *rest()))
        self._lost_at: float | None = None
        self.lost: list[int] = []  # those that cannot be killed
        if not is_killed:
            for pid in (child,) if children.is_there(child) else rest():
                _send(pid, signal.SIGTERM)

    def look(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        if not self._kill.is_over():
            return
        left = [
            pid for pid in dict.fromkeys((self._child, *self._rest())) if children.is_there(pid)
        ]
        if any(map(children.is_traced, left)):
            return  # somebody looks at it now
        for pid in left:
            if not children.is_doomed(pid):
                _send(pid, signal.SIGKILL)
        if self._lost_at is None:
            self._lost_at = now + self._timeout.after_kill()
        elif now >= self._lost_at:
            self.lost = left

    @property
    def is_over(self) -> bool:
        """Whether all are gone, or those that are left never will be."""
        return bool(self.lost) or not any(
            map(children.is_there, dict.fromkeys((self._child, *self._rest())))
        )


class Saving:
    """Keepers that are waited for, as long as they get on."""

    def __init__(self, timeout: Timeout) -> None:
        self._seconds = timeout.for_disk()
        self._seen: object = None
        self._since = time.monotonic()

    def moves(self, pids: list[int]) -> bool:
        """Whether one of them has done anything of late, or could."""
        seen = [children.work_of(pid) for pid in pids]
        now = time.monotonic()
        # Not in the kernel's wait for a disk: then it waits for something else, with a bound.
        if seen != self._seen or any(state != b"D" for state, *_ in seen):
            self._seen, self._since = seen, now
        return now - self._since < self._seconds


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)
