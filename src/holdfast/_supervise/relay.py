"""Output on its way from the command to our own streams.

Nothing here blocks: a reader that does not read makes the command wait, as it would without us,
and signals are still received. When a reader leaves (`| head`), our end is closed, and the command
gets SIGPIPE.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
from collections.abc import Callable

_PIECE_BYTES = 65536
_MOST_WAITING_BYTES = 65536
_MOST_PIECES = 64  # no pipe holds more
# A write of this size does not block if the descriptor is writable.
_SURE_BYTES = 512
_SURE_OF_SOCKET_BYTES = 4096


class Outlet:
    """One of our own streams, written to without ever blocking."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._waiting = bytearray()
        self.is_closed = False
        self.is_for_errors = False  # gets our own lines, too
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
        """Write what can be written now, and keep the rest."""
        if not self.is_closed:
            self._waiting += data
            self.flush()

    def flush(self) -> None:
        while self._waiting and not self.is_closed:
            may_wait = self._waits and self._own is None
            if may_wait and not self._is_writable():
                return
            piece = self._waiting[: self._sure_bytes if may_wait else _PIECE_BYTES]
            try:
                written = os.write(self.descriptor if self._own is None else self._own, piece)
            except BlockingIOError:
                return
            except InterruptedError:
                continue
            except OSError as error:
                self._waiting.clear()
                # A full disk may have room again. A terminal that was closed is no reason to stop
                # training: its SIGHUP says that already.
                if error.errno in (errno.EPIPE, errno.ECONNRESET, errno.EBADF):
                    self._close()
                return
            del self._waiting[:written]

    def _is_writable(self) -> bool:
        poller = select.poll()
        poller.register(self.descriptor, select.POLLOUT)
        return bool(poller.poll(0))

    def _close(self) -> None:
        self.is_closed = True
        if self._own is not None:
            with contextlib.suppress(OSError):
                os.close(self._own)


def open_again(descriptor: int, flags: int) -> int | None:
    """The same terminal or pipe as an open file of our own, or None.

    O_NONBLOCK is a property of the open file, which other processes share with us.
    """
    with contextlib.suppress(OSError):
        flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    return None


class Inlet:
    """One end of a pipe or terminal into which the command writes."""

    def __init__(self, descriptor: int, outlet: Outlet, on_output: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._outlet = outlet
        self._on_output = on_output
        self.is_terminal = os.isatty(descriptor)
        self.is_over = False
        self._pieces_left: int | None = None  # no limit while the command lives

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
        except OSError:  # the other end of a terminal is closed
            data = b""
        if not data:
            self.close()
            return False
        self._on_output(data)
        self._outlet.add(data)
        if self._outlet.is_closed and not self.is_terminal:
            self.close()
        if self._pieces_left is not None:
            self._pieces_left -= 1
            if self._pieces_left <= 0:
                self.close()
        return True

    def drain(self) -> None:
        """The command has ended: pass on what is there, as far as it is taken.

        The pieces are limited: a process that it left behind may write forever.
        """
        if self._pieces_left is None:
            self._pieces_left = _MOST_PIECES
        while self.wants_to_read and self.pump():
            pass

    def close(self) -> None:
        """The command gets SIGPIPE if it writes on."""
        if not self.is_over:
            self.is_over = True
            if not self.is_terminal:  # the terminal's end is also where keys go in
                os.close(self.descriptor)
