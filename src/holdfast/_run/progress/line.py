"""Progress: shows where the run stands, in the way that suits the output stream.

terminal   one line at its bottom, drawn four times a second
otherwise  a plain line now and then: a log file, a pipe, a notebook, TERM=dumb
HOLDFAST_PROGRESS=0 shows nothing, =plain only plain lines

A daemon thread does all of it and never raises. It writes nothing after `close` has returned. A
forked child neither draws nor inherits a lock that the thread holds.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast._environment.variables import progress_wish, terminal_is_dumb
from holdfast._run.progress.words import ShownPace, Standing, plain_line
from holdfast._text import is_terminal, say

if TYPE_CHECKING:
    from holdfast._run.progress.terminal import TerminalLine

    Display: TypeAlias = "PlainLines | TerminalLine"

# Soon at first, since a person wants to see that it runs; then seldom, to keep a log short.
PLAIN_GAPS_SECONDS = (10.0, 30.0, 60.0)
_JOIN_SECONDS = 1.0


class PlainLines:
    """A line of text now and then."""

    def __init__(self) -> None:
        self.tick_seconds = min(2.0, PLAIN_GAPS_SECONDS[0])
        self.fork_lock = threading.RLock()
        self._gaps = iter(PLAIN_GAPS_SECONDS)
        self._due = time.monotonic() + next(self._gaps)
        self._is_closed = False

    def show(self, standing: Standing, rate: float | None, idle_seconds: float | None) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + next(self._gaps, PLAIN_GAPS_SECONDS[-1])
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
        if self._display is not None or (display := _choose_display()) is None:
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
        """Remove the line. In a forked child do nothing: the line is the parent's."""
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
        pace = ShownPace()
        while not over.is_set():
            with contextlib.suppress(Exception):  # a line of text must not cost a run
                standing = self._look()
                pace.observe(standing)
                display.show(standing, pace.rate, pace.idle_seconds)
            over.wait(display.tick_seconds)


def _choose_display() -> Display | None:
    wish = progress_wish()
    if wish == "off" or sys.stderr is None or getattr(sys.stderr, "closed", False):
        return None
    if wish == "plain" or not is_terminal(sys.stderr) or terminal_is_dumb():
        return PlainLines()
    with contextlib.suppress(Exception):  # as above; also where a stream cannot be wrapped
        from holdfast._run.progress.terminal import TerminalLine  # imports tqdm

        return TerminalLine(sys.stderr)
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
