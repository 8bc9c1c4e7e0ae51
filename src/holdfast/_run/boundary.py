"""What happens at a boundary, between two optimizer steps.

request? → snapshot → order → (stop: wait until durable)
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast import _errors
from holdfast._adapters.metrics import Metrics
from holdfast._environment import variables
from holdfast._environment.slurm.job import find_job
from holdfast._errors import HoldfastError, SettingsError, Stopped
from holdfast._run.data.course import Course, Lap
from holdfast._run.data.feed import Feed
from holdfast._run.data.feeds import Feeds
from holdfast._run.data.loops import LoopMark, is_left_by_script
from holdfast._run.exit.messages import say_leaving
from holdfast._run.exit.record import ExitRecord
from holdfast._run.keeper_events import Hearing
from holdfast._run.phases import Phases
from holdfast._run.progress import Progress, Standing
from holdfast._run.ranks.world import Launcher
from holdfast._run.resume.start import Resumed
from holdfast._run.saving.cadence import Cadence
from holdfast._run.saving.job import JobSide
from holdfast._run.saving.keeper_client import Custody, Handle
from holdfast._run.saving.rank_orders import Crew
from holdfast._run.saving.saver import Saver
from holdfast._run.signals.children import children_unheard
from holdfast._run.signals.guard import Guard
from holdfast._run.signals.hosted import as_the_script_means
from holdfast._run.witness.observer import RunObserver
from holdfast._settings import Settings, checked
from holdfast._state.capture import refuse_unstorable, restore_generators
from holdfast._store.folder import journal
from holdfast._store.folder.errand import current as current_errand
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.requests import StopRequest, request_from_signal
from holdfast._store.memory import control
from holdfast._store.memory.control import BOUNDARY_NS, DONE, DUE, IN_LOOP, MARK, STEP, mark_of
from holdfast._text import say, speak_plainly
from holdfast.rules import Rule
from holdfast.rules._judge import Judge, checked_rule

_LOOK_SECONDS = 0.1


class Boundaries(Hearing):
    """The working part of a run that is open: boundaries, and what is heard in between."""

    # From opening on:
    _layout: RunLayout
    _words: Any  # shared with the keeper
    _cadence: Cadence
    _saver: Saver
    _guard: Guard
    _phases: Phases
    _found: Resumed
    _eye: RunObserver | None  # only while `holdfast prove` watches
    _crew: Crew | None  # where there are several ranks
    _pid: int
    _thread: int
    #: Whether the batch that `run.batches` gave last completes an optimizer step.
    completes_step: bool = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *unnamed: Any,
        settings: Settings | None = None,
        stop_when: Rule | None = None,
        **state: Any,
    ) -> None:
        speak_plainly()
        if unnamed:
            raise SettingsError(
                f"holdfast.Run({str(folder)!r}, …): there is a {type(unnamed[0]).__name__} without "
                "a name.\nName all state: "
                "holdfast.Run(folder, model=model, optimizer=optimizer)"
            )
        errand = current_errand()
        place = as_the_script_means(Path(folder))
        self._folder = place if errand is None else errand.redirected(place)
        self._settings = checked(settings, state)
        self._rule = checked_rule(stop_when)
        self._judge = Judge(self._rule)
        self._state = dict(state)
        refuse_unstorable(self._state)  # now, and not at the first save
        self.step = 0
        self.attempt = 0
        self.resumed_from: int | None = None
        self._metrics = Metrics(self._settings.best_metric)
        self._listeners = []
        self._asked: StopRequest | None = None
        self._asked_late: StopRequest | None = None  # in the last step of a loop
        self._trouble: HoldfastError | None = None
        self._is_open = False
        self._loop_number = -1  # of the outermost loops in this life, the last one
        self._is_by_hand = False  # the last boundary was passed by run.boundary()
        self._loops: list[LoopMark] = []  # those that are running, the outermost first
        self._total: int | None = None
        self._epochs_total: int | None = None
        self._stopped: Stopped | None = None
        self._leaves_at = None
        self._noted: list[int] = []
        self._announced = False
        self._generators: dict[str, Any] | None = None
        self._course = Course()
        self._feeds = Feeds([])
        self._feed: Feed | None = None  # of the lap that is running
        self._feed_state: Any = None  # of the last one that keeps its own position
        self._lap: tuple[Lap, int | None, Any] | None = None  # that is running: see Course.use
        self._made_at = -1  # behind this step an optimizer stepped, or values were handed over
        self._left_at = -1  # the step at which the script has left a loop by itself
        self._steps_expected: int | None = None  # of all epochs, if their loops are alike
        self._progress = Progress(self._standing)
        self._has_course = False  # whether there is a position in data to speak of
        self._at_turn = False
        self._custody: Custody = None  # type: ignore[assignment]  # from opening on
        self._crew = None
        self._job: JobSide | None = None  # where a scheduler has started this one process
        self._in_job = find_job(variables.of_job()) is not None
        self._is_requeued = False
        self._launcher: Launcher | None = None  # whatever would start the run again by itself
        self._next_look = 0.0
        self._next_due_step = sys.maxsize

    def _pass_boundary(self) -> bool:
        self.step = step = self.step + 1
        self._at_turn = False
        now_ns = time.monotonic_ns()
        now = now_ns / 1e9
        words = self._words
        words[256 | step & 255] = (
            now_ns  # the ring of _store/memory/control.py; first: _keeper/series.py
        )
        words[STEP] = step
        words[BOUNDARY_NS] = now_ns
        words[MARK] = mark = 2 * step  # before the next word is read: see _keeper/ranks/member.py
        if (
            now < self._next_look
            and step < self._next_due_step
            and (self._crew is None or mark < words[DUE])
            and not self._noted
            and not (self._judge.is_there and self._judge.look(step))
        ):
            return False
        return self._work(now)

    def _work(self, now: float) -> bool:
        """A boundary at which there is something to do, or to look after."""
        with children_unheard() as deaths:
            leaves = self._save_or_stop(now)
            if leaves:
                deaths.clear()  # the step that needed them is made
        return leaves

    def _save_or_stop(self, now: float) -> bool:
        self._require_open()
        self._next_look = now + _LOOK_SECONDS
        self._custody.look_after_keeper()
        self._guard.mend(is_alone=not self._custody.has_keeper)
        if self._trouble is not None:
            raise self._trouble
        if self._eye is not None:
            self._show(self._eye)
        self._look_at_rules()
        if self._bad is not None:
            return self._leave_bad()  # before anything is saved
        if self._over is not None:
            return True
        request = self._request()
        if self._crew is not None:
            stops = self._act_together(self._crew, request, now)
        elif request is not None:
            self._stop_for(request)
            stops = True
        else:
            self._saver.pass_boundary(now, self.step)
            stops = False
        if self._bad is not None and not stops:  # the values of this step have come meanwhile
            return self._leave_bad()
        if stops:
            return True
        if self.step == self._phases.expected_step:
            self._saver.rest_at(self.step)
        self._next_look = min(self._next_look, self._cadence.next_look())
        if self._eye is not None:
            self._next_look = 0.0  # every boundary is to be seen
        self._set_next_due_step()
        return False

    def _request(self) -> StopRequest | None:
        """Who wants the run to stop at this boundary; a rule that ends it well comes first."""
        if self._is_complete():
            return None
        verdict = self._judge.verdict
        if verdict is not None:
            return StopRequest(verdict.reason, _errors.FINISHED)
        return self._guard.request(self._asked)

    def _act_together(self, crew: Crew, request: StopRequest | None, now: float) -> bool:
        """Ask what all ranks do at this boundary, and do it; True to leave."""
        mark = mark_of(self.step, self._at_turn)
        if request is not None:
            crew.wish("stop", request.reason, status=request.status, signal=request.number)
        elif (wanted := self._saver.wants_something()) is not None:
            crew.wish("save", wanted)
        decision = crew.at_boundary(mark)
        if decision is not None and self._is_stopped_as_bad(decision):
            return True
        if decision is not None and decision.kind == "stop" and not self._is_complete():
            # Heard only after a phase at the turn: what it rested on, all hold and save.
            request = StopRequest(decision.reason, decision.status, decision.signal)
            self._stop_for(request, is_saved=self._at_turn and decision.mark == mark - 1)
            return True
        decided = None if decision is None else decision.reason
        self._saver.pass_together(now, self.step, mark, decided)
        crew.show_waits()
        return False

    def _show(self, eye: RunObserver) -> None:
        """Let a proof see this boundary, and interrupt it here if it likes."""
        wants_checkpoint = eye.boundary(
            self.step,
            at_turn=self._at_turn,
            state=self._state,
            metrics=self._metrics.values(),
            position=self._course.position.to_tree() if self._has_course else None,
        )
        if wants_checkpoint:
            self._saver.want(Handle("prove"))

    def _show_batch(self, number: int, batch: Any) -> None:
        if self._eye is not None:
            self._eye.batch(number, batch)
        if self._crew is not None:
            self._crew.show_batch(batch)

    def _is_complete(self) -> bool:
        """Whether training is over anyway, so that there is nothing to stop any more."""
        if self._total is not None and self.step >= self._total:
            return True
        return self._epochs_total is not None and self._course.epoch >= self._epochs_total

    def _set_next_due_step(self) -> None:
        expected = self._phases.expected_step
        if expected <= self.step:
            expected = sys.maxsize
        self._next_due_step = min(self._cadence.next_step(), expected)

    def _where(self) -> dict[str, Any]:
        """Where in its data the run is, for the saver."""
        position = None
        if self._has_course:
            position = self._course.position.to_tree()
            if self._feed is not None and not self._course.position.is_over:
                self._feed_state = self._feed.state()
            # At the end of a lap the last one stays, unused: a layout that changes costs memory.
            position["state"] = self._feed_state
        head = {
            "at_turn": self._at_turn,
            "phases": self._phases.remember(),
            "loop": self._loop_number,
            "by_hand": self._is_by_hand,
            "rules": self._rules_state(),
        }
        return {"position": position, "head": head}

    def _standing(self) -> Standing:
        """For the progress line: read by its thread, so nothing here waits for anything."""
        newest, feed = self._saver.newest, self._feed
        in_epochs = self._epochs_total is not None
        return Standing(
            step=self.step,
            steps=self._total or self._steps_expected,
            epoch=self._course.epoch if in_epochs else None,
            epochs=self._epochs_total,
            batch=None if feed is None else self._course.batch,
            batches=None if feed is None else feed.length,
            phase=self._phases.name,
            metrics=self._metrics.glance(),
            memory_step=None if newest is None else newest.step,
            disk_step=self._durable_step(),
        )

    def _leave_from_rest(self, number: int) -> Stopped:
        """What leaves a phase, in the signal handler."""
        request = self._asked or request_from_signal(number)
        return Stopped(request.status, request.reason, self.step)

    def _stop_for(self, request: StopRequest, *, is_saved: bool = False) -> None:
        """Make this boundary durable and note why the run leaves."""
        if request.status == _errors.FINISHED:
            self._end_well(request.reason)
            return
        self._leaves_at = self.step
        durable = is_saved or self._saver.save_and_wait(
            self.step, f"stop: {request.reason}", is_last=True
        )
        if self._bad is not None:
            self._stop_bad()  # found, here or by another rank, while it was to be saved
            return
        status = request.status if durable else _errors.NOT_DURABLE
        self._stopped = stopped = Stopped(status, request.reason, self.step)
        if self._job is not None:
            self._job.settle(stopped, request.number, self.step)
        self._note("stop", step=self.step, reason=stopped.reason, status=stopped.status)
        if durable:
            say_leaving(stopped, self.step, in_job=self._in_job)
        if self._job is not None:
            self._job.requeue(stopped)
        self._guard.call_users_handler(request.number)

    def _enter_loop(self) -> None:
        if self._words[IN_LOOP]:
            return
        if self._generators is not None:
            # What the script drew between `with` and the loop, it drew before too.
            self._restore_generators()
            if not self._course.is_on_the_way:
                self._generators = None
        self._words[DONE] = 0
        self._guard.defer(True)  # first: a signal that acts at once would cut the rest in two
        control.begin_loop(self._words)
        if self._crew is None or self._crew.rank == 0:
            self._progress.begin()

    def _leave_loop(self) -> None:
        # The loop's generator may be closed after the run, or by a forked child.
        if not self._is_open or os.getpid() != self._pid:
            return
        self._words[IN_LOOP] = 0
        self._progress.close()
        self._guard.defer(False)

    def _pass_made_step(self) -> bool:
        """A loop ends within a step: the step counts if it was made."""
        if self._made_at != self.step or not (self._lap is None or self.completes_step):
            return False
        if self._lap is not None:
            lap, length, start = self._lap
            self._course.use(lap, self._course.batch + 1, length, start)
        self._pass_boundary()
        return True

    def _hear_optimizer(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        if not self._phases.rests:
            self._made_at = self.step
            self._saver.forgotten.note_optimizer(optimizer, self.step)

    def _leave_by(self, frame: FrameType | None) -> None:
        """A frame closes a loop: if the script leaves it, the last step is kept."""
        is_ours = self._is_open and os.getpid() == self._pid
        if is_ours and is_left_by_script(frame):
            self._keep_left()

    def _keep_left(self) -> None:
        """The script has left its loop by itself: have the last complete step in memory."""
        course, feed = self._course, self._feed
        if self._over is not None or course.is_on_the_way:
            return  # kept already, or nothing was trained in this life
        if self._left_at != self.step:  # else the loop inside was left just now
            is_made = self._made_at == self.step or course.position.is_over
            if self._loops[-1].name == "run.epochs" and is_made:
                self._pass_turn()
            elif not self._pass_made_step() and feed is not None and feed.state() is not None:
                return  # a loader that keeps its own position is behind the batch at hand
        if self._stopped is None and self._over is None:
            self._left_at = self.step
            self._saver.rest_at(self.step, at_any_cost=len(self._loops) == 1)

    def _reach_loop(self, *, is_passed_over: bool = False) -> None:
        """Count the outermost loops: code between them may have run before the state was stored."""
        self._loop_number += 1
        if self._found.is_released:
            return
        if self._loop_number < self._found.loop:
            self._found.look(self._state)
        elif is_passed_over or not self._course.is_on_the_way:
            self._arrive()

    def _is_passed_over(self) -> bool:
        """Whether a loop is, since a rule had ended the training in an earlier life."""
        if not self._is_ended_before():
            return False
        self._reach_loop(is_passed_over=True)
        return True

    def _restore_generators(self) -> None:
        for lost in restore_generators(self._generators or {}):
            say(f"not restored: {lost}. The run goes on, but not to the same bits.")

    def _arrive(self) -> None:
        """Here the life before had been: everything is to be as it was stored."""
        changed = self._found.put_back(self._state)
        if changed:
            self._note("put-back", names=changed)
        if self._generators is not None:
            restore_generators(self._generators)
            self._generators = None
        self._metrics.restore(self._found.metrics, self._found.best)
        self._judge.load(self._found.rules)

    def _pass_turn(self) -> bool:
        raise NotImplementedError

    def _durable_step(self) -> int | None:
        step = self._custody.durable_step
        return self.resumed_from if step is None else step

    def _exit_record(self) -> ExitRecord:
        rank = 0 if self._crew is None else self._crew.rank
        return ExitRecord(self._layout, self.attempt, rank, self._launcher)

    def _note(self, event: str, **fields: Any) -> None:
        if self._crew is None or self._crew.rank == 0:  # one journal, with one hand
            fields.setdefault("attempt", self.attempt)
            journal.append(self._layout.journal, event, **fields)

    def _require_open(self) -> None:
        if not self._is_open:
            raise HoldfastError(
                f"{self._folder}: the run is not open.\nUse it as `with holdfast.Run(…) as run:`."
            )
