"""A real shell in a real terminal: keys go in, and what the screen shows is kept with its time."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyte

_KEY_SECONDS = 0.04  # as a person types
T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """One run of characters of one colour, at a place of a row."""

    column: int
    text: str
    colour: str
    is_bold: bool


Row = tuple[Cell, ...]
Screen = tuple[Row, ...]


@dataclass(frozen=True)
class Shot:
    seconds: float
    screen: Screen


class Shell:
    """A bash with a terminal of its own, whose screen is kept whenever it has changed."""

    def __init__(self, folder: Path, columns: int, rows: int, began: float) -> None:
        self._began = began
        self._lock = threading.Lock()
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._is_over = False
        self.shots: list[Shot] = []
        self._master, slave = pty.openpty()
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environment |= {"PS1": "$ ", "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        # The prompt is ours: no file of the machine's may add to it.
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "+m"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait_for(lambda: self.text().startswith("$"), "a prompt")

    @property
    def pid(self) -> int:
        return self._process.pid

    def text(self) -> str:
        """What is on the screen now, without the empty end."""
        with self._lock:
            return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    def type(self, line: str) -> None:
        """Type a line as a person does, and press Enter."""
        for key in line:
            os.write(self._master, key.encode())
            time.sleep(_KEY_SECONDS)
        os.write(self._master, b"\r")

    def wait_for(self, look: Callable[[], T], what: str, seconds: float = 120.0) -> T:
        """Wait until `look` finds something; what never comes is an error with the screen in it."""
        deadline = time.monotonic() + seconds
        while not (found := look()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come:\n{self.text()}")
            time.sleep(0.02)
        return found

    def wait_for_prompt(self) -> None:
        """Wait until the shell asks for the next command."""
        self.wait_for(lambda: self.text().endswith("\n$"), "a prompt")

    def close(self) -> None:
        """End the shell; what it says to that is not kept."""
        self._is_over = True
        os.write(self._master, b"\x04")
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5)
        os.close(self._master)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return  # nobody has the other end any more
            if not data:
                return
            with self._lock:
                if self._is_over:
                    continue
                self._stream.feed(data)
                screen = _copied(self._screen)
                if not self.shots or self.shots[-1].screen != screen:
                    self.shots.append(Shot(time.monotonic() - self._began, screen))


def _copied(screen: pyte.Screen) -> Screen:
    """The rows as runs of one colour each."""
    rows = []
    for number in range(screen.lines):
        line = screen.buffer[number]
        cells: list[Cell] = []
        for column in range(screen.columns):
            character = line[column]
            colour, is_bold = character.fg, character.bold
            last = cells[-1] if cells else None
            if last and (last.colour, last.is_bold) == (colour, is_bold):
                cells[-1] = Cell(last.column, last.text + character.data, colour, is_bold)
            else:
                cells.append(Cell(column, character.data, colour, is_bold))
        rows.append(tuple(cell for cell in cells if cell.text.strip()))
    return tuple(rows)
