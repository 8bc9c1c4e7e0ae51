"""Output on its way from the command to where it would have gone by itself.

Nothing here waits: whoever does not read makes the command wait, as it would without us, and
signals are heard all the same. A reader that leaves (`| head`) is passed on as such: our end
is closed, and the command meets SIGPIPE.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import time
from collections.abc import Callable

from holdfast._supervise import children

_PIECE_BYTES = 65536
_MOST_WAITING_BYTES = 65536
_MOST_PIECES = 64  # no pipe holds more
# What is taken without a wait, if anything is.
_SURE_BYTES = 512
_SURE_OF_SOCKET_BYTES = 4096


class Outlet:
    """One of our own streams, as something to write to without ever waiting."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._waiting = bytearray()
        self.is_closed = False
        self.is_for_errors = False  # where lines of ours go, too
        self.is_terminal = os.isatty(descriptor)
        mode = os.fstat(descriptor).st_mode
        self._waits = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or self.is_terminal
        self._own = open_again(descriptor, os.O_WRONLY) if self._waits else None
        self._sure_bytes = _SURE_OF_SOCKET_BYTES if stat.S_ISSOCK(mode) else _SURE_BYTES

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= _MOST_WAITING_BYTES

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting) and not self.is_closed

    def add(self, data: bytes) -> None:
        """Write what can be written now; the rest waits."""
        if not self.is_closed:
            self._waiting += data
            self.flush()

    def flush(self) -> None:
        """Write as much as can be written without a wait."""
        while self._waiting and not self.is_closed:
            may_wait = self._waits and self._own is None
            if may_wait and not self._takes_some():
                return
            piece = self._waiting[: self._sure_bytes if may_wait else _PIECE_BYTES]
            try:
                written = os.write(self.descriptor if self._own is None else self._own, piece)
            except BlockingIOError:
                return
            except InterruptedError:
                continue
            except OSError as error:
                self._meet(error)
                return
            del self._waiting[:written]

    def forget(self) -> None:
        """Give up what waits: nobody reads it, and we are to leave."""
        self._waiting.clear()

    def _takes_some(self) -> bool:
        poller = select.poll()
        poller.register(self.descriptor, select.POLLOUT)
        return bool(poller.poll(0))

    def _meet(self, error: OSError) -> None:
        self._waiting.clear()
        # A full disk may have room again, and a terminal that was closed is no reason to stop
        # training: its signal says that already.
        if error.errno in (errno.EPIPE, errno.ECONNRESET, errno.EBADF):
            self.is_closed = True
            if self._own is not None:
                with contextlib.suppress(OSError):
                    os.close(self._own)


def open_again(descriptor: int, flags: int) -> int | None:
    """The same terminal or pipe, as an open file of our own: not to wait is a property of the open
    file, which others share with us. None if that cannot be had."""
    with contextlib.suppress(OSError):
        flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    return None


class Inlet:
    """One end of a pipe or terminal into which the command writes."""

    def __init__(self, descriptor: int, outlet: Outlet, note: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._outlet = outlet
        self._note = note
        self.is_terminal = os.isatty(descriptor)
        self.is_over = False
        self._pieces_left: int | None = None  # for ever, while the command lives

    @property
    def wants_to_read(self) -> bool:
        return not self.is_over and not self._outlet.is_full

    def pump(self) -> bool:
        """Pass on one piece; False if there was none."""
        if self._outlet.is_closed and not self.is_terminal:
            self.close()
            return False
        try:
            data = os.read(self.descriptor, _PIECE_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:  # a terminal that nobody has open any more
            data = b""
        if not data:
            self.close()
            return False
        self._note(data)
        self._outlet.add(data)
        if self._outlet.is_closed and not self.is_terminal:
            self.close()
        if self._pieces_left is not None:
            self._pieces_left -= 1
            if self._pieces_left <= 0:
                self.close()
        return True

    def drain(self) -> None:
        """The command has ended: pass on all that is there, as far as it is taken, but not what
        somebody whom it has left behind writes for ever."""
        if self._pieces_left is None:
            self._pieces_left = _MOST_PIECES
        while self.wants_to_read and self.pump():
            pass

    def close(self) -> None:
        """The command meets SIGPIPE if it writes on."""
        if not self.is_over:
            self.is_over = True
            if not self.is_terminal:  # the terminal's end is also where keys go in
                os.close(self.descriptor)


# -- Warnings that wait until somebody catches them ------------------------------------------------


_LOOK_SECONDS = 0.05
_LOOK_SELDOM_SECONDS = 0.5
_IMPORTS_SECONDS = 120.0  # after which whoever does not catch a signal yet hardly ever will


class Warnings:
    """The warning signals that have come, until all who should have got them have.

    One that comes while the trainer still imports torch would kill it. So it is given only to
    processes that catch it, and is kept until there are some.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._came: dict[int, float] = {}
        self._given: dict[int, float] = {}  # when the first process got it
        self._reached: dict[int, set[int]] = {}

    def add(self, number: int) -> None:
        """A signal has come. The same once more, later, is a new wish."""
        self._came[number] = time.monotonic()
        self._reached[number] = set()
        self._given.pop(number, None)

    def deliver(self) -> None:
        """Give each to whoever catches it by now and has not got it yet."""
        for number in self._came:
            reached = self._reached[number]
            for pid in children.catchers(self._top, number, reached):
                if self._is_of_a_later_life(number, pid):
                    continue
                reached.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
                self._given.setdefault(number, time.monotonic())

    def next_look_seconds(self) -> float | None:
        """None: there is nothing to give."""
        now = time.monotonic()
        if not self._came:
            return None
        if any(now - came < _IMPORTS_SECONDS for came in self._came.values()):
            return _LOOK_SECONDS
        return _LOOK_SELDOM_SECONDS

    def _is_of_a_later_life(self, number: int, pid: int) -> bool:
        # torchrun starts its ranks together, well before the first of them catches anything.
        # One that began after that was started anew, to train: the wish was for those before.
        # (A run of holdfast that was asked to stop leaves again by itself.)
        given = self._given.get(number)
        return given is not None and children.age_seconds(pid) < time.monotonic() - given
