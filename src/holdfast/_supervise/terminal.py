"""A terminal for the command, behind the one at which we were started.

Ours is made raw, so every key is passed on as it is. The line discipline of the command's own
terminal interprets it: Ctrl-C is one SIGINT to the foreground there. Ours is restored before we
stop or leave.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import termios
import time
from typing import Any

from holdfast._supervise import children

_MOST_TYPED_BYTES = 65536
_STOP_SECONDS = 0.05  # for a program that restores the screen before it stops
_SIZE_BYTES = 8


def open_pair(like: int, *, is_screen_only: bool = False) -> tuple[int, int]:
    """A terminal with the modes of another: the end for us and the end for the command."""
    master, slave = os.openpty()
    copy_modes(like, slave, is_screen_only=is_screen_only)
    copy_size(like, master)
    os.set_blocking(master, False)
    return master, slave


def copy_modes(source: int, target: int, *, is_screen_only: bool) -> None:
    with contextlib.suppress(termios.error, OSError):
        modes = termios.tcgetattr(source)
        if is_screen_only:
            modes[1] &= ~termios.OPOST  # our own terminal does that
        termios.tcsetattr(target, termios.TCSANOW, modes)


def copy_size(source: int, target: int) -> None:
    """Copy rows and columns; the system sends SIGWINCH if they changed."""
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * _SIZE_BYTES)
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)


def open_again(descriptor: int, flags: int) -> int | None:
    """The same terminal or pipe as an open file of our own, or None.

    O_NONBLOCK is a property of the open file, which other processes share with us.
    """
    with contextlib.suppress(OSError):
        flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    return None


class Keyboard:
    """Passes keys from our terminal to the command's, while we are in the foreground."""

    def __init__(self, descriptor: int, master: int, child: int) -> None:
        self.descriptor = descriptor
        self.master = master
        self._child = child
        self._is_open = False
        self._before: list[Any] | None = None  # the modes before we changed them
        self._ours: list[Any] | None = None
        self._typed = bytearray()
        self._own: int | None = None
        self._stop_at: float | None = None
        self._is_gone = False
        self.asked_at: float | None = None  # when Ctrl-C or the like was last typed

    @property
    def is_open(self) -> bool:
        """Whether keys come to us now."""
        return self._is_open and not self._is_gone

    @property
    def wants_to_read(self) -> bool:
        return self.is_open and len(self._typed) < _MOST_TYPED_BYTES

    @property
    def has_typed(self) -> bool:
        return bool(self._typed)

    def open(self) -> None:
        """Take the keys, if we are in the foreground."""
        if self.is_open or self._is_gone or not _is_in_foreground(self.descriptor):
            return
        try:
            modes = termios.tcgetattr(self.descriptor)
            if modes != self._ours:  # else it is still raw
                self._before = modes
                termios.tcsetattr(self.descriptor, termios.TCSANOW, _raw(modes))
                self._ours = termios.tcgetattr(self.descriptor)
        except (termios.error, OSError):
            self._is_gone = True
            return
        self._is_open = True
        # A read that blocks, after another process ended the raw mode, would stop everything.
        self._own = open_again(self.descriptor, os.O_RDONLY)
        copy_size(self.descriptor, self.master)

    def open_again(self) -> None:
        """After a stop that we did not receive: the shell may have changed the modes."""
        self._let_go()
        self.open()

    def close(self) -> None:
        if self._is_open and self._before is not None:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(self.descriptor, termios.TCSANOW, self._before)
        self._let_go()

    def read(self) -> list[str]:
        """Take what was typed, and pass it on; the names of the signals that it becomes."""
        try:
            keys = os.read(self.descriptor if self._own is None else self._own, 4096)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            if not _is_in_foreground(self.descriptor):
                self._let_go()  # the shell has it now, with modes of its own
                return []
            keys = b""
        if not keys:
            self._is_gone = True
            return []
        asked = self._find_signals(keys)
        self._typed += keys
        self.flush()
        return asked

    def flush(self) -> None:
        while self._typed:
            try:
                del self._typed[: os.write(self.master, self._typed)]
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._typed.clear()

    def _let_go(self) -> None:
        self._is_open = False
        own, self._own = self._own, None
        if own is not None:
            os.close(own)

    def next_poll_seconds(self) -> float | None:
        if self._stop_at is not None:
            return max(0.0, self._stop_at - time.monotonic())
        # The shell's `fg` sends nothing to a job that was not stopped.
        return None if self.is_open or self._is_gone else 0.3

    def poll(self) -> None:
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self._stop_at = None
            # SIGTSTP of its terminal does not stop the first group of a session: the system does
            # so only where a shell could continue it. An interactive shell ignores it and stops
            # others.
            ignores_stops = children.ignores(self._child, signal.SIGTSTP)
            with contextlib.suppress(OSError):
                if os.tcgetpgrp(self.master) == self._child and not ignores_stops:
                    os.killpg(self._child, signal.SIGSTOP)
        self.open()

    def _find_signals(self, keys: bytes) -> list[str]:
        try:
            modes = termios.tcgetattr(self.master)
        except (termios.error, OSError):
            return []
        if not modes[3] & termios.ISIG:
            return []
        of = {"SIGINT": termios.VINTR, "SIGQUIT": termios.VQUIT, "SIGTSTP": termios.VSUSP}
        control = modes[6]
        found = [name for name, n in of.items() if control[n] != b"\0" and control[n] in keys]
        if "SIGTSTP" in found:
            found.remove("SIGTSTP")
            self._stop_at = time.monotonic() + _STOP_SECONDS
        if found:
            self.asked_at = time.monotonic()
        return found


def _is_in_foreground(descriptor: int) -> bool:
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return os.isatty(descriptor)  # not the terminal that controls us


def _raw(modes: list[Any]) -> list[Any]:
    """Modes in which a terminal passes everything on."""
    taken, made, control, local, *speeds, characters = modes
    taken &= ~(termios.BRKINT | termios.ICRNL | termios.INLCR | termios.IGNCR)
    taken &= ~(termios.INPCK | termios.ISTRIP | termios.IXON | termios.PARMRK)
    made &= ~termios.OPOST
    control = control & ~(termios.CSIZE | termios.PARENB) | termios.CS8
    local &= ~(termios.ECHO | termios.ECHONL | termios.ICANON | termios.IEXTEN | termios.ISIG)
    characters = list(characters)
    characters[termios.VMIN], characters[termios.VTIME] = 1, 0
    return [taken, made, control, local, *speeds, characters]
