"""Run: what a script calls. An open run has a session, which does the work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast import _errors
from holdfast._adapters.metrics import Metrics
from holdfast._errors import HoldfastError, SettingsError, is_interactive
from holdfast._run.attempt import RunSpec, checked_config, close_forgotten
from holdfast._run.boundary import StopState
from holdfast._run.exit.leaving import cancel_exit, stop_at_interrupt, watch_threads
from holdfast._run.loops import Batches
from holdfast._run.saving.keeper_client import Handle
from holdfast._run.saving.script_state import Forms, StateView, hand_over
from holdfast._run.session import Session, not_open
from holdfast._run.signals.handlers import as_the_script_means, uninterruptible
from holdfast._settings import Settings, check_count, checked
from holdfast._state.capture import capture_generators, refuse_unstorable, restore_generators
from holdfast._store.folder.prove_config import current as current_prove_config
from holdfast._store.folder.requests import StopRequest
from holdfast._text import say, speak_plainly
from holdfast.rules import Rule
from holdfast.rules._judge import checked_rule


class Run:
    """A training run that cannot be lost.

    >>> with holdfast.Run("runs/a", model=model, optimizer=optimizer) as run:  # doctest: +SKIP
    ...     for epoch in run.epochs(3):
    ...         for batch in run.batches(loader):
    ...             train_on(batch)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *unnamed: Any,
        settings: Settings | None = None,
        stop_when: Rule | None = None,
        config: Any = None,
        **state: Any,
    ) -> None:
        speak_plainly()
        watch_threads()
        if unnamed:
            raise SettingsError(
                f"holdfast.Run({str(folder)!r}, …): there is a {type(unnamed[0]).__name__} without "
                "a name.\nName all state: "
                "holdfast.Run(folder, model=model, optimizer=optimizer)"
            )
        prove_config = current_prove_config()
        place = as_the_script_means(Path(folder))
        place = place if prove_config is None else prove_config.redirected(place)
        settings, rule = checked(settings, state), checked_rule(stop_when)
        known = checked_config(config)
        refuse_unstorable(state)  # now, and not at the first save
        metrics = Metrics(settings.best_metric)
        self._spec = RunSpec(place, settings, rule, dict(state), metrics, known)
        self._session: Session | None = None  # the last one stays, closed
        self._stops: StopState | None = None  # of the session, also while that is being opened
        self._view = StateView(self._spec.state, 0)
        self._forms: Forms = {}  # of the values that run.update() was given

    # -- where it is ------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The steps that are complete, counted over all attempts."""
        session = self._session
        return 0 if session is None else session.boundary.step

    @property
    def attempt(self) -> int:
        """Which start of the run this is, counted from 1."""
        return 0 if self._session is None else self._session.attempt.number

    @property
    def resumed_from(self) -> int | None:
        """The step that this attempt resumed from; None if it began the run."""
        return None if self._session is None else self._session.found.resumed_from

    @property
    def state(self) -> StateView:
        """The state by name, as it was given or as it was restored."""
        if self._view.attempt != self.attempt:
            self._view = StateView(self._spec.state, self.attempt)
        return self._view

    @property
    def epoch(self) -> int:
        """The epoch of `run.epochs` that is running, counted from 0 over all attempts."""
        return 0 if self._session is None else self._session.loops.cursor.course.epoch

    @property
    def batch(self) -> int:
        """The index in its epoch of the batch that `run.batches` gave last."""
        return 0 if self._session is None else self._session.loops.cursor.course.batch

    @property
    def completes_step(self) -> bool:
        """True if the batch that `run.batches` gave last completes an optimizer step."""
        return self._session is None or self._session.loops.completes_step

    @property
    def over(self) -> str | None:
        """Why the training is complete, if a rule or run.finish() in a loop has ended it.

        A loop of your own asks this.
        """
        return None if self._session is None else self._session.ruling.over

    # -- opening and closing ----------------------------------------------------------

    def __enter__(self) -> Self:
        if self._session is not None and self._session.is_open and not is_interactive():
            raise HoldfastError(f"{self._spec.folder}: this Run is open already.")
        with stop_at_interrupt():
            close_forgotten(self._spec.folder)
            cancel_exit()
            session = Session(self._spec)
            self._stops = session.stops
            session.open()
            self._session = session
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            self._session.close(error)

    def _opened(self) -> Session:
        """The session, open or closed; before the first one no part could keep a value."""
        if self._session is None:
            raise not_open(self._spec)
        return self._session

    def _open(self) -> Session:
        session = self._session
        if session is None or not session.is_open:
            raise not_open(self._spec)
        return session

    # -- what a step gives and asks ---------------------------------------------------

    @uninterruptible
    def update(self, **state: Any) -> None:
        """Hand over new values for state that cannot change in place: numbers, JAX pytrees.

        >>> run.update(params=params, opt_state=opt_state, best_loss=0.12)  # doctest: +SKIP
        """
        restored = None if self.resumed_from is None else self.state
        for line in hand_over(self._spec.state, state, restored, self._forms):
            say(line)
        session = self._opened()
        session.loops.note_made()
        if session.is_open:
            session.saver.forgotten.note_update(state, session.boundary.step)

    def log(self, **metrics: Any) -> None:
        """Note metrics of this step: for rules, `keep_best`, the journal and `holdfast status`.

        >>> run.log(loss=loss, val_loss=0.3)  # doctest: +SKIP
        """
        session = self._opened()
        is_best = session.log.record(session.boundary.step, metrics)
        if is_best and session.attempt.rank == 0:
            self.save(reason="best")

    def save(self, *, reason: str = "asked") -> Handle:
        """Ask for a checkpoint at the next boundary; the handle's `wait()` waits for it."""
        session = self._open()
        session.boundary.poll_soon()
        return session.saver.want(Handle(reason))

    def stop(self, reason: str = "run.stop()") -> None:
        """Ask the run to stop at the next boundary; from any thread."""
        if self._stops is not None:
            self._stops.ask(StopRequest(str(reason)[:500], _errors.PERSON))
        if self._session is not None:
            self._session.boundary.poll_soon()

    # -- loops ------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """The steps that are left, up to `total` in the whole life of the run.

        >>> for step in run.steps(10_000):  # doctest: +SKIP
        ...     train_one_step()
        """
        check_count(total, f"steps({total!r})", least=0)
        return self._open().loops.steps(total)

    def epochs(self, total: int, *, steps: int | None = None) -> Iterator[int]:
        """The epochs that are left, up to `total` in the whole life of the run.

        With `steps=…` they end when the run has made so many steps, wherever that is.

        >>> for epoch in run.epochs(3):  # doctest: +SKIP
        ...     for batch in run.batches(loader):
        ...         train_on(batch)
        """
        check_count(total, f"epochs({total!r})", least=0)
        if steps is not None:
            check_count(steps, f"epochs(…, steps={steps!r})", least=0)
        return self._open().loops.epochs(total, steps)

    def batches(
        self, loader: Any, *more: Any, accumulate: int = 1, steps: int | None = None
    ) -> Batches:
        """The batches of a loader that are left in this epoch, each a step of the run.

        With `accumulate=4` four batches are one step; `run.completes_step` says when to step
        the optimizer. Inside a phase they are no steps. Several loaders are gone through side
        by side, as `zip` does. With `steps=…` the loop ends when the run has made so many steps.

        >>> for batch in run.batches(loader, accumulate=4):  # doctest: +SKIP
        ...     loss(batch).backward()
        ...     if run.completes_step:
        ...         optimizer.step()
        """
        check_count(accumulate, f"batches(…, accumulate={accumulate!r})", least=1)
        session = self._open()
        sources = (loader, *more)
        if steps is not None:
            check_count(steps, f"batches(…, steps={steps!r})", least=0)
            session.phases.refuse("run.batches(…, steps=…)")
        if session.phases.rests:
            cursor = session.loops.cursor
            return Batches(cursor.uncounted(cursor.feeds.of(sources)), sources)
        return Batches(session.loops.batches(sources, accumulate, steps), sources)

    def boundary(self) -> bool:
        """Say that a step is complete; True means: leave the loop now.

        At the end of a loop of your own call `run.finish()`; `run.steps` does it itself.
        """
        session = self._open()
        session.phases.refuse("run.boundary")
        return session.loops.pass_by_hand()

    def finish(self) -> None:
        """Say that training is complete: this step becomes durable, as the last one.

        In a loop of the run, leave the loop then. The next start has nothing left to train.
        """
        self._open().loops.end_by_script()

    @contextlib.contextmanager
    def phase(self, name: str, *, trains: bool = False) -> Iterator[None]:
        """A stretch of work that is no training step: "eval", "warmup", "compile", …

        A stop inside leaves at once: what was trained is in memory, and the phase is repeated as
        a whole. It leaves the random generators as it found them. With `trains=True` it is only
        a name for steps that pass their boundaries as usual.

        >>> with run.phase("eval"):  # doctest: +SKIP
        ...     run.log(val_loss=evaluate())
        """
        session = self._open()
        before = None if trains else capture_generators()
        loops, step = session.loops, session.boundary.step
        is_amid_steps = not loops.is_between_passes
        session.phases.begin(str(name), trains=trains, step=step, is_amid_steps=is_amid_steps)
        session.boundary.set_next_due_step()
        try:
            session.leave_if_signaled()  # no boundary would see it for long
            yield
        finally:
            session.phases.end(trains=trains)
            if before is not None:
                restore_generators(before)
