"""The boundary between two optimizer steps.

request? → snapshot → order → (stop: wait until durable)
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from holdfast import _errors
from holdfast._errors import HoldfastError, Stopped
from holdfast._run.exit.leaving import say_leaving
from holdfast._run.saving.cadence import Cadence
from holdfast._run.saving.keeper_client import Handle
from holdfast._run.saving.rank_orders import RankAgreement
from holdfast._run.signals.handlers import (
    Guard,
    announce_signal,
    children_deferred,
    uninterruptible,
)
from holdfast._store.folder.requests import StopRequest, request_from_signal
from holdfast._store.memory.control import (
    BOUNDARY_NS,
    DUE,
    MARK,
    STEP,
    mark_of,
    pass_epoch_end,
    private_words,
)

if TYPE_CHECKING:
    from holdfast._run.session import Session


_POLL_SECONDS = 0.1


class Boundary:
    """Counts the steps of a session, and saves or stops between two of them."""

    def __init__(self, session: Session, step: int) -> None:
        self._session = session
        self.step = step
        self.at_epoch_end = False
        self.words: Any = private_words()  # shared with the keeper while the session is open
        self._next_poll = 0.0
        self._next_due_step = sys.maxsize
        self._cadence: Cadence | None = None
        self._ranks: RankAgreement | None = None
        self._judge = session.ruling.judge
        self._signals: list[int] = []

    def share(self, words: Any, ranks: RankAgreement | None, *, at_epoch_end: bool) -> None:
        self.words, self._ranks = words, ranks
        words[STEP] = self.step
        words[MARK] = mark_of(self.step, at_epoch_end)

    def begin(self, cadence: Cadence, signals: list[int]) -> None:
        self._cadence, self._signals = cadence, signals
        self.set_next_due_step()

    def close(self) -> None:
        """A loop may outlive its session: let its next boundary find that it is closed."""
        self.words, self._next_poll = private_words(), 0.0

    # -- every step -------------------------------------------------------------------

    @uninterruptible
    def pass_step(self) -> bool:
        """A step is complete; True to leave the loop."""
        self.step = step = self.step + 1
        self.at_epoch_end = False
        now_ns = time.monotonic_ns()
        now = now_ns / 1e9
        words = self.words
        # First the ring of times in _store/memory/control.py: see _keeper/series.py.
        words[256 | step & 255] = now_ns
        words[STEP] = step
        words[BOUNDARY_NS] = now_ns
        words[MARK] = mark = 2 * step  # before DUE is read: see _keeper/ranks/member.py
        if (
            now < self._next_poll
            and step < self._next_due_step
            and (self._ranks is None or mark < words[DUE])
            and not self._signals
            and not (self._judge.is_there and self._judge.look(step))
        ):
            return False
        return self._save_or_stop(now)

    @uninterruptible
    def pass_epoch_end(self) -> bool:
        """An epoch is over, in which steps were made; True to leave the loop."""
        self.at_epoch_end = True
        now = time.monotonic()
        pass_epoch_end(self.words, int(now * 1e9))
        self.words[MARK] = self.mark()
        return self._save_or_stop(now)

    def mark(self) -> int:
        """The number of this boundary, in which an epoch's end counts too."""
        return mark_of(self.step, self.at_epoch_end)

    def poll_soon(self) -> None:
        """Look for work at the next boundary; from any thread."""
        self._next_poll = 0.0

    def set_next_due_step(self) -> None:
        assert self._cadence is not None
        expected = self._session.phases.expected_step
        if expected <= self.step:
            expected = sys.maxsize
        self._next_due_step = min(self._cadence.next_step(), expected)

    # -- a boundary at which something may be due -------------------------------------

    def _save_or_stop(self, now: float) -> bool:
        with children_deferred() as deaths:
            leaves = self._act(now)
            if leaves:
                deaths.clear()  # the step that needed these children is complete
        return leaves

    def _act(self, now: float) -> bool:
        session = self._session
        session.require_open()
        ruling, stops, saver = session.ruling, session.stops, session.saver
        self._next_poll = now + _POLL_SECONDS
        session.keeper.check_keeper()
        session.guard.reinstall(is_alone=not session.keeper.has_keeper)
        if stops.error is not None:
            raise stops.error
        if session.observer is not None:  # a proof sees this boundary, and interrupts it here
            wants_checkpoint = session.observer.boundary(
                self.step,
                at_epoch_end=self.at_epoch_end,
                state=session.spec.state,
                metrics=session.log.metrics.values(),
                position=session.loops.cursor.tree(),
            )
            if wants_checkpoint:
                saver.want(Handle("prove"))
        ruling.poll()
        if ruling.bad is not None:
            return ruling.leave_bad()  # before anything is saved
        if ruling.over is not None:
            return True
        request = self._request()
        if session.ranks is not None:
            leaves = self._act_together(session.ranks, request, now)
        elif request is not None:
            self._stop_for(request)
            leaves = True
        else:
            saver.pass_boundary(now, self.step)
            leaves = False
        if leaves:
            return True
        if ruling.bad is not None:  # the values of this step have arrived meanwhile
            return ruling.leave_bad()
        if self.step == session.phases.expected_step:
            saver.rest_at(self.step)
        assert self._cadence is not None
        self._next_poll = min(self._next_poll, self._cadence.next_due())
        if session.observer is not None:
            self.poll_soon()  # a proof sees every boundary
        self.set_next_due_step()
        return False

    def _request(self) -> StopRequest | None:
        """The stop to make at this boundary; a rule that ends the training well comes first."""
        if self._session.loops.is_complete():
            return None
        verdict = self._judge.verdict
        if verdict is not None:
            return StopRequest(verdict.reason, _errors.FINISHED)
        return self._session.stops.request()

    def _act_together(self, ranks: RankAgreement, request: StopRequest | None, now: float) -> bool:
        """Do what all ranks have agreed to do at this boundary; True to leave."""
        session, mark = self._session, self.mark()
        if request is not None:
            ranks.request("stop", request.reason, status=request.status, signal=request.number)
        elif session.saver.wanted:
            ranks.request("save", session.saver.wanted[0].reason)
        decision = ranks.at_boundary(mark)
        if decision is not None and session.ruling.is_stopped_as_bad(decision):
            return True
        if decision is not None and decision.what == "stop" and not session.loops.is_complete():
            # Received after a phase at the epoch's end: all ranks hold and save the step before it.
            request = StopRequest(decision.reason, decision.status, decision.signal)
            self._stop_for(request, is_saved=self.at_epoch_end and decision.mark == mark - 1)
            return True
        decided = None if decision is None else decision.reason
        session.saver.pass_together(now, self.step, mark, decided)
        ranks.show_waits()
        return False

    def _stop_for(self, request: StopRequest, *, is_saved: bool = False) -> None:
        """Make this boundary durable and record why the run leaves."""
        session = self._session
        ruling, stops, job = session.ruling, session.stops, session.job
        if request.status == _errors.FINISHED:
            ruling.end_well(request.reason)
            return
        stops.begin_last_save(self.step)
        durable = is_saved or session.saver.save_and_wait(
            self.step, f"stop: {request.reason}", is_last=True
        )
        if ruling.bad is not None:
            ruling.stop_bad()  # found, here or by another rank, while it was being saved
            return
        status = request.status if durable else _errors.NOT_DURABLE
        stopped = stops.stop(Stopped(status, request.reason, self.step))
        if job is not None:
            job.resolve_stop(stopped, request.number, self.step)
        session.attempt.journal(
            "stop", step=self.step, reason=stopped.reason, status=stopped.status
        )
        if durable:
            say_leaving(stopped, self.step, in_job=session.attempt.in_job)
        if job is not None:
            job.requeue(stopped)
        session.guard.handlers.call_users(request.number)


