"""What code that drives a run's loops from outside may use of it: trainers and loggers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from holdfast._errors import HoldfastError
from holdfast._run.data.course import Position
from holdfast._run.data.feed import FeedContext
from holdfast._run.metric_log import MetricLog
from holdfast._run.run import Run
from holdfast._run.session import Session
from holdfast._settings import Settings
from holdfast._store.folder.layout import RunLayout
from holdfast._store.memory.control import EPOCHS, MARK
from holdfast.rules import Rule


class LoopDriver:
    """The inner side of a run, for Keras, Lightning, Transformers and loggers."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def _session(self) -> Session:
        return self._run._opened()

    @property
    def folder(self) -> Path:
        return self._run._spec.folder

    @property
    def is_open(self) -> bool:
        session = self._run._session
        return session is not None and session.is_open

    def require_open(self) -> None:
        self._run._open()

    # -- where the run is -------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Where in the data the last boundary was."""
        return self._session.loops.cursor.course.position

    @property
    def is_on_the_way(self) -> bool:
        """True until the loops reach the stored position."""
        return self._session.loops.cursor.course.is_on_the_way

    @property
    def is_finished(self) -> bool:
        """True if this step is durable as the last one."""
        return self._session.loops.finished_at == self._run.step

    @property
    def feed_length(self) -> int | None:
        feed = self._session.loops.cursor.feed
        return None if feed is None else feed.length

    @property
    def context(self) -> FeedContext:
        """What the run's feeds share: ranks and seeds."""
        return self._session.loops.cursor.feeds.context

    def stored_with_position(self) -> dict[str, Any]:
        """What the trainer keeps with every position; it writes into it."""
        return self._session.loops.cursor.course.trainer_state()

    def was_ended_before(self) -> bool:
        """True, with a line, if a rule or run.finish() had ended the training."""
        return self._session.ruling.was_ended_before()

    # -- driving the loops ------------------------------------------------------------

    def pass_over(self) -> None:
        """A loop was finished in an earlier attempt: there is nothing to do in it."""
        self._session.loops.reach(is_passed_over=True)

    def set_completes_step(self, completes: bool) -> None:
        """Say whether the current batch completes an optimizer step."""
        self._session.loops.completes_step = completes

    def show_batch(self, batch: Any) -> None:
        """A batch was made where `run.batches` gave only a promise of it."""
        self._session.loops.show_batch(self._run.batch, batch)

    def end_epochs(self) -> None:
        """This epoch is the last one: a stop has nothing to interrupt any more."""
        self._session.loops.epochs_total = self._run.epoch + 1

    def forget_epochs_total(self) -> None:
        """The number of epochs is not known: a step, a time or a rule ends the fit."""
        self._session.loops.epochs_total = None
        self._session.boundary.words[EPOCHS] = 0

    def expect_phase(self) -> None:
        """A phase follows the current step: have its boundary in memory."""
        self._session.phases.expect(self._run.step + 1)
        self._session.boundary.set_next_due_step()

    def log_numbers(self, values: Mapping[str, Any]) -> None:
        """Log what of these is a number; one on a device is not read yet."""
        numbers = {name: value for name, value in values.items() if is_number(value)}
        if numbers:
            self._run.log(**numbers)

    def hide_progress(self) -> None:
        """The trainer shows its own."""
        self._session.progress.close()

    # -- loggers ----------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._session.attempt.rank

    @property
    def layout(self) -> RunLayout:
        return self._session.attempt.layout

    @property
    def log(self) -> MetricLog:
        return self._session.log

    @property
    def words(self) -> Any:
        """Shared with the keeper; MARK is the last boundary."""
        return self._session.boundary.words

    @property
    def mark(self) -> int:
        return int(self.words[MARK])

    @property
    def loops(self) -> list[Any]:
        return self._session.loops.running

    @property
    def has_arrived(self) -> bool:
        """True once the script has reached the stored position: what it logs is new."""
        return self._session.found.is_released

    @property
    def begins_there(self) -> bool:
        """True where no loop of ours leads to the stored position."""
        return self._session.found.is_released or self._session.found.by_hand

    def count_signals(self) -> int:
        return len(self._session.stops.signals)


def replace_method(stack: ExitStack, place: Any, name: str, ours: Callable[..., Any]) -> Any:
    """Call `ours` in place of an object's method until the stack closes; returns the original.

    `ours` gets the original as its first argument. The object's class stays as it is.
    """
    original = getattr(place, name)
    if name in vars(place):
        stack.callback(setattr, place, name, original)
    else:
        stack.callback(vars(place).pop, name, None)
    setattr(place, name, functools.partial(ours, original))
    return original


def is_number(value: Any) -> bool:
    """Whether a value, perhaps of a framework, is one number without dimensions."""
    if isinstance(value, bool | int | float):
        return True
    return hasattr(value, "__float__") and tuple(getattr(value, "shape", (1,))) == ()


def do_nothing(*_: Any, **__: Any) -> None:
    """In place of a trainer's method that must not act."""


class RunCallback:
    """The callback of a trainer that opens a run by itself: its arguments, and its run."""

    name = ""  # as users write it
    kept: tuple[str, ...] = ()  # the states that it gives the run
    _training: Any = None  # of the trainer's loop, while it runs; it has the run

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        settings: Settings | None = None,
        stop_when: Rule | None = None,
        **more_state: Any,
    ) -> None:
        super().__init__()
        taken = sorted(set(self.kept) & set(more_state))
        if taken:
            raise HoldfastError(
                f"{self.name}({', '.join(taken)}=…): this is kept by itself.\n"
                "Leave it out, or give it another name."
            )
        options = {"settings": settings, "stop_when": stop_when, **more_state}
        self.make_run: Callable[[dict[str, Any]], Run] = lambda state: Run(
            folder, **state, **options
        )

    @property
    def run(self) -> Run | None:
        """The run, while the trainer trains: for `run.stop()`, `run.log`, `run.save()`."""
        return None if self._training is None else self._training.run

    def refuse_another(self, callbacks: Sequence[Any]) -> None:
        if sum(isinstance(each, RunCallback) for each in callbacks) > 1:
            raise HoldfastError(
                f"two {self.name} in one Trainer: each would count the steps.\nGive it one."
            )


def session_of(run: Run) -> Session:
    """For tests and benchmarks, which look at the parts of an open run."""
    return run._opened()
