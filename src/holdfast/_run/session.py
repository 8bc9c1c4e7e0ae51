"""One life of a run: the only file that knows the order of the stages.

open:      folder → attempt → newest good state → restore → keeper → signals
boundary:  request? → snapshot → order → (stop: wait until durable)
close:     last snapshot durable → goodbye → handlers put back
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from holdfast import _errors
from holdfast._environment import variables
from holdfast._environment.slurm.job import is_lonely_task
from holdfast._errors import HoldfastError, Stopped, is_interactive
from holdfast._run.attempts_ended import close_forgotten, note_closed, note_open
from holdfast._run.boundary import Boundaries
from holdfast._run.data.course import Course
from holdfast._run.data.feeds import Feeds
from holdfast._run.exit.bounded import bound_leaving, die_if_terminated, goes_on
from holdfast._run.exit.exception_record import Scene, is_failure, leave_words, look_for_graphs
from holdfast._run.exit.followers import end_followers
from holdfast._run.exit.messages import (
    answer_late,
    say_in_memory,
    say_leaving,
    say_unseen_fit,
    say_verdict,
)
from holdfast._run.exit.record import reason_of, status_of
from holdfast._run.phases import Phases
from holdfast._run.ranks.party import Party, come_together, leave_again, stopped_before
from holdfast._run.ranks.world import World, find_launcher, find_world
from holdfast._run.resume.from_mirror import MirrorSide
from holdfast._run.resume.start import Start, resume
from holdfast._run.saving.forgotten_state import hear_optimizers
from holdfast._run.saving.job import JobSide, start_facts
from holdfast._run.saving.keeper_client import Custody
from holdfast._run.saving.keeper_config import begin_cadence, grace_of, hang_policy
from holdfast._run.saving.rank_orders import join_crew, prepare_ranks
from holdfast._run.saving.saver import Saver
from holdfast._run.signals.children import children_unheard
from holdfast._run.signals.guard import Guard
from holdfast._run.witness.observer import open_run_observer
from holdfast._store.commit.checkpoint import Policy
from holdfast._store.folder.attempts import beating, cannot_write, claim, open_folder
from holdfast._store.folder.opened import tell_leader
from holdfast._store.format.version import __version__
from holdfast._store.memory.control import DONE, MARK, STAYS, STEP, WORK, mark_of, private_words
from holdfast._text import say, speak_as

_LEAVE_SECONDS = 60.0


class Attempt(Boundaries):
    """Opens and closes a run; `Run` adds the loops."""

    _party: Party | None = None  # the ranks that opened it together
    _grace_seconds: float | None = None  # after a SIGTERM
    _hear_no_optimizers: Callable[[], None]  # any more

    def __enter__(self) -> Self:
        if self._is_open and not is_interactive():
            raise HoldfastError(f"{self._folder}: this Run is open already.")
        close_forgotten(self._folder)
        goes_on()
        world = find_world()
        speak_as(world.rank)
        self._mirror = MirrorSide(self._folder, self._settings, world.rank)
        self._layout, run_id = open_folder(self._folder)
        start = Start(self._layout, run_id, self._folder)
        self.attempt, self._party = 0, None
        try:
            self.attempt = self._take_attempt(world, run_id)
            self._open(start, run_id)
        except BaseException as error:
            start.close()
            if self._party is not None:
                self._party.fail(error)
            if self.attempt:
                self._abort(error)
            if isinstance(error, OSError):
                raise cannot_write(self._folder, error) from error
            raise
        return self

    def _take_attempt(self, world: World, run_id: str) -> int:
        """Which life of the run this is; with other ranks, the same for all of them."""
        self._launcher = find_launcher()
        if world.is_alone:
            stopped = stopped_before(self._layout, self._launcher)
            if stopped is not None:
                raise leave_again(self._folder, stopped, say)
            return claim(self._layout, self._folder, say)
        self._party = come_together(world, self._layout, run_id, self._state, self._folder)
        return self._party.take_attempt(self._layout, self._folder, say)

    def _open(self, start: Start, run_id: str) -> None:
        self._stopped = self._asked = self._asked_late = self._trouble = None
        self._announced, self._next_look, self._made_at, self._left_at = False, 0.0, -1, -1
        party = self._party
        led = variables.led_folder()
        if led is not None:
            tell_leader(led, self._folder, self.attempt, 0 if party is None else party.rank)
        with beating(self._layout, self.attempt, is_needed=party is None or party.rank == 0):
            self._mirror.bring(start, party)
            found = resume(start, self.attempt, self._state, party)
        self._found = found
        self._generators = found.generators
        self._course = Course(found.position, 1 if party is None else party.size)
        self._has_course = found.position is not None
        self._feed_state = None if found.position is None else found.position.state
        self._at_turn = False
        self._loop_number, self._is_by_hand = -1, False
        self._loops.clear()  # a loop of the life before may not be closed yet
        ranks = (0, 1) if party is None else (party.rank, party.size)
        self._feeds = Feeds(list(self._state.values()), *ranks)
        self.step = found.step
        self.resumed_from = found.resumed_from
        self._metrics.restore(found.metrics, found.best)
        self._begin_rules(found, party)
        settings = self._settings
        policy = Policy(
            layout=self._layout,
            run_id=run_id,
            attempt=self.attempt,
            line=found.line,
            keep_last=settings.keep_last,
            best=settings.best_metric,
            version=__version__,
            rank=0 if party is None else party.rank,
            size=1 if party is None else party.size,
            requeue_limit=settings.requeue_limit,
            **hang_policy(settings),
            **self._mirror.policy(),
            notices=variables.notices() if settings.notices == "auto" else settings.notices,
        )
        self._crew = None
        self._grace_seconds = grace_of(settings)
        terms = (policy, self._grace_seconds, settings.signal_numbers, self._hear)
        if party is None:
            self._custody = Custody(*terms)
        else:
            self._custody, self._crew = join_crew(party, *terms)
        self._job = None
        if party is None and self._custody.has_keeper and self._in_job and not is_interactive():
            self._job = JobSide(self._custody)  # a kernel and its server go on: no requeue
        self._words, self._logged = self._custody.words, self._custody.logged
        self._words[STEP] = self.step
        self._words[MARK] = mark_of(self.step, bool(found.at_turn))
        self._words[STAYS] = is_interactive()
        self._cadence = begin_cadence(settings, policy, self.step, self._note)
        self._saver = Saver(
            *(self._state, self._metrics, self._custody, self._cadence, self._where, self._crew),
            is_bad=self._is_bad,
        )
        found.hand_over(self._custody)
        self._pid, self._thread = os.getpid(), threading.get_ident()
        stacks = self._layout.stacks(self.attempt, policy.rank)
        self._guard = Guard(
            settings.signal_numbers, self._custody.wakeup, stacks, in_job=self._in_job
        )
        if party is not None:
            self._guard.wait_for_others()
        if self._launcher is not None:
            self._guard.set_children_apart()
        self._eye = open_run_observer(self._folder, self.step)
        self._phases = Phases(
            self._words, self._guard, self._custody, self._leave_from_rest, self._eye
        )
        self._phases.recall(found.phases)
        self._hear_no_optimizers = hear_optimizers(self._hear_optimizer)
        self._set_next_due_step()
        self._is_open = True
        note_open(self._folder, self)
        # A warning waits until all ranks are here: it would end this one, and leave the others.
        self._guard.defer(False, holds_warnings=True)
        self._noted = self._guard.noted
        self._warn_of_lonely_task(policy.rank)
        self._note(
            "start",
            attempt=self.attempt,
            step=self.step,
            source=found.source,
            pid=self._pid,
            keep_last=settings.keep_last,
            keep_best=settings.keep_best,
            **start_facts(settings),
            **({} if party is None else {"ranks": party.size}),
        )
        if party is not None and self._crew is not None:
            party.exchange("open", None)  # nobody trains before all can be asked to stop
            party.opened()
            prepare_ranks(self._state, self._crew)
        if self._generators is not None and found.by_hand:
            # A loop of the user's own begins where nobody sees it.
            self._restore_generators()
        self._words[WORK] = 0
        self._guard.defer(False)

    def _warn_of_lonely_task(self, rank: int) -> None:
        """Where the keeper does not outlive this process, say so once."""
        if rank or not self._custody.has_keeper:
            return
        how = ""
        if os.getpid() == 1:
            how = "this is process 1 of its container"
        elif is_lonely_task(variables.of_job(), os.getpid(), os.getppid()):
            how = "SLURM ends a task with its first process"
        if how:
            say(
                f"{how}: a kill -9 would end the keeper too, and cost the work since the last "
                "checkpoint.\nStart it as: holdfast run -- python … (under SLURM: srun holdfast "
                "run -- python …)."
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid or not self._is_open:
            return  # a forked child that leaves its parent's block, or closed as forgotten
        with children_unheard() as deaths:
            self._leave(error)
            deaths.clear()

    def _leave(self, error: BaseException | None) -> None:
        self._guard.defer(True)  # our own work is not to be cut in two
        self._progress.close()
        self._guard.rest(None)
        if error is None and self._loop_number < 0 and not self._is_by_hand:
            say_unseen_fit(self._state, self.step)
        words = {}
        if error is not None and is_failure(error) and self._is_unasked():
            words = leave_words(error, self._scene(error))
        if error is None and self._stopped is None and self._is_bad():
            self._stop_bad()  # the values of the last steps have come after the last boundary
        if error is None and self._stopped is None and self._loops:
            self._keep_left()  # the script holds the iterator of the loop that it has left
        durable = self._keep_last(error)
        if error is None and self.resumed_from is None and self.step > 1:
            for line in self._saver.forgotten.look_at_numbers():
                say(line)
        leaving = self._stopped or error
        answered = len(self._noted)
        if self._stopped is None and not isinstance(error, Stopped):
            leaving = self._answer_late(error, durable) or error
            if error is not None and leaving is error:
                say_verdict(error, words, self._folder)
            if isinstance(leaving, Stopped) and durable and self._job is not None:
                self._job.requeue(leaving)
        elif self._stopped is None and durable:
            self._tell_of_rest(error)
        if not durable and isinstance(leaving, Stopped | None):
            reason = leaving.reason if leaving is not None else "closed"
            leaving = Stopped(_errors.NOT_DURABLE, reason, self.step)
            if self._custody.has_keeper and self._saver.newest is not None:
                say_in_memory(leaving, self._saver.newest.step)
        durable_step = self._custody.durable_step
        how = f"finished: {self._over}" if leaving is None and self._over else reason_of(leaving)
        self._record_exit(status_of(leaving), how, durable_step, asked=isinstance(leaving, Stopped))
        end_followers(self._followers, status_of(leaving))
        self._mirror.part(self._layout, durable_step, lambda: len(self._noted) > answered)
        self._close(leaving)
        self._stopped = None  # else whoever catches it would keep it for ever
        self._leaves_at = None
        if isinstance(leaving, Stopped):
            die_if_terminated(leaving)
        if leaving is not None and leaving is not error:
            raise leaving from error
        for number in self._noted[answered:] if leaving is None else ():
            signal.raise_signal(number)  # it came while we were closing: let it act now

    def _is_unasked(self) -> bool:
        """Whether nobody has asked the run to leave: a stop may well break what it interrupts."""
        return self._stopped is None and self._guard.request(self._asked) is None

    def _hear(self, message: dict[str, Any]) -> None:
        self._mirror.heed(message)
        super()._hear(message)
        if message["kind"] == "memory" and "of_rank" not in message:  # of this process
            look_for_graphs(self._scene(None), self._thread)

    def _scene(self, error: BaseException | None) -> Scene:
        """Where the run stands, as an exception leaves it or now."""
        party, steps = self._party, self.step - (self.resumed_from or 0)
        # A loop that an exception has left is over by now.
        is_in_loop = self._loop_number >= 0 or self._is_by_hand
        return Scene(
            *(self._layout, self.attempt),
            rank=0 if party is None else party.rank,
            ranks=1 if party is None else party.size,
            step=self.step,
            steps=steps,
            batch=self._course.batch,
            phase=None if error is None else self._phases.was_left_by(error),
            where="loop" if is_in_loop and not self._words[DONE] else "outside",
            state=self._state,
            counters=self._custody.first_counters,
        )

    def _keep_last(self, error: BaseException | None) -> bool:
        """Make the last boundary in memory durable, with all ranks if there are several."""
        if self._crew is None:
            return self._saver.keep_last("exception" if error is not None else "closed")
        leaving = self._stopped or error
        clean = isinstance(leaving, Stopped | None)
        bye = self._crew.say_farewell(
            clean=clean,
            status=status_of(leaving),
            reason=reason_of(leaving) if clean else f"failed: {reason_of(leaving)}",
            error=None if clean else reason_of(leaving),
        )
        if bye is not None and bye["step"] is not None:
            self._custody.durable_step = bye["step"]
        if bye is not None and bye.get("said"):
            self._is_requeued = True
            say(bye["said"])
            if isinstance(leaving, Stopped):
                leaving.change(bye["status"], leaving.reason)
        return True

    def _tell_of_rest(self, stopped: BaseException | None) -> None:
        """A signal has left a phase, or the code around the loops: say what that costs."""
        assert isinstance(stopped, Stopped)
        if self._job is not None:
            number = self._noted[0] if self._noted else 0
            self._job.settle(stopped, number, self._custody.durable_step)
        self._note("stop", step=self.step, reason=stopped.reason, status=stopped.status)
        say_leaving(stopped, self._durable_step(), in_job=self._in_job)
        if self._job is not None:
            self._job.requeue(stopped)
        if self._noted:
            self._guard.call_users_handler(self._noted[0])

    def close_forgotten(self) -> None:
        """Close a run that was opened without `with`, before its folder is opened again."""
        self._guard.defer(True)
        self._guard.rest(None)
        self._progress.close()
        self._saver.keep_last("closed")
        self._record_exit(_errors.FINISHED, "left open", self._custody.durable_step)
        end_followers(self._followers, _errors.FINISHED)
        self._close(None)

    def _answer_late(self, error: BaseException | None, durable: bool) -> Stopped | None:
        request = self._guard.request(self._asked)
        if request is not None and error is None and request.is_by_clock:
            request = None  # all was done in time
        stopped = None
        if request is not None:
            stopped = Stopped(request.status, request.reason, self.step)
            if self._job is not None and durable:
                self._job.settle(stopped, request.number, self._custody.durable_step)
        is_left = self._left_at == self.step != self._finished_at
        answer_late(stopped, error, self.step, self._durable_step(), is_left=is_left)
        if stopped is not None and error is not None:
            self._exit_record().write_trouble(error)
        elif request is not None:
            self._guard.call_users_handler(request.number)
        return stopped

    def _close(self, error: BaseException | None) -> None:
        self._hear_no_optimizers()
        seconds = self._grace_seconds or _LEAVE_SECONDS
        if isinstance(error, Stopped):
            self._custody.close(leaving=(error.status, seconds))
            bound_leaving(error, seconds, self._custody.stay)
        else:
            self._custody.close()
        self._saver.close()
        if self._is_requeued or (self._job is not None and self._job.is_requeued):
            self._guard.heed_no_more(signal.SIGTERM)  # SLURM ends what is left; we are leaving
        self._guard.remove()
        self._words, self._next_look = private_words(), 0.0  # for a loop that is still alive
        self._logged = None
        self._custody.release()
        self._found.release()
        if self._custody.durable_step is not None:
            self._found.clear_memory()
        self._feeds = Feeds([])  # with the old ones go the workers that outlive an epoch
        if self._eye is not None:
            self._eye.close()
        if self._party is not None:
            self._party.close()
        self._is_open = False
        note_closed(self._folder)

    def _abort(self, error: BaseException) -> None:
        """Opening failed: leave the run as it was found."""
        if is_failure(error):
            party = self._party
            rank, ranks = (0, 1) if party is None else (party.rank, party.size)
            scene = Scene(self._layout, self.attempt, rank, ranks, where="opening")
            say_verdict(error, leave_words(error, scene), self._folder)
        self._record_exit(status_of(error), f"could not start: {reason_of(error)}", None)
        if self._custody is not None:
            self._custody.close()
        if self._is_open:
            self._guard.remove()
            self._is_open = False
            note_closed(self._folder)

    def _record_exit(
        self, status: int, how: str, durable_step: int | None, *, asked: bool = False
    ) -> None:
        record = {"status": status, "how": how, "step": self.step, "durable_step": durable_step}
        self._exit_record().write(record, asked=asked)
