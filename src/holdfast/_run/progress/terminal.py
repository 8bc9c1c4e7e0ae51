"""The progress line at the bottom of a terminal, as one of tqdm's bars with those of the user.

The line is drawn only while the terminal is free: not inside an incomplete line, not over a
prompt, not while another program or library has the screen. Text of others is never changed,
delayed or lost: the line is erased before it and drawn again after it. For that the `write` and
`flush` of the stream objects are wrapped; `sys.stdout` stays the same object, and a logging handler
that has held it since before the run is covered too.

Invariant: the cursor rests in column 0 of the uppermost bar. From there one erase removes every
bar and nothing else, even after the terminal became narrower and folded long lines.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TextIO

from tqdm.std import TqdmDefaultWriteLock
from tqdm.std import tqdm as Bar

from holdfast._run.progress.line import Standing, terminal_line
from holdfast._text import is_terminal

# The line is back at once after a print, but not after each of thousands.
_SHORTEST_SHOW_SECONDS = 0.05
# Output that passes no stream (of C code, another process, a key) may have hit the line.
_REPAIR_SECONDS = 1.0
_LOCK_SECONDS = 1.0
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ERASE_LINE = "\x1b[K"
# From the second column on, and then the first: an erase from the very first cell of the screen
# makes tmux and others move its content into their history.
_ERASE_ALL = f"\r \x1b[J\r{_ERASE_LINE}"
# Never tqdm's lock between processes: creating it would fix multiprocessing's start method, and a
# killed worker may hold it forever.
_THREAD_LOCK: Any = TqdmDefaultWriteLock.th_lock

Place = tuple[int, int, int]  # a thread, its frame and its instruction


@contextlib.contextmanager
def _drawing() -> Iterator[bool]:
    """Hold the locks under which tqdm draws; False if they are not free in time."""
    given = vars(Bar).get("_lock")  # of the user, unless it consists of tqdm's own two
    has_own = given is None or isinstance(given, TqdmDefaultWriteLock)
    with contextlib.ExitStack() as held:
        for lock in (_THREAD_LOCK,) if has_own else (_THREAD_LOCK, given):
            if not lock.acquire(True, _LOCK_SECONDS):
                yield False
                return
            held.callback(lock.release)
        yield True


class WrappedStream:
    """A stream whose output passes a TerminalLine; `write` and `flush` are the original ones."""

    def __init__(self, name: str, stream: TextIO, line: TerminalLine) -> None:
        self.name = name
        self.stream = stream
        self.write, self.flush = stream.write, stream.flush
        self._line = line
        self._ours: dict[str, Callable[..., Any]] = {
            "write": self._wrapped_write,
            "flush": self._wrapped_flush,
        }
        # Another library may have wrapped them before us, and gets its own back.
        own = getattr(stream, "__dict__", {})
        self._before = {name: own[name] for name in self._ours if name in own}

    def wrap(self) -> None:
        for name, ours in self._ours.items():
            setattr(self.stream, name, ours)

    def unwrap(self) -> None:
        own = getattr(self.stream, "__dict__", {})
        for name, ours in self._ours.items():
            if own.get(name) is not ours:
                continue  # wrapped again by another library: leave it, ours only passes on
            del own[name]
            if name in self._before:
                own[name] = self._before[name]

    def _wrapped_write(self, text: str, /) -> int:
        # Not sys._getframe(1): the interpreter itself also writes, without a frame.
        caller = sys._getframe().f_back
        if not _is_of_tqdm(caller):
            return self._line.pass_text(self, text)
        is_message = caller is not None and caller.f_code.co_name == "write"
        return self._line.pass_bar(self, text, is_message=is_message)

    def _wrapped_flush(self) -> None:
        self.flush()
        caller = sys._getframe().f_back
        if caller is not None and not _is_of_tqdm(caller):
            self._line.observe_flush(self, _place(threading.get_ident(), caller))


class TerminalLine(Bar):  # type: ignore[misc]  # tqdm ships no types
    """Our line among tqdm's bars, from its creation to `close`."""

    tick_seconds = 0.25
    fork_lock = _THREAD_LOCK
    monitor_interval = 0  # tqdm needs no second thread for it
    _lock = _THREAD_LOCK

    def __init__(self, stream: TextIO) -> None:
        """AttributeError or TypeError if a stream cannot be wrapped."""
        self._pid, self._descriptor = os.getpid(), stream.fileno()
        self._write, self._flush = stream.write, stream.flush  # not wrapped yet
        self._ascii_only = not _can_write("━╸─", stream)
        self._text = ""
        self._is_hidden = False  # True: tqdm must not draw it either
        self._is_shown = False
        self._is_closed = self.disable = False
        self._width = 0
        self._shown_at = 0.0
        self._in_mid_line = False
        self._is_free = True
        self._was_taken = False
        self._flushed_at: Place | None = None
        self._prompt_at: Place | None = None  # where a thread waits in `input()`
        self._streams: list[WrappedStream] = []
        # Every argument that TQDM_… in the environment could change otherwise.
        super().__init__(
            file=stream, disable=False, leave=False, miniters=1, position=None, delay=0
        )
        for name in ("stderr", "stdout"):
            stream = getattr(sys, name)
            if is_terminal(stream) and all(each.stream is not stream for each in self._streams):
                self._streams.append(WrappedStream(name, stream, self))
        try:
            for each in self._streams:
                each.wrap()
        except (AttributeError, TypeError):
            self.close()
            raise

    def show(self, standing: Standing, rate: float | None, idle_seconds: float | None) -> None:
        width = _size(self._descriptor).columns - 1  # some terminals fold at the last column
        text = terminal_line(standing, rate, idle_seconds, width, ascii_only=self._ascii_only)
        with _drawing() as has_locks:
            if not has_locks or self._is_closed:
                return
            self._is_free = self._find_whether_free()
            is_new_width, is_new_text = width != self._width, text != self._text
            self._width, self._text = width, text
            if not self._is_free or self._in_mid_line:
                return
            # Another bar may want our place, or a better one may have become free.
            is_misplaced = self._get_free_pos(self) != abs(self.pos)
            if not self._is_shown or is_new_width or is_misplaced:
                self._draw_all()
            elif is_new_text or time.monotonic() - self._shown_at > _REPAIR_SECONDS:
                self.display()
                self._shown_at = time.monotonic()

    def close(self) -> None:
        """Leave terminal and streams as if there had been no line.

        tqdm calls it too when a bar is collected, in any thread and any child.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        with _drawing() as has_locks:
            self._is_closed = True
            for each in self._streams:
                each.unwrap()
            with contextlib.suppress(Exception):  # the terminal may be gone
                if has_locks:
                    was_shown = self._is_shown
                    self._hide()
                    self.disable = True
                    self._decr_instances(self)
                    if was_shown:
                        self._draw_bars()

    # tqdm calls these for every bar when it writes around one of the user's or closes it.

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:  # noqa: ARG002  tqdm's
        is_in_view = abs(self.pos) < _size(self._descriptor).lines
        is_wanted = self._text and not self._is_hidden and not self.disable
        if is_wanted and is_in_view and os.getpid() == self._pid:
            self._put_in_place(self._text)
            self._is_shown = True
        return True

    def clear(self, nolock: bool = False) -> None:  # noqa: ARG002  tqdm's signature
        if self._is_shown and os.getpid() == self._pid:
            self._put_in_place("")
            self._is_shown = False

    # -- drawing, under the locks -----------------------------------------------------

    def _draw_all(self) -> None:
        self._hide()
        self._is_hidden = False
        self._draw_bars()
        self._shown_at = time.monotonic()

    def _draw_bars(self) -> None:
        self.pos = self._get_free_pos(self)
        for bar in sorted(self._instances, key=lambda bar: abs(getattr(bar, "pos", 0))):
            if bar is self:
                self.display()
            elif hasattr(bar, "start_t") and bar.fp in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # a bar of the user with its own format
                    bar.refresh(nolock=True)

    def _hide(self) -> None:
        """Erase all bars, so that others can write where the uppermost was."""
        if self._is_shown:
            self._put(_ERASE_ALL)
        self._is_shown, self._is_hidden = False, True

    def _put_in_place(self, text: str) -> None:
        down = abs(self.pos)
        self._put("\n" * down + f"\r{text}{_ERASE_LINE}\r" + "\x1b[A" * down)

    def _put(self, text: str) -> None:
        try:
            self._write(text)
            self._flush()
        except (OSError, ValueError):  # closed, or the terminal is gone
            self.disable = True

    def _find_whether_free(self) -> bool:
        if self._prompt_at is not None:
            thread = self._prompt_at[0]
            frame = sys._current_frames().get(thread)
            if frame is not None and _place(thread, frame) == self._prompt_at:
                return False
            self._prompt_at = None
        # Another library has put its own terminal in place of ours, as rich does.
        now = [(each, getattr(sys, each.name, None)) for each in self._streams]
        if any(stream is not each.stream and is_terminal(stream) for each, stream in now):
            self._hide()
            self._was_taken = True
            return False
        if self._was_taken:
            self._was_taken = self._in_mid_line = False
        if _is_lent(self._descriptor):
            # The screen has other content now, which is not ours to erase.
            self._is_shown, self._is_hidden = False, True
            return False
        return True

    # -- what the wrapped streams call ------------------------------------------------

    def pass_text(self, to: WrappedStream, text: str) -> int:
        """Hide the line for this text, and draw it again when the text ends with its line."""
        if os.getpid() != self._pid:
            # The line on the screen is that of the parent, which draws it again.
            is_over = text != "" and not self._in_mid_line and not self._is_closed
            self._in_mid_line = ends_in_mid_line(text, self._in_mid_line)
            return to.write(_ERASE_LINE + text if is_over and is_terminal(to.stream) else text)
        with contextlib.ExitStack() as held:
            has_locks = False
            with contextlib.suppress(Exception):  # if anything fails here, the text is written
                if text and not self._is_closed:
                    has_locks = held.enter_context(_drawing())
                if has_locks and not self._is_closed:
                    self._hide()
            try:
                return to.write(text)
            finally:
                if has_locks:
                    self._come_back(to, text)

    def _come_back(self, to: WrappedStream, text: str) -> None:
        self._in_mid_line = ends_in_mid_line(text, self._in_mid_line)
        is_early = time.monotonic() - self._shown_at < _SHORTEST_SHOW_SECONDS
        if self._in_mid_line or is_early or self._is_closed or not self._is_free:
            return
        if _size(self._descriptor).columns - 1 == self._width:  # else `_text` does not fit
            with contextlib.suppress(Exception):
                to.flush()
                self._draw_all()

    def pass_bar(self, to: WrappedStream, text: str, *, is_message: bool) -> int:
        """A bar of tqdm draws itself under tqdm's lock, or it has made room for a message."""
        if is_message:
            self._in_mid_line = ends_in_mid_line(text, self._in_mid_line)
        elif self._is_shown and len(text) > 1 and text[0] == "\r":
            # A bar that ends moves up into our line, which may be longer.
            text = f"\r{_ERASE_LINE}{text[1:]}"
        return to.write(text)

    def observe_flush(self, of: WrappedStream, place: Place) -> None:
        """Hide the line for a prompt.

        `input()` writes its prompt past every stream. But it flushes standard error and then
        standard output, from one instruction, and its thread stays there until the answer comes.
        """
        if of.name == "stderr":
            self._flushed_at = place
        elif place == self._flushed_at and os.getpid() == self._pid:
            self._flushed_at = None
            with contextlib.suppress(Exception), _drawing() as has_locks:
                if has_locks and not self._is_closed:
                    self._hide()
                    self._prompt_at, self._is_free = place, False


