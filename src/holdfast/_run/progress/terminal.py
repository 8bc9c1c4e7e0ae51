"""One line at the bottom of a terminal, and the manners it needs there.

The line is drawn only where the terminal is free: not into somebody's half-written line, not over
a prompt, not while another program or another library has the screen. Whatever others write, the
line goes away before it and comes back after it; their text is never changed, held up or lost.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TextIO

from holdfast._run.progress.streams import Place, Tap, ends_in_mid_line, is_terminal, place_of
from holdfast._run.progress.tqdm_bar import THREAD_LOCK, BarLock, Bottom
from holdfast._run.progress.words import Standing, terminal_line

# The line is back at once after a print, but not after each of thousands.
_SHORTEST_SHOW_SECONDS = 0.05
# What writes past every stream (C code, another process, a key) may have hit the line.
_REPAIR_SECONDS = 1.0
_LOCK_SECONDS = 1.0
_ERASE_LINE = "\x1b[K"


class Screen:
    """A line on a terminal, from `open` to `close`."""

    tick_seconds = 0.25
    fork_lock = THREAD_LOCK

    def __init__(self, stream: TextIO) -> None:
        self._pid = os.getpid()
        self._descriptor = stream.fileno()
        self._lock = BarLock()
        self._bottom = Bottom(stream)
        self._ascii_only = not _can_write("━╸─", stream)
        self._taps: list[Tap] = []
        self._text = ""
        self._width = 0
        self._shown_at = 0.0
        self._in_mid_line = False
        self._is_free = True
        self._was_taken = False
        self._flushed_at: Place | None = None
        self._asked_at: Place | None = None  # where somebody waits for an answer
        self._is_closed = False

    def open(self) -> bool:
        """Begin; False if others' text could not be kept apart from the line."""
        for name in ("stderr", "stdout"):
            stream = getattr(sys, name)
            if is_terminal(stream) and all(tap.stream is not stream for tap in self._taps):
                tap = Tap(name, stream, self)
                if not tap.cover():
                    self.close()
                    return False
                self._taps.append(tap)
        return True

    def tell(self, standing: Standing, rate: float | None, idle_seconds: float | None) -> None:
        """Show this, if the terminal is free."""
        width = self._columns() - 1  # the last column would fold the line in some terminals
        text = terminal_line(standing, rate, idle_seconds, width, ascii_only=self._ascii_only)
        if not self._lock.acquire(_LOCK_SECONDS):
            return
        try:
            if self._is_closed:
                return
            self._is_free = self._look_whether_free()
            is_new_width, self._width, self._text = width != self._width, width, text
            if not self._is_free or self._in_mid_line:
                return
            bottom = self._bottom
            if not bottom.is_shown or is_new_width or bottom.is_misplaced():
                self._show()
            elif text != bottom.words or time.monotonic() - self._shown_at > _REPAIR_SECONDS:
                bottom.words = text
                bottom.draw()
                self._shown_at = time.monotonic()
        finally:
            self._lock.release()

    def _show(self) -> None:
        self._bottom.wipe()
        self._bottom.words = self._text
        self._bottom.draw_all()
        self._shown_at = time.monotonic()

    def _hide(self) -> None:
        self._bottom.wipe()
        self._bottom.words = ""  # else tqdm would bring it back

    def _look_whether_free(self) -> bool:
        if self._asked_at is not None:
            if place_of(self._asked_at.thread) == self._asked_at:
                return False
            self._asked_at = None
        if self._is_taken():
            self._hide()
            self._was_taken = True
            return False
        if self._was_taken:
            self._was_taken = self._in_mid_line = False
        if _is_lent(self._descriptor):
            # What is on the screen now is not ours to wipe.
            self._bottom.is_shown, self._bottom.words = False, ""
            return False
        return True

    def _is_taken(self) -> bool:
        """Whether somebody has put a terminal of their own in place of ours, as rich does."""
        now = [(tap, getattr(sys, tap.name, None)) for tap in self._taps]
        return any(stream is not tap.stream and is_terminal(stream) for tap, stream in now)

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._descriptor).columns or 80
        except OSError:
            return 80

    def pass_text(self, tap: Tap, text: str) -> int:
        """Somebody prints: out of the way, and back when the line is complete."""
        if os.getpid() != self._pid:
            return tap.write(self._over_the_line(tap, text))
        made_room = False
        with contextlib.suppress(Exception):  # whatever happens to us, the text is written
            made_room = text != "" and self._make_room()
        try:
            return tap.write(text)
        finally:
            if made_room:
                self._come_back(tap, text)

    def _make_room(self) -> bool:
        if self._is_closed or not self._lock.acquire(_LOCK_SECONDS):
            return False
        if not self._is_closed:
            self._hide()
        return True

    def _come_back(self, tap: Tap, text: str) -> None:
        try:
            self._in_mid_line = ends_in_mid_line(text, self._in_mid_line)
            is_early = time.monotonic() - self._shown_at < _SHORTEST_SHOW_SECONDS
            if self._in_mid_line or is_early or self._is_closed or not self._is_free:
                return
            if self._columns() - 1 == self._width:  # else the text is for another width
                with contextlib.suppress(Exception):
                    tap.flush()
                    self._show()
        finally:
            self._lock.release()

    def _over_the_line(self, tap: Tap, text: str) -> str:
        """In a forked child: the line on the screen is the parent's, and it will draw it again."""
        at_start = not self._in_mid_line
        self._in_mid_line = ends_in_mid_line(text, self._in_mid_line)
        is_over = text != "" and at_start and not self._is_closed and is_terminal(tap.stream)
        return _ERASE_LINE + text if is_over else text

    def pass_bar(self, tap: Tap, text: str, *, is_message: bool) -> int:
        """A bar of tqdm's draws itself, under tqdm's lock, or it has made room for a message."""
        if is_message:
            self._in_mid_line = ends_in_mid_line(text, self._in_mid_line)
        elif self._bottom.is_shown and len(text) > 1 and text[0] == "\r":
            # A bar that ends moves up into our line, which may be longer than it.
            text = f"\r{_ERASE_LINE}{text[1:]}"
        return tap.write(text)

    def note_flush(self, tap: Tap, place: Place) -> None:
        """Make room for a question.

        `input()` writes its prompt past every stream. What gives it away is that it flushes
        standard error and then standard output, from one and the same instruction; and as long as
        nobody has answered, its thread stays at that instruction.
        """
        if tap.name == "stderr":
            self._flushed_at = place
        elif place == self._flushed_at and os.getpid() == self._pid:
            self._flushed_at = None
            with contextlib.suppress(Exception):
                if self._make_room():
                    self._asked_at, self._is_free = place, False
                    self._lock.release()

    def close(self) -> None:
        """Leave the terminal as if there had been no line; its streams, too."""
        locked = self._lock.acquire(_LOCK_SECONDS)
        self._is_closed = True
        for tap in self._taps:
            tap.uncover()
        if locked:
            with contextlib.suppress(Exception):
                self._bottom.retire()
            self._lock.release()


def _can_write(text: str, stream: TextIO) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def _is_lent(descriptor: int) -> bool:
    """Whether another program has the terminal, or somebody types into a line editor.

    So it is with a job in the background, in a debugger's prompt, and where a password is asked.
    """
    try:
        import termios
    except ImportError:  # Windows
        return False
    try:
        if os.tcgetpgrp(descriptor) != os.getpgrp():
            return True
    except OSError:
        pass  # a terminal, but not the one that controls us: nobody else has it
    try:
        modes = termios.tcgetattr(descriptor)[3]
        return not modes & termios.ICANON or not modes & termios.ECHO
    except (OSError, termios.error):
        return False
