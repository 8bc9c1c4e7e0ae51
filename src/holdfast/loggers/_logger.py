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
import importlib.util
import json
import time
from collections.abc import Callable
from time import time as _now
from typing import TYPE_CHECKING, Any, Self

from holdfast._errors import HoldfastError, SettingsError, not_installed
from holdfast._run.exit.leaving import status_of
from holdfast._store.folder.prove_config import current as current_prove_config
from holdfast._store.memory.control import MARK
from holdfast._text import say
from holdfast.loggers._process import Writer
from holdfast.rules._reading import begin_reading

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
