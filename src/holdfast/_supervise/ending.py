"""The end of a command that hangs: asked first, then killed, and never waited for without bound.

What waits for a file system that does not answer survives a kill. It is left where it is, and
so is the command: who leads it must not stand still with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from holdfast._supervise import family
from holdfast._supervise.timeout import Timeout
from holdfast._watch.run_queue import FairDeadline


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
            for pid in (child,) if family.is_there(child) else rest():
                _send(pid, signal.SIGTERM)

    def look(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        if not self._kill.is_over():
            return
        left = [pid for pid in dict.fromkeys((self._child, *self._rest())) if family.is_there(pid)]
        if any(map(family.is_traced, left)):
            return  # somebody looks at it now
        for pid in left:
            if not family.is_doomed(pid):
                _send(pid, signal.SIGKILL)
        if self._lost_at is None:
            self._lost_at = now + self._timeout.after_kill()
        elif now >= self._lost_at:
            self.lost = left

    @property
    def is_over(self) -> bool:
        """Whether all are gone, or those that are left never will be."""
        return bool(self.lost) or not any(
            map(family.is_there, dict.fromkeys((self._child, *self._rest())))
        )


class Saving:
    """Keepers that are waited for, as long as they get on."""

    def __init__(self, timeout: Timeout) -> None:
        self._seconds = timeout.for_disk()
        self._seen: object = None
        self._since = time.monotonic()

    def moves(self, pids: list[int]) -> bool:
        """Whether one of them has done anything of late, or could."""
        seen = [family.work_of(pid) for pid in pids]
        now = time.monotonic()
        # Not in the kernel's wait for a disk: then it waits for something else, with a bound.
        if seen != self._seen or any(state != b"D" for state, *_ in seen):
            self._seen, self._since = seen, now
        return now - self._since < self._seconds


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)
