"""A terminal of a given size with one command in it, as a person would see it."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
from typing import Any

import pyte

from tests.cli.command import environment
from tests.support import wait_until

CTRL_C = "\x03"


class TerminalScreen:
    """Runs a command in a terminal, and knows what stands on the screen."""

    def __init__(self, *command: Any, columns: int = 80, rows: int = 24, **popen: Any) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._master, slave = pty.openpty()
        self.resize(columns, rows)
        self.raw = b""
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
            env=popen.pop("env", None) or environment(TERM="xterm"),
            **popen,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def lines(self) -> list[str]:
        """The screen from its top to its last line with something in it."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip().split("\n")

    @property
    def cursor(self) -> tuple[int, bool]:
        """The column of the cursor, and whether it can be seen."""
        return self._screen.cursor.x, not self._screen.cursor.hidden

    def wait_for(self, text: str, seconds: float = 30.0) -> str:
        """Wait for a line on the screen that contains `text`, and return it."""
        return wait_until(
            lambda: next((line for line in self.lines if text in line), None),
            seconds,
            f"{text!r} on the screen",
        )

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        self._screen.resize(rows, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait(self, seconds: float = 20.0) -> int:
        status = self.process.wait(seconds)
        self._reader.join(10)
        return status

    def end(self) -> None:
        """End it if it still runs; for clean-up only."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(10)
        os.close(self._master)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return  # nobody has the other end any more
            if not data:
                return
            self.raw += data
            self._stream.feed(data)


def _take_terminal() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