def ends_in_mid_line(text: str, before: bool) -> bool:
    """Whether the cursor is inside an incomplete line after this text.

    >>> ends_in_mid_line("50%", False), ends_in_mid_line("done\\n\\x1b[0m", True)
    (True, False)
    """
    shown = (_CONTROL.sub("", text) if "\x1b" in text else text).rstrip("\r")
    return not shown.endswith("\n") if shown else before


def _place(thread: int, frame: FrameType) -> Place:
    return thread, id(frame), frame.f_lasti  # the frame itself would keep its variables alive


def _is_of_tqdm(caller: FrameType | None) -> bool:
    name = "" if caller is None else caller.f_globals.get("__name__", "")
    return str(name).partition(".")[0] == "tqdm"


def _size(descriptor: int) -> os.terminal_size:
    try:
        columns, lines = os.get_terminal_size(descriptor)
    except (OSError, ValueError):
        columns = lines = 0
    return os.terminal_size((columns or 80, lines or 24))


def _can_write(text: str, stream: TextIO) -> bool:
    try:
        return bool(text.encode(stream.encoding or "ascii"))
    except (UnicodeError, LookupError):
        return False


def _is_lent(descriptor: int) -> bool:
    """Whether another program has the terminal, or a line editor or password prompt reads keys.

    So it is for a job in the background and in a debugger.
    """
    try:
        import termios
    except ImportError:  # Windows
        return False
    with contextlib.suppress(OSError):  # not the terminal that controls us: no other has it
        if os.tcgetpgrp(descriptor) != os.getpgrp():
            return True
    try:
        modes = termios.tcgetattr(descriptor)[3]
        return not modes & termios.ICANON or not modes & termios.ECHO
    except (OSError, termios.error):
        return False
