"""The progress line at the bottom of a terminal, as one of tqdm's bars with those of the user.

Text of others is never changed, delayed or lost: the line is erased before it and drawn again after
it, unless it ends inside a line. For that the `write` of the stream objects is replaced, while
`sys.stdout` stays the same object: a logging handler that has held it since before the run is
covered too. While a prompt waits, or another program has the terminal, nothing is drawn.

Invariant: the cursor rests in column 0 of the uppermost bar. From there one erase removes every
bar and nothing else, even after the terminal became narrower and folded long lines.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
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
_LOCK: Any = TqdmDefaultWriteLock.th_lock


@contextlib.contextmanager
def _drawing() -> Iterator[bool]:
    """Hold the lock under which tqdm draws; False if it is not free in time."""
    has_lock = _LOCK.acquire(True, _LOCK_SECONDS)
    try:
        yield has_lock
    finally:
        if has_lock:
            _LOCK.release()


class ReplacedFunction:
    """A function of a stream or module, replaced by ours until `restore`."""

    def __init__(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """AttributeError or TypeError if it cannot be replaced; `ours` gets it first."""
        self._owner, self._name = owner, name
        self._before = vars(owner).get(name)  # None: the method of its class
        self._ours = functools.partial(ours, getattr(owner, name))
        setattr(owner, name, self._ours)

    def restore(self) -> None:
        own = vars(self._owner)
        if own.get(self._name) is not self._ours:
            return  # replaced again by another library: leave it, ours only passes on
        if self._before is None:
            del own[self._name]
        else:
            own[self._name] = self._before


class TerminalLine(Bar):  # type: ignore[misc]  # tqdm ships no types
    """Our line among tqdm's bars, from its creation to `close`."""

    tick_seconds = 0.25
    monitor_interval = 0  # tqdm needs no second thread for it
    _lock = _LOCK

    def __init__(self, stream: TextIO) -> None:
        """AttributeError or TypeError if a stream cannot be wrapped."""
        self._pid, self._descriptor = os.getpid(), stream.fileno()
        self._write, self._flush = stream.write, stream.flush  # not replaced yet
        self._text = ""
        self._is_shown = False
        self._is_closed = self.disable = False
        self._width = 0
        self._shown_at = 0.0
        self._in_mid_line = False  # others have written an incomplete line
        self._is_lent = False  # another program has the terminal
        self._prompts = 0  # calls of `input` that wait for an answer
        self._replaced: list[ReplacedFunction] = []
        # Every argument that TQDM_… in the environment could change otherwise.
        super().__init__(
            file=stream, disable=False, leave=False, miniters=1, position=None, delay=0
        )
        try:
            for each in dict.fromkeys((sys.stderr, sys.stdout)):
                if is_terminal(each):
                    ours = functools.partial(self._pass_text, each)
                    self._replaced.append(ReplacedFunction(each, "write", ours))
            self._replaced.append(ReplacedFunction(builtins, "input", self._ask))
        except (AttributeError, TypeError):
            self.close()
            raise

    def show(self, standing: Standing, rate: float | None, idle_seconds: float | None) -> None:
        width = _size(self._descriptor).columns - 1  # some terminals fold at the last column
        text = terminal_line(standing, rate, idle_seconds, width)
        with _drawing() as has_lock:
            if not has_lock or self._is_closed:
                return
            is_new_width, is_new_text = width != self._width, text != self._text
            self._width, self._text = width, text
            self._is_lent = _is_lent(self._descriptor)
            if self._is_lent:
                self._is_shown = False  # the screen has other content now: not ours to erase
            if not self._is_free:
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
        with _drawing() as has_lock:
            self._is_closed = True
            for each in self._replaced:
                each.restore()
            with contextlib.suppress(Exception):  # the terminal may be gone
                if has_lock:
                    was_shown = self._is_shown
                    self._hide()
                    self.disable = True
                    self._decr_instances(self)
                    if was_shown:
                        self._draw_bars()

    # tqdm calls these for every bar when it writes around one of the user's or closes it.

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:  # noqa: ARG002  tqdm's
        is_in_view = abs(self.pos) < _size(self._descriptor).lines
        is_wanted = self._text and self._is_free and not self.disable
        if is_wanted and is_in_view and os.getpid() == self._pid:
            self._put_in_place(self._text)
            self._is_shown = True
        return True

    def clear(self, nolock: bool = False) -> None:  # noqa: ARG002  tqdm's signature
        if self._is_shown and os.getpid() == self._pid:
            self._put_in_place("")
            self._is_shown = False

    # -- drawing, under the lock ------------------------------------------------------

    @property
    def _is_free(self) -> bool:
        return not (self._in_mid_line or self._prompts or self._is_lent)

    def _draw_all(self) -> None:
        self._hide()
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
        self._is_shown = False

    def _put_in_place(self, text: str) -> None:
        down = abs(self.pos)
        self._put("\n" * down + f"\r{text}{_ERASE_LINE}\r" + "\x1b[A" * down)

    def _put(self, text: str) -> None:
        try:
            self._write(text)
            self._flush()
        except (OSError, ValueError):  # closed, or the terminal is gone
            self.disable = True

    # -- in place of the functions that others call -----------------------------------

    def _pass_text(self, stream: TextIO, write: Callable[[str], int], text: str, /) -> int:
        """Hide the line for this text, and draw it again when the text ends with its line."""
        # Not sys._getframe(1): the interpreter itself also writes, without a frame.
        caller = sys._getframe().f_back
        module = "" if caller is None else str(caller.f_globals.get("__name__", ""))
        if caller is not None and module.partition(".")[0] == "tqdm":
            return write(self._text_of_tqdm(text, is_message=caller.f_code.co_name == "write"))
        if self._is_closed or not text:
            return write(text)
        if os.getpid() != self._pid:
            # The line on the screen is that of the parent, which draws it again.
            is_over = not self._in_mid_line and is_terminal(stream)
            self._in_mid_line = ends_in_mid_line(text, self._in_mid_line)
            return write(_ERASE_LINE + text if is_over else text)
        with _drawing() as has_lock:
            if has_lock and not self._is_closed:
                self._hide()
            try:
                return write(text)
            finally:
                if has_lock:
                    self._come_back(stream, text)

    def _come_back(self, stream: TextIO, text: str) -> None:
        self._in_mid_line = ends_in_mid_line(text, self._in_mid_line)
        is_early = time.monotonic() - self._shown_at < _SHORTEST_SHOW_SECONDS
        if is_early or self._is_closed or not self._is_free:
            return
        if _size(self._descriptor).columns - 1 == self._width:  # else `_text` does not fit
            with contextlib.suppress(Exception):
                stream.flush()
                self._draw_all()

    def _text_of_tqdm(self, text: str, *, is_message: bool) -> str:
        """A bar of tqdm draws itself under tqdm's lock, or it has made room for a message."""
        if is_message:
            self._in_mid_line = ends_in_mid_line(text, self._in_mid_line)
        elif self._is_shown and len(text) > 1 and text[0] == "\r":
            # A bar that ends moves up into our line, which may be longer.
            return f"\r{_ERASE_LINE}{text[1:]}"
        return text

    def _ask(self, ask: Callable[..., str], *prompt: object) -> str:
        """Hide the line for `input`, which writes its prompt past every stream."""
        with _drawing() as has_lock:
            self._prompts += 1
            if has_lock and not self._is_closed and os.getpid() == self._pid:
                self._hide()
        try:
            answer = ask(*prompt)
            self._in_mid_line = False  # the answer has ended its line
            return answer
        finally:
            self._prompts -= 1


def ends_in_mid_line(text: str, before: bool) -> bool:
    """Whether the cursor is inside an incomplete line after this text.

    >>> ends_in_mid_line("50%", False), ends_in_mid_line("done\\n\\x1b[0m", True)
    (True, False)
    """
    shown = (_CONTROL.sub("", text) if "\x1b" in text else text).rstrip("\r")
    return not shown.endswith("\n") if shown else before


def _size(descriptor: int) -> os.terminal_size:
    try:
        columns, lines = os.get_terminal_size(descriptor)
    except (OSError, ValueError):
        columns = lines = 0
    return os.terminal_size((columns or 80, lines or 24))


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


# -- Forked children: none may inherit the lock while our thread holds it --------------------------


def _before_fork() -> None:
    _LOCK.acquire(True, _LOCK_SECONDS)


def _after_fork() -> None:
    with contextlib.suppress(RuntimeError):  # another thread has kept it too long
        _LOCK.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )
