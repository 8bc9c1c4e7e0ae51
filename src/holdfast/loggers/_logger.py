"""The trainer's side of a logger: a queue, a pipe, and a process at its other end.

`run.log` appends and returns. A thread sends what is there a few times a second; before a snapshot
the main thread sends the rest. So whatever the next life does not make again is out of this process
before there is a state to resume from, and a kill -9 leaves no hole in a curve. Nothing waits for
the process at the other end: when the pipe is full, the queue grows, and when that is full, values
are lost, and it is said.
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

from holdfast._errors import HoldfastError, SettingsError, install_command
from holdfast._run.exit.leaving import status_of
from holdfast._store.folder.errand import current as current_errand
from holdfast._store.memory.control import MARK
from holdfast._text import say
from holdfast.loggers._process import Writer
from holdfast.loggers._values import begin_reading

if TYPE_CHECKING:
    from holdfast._run.run import Run

LABELS = {"tensorboard": "TensorBoard", "wandb": "W&B", "mlflow": "MLflow"}
_MOST_ROWS = 100_000
_MOST_WAITING = 10_000  # a value on a device may keep more than itself there
_LOOK_SECONDS = 0.05
_END_SECONDS = 10.0


class Logger:
    """What `run.log` is given, sent on to another process; of several ranks, the first one's."""

    _writer: Writer | None = None  # None: there is nothing to do

    def __init__(
        self, run: Run, kind: str, package: str, *, target: str, options: dict[str, Any]
    ) -> None:
        from holdfast._run.driver import LoopDriver  # loads the run, which a logger's process lacks

        self._driver = driver = LoopDriver(run)
        self._label = LABELS[kind]
        if not driver.is_open:
            raise HoldfastError(
                f"{type(self).__name__}(run, …): the run is not open.\n"
                "Make it inside of `with holdfast.Run(…) as run:`."
            )
        _require(package, kind, type(self).__name__)
        plan = _checked(type(self).__name__, {"kind": kind, "target": target, "options": options})
        # A proof makes the run again and again, and none of that is for anybody's curves.
        if driver.rank or current_errand() is not None:
            return
        self._lost = 0
        self._rows: collections.deque[tuple[Any, ...]] = collections.deque()
        # With values that are on a device, and what came behind them; of the main thread alone.
        self._waiting: collections.deque[tuple[Any, ...]] = collections.deque()
        self._next_look = 0.0
        self._begin(run.attempt, kind, plan)

    def _begin(self, attempt: int, kind: str, plan: dict[str, Any]) -> None:
        driver = self._driver
        same = sum(getattr(each, "_label", "") == self._label for each in driver.log.sinks)
        name = f"{kind}-{same + 1}" if same else kind
        layout = driver.layout
        plan |= {
            "label": self._label,
            "state": str(layout.logger_state(name)),
            "lock": str(layout.logger_lock(name)),
            "folder": str(layout.folder),
            "loggers": str(layout.loggers),
            "mark": driver.mark,
            "attempt": attempt,
        }
        try:
            layout.loggers.mkdir(exist_ok=True)
            self._writer = Writer(self._label, plan, layout.logger_log(name), self._rows)
        except OSError as error:
            say(f"{self._label}: cannot be logged to ({error}). The training goes on without it.")
            return
        self._listens = self._listener() if driver.begins_there else self._note_on_the_way
        driver.log.add(self, self._listens)

    # -- while the run is open --------------------------------------------------------

    def _listener(self) -> Callable[[int, dict[str, Any]], None]:
        """For `run.log`, in the main thread: a step has other things to do."""
        # What a function finds around itself, it finds sooner than what an object has.
        words, loops = self._driver.words, self._driver.loops
        rows, waiting, otherwise = self._rows, self._waiting, self._note_otherwise

        def note(step: int, held: dict[str, Any]) -> None:
            is_between = len(loops) == 1 and loops[0].name == "run.epochs"
            row = (words[MARK], step, _now(), is_between, held)
            for value in held.values():
                if type(value) is not float:
                    otherwise(row)
                    return
            if waiting or len(rows) >= _MOST_ROWS:
                otherwise(row)
            else:
                rows.append(row)

        return note

    def _note_otherwise(self, row: tuple[Any, ...]) -> None:
        """What is not simply appended."""
        *place, held = row
        values = {name: begin_reading(value) for name, value in held.items()}
        if self._waiting or any(type(value) is not float for value in values.values()):
            self._wait((*place, values))
        else:
            self._append((*place, values))

    def _note_on_the_way(self, step: int, held: dict[str, Any]) -> None:
        """Before the place where the life before had been: that life has logged this."""
        if self._driver.has_arrived:
            before, self._listens = self._listens, self._listener()
            self._driver.log.replace(before, self._listens)
            self._listens(step, held)

    def _append(self, row: tuple[Any, ...]) -> None:
        if len(self._rows) < _MOST_ROWS:
            self._rows.append(row)
        else:
            self._lose()

    def _wait(self, row: tuple[Any, ...]) -> None:
        self._waiting.append(row)
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self._lose()
        now = time.monotonic()
        if now > self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self._read(waits=False)

    def _read(self, *, waits: bool) -> None:
        """Pass on the rows whose values have come; of `waits`, all of them."""
        while self._waiting:
            *place, held = self._waiting[0]
            values = {}
            for name, value in held.items():
                if type(value) is float:
                    values[name] = value
                    continue
                if not waits and not value.is_ready():
                    return
                # What a device cannot give, it gives to nobody: the training will hear of it.
                with contextlib.suppress(Exception):
                    values[name] = value.value()
            self._waiting.popleft()
            self._append((*place, values))

    def _lose(self) -> None:
        if not self._lost:
            say(
                f"{self._label} takes values more slowly than they come: some are lost. "
                "The training goes on."
            )
        self._lost += 1

    def hand_over(self) -> None:
        """A snapshot is near; it waits for the device anyway."""
        if self._writer is None:
            return
        self._read(waits=True)
        self._writer.send()
        if self._writer.is_gone:
            self._listen_no_more()  # or rows would be kept for nobody
            self._writer = None

    # -- the end ----------------------------------------------------------------------

    def begin_end(self, status: int) -> None:
        """Nothing more comes; the process may finish."""
        if self._writer is None:
            return
        self._listen_no_more()
        self._read(waits=True)
        self._writer.begin_end(status)

    def _listen_no_more(self) -> None:
        self._driver.log.remove(self, self._listens)

    def wait_for_end(self) -> None:
        """Wait until it has finished, but not for long."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        count = self._driver.count_signals
        answered = count()
        # Another signal says: do not wait.
        self._lost += writer.wait_for_end(_END_SECONDS, lambda: count() > answered)
        if self._lost:
            say(f"{self._label}: {self._lost} rows of metrics are lost.")

    def close(self) -> None:
        """End it before the run ends."""
        self._end(0)

    def _end(self, status: int) -> None:
        self.begin_end(status)
        self.wait_for_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._end(status_of(error))


def _require(package: str, extra: str, name: str) -> None:
    spec = None
    with contextlib.suppress(ImportError, ValueError):  # in a broken or half removed package
        spec = importlib.util.find_spec(package)
    # A folder that is called so, such as the one wandb leaves behind, is no package.
    if spec is None or spec.origin is None:
        raise ImportError(
            f"holdfast.loggers.{name} needs {package}, which is not installed here.\n"
            f"Install it: {install_command(extra)}"
        )


def _checked(name: str, plan: dict[str, Any]) -> dict[str, Any]:
    """The plan, if it can be handed to another process."""
    try:
        json.dumps(plan)
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"{name}(run, …): an argument cannot be written as JSON ({error}).\n"
            "It goes to another process: give numbers, texts, lists and dicts."
        ) from error
    return plan
