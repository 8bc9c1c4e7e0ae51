"""A real terminal with a process in its foreground, and keys to press."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import threading
from typing import Any

CTRL_C = "\x03"
CTRL_BACKSLASH = "\x1c"


class ForegroundJob:
    """One command as the foreground job of a terminal of its own; a subclass hears its output."""

    def __init__(self, command: list[str], columns: int = 80, rows: int = 24, **popen: Any) -> None:
        self.raw = b""
        self._lock = threading.Lock()  # for whoever looks while the reader hears
        self._master, slave = pty.openpty()
        self._is_hung_up = threading.Event()
        set_size(self._master, columns, rows)
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
            **popen,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def hang_up(self) -> None:
        """Close the terminal, as its window or a lost connection does."""
        self._is_hung_up.set()
        self._reader.join(10)  # a read that waits would keep the terminal open
        os.close(self._master)

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for the end and return the exit status as subprocess gives it."""
        status = self.process.wait(seconds)
        self._reader.join(10)
        return status

    def end(self) -> None:
        """End it if it still runs; for clean-up only."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(10)
        if not self._is_hung_up.is_set():
            os.close(self._master)

    def hear(self, data: bytes) -> None:
        """Make something of what the command writes, as it comes."""

    def _set_size(self, columns: int, rows: int) -> None:
        set_size(self._master, columns, rows)

    def _read(self) -> None:
        while not self._is_hung_up.is_set():
            if not select.select([self._master], [], [], 0.05)[0]:
                continue
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return  # nobody has the other end any more
            if not data:
                return
            with self._lock:
                self.raw += data
                self.hear(data)


def set_size(descriptor: int, columns: int, rows: int) -> None:
    """Make a terminal so wide and so high."""
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _take_terminal() -> None:
    # A shell that started the tests in the background has made Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
