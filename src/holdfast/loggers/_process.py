"""The trainer's handle of the process that logs: starts it, sends rows without waiting."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast._environment import variables
from holdfast._environment.processes.identity import command
from holdfast._run.saving.debuggers import never_held, without_debugger
from holdfast._store.folder.plain_file import open_log
from holdfast._text import say

_SEND_SECONDS = 0.2
_ROWS_AT_ONCE = 2000
_PIPE_BYTES = 1 << 20
_SET_PIPE_SIZE = getattr(fcntl, "F_SETPIPE_SZ", None)  # of Linux
# With these, `holdfast run` would take it for a rank without a parent, and end it.
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_unfinished: list[subprocess.Popen[bytes]] = []  # those that still write when the run closes


class Writer:
    """One process that logs, and the rows on their way to it."""

    def __init__(
        self,
        label: str,
        plan: dict[str, Any],
        log: Path,
        rows: collections.deque[tuple[Any, ...]],
    ) -> None:
        self._label = label
        self._log = log
        self._rows = rows
        self._unsent = memoryview(b"")
        self._lock = threading.Lock()  # of the pipe; never held while waiting
        self.is_gone = False
        self._is_ending = self._is_closed = False
        self._received = b""
        environment = variables.child_environment().items()
        with open_log(log) as file, without_debugger():
            told, theirs = os.pipe()
            plan = {**plan, "told": theirs, "parent": os.getpid(), "script": (sys.argv or [""])[0]}
            self._process = subprocess.Popen(
                command("holdfast.loggers._child", plan),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                start_new_session=True,
                pass_fds=[theirs],
                env={name: value for name, value in environment if name not in _OF_RANKS},
            )
        os.close(theirs)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        self._lines = told
        for each in (self._pipe, told):
            os.set_blocking(each, False)
        if _SET_PIPE_SIZE is not None:
            with contextlib.suppress(OSError):  # the user's limit of pages is reached
                fcntl.fcntl(self._pipe, _SET_PIPE_SIZE, _PIPE_BYTES)
        self._over = threading.Event()
        thread = threading.Thread(target=self._send_on, name="holdfast-logger", daemon=True)
        self._thread = never_held(thread)
        self._thread.start()

    def _send_on(self) -> None:
        while not self._over.wait(_SEND_SECONDS):
            self.send()
            self._receive()

    def send(self) -> None:
        with self._lock:
            while not (self.is_gone or self._is_closed) and (self._unsent or self._take()):
                try:
                    self._unsent = self._unsent[os.write(self._pipe, self._unsent) :]
                except BlockingIOError:
                    break
                except OSError:
                    self.is_gone = True
            if self.is_gone:
                self._rows.clear()

    def _take(self) -> bool:
        taken: list[dict[str, Any]] = []
        while self._rows and len(taken) < _ROWS_AT_ONCE:
            mark, step, when, is_between, values = self._rows.popleft()
            row = {"m": mark, "s": step, "t": when, "v": values}
            taken.append({**row, "b": 1} if is_between else row)
        if taken:
            self._unsent = memoryview(json.dumps(taken).encode() + b"\n")
        return bool(taken)

    def _receive(self) -> None:
        """Print the lines that it has sent, and one if it has ended."""
        with contextlib.suppress(OSError):
            while chunk := os.read(self._lines, 65536):
                self._received += chunk
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError):
                say(f"{self._label}: {json.loads(line)['say']}")
        if not self._is_ending and self._process.poll() is not None:
            self.is_gone = self._is_ending = True
            status = self._process.returncode
            if status:  # else it has sent the reason
                how = f"status {status}"
                if status < 0:
                    how = f"killed by {signal.Signals(-status).name}"
                say(
                    f"{self._label}: its process has ended ({how}). The training goes on without "
                    f"it.\nIts last output: {self._log}"
                )
            self._over.set()

    # -- the end ----------------------------------------------------------------------

    def begin_end(self, status: int) -> None:
        """Send the rest; the end follows when the pipe is closed."""
        self._is_ending = True
        self.send()
        self._end = json.dumps({"end": status}).encode() + b"\n"

    def wait_for_end(self, seconds: float, is_hurried: Callable[[], bool]) -> int:
        """Wait until it has ended or the time is up; returns how many rows could not be sent."""
        deadline = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < deadline and not is_hurried():
            self.send()
            self._close_pipe()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.02)
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)
        lost = len(self._rows)
        self._rows.clear()
        self._close_pipe(even_unsent=True)
        self._receive()
        os.close(self._lines)
        if self._process.poll() is None:
            say(
                f"{self._label}: still writing what was logged; process {self._process.pid} "
                "finishes it by itself."
            )
            _unfinished.append(self._process)
        return lost

    def _close_pipe(self, *, even_unsent: bool = False) -> None:
        with self._lock:
            if self._is_closed or (not even_unsent and (self._unsent or self._rows)):
                return
            if not self._unsent:
                with contextlib.suppress(OSError):
                    os.write(self._pipe, self._end)
            self._is_closed = True
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
