"""The trainer's side of a logger: a queue, a pipe, and a process at its other end.

`run.log` appends to the queue and returns. A thread sends the queue a few times a second, and the
main thread sends the rest before each snapshot. So every row that the next attempt does not log
again has left this process before the state exists that it resumes from, and a kill -9 leaves no
gap in a curve. Nothing waits for the other process: if the pipe is full, the queue grows; if the
queue is full, values are lost, and a line says so.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import time as _now
from typing import TYPE_CHECKING, Any, Self

from holdfast._environment import variables
from holdfast._environment.processes.identity import command
from holdfast._errors import HoldfastError, SettingsError, not_installed
from holdfast._run.exit.leaving import status_of
from holdfast._run.saving.pulse import never_held, without_debugger
from holdfast._store.folder.plain_file import open_log
from holdfast._store.folder.prove_config import current as current_prove_config
from holdfast._store.memory.control import MARK
from holdfast._text import say
from holdfast.rules._judge import begin_reading

if TYPE_CHECKING:
    from holdfast._run.run import Run

LABELS = {"tensorboard": "TensorBoard", "wandb": "W&B", "mlflow": "MLflow"}
_MOST_ROWS = 100_000
_MOST_WAITING = 10_000  # a value on a device may keep more than itself there
_POLL_SECONDS = 0.05
_END_SECONDS = 10.0


class Logger:
    """Sends what `run.log` is given to another process; only on rank 0."""

    _writer: Writer | None = None  # None: there is nothing to do

    def __init__(
        self, run: Run, kind: str, package: str, *, target: str, options: dict[str, Any]
    ) -> None:
        # It loads the run, which the process that logs does not need.
        from holdfast._run.driver import LoopDriver

        self._driver = driver = LoopDriver(run)
        self._label = LABELS[kind]
        if not driver.is_open:
            raise HoldfastError(
                f"{type(self).__name__}(run, …): the run is not open.\n"
                "Make it inside of `with holdfast.Run(…) as run:`."
            )
        _require(package, kind, type(self).__name__)
        plan = {"kind": kind, "target": target, "options": options}
        try:
            json.dumps(plan)
        except (TypeError, ValueError) as error:
            raise SettingsError(
                f"{type(self).__name__}(run, …): an argument cannot be written as JSON ({error}).\n"
                "It goes to another process: give numbers, texts, lists and dicts."
            ) from error
        # A proof repeats the training, and its values do not belong into a curve.
        if driver.rank or current_prove_config() is not None:
            return
        self._lost = 0
        self._rows: collections.deque[tuple[Any, ...]] = collections.deque()
        # Rows with values on a device, and all later rows; used by the main thread only.
        self._waiting: collections.deque[tuple[Any, ...]] = collections.deque()
        self._next_poll = 0.0
        self._begin(run.attempt, kind, plan)

    def _begin(self, attempt: int, kind: str, plan: dict[str, Any]) -> None:
        driver = self._driver
        same = sum(getattr(each, "_label", "") == self._label for each in driver.log.sinks)
        name = f"{kind}-{same + 1}" if same else kind
        layout = driver.layout
        plan |= {
            "label": self._label,
            "state": str(layout.logger(name, "json")),
            "lock": str(layout.logger(name, "lock")),
            "folder": str(layout.folder),
            "loggers": str(layout.loggers),
            "mark": driver.mark,
            "attempt": attempt,
        }
        try:
            layout.loggers.mkdir(exist_ok=True)
            self._writer = Writer(self._label, plan, layout.logger(name, "log"), self._rows)
        except OSError as error:
            say(f"{self._label}: cannot be logged to ({error}). The training goes on without it.")
            return
        self._listens = self._listener() if driver.begins_there else self._wait_for_arrival
        driver.log.add(self, self._listens)

    # -- while the run is open --------------------------------------------------------

    def _listener(self) -> Callable[[int, dict[str, Any]], None]:
        """The function that `run.log` calls."""
        # It runs in every step, and closure variables are faster than attributes.
        words, loops = self._driver.words, self._driver.loops
        rows, waiting, append_slowly = self._rows, self._waiting, self._append_slowly

        def append(step: int, held: dict[str, Any]) -> None:
            is_between = len(loops) == 1 and loops[0].name == "run.epochs"
            row = (words[MARK], step, _now(), is_between, held)
            for value in held.values():
                if type(value) is not float:
                    append_slowly(row)
                    return
            if waiting or len(rows) >= _MOST_ROWS:
                append_slowly(row)
            else:
                rows.append(row)

        return append

    def _append_slowly(self, row: tuple[Any, ...]) -> None:
        """A row that has other values than numbers, or comes after such a row."""
        *place, held = row
        values = {name: begin_reading(value, for_rule=False) for name, value in held.items()}
        self._waiting.append((*place, values))
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self._lose()
        now = time.monotonic()
        if len(self._waiting) == 1 or now > self._next_poll:
            self._next_poll = now + _POLL_SECONDS
            self._read(waits=False)

    def _wait_for_arrival(self, step: int, held: dict[str, Any]) -> None:
        """Ignore rows before the stored position: the previous attempt has logged them."""
        if self._driver.has_arrived:
            before, self._listens = self._listens, self._listener()
            self._driver.log.replace(before, self._listens)
            self._listens(step, held)

    def _read(self, *, waits: bool) -> None:
        """Queue the rows whose values have arrived; with `waits`, wait for all."""
        while self._waiting:
            *place, held = self._waiting[0]
            values = {}
            for name, value in held.items():
                if type(value) is float:
                    values[name] = value
                    continue
                if not waits and not value.is_ready():
                    return
                # An error of the device: the training itself will raise it.
                with contextlib.suppress(Exception):
                    values[name] = value.value()
            self._waiting.popleft()
            if len(self._rows) < _MOST_ROWS:
                self._rows.append((*place, values))
            else:
                self._lose()

    def _lose(self) -> None:
        if not self._lost:
            say(
                f"{self._label} takes values more slowly than they come: some are lost. "
                "The training goes on."
            )
        self._lost += 1

    def hand_over(self) -> None:
        """Called before a snapshot, which waits for the device anyway."""
        if self._writer is None:
            return
        self._read(waits=True)
        self._writer.send()
        if self._writer.is_gone:
            self._stop_listening()  # else the queue would grow without a reader
            self._writer = None

    # -- the end ----------------------------------------------------------------------

    def begin_end(self, status: int) -> None:
        """No more rows follow: the process can finish."""
        if self._writer is None:
            return
        self._stop_listening()
        self._read(waits=True)
        self._writer.begin_end(status)

    def _stop_listening(self) -> None:
        self._driver.log.remove(self, self._listens)

    def wait_for_end(self) -> None:
        """Wait until it has finished, for a limited time."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        count = self._driver.count_signals
        answered = count()
        # Another signal ends the wait.
        self._lost += writer.wait_for_end(_END_SECONDS, lambda: count() > answered)
        if self._lost:
            say(f"{self._label}: {self._lost} rows of metrics are lost.")

    def close(self) -> None:
        """End it before the run ends."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.begin_end(status_of(error))
        self.wait_for_end()


def _require(package: str, extra: str, name: str) -> None:
    spec = None
    with contextlib.suppress(ImportError, ValueError):  # in a broken or half removed package
        spec = importlib.util.find_spec(package)
    # A folder of that name, such as the one that wandb creates, is not a package.
    if spec is None or spec.origin is None:
        raise ImportError(not_installed(f"holdfast.loggers.{name}", package, extra))


# -- The process: started, and sent rows without waiting ---------------------------------


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
