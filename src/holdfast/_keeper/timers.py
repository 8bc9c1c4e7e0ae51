"""What the keeper does by the clock: a heap of calls; and what it does in the background.

A named timer replaces the older one of its name. Any thread may set a timer; only the keeper's
loop runs them.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
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
        self._heap: list[tuple[float, int, str, Act]] = []
        self._named: dict[str, tuple[float, int]] = {}  # the entry that counts
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._loop_thread = threading.get_ident()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    def after(self, seconds: float, act: Act, name: str = "") -> None:
        self.at(time.monotonic() + seconds, act, name)

    def at(self, when: float, act: Act, name: str = "") -> None:
        with self._lock:
            number = next(self._numbers)
            heapq.heappush(self._heap, (when, number, name, act))
            if name:
                self._named[name] = (when, number)
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
            self._named.pop(name, None)

    def due_at(self, name: str) -> float | None:
        """When a named timer is due; None if it is not set."""
        found = self._named.get(name)
        return None if found is None else found[0]

    def next_at(self) -> float:
        with self._lock:
            self._drop_cancelled()
            return self._heap[0][0] if self._heap else math.inf

    def run_due(self) -> None:
        """Make the calls that are due now; one that sets itself again must not block the loop."""
        now = time.monotonic()
        while (act := self._pop_due(now)) is not None:
            act()

    def clear(self) -> None:
        with self._lock:
            self._heap.clear()
            self._named.clear()

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
            self._drop_cancelled()
            if not self._heap or self._heap[0][0] > now:
                return None
            _, _, name, act = heapq.heappop(self._heap)
            self._named.pop(name, None)
            return act

    def _drop_cancelled(self) -> None:
        while self._heap:
            _, number, name, _ = self._heap[0]
            if not name or self._named.get(name, (0.0, -1))[1] == number:
                return
            heapq.heappop(self._heap)
