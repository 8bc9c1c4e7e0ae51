"""A terminal of a given size with one command in it, as a person would see it."""

from __future__ import annotations

import os
import pty
import threading
from typing import Any

import pyte

from tests.cli.command import environment, holdfast
from tests.support import wait_until
from tests.terminal import ForegroundJob, set_size


class Picture:
    """What a command of this process has drawn on a terminal, when it has ended."""

    def __init__(self, *arguments: Any, columns: int = 80, rows: int = 24, **options: Any) -> None:
        self.raw = b""
        options.setdefault("env", environment(TERM="xterm"))
        ours, theirs = pty.openpty()
        set_size(theirs, columns, rows)
        reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        reader.start()  # a terminal takes a few kB, and then the command would wait
        try:
            self.returncode = holdfast(*arguments, stdout=theirs, **options).returncode
        finally:
            os.close(theirs)
            reader.join(10)
            os.close(ours)
        screen = pyte.Screen(columns, rows)
        pyte.ByteStream(screen).feed(self.raw)
        self.lines = [line.rstrip() for line in screen.display]

    def _read(self, descriptor: int) -> None:
        while True:
            try:
                data = os.read(descriptor, 65536)
            except OSError:
                return  # the other end is closed
            self.raw += data


class TerminalScreen(ForegroundJob):
    """Runs a command in a terminal, and knows what stands on the screen."""

    def __init__(self, *command: Any, columns: int = 80, rows: int = 24, **popen: Any) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        env = popen.pop("env", None) or environment(TERM="xterm")
        super().__init__([str(word) for word in command], columns, rows, env=env, **popen)

    @property
    def lines(self) -> list[str]:
        """The screen from its top to its last line with something in it."""
        with self._lock:
            shown = [line.rstrip() for line in self._screen.display]
        return "\n".join(shown).rstrip().split("\n")

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

    def resize(self, columns: int, rows: int) -> None:
        with self._lock:
            self._screen.resize(rows, columns)
        self._set_size(columns, rows)

    def hear(self, data: bytes) -> None:
        self._stream.feed(data)
