"""A script in a real terminal, and the screen that it makes there, by a terminal emulator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyte

from tests.support import wait_until
from tests.terminal import ForegroundJob

ROWS = 24


class Watched(ForegroundJob):
    """A script in the foreground of a terminal, and the screen that it makes."""

    def __init__(self, command: list[str], gates: Path, columns: int, env: dict[str, str]) -> None:
        self._gates = gates
        self.screen = pyte.HistoryScreen(columns, ROWS, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        super().__init__(command, columns, ROWS, env=env)

    def resize(self, columns: int) -> None:
        with self._lock:
            self.screen.resize(ROWS, columns)
            self._set_size(columns, ROWS)

    def hear(self, data: bytes) -> None:
        self._stream.feed(data)

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
