"""The loops of a session: which run, where in the data they are, and how each is left.

All loops call the boundary from here. After a restart the epoch is replayed from its beginning
without training; at the stored position the stored state is restored.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import opcode
import os
import sys
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from holdfast import _errors
from holdfast._adapters.registry import generators_of
from holdfast._errors import HoldfastError, Stopped
from holdfast._run.data.course import completes_step, expect_steps
from holdfast._run.data.feed import generator_states, restore_held, say_reached
from holdfast._run.data.session_feeds import END, DataCursor
from holdfast._run.progress.line import Standing
from holdfast._run.resume.start import Resumed
from holdfast._run.signals.handlers import children_deferred, uninterruptible
from holdfast._state.capture import capture_generators, restore_generators
from holdfast._store.memory.control import (
    DONE,
    EPOCH,
    EPOCHS,
    HEARD,
    IN_LOOP,
    REST,
    RESTS,
    begin_loop,
    begin_rest,
    end_rest,
)
from holdfast._text import say

if TYPE_CHECKING:
    from holdfast._run.session import Session


# The instructions by which a frame drops a loop's iterator: `break` and `return`, or the end of the
# loop where something around the iterator (islice, zip) ends it. None of these is an exception.
_LEAVING = frozenset({"POP_TOP", "POP_ITER", "FOR_ITER"})
# The instructions by which a line can change an array.
_ACTING = ("CALL", "STORE_SUBSCR", "STORE_ATTR", "STORE_SLICE")
_IN_PLACE = ("+=", "-=", "*=", "/=", "//=", "%=", "**=", "@=", "&=", "|=", "^=", "<<=", ">>=")


class Loops:
    def __init__(self, session: Session, found: Resumed) -> None:
        attempt = session.attempt
        self._session = session
        self._boundary = session.boundary
        state = list(session.spec.state.values())
        self.cursor = DataCursor(found.position, state, attempt.rank, attempt.size)
        self._generators = found.generators  # to restore at the stored position
        self.running: list[LoopMark] = []  # the outermost first
        self.number = -1  # of the outermost loop, in this attempt
        self.is_by_hand = False  # the last boundary was passed by run.boundary()
        self.total: int | None = None  # steps
        self.epochs_total: int | None = None
        self._steps_expected: int | None = None  # of all epochs, if their loops are alike
        self.completes_step = True  # the current batch ends an optimizer step
        self._made_at = -1  # the step number at the last optimizer step or run.update()
        self.left_at = -1  # the step at which the script has left a loop by itself
        self.finished_at = -1  # the step that is durable as the last one
        self._has_warned = False

    # -- the three loops --------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        boundary = self._boundary
        if self._has_made(total) or self._is_passed_over():
            return
        with self._loop("run.steps", total):
            self._session.attempt.journal("loop", step=boundary.step, total=total)
            while boundary.step < total:
                try:
                    yield boundary.step
                except GeneratorExit:
                    self._leave_by(sys._getframe().f_back)
                    raise
                if boundary.pass_step() and self._ends():
                    break
            self.finish()

    def epochs(self, total: int, steps: int | None) -> Iterator[int]:
        course, boundary = self.cursor.course, self._boundary
        if course.epoch >= total:
            made = f"{say_reached(course.epoch, total, ' epochs')}, at step {boundary.step}"
            say(f"{self._session.spec.folder}: finished after {made}; nothing left to train.")
            self.reach(is_passed_over=True)
            return
        if self._has_made(steps) or self._is_passed_over():
            return
        with self._loop("run.epochs", steps):
            self.epochs_total = boundary.words[EPOCHS] = total
            bound = {} if steps is None else {"total": steps}
            self._session.attempt.journal("loop", step=boundary.step, epochs=total, **bound)
            course.begin_epochs(boundary.step)
            try:
                while course.epoch < total and boundary.step != steps:
                    self._begin_epoch()
                    try:
                        yield course.epoch
                    except GeneratorExit:
                        self._leave_by(sys._getframe().f_back)
                        raise
                    if self._pass_epoch_end() and self._ends():
                        break
                self.finish()
            finally:
                self.epochs_total = None

    @uninterruptible
    def _begin_epoch(self) -> None:
        course = self.cursor.course
        self._boundary.words[EPOCH] = course.epoch + 1
        state = self._session.spec.state
        owned = {name: value for name, value in state.items() if generators_of(value) is not None}
        states = dict(zip(owned, generator_states([*owned.values()]), strict=True))
        top = course.note_top({"global": capture_generators(), "owned": states})
        if top is not None:
            # The interrupted epoch is replayed, and draws the same numbers at its beginning. What
            # differs from the remembered state at the loop is put back there.
            self._session.found.remember(state)
            restore_generators(top.get("global", top))  # older versions stored these alone
            stored = top.get("owned", {})
            names = [name for name in stored if name in owned]
            restore_held([owned[name] for name in names], [stored[name] for name in names])

    @uninterruptible
    def _pass_epoch_end(self) -> bool:
        """A boundary that completes no step, unless the epoch had none."""
        self._session.phases.end_epoch()
        del self.running[1:]  # one that was left by `break` may not be closed yet
        course = self.cursor.course
        if course.is_on_the_way:
            self._arrive()
            raise HoldfastError(
                f"the loop over data in which the run was interrupted (number "
                f"{course.position.lap + 1} of its epoch) did not come again: the loops of "
                "an epoch must come in the same order in every attempt.\n"
                "Nothing was trained. Give each epoch the same loops, or use another folder."
            )
        if not course.end_epoch(self._boundary.step):
            return self._boundary.pass_step()
        return self._boundary.pass_epoch_end()

    def batches(
        self, sources: tuple[Any, ...], accumulate: int, steps: int | None
    ) -> Generator[Any, None, None]:
        session, boundary, cursor = self._session, self._boundary, self.cursor
        if session.ruling.over is not None:
            if not self.running:
                self._is_passed_over()
            return  # the rest of the epoch in which the training has ended
        if steps is not None and self.running:
            raise HoldfastError(
                "run.batches(…, steps=…) inside run.epochs(): the epochs would go on without it.\n"
                "Give the number to the outer loop: run.epochs(n, steps=…)."
            )
        if self._has_made(steps):
            return
        with self._loop("run.batches", self.total if steps is None else steps):
            if len(self.running) == 1:
                cursor.feeds.refuse_second_lap(sources)
            feed = cursor.feeds.of(sources)
            feed.expect(accumulate)
            is_elsewhere = threading.get_ident() != session.attempt.thread
            cursor.feeds.warn_of_looking_ahead(sys._getframe(1).f_code, is_elsewhere)
            course, lap = cursor.course, cursor.course.begin_lap()
            if lap.goal is not None:
                self._arrive()
            start, batches = cursor.open(feed, lap)
            if lap.is_over:
                return
            self._steps_expected = expect_steps(
                boundary.step, feed.length, accumulate, lap, self.epochs_total
            )
            number, length, ahead = lap.skip, feed.length, END
            is_shown = session.observer is not None or session.ranks is not None
            try:
                while True:
                    batch, ahead = ahead, END
                    if batch is END:
                        batch = cursor.take(batches, number)
                    if batch is END:
                        break
                    is_last = length is not None and number + 1 >= length
                    if length is None and (number + 1) % accumulate:
                        ahead = cursor.take(batches, number + 1)  # the only way to know
                        is_last = ahead is END
                    course.batch = number
                    self.completes_step = completes_step(number, accumulate, is_last)
                    if is_shown:
                        self.show_batch(number, batch)
                    try:
                        yield batch
                    except GeneratorExit:
                        self._leave_by(sys._getframe().f_back)
                        raise
                    batch = None  # else two are in memory while the next one is made
                    number += 1
                    if self.completes_step:
                        course.use(lap, number, length, start)
                        leaves = boundary.pass_step() and self._ends()
                        if leaves or boundary.step == self.total:
                            if len(self.running) == 1:
                                self.finish()
                            return
                        if is_last and length is None:
                            break
                course.end_lap(lap, feed.state())
                if session.ranks is not None and lap.goal is None:
                    session.ranks.show_lap(lap.epoch, lap.number, number)
                if session.phases.follows_loops:
                    session.saver.rest_at(boundary.step)
            finally:
                cursor.close(feed)
                del batches  # with it go the workers that do not outlive a pass

    def show_batch(self, number: int, batch: Any) -> None:
        """Let a proof see this batch, and other ranks compare it."""
        observer, ranks = self._session.observer, self._session.ranks
        if observer is not None:
            observer.batch(number, batch)
        if ranks is not None:
            ranks.show_batch(batch)

    # -- steps of a loop that the script writes ---------------------------------------

    def pass_by_hand(self) -> bool:
        """`run.boundary()`."""
        session, boundary = self._session, self._boundary
        if self.running and not self.is_between_passes:
            raise HoldfastError(
                f"run.boundary() inside {self.running[-1].name}(), which passes the boundaries "
                "itself.\nUse one of the two."
            )
        if self.running and not self._has_warned:
            self._has_warned = True
            say(
                "run.boundary() inside run.epochs(): where in the epoch a step stands cannot be "
                "known, so an interrupted epoch starts over.\n"
                "Loop over run.batches(loader), which knows, or keep the position in the state."
            )
        if not session.found.is_released:
            self._generators = None  # the step that ends here has drawn from them already
            session.found.release()
        self.is_by_hand = not self.running
        if session.ruling.over is not None and not self.running:
            return session.ruling.was_ended_before()  # this step does not count
        if not boundary.words[IN_LOOP]:
            self._enter()
        leaves = boundary.pass_step()
        if leaves and session.stops.stopped is None:
            self.finish()
        elif leaves and not self.running:
            self.leave()
        return leaves

    def note_made(self) -> None:
        """Values were given, or an optimizer has stepped: the step counts if the loop ends now."""
        self._made_at = self._boundary.step

    def note_optimizer(self, optimizer: Any) -> None:
        if not self._session.phases.rests:
            self.note_made()
            self._session.saver.forgotten.note_optimizer(optimizer, self._boundary.step)

    # -- the end ----------------------------------------------------------------------

    def end_by_script(self) -> None:
        """`run.finish()`."""
        if self.running:
            self._session.ruling.end_by_script()
            self._pass_made_step()
            self._boundary.poll_soon()  # for a script that does not leave its loop
        self.finish()

    @uninterruptible
    def finish(self) -> None:
        session, boundary, folder = self._session, self._boundary, self._session.spec.folder
        ruling, stops, step = session.ruling, session.stops, boundary.step
        if ruling.over is not None and self.finished_at == step and not self.running:
            return  # a rule has ended the training, and has said so
        if not self.running and step == session.found.resumed_from:
            say(f"{folder}: finished at step {step}; nothing left to train.")
            self.leave()
            return
        ruling.judge_the_end()
        boundary.words[DONE] = 1
        with children_deferred():
            is_saved = session.saver.save_and_wait(step, "finished", is_last=False)
        if ruling.bad is not None:
            raise ruling.stop_bad()
        if stops.error is not None:
            raise stops.error
        if not is_saved:
            say(f"{folder}: trained to step {step}, but the last checkpoint was not made.")
            raise Stopped(_errors.NOT_DURABLE, "the last checkpoint was not made", step)
        stops.postpone()
        self.finished_at = step
        session.attempt.journal("finished", step=step, total=self.total or step)
        say(f"{folder}: trained to step {step}; the last checkpoint is durable.")
        if not self.running:
            self.leave()

    def _ends(self) -> bool:
        """A boundary says to leave: True if a rule has ended the training well."""
        if self._session.stops.stopped is not None:
            raise self._session.stops.stopped
        return True

    def is_complete(self) -> bool:
        """True at the last boundary: a stop would interrupt nothing."""
        if self.total is not None and self._boundary.step >= self.total:
            return True
        return self.epochs_total is not None and self.cursor.course.epoch >= self.epochs_total

    def _has_made(self, steps: int | None) -> bool:
        """True, with a line, if earlier attempts made all steps of a loop."""
        step = self._boundary.step
        if steps is None or step < steps:
            return False
        made = say_reached(step, steps)
        say(f"{self._session.spec.folder}: finished at step {made}; nothing left to train.")
        self.reach(is_passed_over=True)
        return True

    def _is_passed_over(self) -> bool:
        """True if a rule had ended the training in an earlier attempt."""
        if not self._session.ruling.was_ended_before():
            return False
        self.reach(is_passed_over=True)
        return True

    # -- entering and leaving ---------------------------------------------------------

    @contextlib.contextmanager
    def _loop(self, name: str, total: int | None) -> Iterator[None]:
        """Note a running loop, which ends with step `total`."""
        self._session.phases.refuse(name)
        outer = self.running[-1].name if self.running else None
        if outer is not None and (outer, name) != ("run.epochs", "run.batches"):
            remedy = "Put the inner one into `with run.phase('eval'):`, where it counts no steps."
            if "run.steps" in (name, outer) or name == "run.epochs":
                remedy = "Use `for epoch in run.epochs(n): for batch in run.batches(loader):`."
            raise HoldfastError(
                f"{name}() inside {outer}(): a step of the inner loop would be saved in the "
                f"middle of a step of the outer one.\n{remedy}"
            )
        mark = LoopMark(name)
        self.running.append(mark)
        self.total = total
        self.is_by_hand = False
        self._enter()
        if outer is None:
            self._session.stops.resume_postponed()
            self.reach()
        try:
            yield
        finally:
            if outer is None:
                self.total = None
            # A script that breaks out of a loop and keeps its iterator may end it at any time.
            if mark in self.running:
                del self.running[self.running.index(mark) :]
                if not self.running:
                    self.leave()

    @uninterruptible
    def _enter(self) -> None:
        session, words = self._session, self._boundary.words
        if words[IN_LOOP]:
            return
        if self._generators is not None:
            # The script has drawn between `with` and the loop, as it did in the first attempt.
            self.restore_generators()
            if not self.cursor.course.is_on_the_way:
                self._generators = None
        words[DONE] = 0
        session.guard.defer(True)  # first: signals must not interrupt our own work
        begin_loop(words)
        if session.attempt.rank == 0:
            session.progress.begin()

    @uninterruptible
    def leave(self) -> None:
        # The loop's generator may be closed after the run, or by a forked child.
        session = self._session
        if not session.is_open or os.getpid() != session.attempt.pid:
            return
        self._boundary.words[IN_LOOP] = 0
        session.progress.close()
        session.guard.defer(False)

    def _leave_by(self, frame: FrameType | None) -> None:
        """A frame closes a loop: if the script leaves it, the last step is kept."""
        is_ours = self._session.is_open and os.getpid() == self._session.attempt.pid
        if is_ours and (left := frame_that_leaves(frame)) is not None:
            self.keep_left(left)

    @uninterruptible
    def keep_left(self, frame: FrameType | None = None) -> None:
        """The script has left its loop by itself: have the last complete step in memory."""
        course, feed, session = self.cursor.course, self.cursor.feed, self._session
        if session.ruling.over is not None or course.is_on_the_way:
            return  # kept already, or nothing was trained in this attempt
        step = self._boundary.step
        if self.left_at != step:  # else the loop inside was left just now
            is_made = self._made_at == step or course.position.is_over
            if self.running[-1].name == "run.epochs" and is_made:
                self._pass_epoch_end()
            elif not self._pass_made_step():
                if feed is not None and feed.state() is not None:
                    return  # a loader that keeps its own position is after the current batch
                if self._made_at < 0 and (frame is None or has_acted(frame)):
                    return  # arrays may have changed since the boundary, unseen
        if session.stops.stopped is None and session.ruling.over is None:
            self.left_at = step = self._boundary.step
            session.saver.rest_at(step, at_any_cost=len(self.running) == 1)

    def _pass_made_step(self) -> bool:
        """A loop ends within a step: the step counts if it was made."""
        is_whole = self.completes_step or self.cursor.lap is None
        if self._made_at != self._boundary.step or not is_whole:
            return False
        self.cursor.use_batch_at_hand()
        self._boundary.pass_step()
        return True

    # -- the way to the stored position -----------------------------------------------

    @uninterruptible
    def reach(self, *, is_passed_over: bool = False) -> None:
        """Count the outermost loops: code between them may have run before the state was stored."""
        found = self._session.found
        self.number += 1
        if found.is_released:
            return
        if self.number < found.loop:
            found.remember(self._session.spec.state)
        elif is_passed_over or not self.cursor.course.is_on_the_way:
            self._arrive()

    @uninterruptible
    def _arrive(self) -> None:
        """At the stored position: restore the stored state."""
        session = self._session
        changed = session.found.put_back(session.spec.state)
        if changed:
            session.attempt.journal("put-back", names=changed)
        if self._generators is not None:
            restore_generators(self._generators)
            self._generators = None
        session.log.metrics.restore(session.found.metrics, session.found.best)
        session.ruling.judge.load(session.found.rules)

    def restore_generators(self) -> None:
        for lost in restore_generators(self._generators or {}):
            say(f"not restored: {lost}. The run goes on, but not to the same bits.")

    # -- where the session is ---------------------------------------------------------

    @property
    def is_between_passes(self) -> bool:
        """True inside an epoch, but outside its loops over data."""
        return bool(self.running) and self.running[-1].name == "run.epochs"

    def step_at_hand(self) -> int:
        """The step that is being made; after the last one of a pass, still that."""
        last, step = self._session.stops.last_step, self._boundary.step
        if last is not None:  # the signal came while its step was being saved
            return last
        if self.is_between_passes and self.cursor.course.position.is_over:
            return step
        return step + 1 if self.total is None else min(step + 1, self.total)

    def where(self) -> dict[str, Any]:
        """The position in data and loops, for a snapshot."""
        head = {
            "at_turn": self._boundary.at_epoch_end,
            "phases": self._session.phases.rhythm,
            "loop": self.number,
            "by_hand": self.is_by_hand,
            "rules": self._session.ruling.state(),
        }
        is_first_epoch = self.epochs_total is not None and self.cursor.course.epoch == 0
        return {
            "position": self.cursor.stored(),
            "head": head,
            # After it the script may hand over its first values.
            "in_first_epoch": is_first_epoch or self._boundary.at_epoch_end,
        }

    def standing(self) -> Standing:
        """For the progress line, which reads it in its own thread: nothing here waits."""
        session, cursor = self._session, self.cursor
        feed, epoch = cursor.feed, cursor.course.epoch
        newest = session.saver.newest
        return Standing(
            step=self._boundary.step,
            steps=self.total or self._steps_expected,
            epoch=None if self.epochs_total is None else epoch,
            epochs=self.epochs_total,
            batch=None if feed is None else cursor.course.batch,
            batches=None if feed is None else feed.length,
            phase=session.phases.name,
            metrics=session.log.metrics.glance(),
            memory_step=None if newest is None else newest.step,
            disk_step=session.durable_step(),
        )


@dataclass(eq=False)
class LoopMark:
    """A loop that is running, told apart from others of its name."""

    name: str


class Batches(Iterator[Any]):
    """An iterator over the batches that are left; its length is that of the loaders."""

    def __init__(self, batches: Generator[Any, None, None], sources: tuple[Any, ...]) -> None:
        self._batches = batches
        self._sources = sources

    def __iter__(self) -> Generator[Any, None, None]:
        return self._batches  # so that it is closed as soon as a loop over it is left

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        """All batches of a pass: the same number in every attempt."""
        return min(len(source) for source in self._sources)

    def __bool__(self) -> bool:
        return True

    def close(self) -> None:
        self._batches.close()


def frame_that_leaves(frame: FrameType | None) -> FrameType | None:
    """The frame that leaves the generator which `frame` is closing by `break` or `return`; or None.

    An exception that leaves a loop closes the generator too, and a step that failed is no step.
    """
    while frame is not None:
        code = frame.f_code
        if opcode.opname[code.co_code[frame.f_lasti]] in _LEAVING:
            return frame
        if not code.co_flags & inspect.CO_GENERATOR:
            return None
        frame = frame.f_back  # a generator around ours, such as tqdm's, that is closed itself
    return None


def has_acted(frame: FrameType) -> bool:
    """Whether code between the head of the loop and the place where it is left can act.

    `if step == 9: break` at the top of a loop only compares.
    """
    acts = False
    for each in dis.get_instructions(frame.f_code):
        if each.offset == frame.f_lasti:
            return acts and each.opname != "FOR_ITER"  # there the loop was at its head
        if each.opname == "FOR_ITER" and each.argval > frame.f_lasti:
            acts = False  # the head of a loop around that place
        elif each.opname.startswith(_ACTING) or each.argrepr in _IN_PLACE:
            acts = True
    return True


# -- Phases: work that passes no boundary, such as an evaluation -----------------------------------
# The boundary before a phase is in memory when the phase begins. So a stop inside leaves at once
# and loses nothing: the phase is repeated as a whole.


class Phases:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._words, self._guard = session.boundary.words, session.guard
        self._names: list[str] = []
        self._resting = 0  # phases that pass no boundary
        self._last_step = -1  # at which a phase began between steps
        self._every: int | None = None
        if session.found.phases is not None:
            self._last_step, self._every = session.found.phases[0] or 0, session.found.phases[1]
        self._has_rested = False  # in this epoch, outside its loops
        self._left_by: tuple[int, str] | None = None  # an exception, and the phase it came from
        self.follows_loops = True  # True until an epoch had none after its loops

    @property
    def name(self) -> str | None:
        return self._names[-1] if self._names else None

    @property
    def rests(self) -> bool:
        return self._resting > 0

    @property
    def expected_step(self) -> int:
        """The step before the next phase between steps, if they are regular."""
        return sys.maxsize if self._every is None else self._last_step + self._every

    def expect(self, step: int) -> None:
        """A phase will begin after this step, as a trainer knows."""
        self._every = step - self._last_step

    @property
    def rhythm(self) -> list[int | None]:
        """When phases come, for the next attempt."""
        return [self._last_step, self._every]

    def end_epoch(self) -> None:
        self.follows_loops, self._has_rested = self._has_rested, False

    def begin(self, name: str, *, trains: bool, step: int, is_amid_steps: bool) -> None:
        if not trains and not self._resting and self._words[IN_LOOP]:
            if is_amid_steps:
                # Between steps, the boundary before a phase is in memory only if it was expected.
                every, self._last_step = step - self._last_step, step
                self._every = every if every > 0 else self._every
            self._has_rested |= not is_amid_steps
            self._words[REST] = RESTS
            self._guard.leave = self._hear
        if not trains and not self._resting:
            begin_rest(self._words)
        self._names.append(name)
        self._resting += not trains
        self._session.keeper.send("phase", may_drop=True, name=name)
        if self._session.observer is not None:
            self._session.observer.phase(name)

    def end(self, *, trains: bool) -> None:
        name, error = self._names.pop(), sys.exc_info()[1]
        if error is not None and not self.was_left_by(error):
            # Not the exception itself, which would keep all that its frames hold.
            self._left_by = (id(error), name)
        self._resting -= not trains
        self._session.keeper.send("phase", may_drop=True, name=self.name)
        if not self._resting:
            self._guard.leave = None
            self._words[REST] = 0
            if not trains:
                end_rest(self._words)

    def was_left_by(self, error: BaseException) -> str | None:
        """The innermost phase that an exception has left."""
        known = self._left_by
        return known[1] if known is not None and known[0] == id(error) else None

    def refuse(self, what: str) -> None:
        """Refuse boundaries inside a phase that is to be repeated as a whole."""
        if self._resting:
            raise HoldfastError(
                f"{what}() inside run.phase({self.name!r}): a phase is repeated as a whole, so it "
                "has no boundaries.\n"
                f"If it trains, say so: run.phase({self.name!r}, trains=True)."
            )

    def _hear(self, number: int) -> Stopped:
        """In the signal handler: the exception that leaves the phase."""
        self._guard.leave = None  # only once: a second signal means something else
        self._words[REST] = HEARD
        return self._session.stops.leave_phase(number, self._session.boundary.step)
