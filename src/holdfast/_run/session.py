"""One attempt of a run, from opening to closing: the only file that knows the order of the stages.

open:      folder → attempt → newest good state → restore → keeper → signals
boundary:  request? → snapshot → order → (stop: wait until durable)
close:     last snapshot durable → goodbye → handlers put back
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from holdfast import _errors
from holdfast._environment import variables
from holdfast._environment.slurm.job import is_lonely_task
from holdfast._errors import HoldfastError, Stopped, is_interactive
from holdfast._run.attempt import (
    LateLines,
    RunAttempt,
    RunSpec,
    line_of_changes,
    note_closed,
    note_open,
    write_start,
)
from holdfast._run.boundary import Boundary, StopState
from holdfast._run.exit import leaving
from holdfast._run.exit.leaving import ErrorContext, ExitRecord, reason_of, status_of, thread_errors
from holdfast._run.keeper_events import KeeperEvents
from holdfast._run.loops import Loops, Phases
from holdfast._run.metric_log import MetricLog
from holdfast._run.progress.line import Progress
from holdfast._run.ranks.world import find_world
from holdfast._run.resume.from_mirror import MirrorClient
from holdfast._run.resume.start import Resumed, Start, line_of_death, resume
from holdfast._run.ruling import Ruling
from holdfast._run.saving import keeper_client
from holdfast._run.saving.cadence import Cadence, begin_cadence
from holdfast._run.saving.keeper_client import JobClient, KeeperClient, start_facts
from holdfast._run.saving.rank_orders import RankAgreement, join_ranks, prepare_ranks
from holdfast._run.saving.saver import Saver
from holdfast._run.saving.script_state import watch_optimizers
from holdfast._run.signals.handlers import Guard, children_deferred, uninterruptible
from holdfast._run.witness.observer import RunObserver, open_run_observer
from holdfast._store.commit.write import Policy, is_replaced
from holdfast._store.folder.attempts import beating, cannot_write, open_folder, release
from holdfast._store.folder.supervised import tell_leader, tell_leader_of_modules
from holdfast._store.format.version import __version__
from holdfast._store.memory.control import DONE, STAYS, WORK
from holdfast._text import say, speak_as

_LEAVE_SECONDS = 60.0


class Session:
    # Made by `open`, in this order:
    mirror: MirrorClient
    attempt: RunAttempt
    found: Resumed
    log: MetricLog
    ruling: Ruling
    boundary: Boundary
    loops: Loops
    progress: Progress
    keeper: KeeperClient
    saver: Saver
    guard: Guard
    phases: Phases

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.stops = StopState()
        self.late = LateLines()
        self.ranks: RankAgreement | None = None  # where there are several
        self.job: JobClient | None = None  # where a scheduler has started this one process
        self.observer: RunObserver | None = None  # while `holdfast prove` watches
        self.is_open = False
        self._ignore_optimizers: Callable[[], None] | None = None

    # -- opening ----------------------------------------------------------------------

    @uninterruptible
    def open(self) -> None:
        folder, world = self.spec.folder, find_world()
        speak_as(world.rank)
        self.mirror = MirrorClient(folder, self.spec.settings, world.rank)
        layout, run_id = open_folder(folder)
        start = Start(layout, run_id, folder)
        self.attempt = RunAttempt(folder, layout, run_id)
        try:
            state = self.spec.state
            self.attempt.claim(world, state, lambda last: start.read_ahead(last, state))
            if not self.attempt.rank:
                self.late.write(lambda: write_start(self.attempt, self.spec.config))
            self._restore(start)
            self._start_keeper()
            cadence = self._start_saving()
            self._watch_signals(cadence)
            self._begin()
            led = variables.led_folder()
            if led is not None and variables.text("HOLDFAST_SPARE") == "1":
                tell_leader_of_modules(led)
            self.late.begin()
        except BaseException as error:
            start.close()
            if self.attempt.group is not None:
                self.attempt.group.fail(error)
            if self.attempt.number:
                self.late.begin()
                self._abort(error)
            if isinstance(error, OSError):
                raise cannot_write(folder, error) from error
            raise

    def _restore(self, start: Start) -> None:
        """Find the newest good state, and put it into the objects of the script."""
        spec, attempt = self.spec, self.attempt
        led = variables.led_folder()
        if led is not None:
            tell_leader(led, spec.folder, attempt.number, attempt.rank)
        with beating(attempt.layout, attempt.number, is_needed=attempt.rank == 0):
            self.mirror.fetch(start, attempt.group)
            found = resume(start, attempt.number, spec.state, attempt.group)
        self.found = found
        if not attempt.rank:
            dead = attempt.layout, spec.folder, attempt.number
            self.late.finders.append(lambda: line_of_death(*dead))
            if found.found is not None:
                before = found.found.attempt
                self.late.finders.append(lambda: line_of_changes(attempt, before))
        spec.metrics.restore(found.metrics, found.best)
        self.ruling = Ruling(self, found, found.step)
        self.log = MetricLog(spec.metrics, self.ruling.judge)
        self.boundary = Boundary(self, found.step)
        self.loops = Loops(self, found)
        self.progress = Progress(self.loops.standing)

    def _start_keeper(self) -> None:
        settings, attempt, found = self.spec.settings, self.attempt, self.found
        policy = Policy(
            layout=attempt.layout,
            run_id=attempt.run_id,
            attempt=attempt.number,
            line=found.line,
            keep_last=settings.keep_last,
            best=settings.best_metric,
            version=__version__,
            rank=attempt.rank,
            size=attempt.size,
            requeue_limit=settings.requeue_limit,
            **keeper_client.hang_policy(settings),
            **self.mirror.policy(),
            notices=variables.notices() if settings.notices == "auto" else settings.notices,
            keep_memory_seconds=keeper_client.keep_memory_of(settings, in_job=attempt.in_job),
        )
        receive = KeeperEvents(self).receive
        terms = (policy, keeper_client.grace_of(settings), settings.signal_numbers, receive)
        if attempt.group is None:
            self.keeper = KeeperClient(*terms)
        else:
            self.keeper, self.ranks = join_ranks(attempt.group, *terms)
        is_alone_in_job = attempt.group is None and attempt.in_job
        if is_alone_in_job and self.keeper.has_keeper and not is_interactive():
            self.job = JobClient(self.keeper)  # a kernel and its server go on: no requeue
        words = self.keeper.words
        self.boundary.share(words, self.ranks, at_epoch_end=found.at_epoch_end)
        self.log.keeper_log = self.keeper.logged
        words[STAYS] = is_interactive()

    def _start_saving(self) -> Cadence:
        spec, step = self.spec, self.boundary.step
        cadence = begin_cadence(
            spec.settings, self.keeper.policy, step, self.attempt.journal, self.keeper.words
        )
        self.saver = Saver(
            *(spec.state, spec.metrics, self.keeper, cadence, self.loops.where, self.ranks),
            *(self.ruling.is_bad, spec.settings),
            is_new=self.found.resumed_from is None,
        )
        self.found.hand_over(self.keeper, self.saver.snapshots)
        return cadence

    def _watch_signals(self, cadence: Cadence) -> None:
        spec, attempt = self.spec, self.attempt
        stacks = attempt.layout.stacks(attempt.number, attempt.rank)
        plan, numbers = self.keeper.plan, spec.settings.signal_numbers
        wakeup = -1 if plan is None else plan.signals_write  # signals reach the keeper there
        self.guard = Guard(numbers, wakeup, stacks, in_job=attempt.in_job)
        if attempt.group is not None:
            self.guard.leaves_when_nudged = True
        if attempt.launcher is not None:
            # It signals the whole process group.
            self.guard.sets_children_apart = True
        self.observer = open_run_observer(spec.folder, self.boundary.step)
        self.phases = Phases(self)
        self._ignore_optimizers = watch_optimizers(self.loops.note_optimizer)
        self.boundary.begin(cadence, self.guard.noted)
        self.is_open = True
        note_open(spec.folder, self)
        leaving.thread_journals[spec.folder] = attempt.journal
        # A warning waits until all ranks are here: it would end this one, and leave the others.
        self.guard.defer(False, holds_warnings=True)
        self.stops.watch(self.guard)

    def _begin(self) -> None:
        """Record the start, and wait for the other ranks."""
        spec, attempt, found = self.spec, self.attempt, self.found
        self._warn_of_lonely_task()
        attempt.journal(
            "start",
            step=self.boundary.step,
            source=found.source,
            pid=attempt.pid,
            keep_last=spec.settings.keep_last,
            keep_best=spec.settings.keep_best,
            **start_facts(spec.settings),
            **({} if attempt.group is None else {"ranks": attempt.size}),
        )
        if attempt.group is not None and self.ranks is not None:
            attempt.group.exchange("open", None)  # no rank trains before all can be stopped
            attempt.group.watch.is_over.set()
            prepare_ranks(spec.state, self.ranks)
        if found.by_hand and found.generators is not None:
            self.loops.restore_generators()  # no code of ours runs where the script's loop begins
        self.boundary.words[WORK] = 0
        self.guard.defer(False)

    def _warn_of_lonely_task(self) -> None:
        """Where the keeper does not outlive this process, say so once."""
        if self.attempt.rank or not self.keeper.has_keeper:
            return
        if os.getpid() == 1:
            how = "this is process 1 of its container"
        elif is_lonely_task(variables.of_job(), os.getpid(), os.getppid()):
            how = "SLURM ends a task with its first process"
        else:
            return
        say(
            f"{how}: a kill -9 would end the keeper too, and cost the work since the last "
            "checkpoint.\nStart it as: holdfast run -- python … (under SLURM: srun holdfast "
            "run -- python …)."
        )

    def _abort(self, error: BaseException) -> None:
        """Opening failed: leave the run as it was found."""
        attempt = self.attempt
        if leaving.is_failure(error):
            of = (attempt.layout, attempt.number, attempt.rank, attempt.size)
            context = ErrorContext(*of, where="opening", threads=thread_errors())
            words = leaving.record_exception(error, context)
            leaving.say_verdict(error, words, self.spec.folder)
        is_interrupt = isinstance(error, KeyboardInterrupt)
        how = "Ctrl-C" if is_interrupt else f"could not start: {reason_of(error)}"
        self._record_exit(status_of(error), how, None, asked=is_interrupt)
        if hasattr(self, "keeper"):
            self.keeper.close()
        if self.is_open:
            self.guard.remove()
            self.is_open = False
            note_closed(self.spec.folder)
            leaving.thread_journals.pop(self.spec.folder, None)
        self.late.finish()

    # -- while it is open -------------------------------------------------------------

    def require_open(self) -> None:
        if not self.is_open:
            raise not_open(self.spec)

    def durable_step(self) -> int | None:
        step = self.keeper.durable_step
        return self.found.resumed_from if step is None else step

    def exit_record(self) -> ExitRecord:
        attempt, rank = self.attempt, 0 if self.ranks is None else self.ranks.rank
        launcher = None if attempt.launcher is None else attempt.launcher.process
        return ExitRecord(attempt.layout, attempt.number, rank, launcher)

    def error_context(self, error: BaseException | None) -> ErrorContext:
        """Where the run stands, as an exception leaves it or now."""
        attempt, step, loops = self.attempt, self.boundary.step, self.loops
        # A loop that an exception has left is over by now.
        is_in_loop = loops.number >= 0 or loops.is_by_hand
        return ErrorContext(
            *(attempt.layout, attempt.number),
            rank=attempt.rank,
            ranks=attempt.size,
            step=step,
            steps=step - (self.found.resumed_from or 0),
            batch=loops.cursor.course.batch,
            phase=None if error is None else self.phases.was_left_by(error),
            where="loop" if is_in_loop and not self.boundary.words[DONE] else "outside",
            state=self.spec.state,
            counters=self.keeper.plan.counters if self.keeper.plan else None,
            threads=thread_errors(),
        )

    def leave_if_signaled(self) -> None:
        """Leave a phase that has just begun, if a signal came in the step before it."""
        newest, stops = self.saver.newest, self.stops
        is_held = newest is not None and newest.step == self.boundary.step
        if stops.signals and self.phases.rests and is_held and self.ranks is None:
            raise stops.leave_phase(stops.signals[0], self.boundary.step)

    # -- closing ----------------------------------------------------------------------

    @uninterruptible
    def close(self, error: BaseException | None) -> None:
        """Leave the run; raises what the script is to leave with, if it is not `error`."""
        if os.getpid() != self.attempt.pid or not self.is_open:
            return  # a forked child that leaves its parent's block, or closed as forgotten
        with children_deferred() as deaths:
            self._leave(error)
            deaths.clear()

    def close_forgotten(self) -> None:
        """Close a session that was opened without `with`, before its folder is opened again."""
        self.guard.defer(True)
        self.guard.leave = None
        self.progress.close()
        self.saver.keep_last("closed")
        self._record_exit(_errors.FINISHED, "left open", self.keeper.durable_step)
        self.log.end(_errors.FINISHED)
        self._release(None)

    def _leave(self, error: BaseException | None) -> None:
        stops, ruling, loops, folder = self.stops, self.ruling, self.loops, self.spec.folder
        step = self.boundary.step
        self.guard.defer(True)  # signals must not interrupt our own work
        self.progress.close()
        self.guard.leave = None
        if error is None and loops.number < 0 and not loops.is_by_hand:
            leaving.say_unseen_fit(self.spec.state, step)
        words = {}
        is_unasked = stops.stopped is None and stops.request() is None
        if error is not None and leaving.is_failure(error) and is_unasked:
            words = leaving.record_exception(error, self.error_context(error))
        left_at = None if error is None else leaving.left_at(error, self.error_context(error))
        if error is None and stops.stopped is None and ruling.is_bad():
            ruling.stop_bad()  # the values of the last steps arrived after the last boundary
        if error is None and stops.stopped is None and loops.running:
            loops.keep_left()  # the script holds the iterator of the loop that it has left
            step = self.boundary.step
        durable = self._keep_last(error)
        if error is None and self.found.resumed_from is None and step > 1:
            for line in self.saver.forgotten.check_numbers():
                say(line)
        outcome = stops.stopped or error
        answered = len(stops.signals)
        if stops.stopped is None and not isinstance(error, Stopped):
            outcome = self._answer_late(error, durable) or error
            if error is not None and outcome is error:
                leaving.say_verdict(error, words, folder)
            if isinstance(outcome, Stopped) and durable and self.job is not None:
                self.job.requeue(outcome)
        elif stops.stopped is None and durable:
            assert isinstance(error, Stopped)
            self._stop_outside_steps(error)
        if not durable and isinstance(outcome, Stopped | None):
            reason = outcome.reason if outcome is not None else "closed"
            outcome = Stopped(_errors.NOT_DURABLE, reason, step)
            if self.keeper.has_keeper and self.saver.newest is not None:
                layout = self.attempt.layout
                is_other = is_replaced(layout, self.attempt.run_id)
                is_removed = is_other or not layout.identity.exists()
                leaving.say_in_memory(outcome, self.saver.newest.step, is_removed=is_removed)
        durable_step = self.keeper.durable_step
        how = f"finished: {ruling.over}" if outcome is None and ruling.over else reason_of(outcome)
        left_at = left_at if outcome is error else None
        self._record_exit(
            *(status_of(outcome), how, durable_step, left_at), asked=isinstance(outcome, Stopped)
        )
        self.log.end(status_of(outcome))
        layout = self.attempt.layout
        self.mirror.finish(layout, durable_step, lambda: len(stops.signals) > answered)
        self._release(outcome)
        stops.forget()
        if isinstance(outcome, Stopped):
            leaving.die_if_terminated(outcome)
        if outcome is not None and outcome is not error:
            raise outcome from error
        for number in stops.signals[answered:] if outcome is None else ():
            signal.raise_signal(number)  # it came while we were closing: let it act now

    def _keep_last(self, error: BaseException | None) -> bool:
        """Make the last boundary in memory durable, with all ranks if there are several."""
        if self.ranks is None:
            return self.saver.keep_last("exception" if error is not None else "closed")
        outcome = self.stops.stopped or error
        clean = isinstance(outcome, Stopped | None)
        bye = self.ranks.say_farewell(
            clean=clean,
            status=status_of(outcome),
            reason=reason_of(outcome) if clean else f"failed: {reason_of(outcome)}",
            error=None if clean else reason_of(outcome),
        )
        if bye is not None and bye["step"] is not None:
            self.keeper.durable_step = bye["step"]
        if bye is not None and bye.get("said"):
            say(bye["said"])
            if isinstance(outcome, Stopped):
                outcome.change(bye["status"], outcome.reason)
        return True

    def _stop_outside_steps(self, stopped: Stopped) -> None:
        """A signal has left a phase, or the code around the loops: say what that costs."""
        number = self.stops.signals[0] if self.stops.signals else 0
        if self.job is not None:
            self.job.resolve_stop(stopped, number, self.keeper.durable_step)
        facts = {"reason": stopped.reason, "status": stopped.status}
        self.attempt.journal("stop", step=self.boundary.step, **facts)
        leaving.say_leaving(stopped, self.durable_step(), in_job=self.attempt.in_job)
        if self.job is not None:
            self.job.requeue(stopped)
        if number:
            self.guard.handlers.call_users(number)

    def _answer_late(self, error: BaseException | None, durable: bool) -> Stopped | None:
        """The stop that came after the last boundary, if one did; says what is durable."""
        request, step, loops = self.stops.request(), self.boundary.step, self.loops
        if request is not None and error is None and request.is_by_clock:
            request = None  # all was done in time
        stopped = None
        if request is not None:
            stopped = Stopped(request.status, request.reason, step)
            if self.job is not None and durable:
                self.job.resolve_stop(stopped, request.number, self.keeper.durable_step)
        is_left = loops.left_at == step != loops.finished_at
        leaving.answer_late(stopped, error, step, self.durable_step(), is_left=is_left)
        if stopped is not None and error is not None:
            self.exit_record().write_trouble(error)
        elif request is not None:
            self.guard.handlers.call_users(request.number)
        return stopped

    def _release(self, error: BaseException | None) -> None:
        assert self._ignore_optimizers is not None
        self._ignore_optimizers()
        seconds = self.keeper.grace_seconds or _LEAVE_SECONDS
        if isinstance(error, Stopped):
            self.keeper.close(leaving=(error.status, seconds))
            leaving.bound_leaving(error, seconds, self.keeper.cancel_leaving)
        else:
            self.keeper.close()
        self.saver.close()
        if any(each is not None and each.is_requeued for each in (self.ranks, self.job)):
            self.guard.ignore_from_now(signal.SIGTERM)  # SLURM ends what is left; we are leaving
        self.guard.remove()
        self.boundary.close()
        self.log.keeper_log = None
        if self.keeper.plan is not None:
            self.keeper.plan.close()
        self.found.release()
        if self.keeper.durable_step is not None:
            self.found.clear_memory()
        self.loops.cursor.release()
        if self.observer is not None:
            self.observer.close()
        if self.attempt.group is not None:
            self.attempt.group.close()
        self.late.finish()
        self.is_open = False
        note_closed(self.spec.folder)
        leaving.thread_journals.pop(self.spec.folder, None)

    def _record_exit(
        self,
        status: int,
        how: str,
        durable_step: int | None,
        left_at: list[list[Any]] | None = None,
        *,
        asked: bool = False,
    ) -> None:
        attempt = self.attempt
        if is_replaced(attempt.layout, attempt.run_id):
            release(attempt.layout, attempt.number)  # another run has this number there
            return
        step = self.boundary.step if hasattr(self, "boundary") else 0
        record = {"status": status, "how": how, "step": step, "durable_step": durable_step}
        more = {} if left_at is None else {"left_at": left_at}
        self.exit_record().write({**record, **more}, asked=asked)


def not_open(spec: RunSpec) -> HoldfastError:
    return HoldfastError(
        f"{spec.folder}: the run is not open.\nUse it as `with holdfast.Run(…) as run:`."
    )
