"""Run: the loops that a user writes.

Each loop passes its boundaries through the attempt, and nothing else does.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

from holdfast import _errors
from holdfast._errors import HoldfastError, SaveFailed, name_place
from holdfast._run.data.course import Lap, completes_step, expect_steps
from holdfast._run.data.feed import Feed, begin_fresh, begin_in_the_middle, say_reached
from holdfast._run.data.loops import Batches, LoopMark, refuse_nested
from holdfast._run.ruling import BY_SCRIPT
from holdfast._run.saving.immutable_state import Asked, hand_over
from holdfast._run.session import Attempt
from holdfast._run.signals.children import children_unheard
from holdfast._settings import check_count
from holdfast._state.capture import capture_generators, restore_generators
from holdfast._store.folder.requests import StopRequest
from holdfast._store.memory.control import DONE, EPOCH, EPOCHS, MARK, mark_of, pass_turn
from holdfast._text import say

_NONE = object()


class Run(Attempt):
    """A training run that cannot be lost.

    >>> with holdfast.Run("runs/a", model=model, optimizer=optimizer) as run:  # doctest: +SKIP
    ...     for epoch in run.epochs(3):
    ...         for batch in run.batches(loader):
    ...             train_on(batch)
    """

    _warned_of_boundary = False
    _asked_for: Asked | None = None  # what of the state somebody has read

    @property
    def state(self) -> Asked:
        """The state by name, as it was given or as it was restored."""
        if self._asked_for is None or self._asked_for.attempt != self.attempt:
            self._asked_for = Asked(self._state, self.attempt)
        return self._asked_for

    @property
    def epoch(self) -> int:
        """The epoch of `run.epochs` that is running, counted from 0 over all lives."""
        return self._course.epoch

    @property
    def batch(self) -> int:
        """The index in its epoch of the batch that `run.batches` gave last."""
        return self._course.batch

    def update(self, **state: Any) -> None:
        """Hand over new values for state that cannot change in place: numbers, JAX pytrees.

        >>> run.update(params=params, opt_state=opt_state, best_loss=0.12)  # doctest: +SKIP
        """
        restored = None if self.resumed_from is None else self.state
        for line in hand_over(self._state, state, restored):
            say(line)
        self._require_opened()
        self._made_at = self.step
        if self._is_open:
            self._saver.forgotten.note_update(state, self.step)

    def stop(self, reason: str = "run.stop()") -> None:
        """Ask the run to stop at the next boundary; from any thread."""
        if self._asked is None or self._asked.is_by_clock:
            self._asked = StopRequest(str(reason)[:500], _errors.PERSON)
        self._next_look = 0.0

    # -- loops ----------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """The steps that are left, up to `total` in the whole life of the run.

        >>> for step in run.steps(10_000):  # doctest: +SKIP
        ...     train_one_step()
        """
        check_count(total, f"steps({total!r})", least=0)
        self._require_open()
        return self._steps(total)

    def _steps(self, total: int) -> Iterator[int]:
        if self._has_made(total) or self._is_passed_over():
            return
        with self._loop("run.steps", total):
            self._note("loop", step=self.step, total=total)
            while self.step < total:
                try:
                    yield self.step
                except GeneratorExit:
                    self._leave_by(sys._getframe().f_back)
                    raise
                if self._pass_boundary() and self._ends():
                    break
            self._finish()

    def _has_made(self, steps: int | None) -> bool:
        """Whether all steps of a loop were made in earlier lives; says so."""
        if steps is None or self.step < steps:
            return False
        made = say_reached(self.step, steps)
        say(f"{self._folder}: finished at step {made}; nothing left to train.")
        self._reach_loop(is_passed_over=True)
        return True

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
        self._require_open()
        return self._epochs(total, steps)

    def _epochs(self, total: int, steps: int | None) -> Iterator[int]:
        course = self._course
        if course.epoch >= total:
            made = f"{say_reached(course.epoch, total, ' epochs')}, at step {self.step}"
            say(f"{self._folder}: finished after {made}; nothing left to train.")
            self._reach_loop(is_passed_over=True)
            return
        if self._has_made(steps) or self._is_passed_over():
            return
        with self._loop("run.epochs", steps):
            self._has_course = True
            self._epochs_total = total
            self._words[EPOCHS] = total
            attempt = self.attempt
            bound = {} if steps is None else {"total": steps}
            self._note("loop", step=self.step, epochs=total, **bound)
            course.begin_epochs(self.step)
            try:
                while course.epoch < total and self.step != steps:
                    self._words[EPOCH] = course.epoch + 1
                    top = course.note_top(capture_generators())
                    if top is not None:
                        # The interrupted epoch begins again, and draws at its top what it drew.
                        restore_generators(top)
                        self._found.look(self._state)
                    try:
                        yield course.epoch
                    except GeneratorExit:
                        self._leave_by(sys._getframe().f_back)
                        raise
                    if self._pass_turn() and self._ends():
                        break
                self._finish()
            finally:
                if self.attempt == attempt:
                    self._epochs_total = None

    def _pass_turn(self) -> bool:
        """An epoch is over: a boundary that completes no step, unless the epoch had none."""
        self._phases.turn()
        del self._loops[1:]  # one that was left by `break` may not be closed yet
        if self._course.is_on_the_way:
            self._arrive()
            raise HoldfastError(
                f"the loop over data in which the run was interrupted (number "
                f"{self._course.position.lap + 1} of its epoch) did not come again: the loops of "
                "an epoch must come in the same order in every life.\n"
                "Nothing was trained. Give each epoch the same loops, or use another folder."
            )
        if not self._course.turn(self.step):
            return self._pass_boundary()
        self._at_turn = True
        now = time.monotonic()
        pass_turn(self._words, int(now * 1e9))
        self._words[MARK] = mark_of(self.step, True)
        return self._work(now)

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
        self._require_open()
        sources = (loader, *more)
        if steps is not None:
            check_count(steps, f"batches(…, steps={steps!r})", least=0)
            self._phases.refuse("run.batches(…, steps=…)")
        if self._phases.rests:
            return Batches(self._just_batches(self._feeds.of(sources)), sources)
        return Batches(self._batches(sources, accumulate, steps), sources)

    def _batches(
        self, sources: tuple[Any, ...], accumulate: int, steps: int | None
    ) -> Generator[Any, None, None]:
        if self._over is not None:
            if not self._loops:
                self._is_passed_over()
            return  # what is left of the epoch in which the training has ended
        if steps is not None and self._loops:
            raise HoldfastError(
                "run.batches(…, steps=…) inside run.epochs(): the epochs would go on without it.\n"
                "Give the number to the outer loop: run.epochs(n, steps=…)."
            )
        if self._has_made(steps):
            return
        with self._loop("run.batches", self._total if steps is None else steps):
            if len(self._loops) == 1:
                self._feeds.refuse_second_lap(sources)
            feed = self._feeds.of(sources)
            feed.expect(accumulate)
            is_elsewhere = threading.get_ident() != self._thread
            self._feeds.warn_of_looking_ahead(sys._getframe(1).f_code, is_elsewhere)
            course, lap = self._course, self._course.begin_lap()
            self._has_course = True
            start, batches = self._begin_lap(feed, lap)
            if lap.is_over:
                return
            self._feed, self._lap = feed, (lap, feed.length, start)
            self._steps_expected = expect_steps(
                self.step, feed.length, accumulate, lap, self._epochs_total
            )
            number, length, ahead = lap.skip, feed.length, _NONE
            try:
                while True:
                    batch, ahead = ahead, _NONE
                    if batch is _NONE:
                        batch = self._take(batches, number)
                    if batch is _NONE:
                        break
                    is_last = length is not None and number + 1 >= length
                    if length is None and (number + 1) % accumulate:
                        ahead = self._take(batches, number + 1)  # the only way to know
                        is_last = ahead is _NONE
                    course.batch = number
                    self.completes_step = completes_step(number, accumulate, is_last)
                    self._show_batch(number, batch)
                    try:
                        yield batch
                    except GeneratorExit:
                        self._leave_by(sys._getframe().f_back)
                        raise
                    batch = None  # else two are in memory while the next one is made
                    number += 1
                    if self.completes_step:
                        course.use(lap, number, length, start)
                        if (self._pass_boundary() and self._ends()) or self.step == self._total:
                            if len(self._loops) == 1:
                                self._finish()
                            return
                        if is_last and length is None:
                            break
                course.end_lap(lap, feed.state())
                if self._crew is not None and lap.goal is None:
                    self._crew.show_lap(lap.epoch, lap.number, number)
                if self._phases.follows_loops:
                    self._saver.rest_at(self.step)
            finally:
                if self._feed is feed:
                    self._feed, self._lap = None, None
                del batches  # with it go the workers that do not outlive a pass

    def _begin_lap(self, feed: Feed, lap: Lap) -> tuple[Any, Iterator[Any]]:
        if lap.goal is not None:
            self._arrive()
            return begin_in_the_middle(feed, lap)
        if lap.is_over:
            return None, iter(())
        return begin_fresh(feed, lap)

    def _take(self, batches: Iterator[Any], number: int) -> Any:
        """The next batch, or _NONE; an error says where in the data it came from."""
        try:
            return next(batches, _NONE)
        except Exception as error:
            name_place(error, self._course.epoch, number)
            raise

    def _just_batches(self, feed: Feed) -> Generator[Any, None, None]:
        """All batches, in a phase: it is repeated as a whole, so nothing is counted."""
        _, batches = begin_fresh(feed, Lap(self._course.epoch, -1))
        number = 0
        try:
            for batch in batches:
                yield batch
                number += 1
        except Exception as error:
            name_place(error, self._course.epoch, number)
            raise

    def boundary(self) -> bool:
        """Say that a step is complete; True means: leave the loop now.

        At the end of a loop of your own call `run.finish()`; `run.steps` does it itself.
        """
        self._require_open()
        self._phases.refuse("run.boundary")
        if self._loops and self._loops[-1].name != "run.epochs":
            raise HoldfastError(
                f"run.boundary() inside {self._loops[-1].name}(), which passes the boundaries "
                "itself.\nUse one of the two."
            )
        if self._loops and not self._warned_of_boundary:
            self._warned_of_boundary = True
            say(
                "run.boundary() inside run.epochs(): where in the epoch a step stands cannot be "
                "known, so an interrupted epoch begins anew.\n"
                "Loop over run.batches(loader), which knows, or keep the position in the state."
            )
        if not self._found.is_released:
            self._generators = None  # the step that ends here has drawn from them already
            self._found.release()
        self._is_by_hand = not self._loops
        if not self._loops and self._is_ended_before():
            return True  # and this step does not count
        self._enter_loop()
        leave = self._pass_boundary()
        if leave and self._stopped is None:
            self._finish()
            return True
        if leave and not self._loops:
            self._leave_loop()
        return leave

    def finish(self) -> None:
        """Say that training is complete: this step becomes durable, as the last one.

        In a loop of the run, leave the loop then. The next start has nothing left to train.
        """
        self._require_open()
        if self._loops:
            self._over = BY_SCRIPT
            self._pass_made_step()
            self._next_look = 0.0  # for a script that does not leave its loop
        self._finish()

    def _finish(self) -> None:
        if self._over is not None and self._finished_at == self.step and not self._loops:
            return  # a rule has, and said so
        if not self._loops and self.step == self.resumed_from:
            say(f"{self._folder}: finished at step {self.step}; nothing left to train.")
            self._leave_loop()
            return
        self._judge_the_end()
        self._words[DONE] = 1
        with children_unheard():
            is_saved = self._saver.save_and_wait(self.step, "finished", is_last=False)
        if self._bad is not None:
            raise self._stop_bad()
        if self._trouble is not None:
            raise self._trouble
        if not is_saved:
            raise SaveFailed(
                f"{self._folder}: trained to step {self.step}, but the last checkpoint was not "
                "made.\nMake room and start the same command again: little is left to repeat."
            )
        # A stop that came in the last step is no interruption, unless another loop follows.
        self._asked_late = self._guard.request(self._asked)
        self._asked = None
        self._noted.clear()
        self._finished_at = self.step
        self._note("finished", step=self.step, total=self._total or self.step)
        say(f"{self._folder}: trained to step {self.step}; the last checkpoint is durable.")
        if not self._loops:
            self._leave_loop()

    @contextlib.contextmanager
    def phase(self, name: str, *, trains: bool = False) -> Iterator[None]:
        """A stretch of work that is no training step: "eval", "warmup", "compile", …

        A stop inside leaves at once: what was trained is in memory, and the phase is repeated as
        a whole. It leaves the random generators as it found them. With `trains=True` it is only
        a name for steps that pass their boundaries as usual.

        >>> with run.phase("eval"):  # doctest: +SKIP
        ...     run.log(val_loss=evaluate())
        """
        self._require_open()
        before = None if trains else capture_generators()
        is_amid_steps = not self._loops or self._loops[-1].name != "run.epochs"
        self._phases.begin(str(name), trains=trains, step=self.step, is_amid_steps=is_amid_steps)
        self._set_next_due_step()
        newest = self._saver.newest
        try:
            is_held = newest is not None and newest.step == self.step
            if self._noted and self._phases.rests and is_held and self._crew is None:
                # It came in this step, before the phase: nothing would look at it for long.
                raise self._leave_from_rest(self._noted[0])
            yield
        finally:
            self._phases.end(trains=trains)
            if before is not None:
                restore_generators(before)

    # -- inside ---------------------------------------------------------------------

    @contextlib.contextmanager
    def _loop(self, name: str, total: int | None) -> Iterator[None]:
        """Note a running loop, which ends with step `total`."""
        self._phases.refuse(name)
        outer = self._loops[-1].name if self._loops else None
        refuse_nested(name, outer)
        mark, attempt = LoopMark(name), self.attempt
        self._loops.append(mark)
        self._total = total
        self._is_by_hand = False
        self._enter_loop()
        if outer is None:
            self._asked, self._asked_late = self._asked or self._asked_late, None
            self._reach_loop()
        try:
            yield
        finally:
            if outer is None and self.attempt == attempt:
                self._total = None  # a traceback may keep us into the next opening
            # Whoever breaks out of a loop and keeps its iterator ends it when he likes.
            if mark in self._loops:
                del self._loops[self._loops.index(mark) :]
                if not self._loops:
                    self._leave_loop()
