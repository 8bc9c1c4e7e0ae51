"""The line as one of tqdm's bars, so that the bars of the user's own find a place beside it.

Invariant: the cursor rests in column 0 of the uppermost bar. From there one erasure takes away
every bar and nothing else, even after the terminal was made narrower and has folded long lines.

Only the thread lock of tqdm is taken, never its lock between processes: making that one would fix
multiprocessing's start method, and a killed worker may hold it for ever.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO

from tqdm.std import TqdmDefaultWriteLock
from tqdm.std import tqdm as Bar

_TO_END_OF_LINE = "\x1b[K"
# From the second column on, and then the first: an erasure from the screen's very first cell
# makes tmux and others move what was there into their history instead.
_WIPE = f"\r \x1b[J\r{_TO_END_OF_LINE}"
_UP = "\x1b[A"

THREAD_LOCK: Any = TqdmDefaultWriteLock.th_lock


class BarLock:
    """What tqdm locks when it draws: its thread lock, and a lock that the user gave it."""

    def __init__(self) -> None:
        self._users: list[Any] = []

    def acquire(self, seconds: float) -> bool:
        if not THREAD_LOCK.acquire(timeout=seconds):
            return False
        given = vars(Bar).get("_lock")
        if isinstance(given, TqdmDefaultWriteLock):
            given = None  # it consists of the thread lock and the one we do without
        if given is not None and not given.acquire(True, seconds):
            THREAD_LOCK.release()
            return False
        self._users.append(given)
        return True

    def release(self) -> None:
        given = self._users.pop()
        if given is not None:
            given.release()
        THREAD_LOCK.release()


class Bottom(Bar):  # type: ignore[misc]  # tqdm ships no types
    """Our line. Whoever calls a method holds the lock."""

    monitor_interval = 0  # no second thread
    _lock = THREAD_LOCK

    def __init__(self, stream: TextIO) -> None:
        self.words = ""  # empty while there is nothing to show
        self.is_shown = False
        self.disable = False
        self._pid = os.getpid()
        # As they are now, below what we will put over them.
        self._write, self._flush = stream.write, stream.flush
        # Every argument that TQDM_… in the environment could otherwise change.
        super().__init__(
            file=stream, disable=False, leave=False, miniters=1, position=None, delay=0
        )

    def draw(self) -> None:
        """Show the words in our place, over what was there."""
        down = abs(self.pos)
        if not self.words or self.disable or os.getpid() != self._pid or down >= _rows(self.fp):
            return
        self._put("\n" * down + f"\r{self.words}{_TO_END_OF_LINE}\r" + _UP * down)
        self.is_shown = True

    def wipe(self) -> None:
        """Take away all bars, so that others can write where the uppermost was."""
        if self.is_shown:
            self._put(_WIPE)
            self.is_shown = False

    def is_misplaced(self) -> bool:
        """Whether another bar wants our place, or a better one has become free."""
        return bool(self._get_free_pos(self) != abs(self.pos))

    def draw_all(self) -> None:
        """Show every bar of this terminal again after `wipe`."""
        self.pos = self._get_free_pos(self)
        for bar in sorted(self._instances, key=lambda bar: abs(getattr(bar, "pos", 0))):
            if bar is self:
                self.draw()
            elif hasattr(bar, "start_t") and bar.fp in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # a bar of the user's, with a format of his
                    bar.refresh(nolock=True)

    def retire(self) -> None:
        """Give the place back."""
        if not self.disable:
            shown = self.is_shown
            self.wipe()
            self.words, self.disable = "", True
            self._decr_instances(self)
            if shown:
                self.draw_all()

    # What tqdm calls for every bar, when one of the user's is written around or closed.

    def clear(self, nolock: bool = False) -> None:  # noqa: ARG002 – tqdm's signature
        if self.is_shown and os.getpid() == self._pid:
            down = abs(self.pos)
            self._put("\n" * down + f"\r{_TO_END_OF_LINE}" + _UP * down)
            self.is_shown = False

    def refresh(self, nolock: bool = False, lock_args: object = None) -> bool:  # noqa: ARG002  tqdm's
        self.draw()
        return True

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:  # noqa: ARG002  tqdm's
        self.draw()
        return True

    def close(self) -> None:
        """Nothing: also tqdm closes bars when they are collected, in any thread and any child."""

    def __str__(self) -> str:
        return self.words

    def _put(self, text: str) -> None:
        try:
            self._write(text)
            self._flush()
        except (OSError, ValueError):  # closed, or the terminal is gone
            self.words, self.disable = "", True


def _rows(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).lines or 24
    except (OSError, ValueError):
        return 24
