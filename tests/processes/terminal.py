"""A real terminal with a process in its foreground, and keys to press."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import Any

from tests.support import wait_until

CTRL_C = "\x03"
CTRL_BACKSLASH = "\x1c"
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """One script as the foreground job of a terminal of its own."""

    def __init__(self, script: Path, *arguments: Any) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(script), *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self._data = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        """What was written, without the codes that move the cursor and erase: each writing
        of the progress line stands as a line of its own."""
        text = _CODES.sub("", self._data.decode(errors="replace"))
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """Wait for a line that contains `text`, and return it."""

        def look() -> str | None:
            whole = self.output.rpartition("\n")[0]
            found = next((line for line in whole.split("\n") if text in line), None)
            if found is None and self.process.poll() is not None:
                self._reader.join(10)
                assert text in self.output, f"ended without {text!r}:\n{self.output}"
            return found

        return wait_until(look, seconds, f"{text!r}")

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def wait(self, seconds: float = 60.0) -> int:
        status = self.process.wait(seconds)
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
                return  # nobody has the other end any more
            if not data:
                return
            self._data += data


def _take_terminal() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