# -- Why a session is to stop, and what it leaves with ---------------------------------------------
# Requests come from signals, from the keeper's thread and from `run.stop()`; the next boundary acts
# on them. Only this class writes its fields.


class StopState:
    """Everything that says that one session is asked to stop, or has stopped."""

    def __init__(self) -> None:
        self.asked: StopRequest | None = None  # other than by a signal
        self.signals: list[int] = []  # that wait for a boundary; the signal handler appends
        self.error: HoldfastError | None = None  # to raise at the next boundary
        self.stopped: Stopped | None = None  # what the session leaves with
        self.last_step: int | None = None  # the step that is being saved as the last one
        self._asked_late: StopRequest | None = None  # in the last step of a loop
        self._is_announced = False
        self._guard: Guard | None = None

    def watch(self, guard: Guard) -> None:
        self._guard, self.signals = guard, guard.noted

    def ask(self, request: StopRequest, *, replaces: bool = False) -> None:
        """Stop at the next boundary. An earlier request stays, unless it is only a deadline."""
        if self.asked is None or self.asked.is_by_clock or replaces:
            self.asked = request

    def fail(self, error: HoldfastError) -> None:
        """Raise this at the next boundary. An earlier error stays: it is the cause."""
        self.error = self.error or error

    def request(self) -> StopRequest | None:
        return self.asked if self._guard is None else self._guard.request(self.asked)

    def announce(self, step: int) -> None:
        """Say once which signal came, where no keeper does."""
        if self.signals and not self._is_announced:
            self._is_announced = True
            announce_signal(self.signals[0], step)

    # -- a loop ends ------------------------------------------------------------------

    def postpone(self) -> None:
        """The training is complete: a stop in its last step interrupts only a later loop."""
        self._asked_late, self.asked = self.request(), None
        self.signals.clear()

    def resume_postponed(self) -> None:
        self.asked, self._asked_late = self.asked or self._asked_late, None

    def leave_phase(self, number: int, step: int) -> Stopped:
        """The exception that leaves a phase; called in the signal handler."""
        request = self.asked or request_from_signal(number)
        return Stopped(request.status, request.reason, step)

    def begin_last_save(self, step: int) -> None:
        self.last_step = step

    def stop(self, stopped: Stopped) -> Stopped:
        self.stopped = stopped
        return stopped

    def forget(self) -> None:
        """Drop the exception: a script that keeps the run would keep its frames too."""
        self.stopped = self.last_step = None
