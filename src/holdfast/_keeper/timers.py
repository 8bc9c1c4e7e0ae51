"""What the keeper does by the clock, and what it does in the background.

A named timer replaces the older one of its name. Any thread may set a timer; only the keeper's
loop runs them.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable

from holdfast._environment.processes.proc import FairDeadline

Act = Callable[[], None]


def in_background(act: Callable[[], object]) -> None:
    """Run it in a thread: the keeper's loop must not wait for SLURM, git or a disk."""
    threading.Thread(target=act, name="background", daemon=True).start()


class Timers:
    """Calls to be made, each not before its time. `fileno` is readable when one was added."""

    def __init__(self) -> None:
        self._calls: dict[object, tuple[float, Act]] = {}  # by name, in the order they were set
        self._lock = threading.Lock()
        self._loop_thread = threading.get_ident()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    def after(self, seconds: float, act: Act, name: str = "") -> None:
        self.at(time.monotonic() + seconds, act, name)

    def at(self, when: float, act: Act, name: str = "") -> None:
        with self._lock:
            self._calls.pop(name, None)
            self._calls[name or object()] = (when, act)
        if threading.get_ident() != self._loop_thread:
            with contextlib.suppress(OSError):
                self._wake_write.send(b"!")

    def on_deadline(self, deadline: FairDeadline, act: Act, name: str) -> None:
        """Act when a deadline is over; it may move while a process waits for a processor."""

        def check() -> None:
            if deadline.is_over():
                act()
            else:
                self.at(deadline.at, check, name)

        self.at(deadline.at, check, name)

    def cancel(self, name: str) -> None:
        with self._lock:
            self._calls.pop(name, None)

    def due_at(self, name: str) -> float | None:
        """When a named timer is due; None if it is not set."""
        found = self._calls.get(name)
        return None if found is None else found[0]

    def next_at(self) -> float:
        with self._lock:
            return min((when for when, _ in self._calls.values()), default=math.inf)

    def run_due(self) -> None:
        """Make the calls that are due now; one that sets itself again must not block the loop."""
        now = time.monotonic()
        while (act := self._pop_due(now)) is not None:
            act()

    def clear(self) -> None:
        with self._lock:
            self._calls.clear()

    def close(self) -> None:
        self._wake_read.close()
        self._wake_write.close()

    def fileno(self) -> int:
        return self._wake_read.fileno()

    def drain(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_read.recv(4096)

    def _pop_due(self, now: float) -> Act | None:
        with self._lock:
            due = [(when, name) for name, (when, _) in self._calls.items() if when <= now]
            # Of two at the same time, the one that was set first.
            return self._calls.pop(min(due, key=lambda each: each[0])[1])[1] if due else None
