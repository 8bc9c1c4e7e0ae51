"""Progress: shows where the run stands, in the way that suits where it is watched.

terminal   one line at its bottom, drawn four times a second
otherwise  a plain line now and then: a log file, a pipe, a notebook, TERM=dumb
HOLDFAST_PROGRESS=0 shows nothing, =plain only plain lines

Everything is done by a daemon thread that never raises, and after `close` has returned it writes
nothing any more. A forked child neither draws nor inherits a lock that the thread holds.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from holdfast._environment.variables import progress_wish, terminal_is_dumb
from holdfast._run.progress.streams import is_terminal
from holdfast._run.progress.words import Pace, Standing, plain_line
from holdfast._text import say

# Soon at first, since a person looks whether it runs at all; then a log must not grow for it.
PLAIN_GAPS_SECONDS = (10.0, 30.0, 60.0)
_JOIN_SECONDS = 1.0


class Display(Protocol):
    """Where it is shown."""

    tick_seconds: float
    fork_lock: Any

    def tell(self, standing: Standing, rate: float | None, idle_seconds: float | None) -> None: ...
    def close(self) -> None: ...


class PlainLines:
    """A line of text now and then."""

    def __init__(self) -> None:
        self.tick_seconds = min(2.0, PLAIN_GAPS_SECONDS[0])
        self.fork_lock = threading.RLock()
        self._gaps: Iterator[float] = itertools.chain(
            PLAIN_GAPS_SECONDS, itertools.repeat(PLAIN_GAPS_SECONDS[-1])
        )
        self._due = time.monotonic() + next(self._gaps)
        self._is_closed = False

    def tell(self, standing: Standing, rate: float | None, idle_seconds: float | None) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + next(self._gaps)
        with self.fork_lock:
            if not self._is_closed:
                say(plain_line(standing, rate, idle_seconds))

    def close(self) -> None:
        locked = self.fork_lock.acquire(timeout=_JOIN_SECONDS)
        self._is_closed = True
        if locked:
            self.fork_lock.release()


class Progress:
    """Shows what `look` returns, from `begin` to `close`."""

    def __init__(self, look: Callable[[], Standing]) -> None:
        self._look = look
        self._display: Display | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._pid = 0

    def begin(self) -> None:
        """Show it; nothing if it is shown already."""
        if self._display is not None:
            return
        display = _choose_display()
        if display is None:
            return
        self._pid = os.getpid()
        self._display, self._over = display, threading.Event()
        _shown.add(self)
        # The interpreter must not end while the thread is in the middle of a write.
        atexit.register(self.close)
        thread = threading.Thread(
            target=self._show, args=(display, self._over), name="holdfast-progress", daemon=True
        )
        thread.start()
        self._thread = thread  # not before: the link's thread may close it at any moment

    def close(self) -> None:
        """Take the line away; in a forked child nothing, for it is the parent's."""
        display, thread = self._display, self._thread
        if display is None or os.getpid() != self._pid:
            return
        self._display = None
        self._over.set()
        display.close()
        _shown.discard(self)
        atexit.unregister(self.close)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _show(self, display: Display, over: threading.Event) -> None:
        pace = Pace()
        while not over.is_set():
            # Whatever goes wrong in here, a run must not be lost for a line of text.
            with contextlib.suppress(Exception):
                standing = self._look()
                pace.note(standing)
                display.tell(standing, pace.rate, pace.idle_seconds)
            over.wait(display.tick_seconds)


def _choose_display() -> Display | None:
    wish = progress_wish()
    if wish == "off" or sys.stderr is None or getattr(sys.stderr, "closed", False):
        return None
    if wish == "plain" or not is_terminal(sys.stderr) or terminal_is_dumb():
        return PlainLines()
    with contextlib.suppress(Exception):  # as above: no run is lost for a line
        from holdfast._run.progress.terminal import Screen  # brings tqdm, which nobody else needs

        screen = Screen(sys.stderr)
        if screen.open():
            return screen
    return PlainLines()


_shown: weakref.WeakSet[Progress] = weakref.WeakSet()
_locked_to_fork: list[Any] = []


def _before_fork() -> None:
    for progress in list(_shown):
        display = progress._display
        if display is not None and display.fork_lock.acquire(timeout=_JOIN_SECONDS):
            _locked_to_fork.append(display.fork_lock)


def _after_fork() -> None:
    while _locked_to_fork:
        _locked_to_fork.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )
