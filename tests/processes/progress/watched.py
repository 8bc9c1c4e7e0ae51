"""A script in a real terminal, and the screen that it makes there, by a terminal emulator."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import pyte

from tests.support import wait_until

ROWS = 24


class Watched:
    """A script in the foreground of a terminal, and the screen that it makes."""

    def __init__(self, command: list[str], gates: Path, columns: int, env: dict[str, str]) -> None:
        self._gates = gates
        self.screen = pyte.HistoryScreen(columns, ROWS, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self._lock = threading.Lock()
        self.raw = b""
        self._master, slave = pty.openpty()
        self._set_size(columns)
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
            env=env,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _set_size(self, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))

    def resize(self, columns: int) -> None:
        with self._lock:
            self.screen.resize(ROWS, columns)
            self._set_size(columns)

    @property
    def lines(self) -> list[str]:
        """Everything that can be read on the screen and above it, without empty lines."""
        with self._lock:
            width = self.screen.columns
            above = ["".join(r[x].data for x in range(width)) for r in self.screen.history.top]
            return [line.rstrip() for line in [*above, *self.screen.display] if line.strip()]

    @property
    def shown(self) -> list[str]:
        """The progress lines on the screen; there should never be more than one."""
        return [line for line in self.lines if "safe: " in line]

    def wait_until(self, look: Callable[[list[str]], object], what: str = "the screen") -> None:
        def check() -> bool:
            if look(self.lines):
                return True
            assert self.process.poll() is None or look(self.lines), "\n".join(self.lines)
            return False

        try:
            wait_until(check, 20, what)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n" + "\n".join(self.lines)) from None

    def wait_for_line(self, part: str = "safe: ") -> str:
        """Wait for the progress line, with a part in it, as the last line."""
        self.wait_until(lambda ls: ls and "safe: " in ls[-1] and part in ls[-1], f"a line: {part}")
        return self.shown[-1]

    def wait_at(self, gate: str) -> None:
        wait_until((self._gates / f"{gate}.reached").exists, 20, f"the gate {gate}")

    def let(self, gate: str) -> None:
        (self._gates / gate).touch()

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait(self) -> int:
        status = self.process.wait(30)
        self._reader.join(10)
        return status

    def end(self) -> None:
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
                return
            with self._lock:
                self.raw += data
                self._stream.feed(data)


def _take_terminal() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
