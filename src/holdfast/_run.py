"""Run: the only file that knows the order of the stages.

open:      folder → attempt → newest good state → restore → keeper → signals
boundary:  request? → snapshot → order → (stop: wait until durable)
close:     last snapshot durable → goodbye → handlers put back
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import holdfast
from holdfast._custody.orders import Custody, Handle
from holdfast._custody.saver import Saver
from holdfast._errors import HoldfastError, RunIsLive, SaveFailed, SettingsError, Stopped
from holdfast._keeper.keep import Policy
from holdfast._leave import statuses
from holdfast._leave.bounded import bound_leaving, leave_at_once
from holdfast._leave.late import answer_late
from holdfast._leave.record import reason_of, record_exit, record_trouble, status_of
from holdfast._metrics import Metrics
from holdfast._record import journal
from holdfast._record.attempts import beating, cannot_write, claim, open_folder
from holdfast._resume.start import Start, resume
from holdfast._save.cadence import Cadence
from holdfast._save.capture import capture, restore_generators
from holdfast._save.control import BOUNDARY_NS, IN_LOOP, STEP
from holdfast._say import say, speak_plainly
from holdfast._settings import Settings
from holdfast._stop.guard import Guard, announce_signal
from holdfast._stop.request import StopRequest, stop_from_file

_LOOK_SECONDS = 0.1
_LEAVE_SECONDS = 60.0


class Run:
    """A training run that cannot be lost.

    >>> with holdfast.Run("runs/a", model=model, optimizer=optimizer) as run:  # doctest: +SKIP
    ...     for step in run.steps(10_000):
    ...         train_one_step()
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, settings: Settings | None = None, **state: Any
    ) -> None:
        speak_plainly()
        if settings is not None and not isinstance(settings, Settings):
            raise SettingsError(
                f"settings={settings!r} is a {type(settings).__name__}.\n"
                "Valid: holdfast.Settings(…), or None for the defaults."
            )
        self._folder = Path(folder)
        self._settings = settings or Settings()
        self._state = dict(state)
        capture(self._state)  # what cannot be stored is refused now, not at the first save
        self.step = 0
        self.attempt = 0
        self.resumed_from: int | None = None
        self._metrics = Metrics(self._settings.best_metric)
        self._asked: StopRequest | None = None
        self._trouble: HoldfastError | None = None
        self._is_open = False
        self._counts_itself = False
        self._total: int | None = None
        self._stopped: Stopped | None = None
        self._noted: list[int] = []
        self._announced = False
        self._generators: dict[str, Any] | None = None
        self._custody: Custody = None  # type: ignore[assignment]  # from opening on
        self._next_look = 0.0
        self._next_checkpoint_step = sys.maxsize

    @property
    def state(self) -> Mapping[str, Any]:
        """The state by name, as it was given or as it was restored."""
        return MappingProxyType(self._state)

    def update(self, **state: Any) -> None:
        """Hand over new values for state that cannot change in place, such as numbers.

        >>> run.update(best_loss=0.12)  # doctest: +SKIP
        """
        unknown = [name for name in state if name not in self._state]
        if unknown:
            raise HoldfastError(
                f"{unknown[0]} is not part of this run's state.\n"
                f"Give it to Run first; there is: {', '.join(self._state) or 'nothing'}."
            )
        capture(state)  # as in the beginning: what cannot be stored is refused now
        self._state.update(state)

    def log(self, **metrics: Any) -> None:
        """Note metrics of this step: for `keep_best`, the journal and `holdfast status`.

        >>> run.log(loss=loss, val_loss=0.3)  # doctest: +SKIP
        """
        if self._metrics.note(metrics):
            self.save(reason="best")

    def save(self, *, reason: str = "asked") -> Handle:
        """Ask for a checkpoint at the next boundary; the handle's `wait()` waits for it."""
        self._require_open()
        self._next_look = 0.0
        return self._saver.want(Handle(reason))

    def stop(self, reason: str = "run.stop()") -> None:
        """Ask the run to stop at the next boundary; from any thread."""
        self._asked = self._asked or StopRequest(str(reason)[:500], statuses.PERSON)
        self._next_look = 0.0

    def steps(self, total: int) -> Iterator[int]:
        """The steps that are left, up to `total` in the whole life of the run.

        >>> for step in run.steps(10_000):  # doctest: +SKIP
        ...     train_one_step()
        """
        if not isinstance(total, int) or isinstance(total, bool) or total < 0:
            raise SettingsError(f"steps({total!r}): the total is a whole number, 0 or more.")
        self._require_open()
        return self._steps(total)

    def _steps(self, total: int) -> Iterator[int]:
        if self.step >= total:
            say(f"{self._folder}: finished at step {self.step} of {total}; nothing left to train.")
            return
        self._total = total
        self._note("loop", attempt=self.attempt, step=self.step, total=total)
        self._counts_itself = True
        self._enter_loop()
        try:
            while self.step < total:
                yield self.step
                if self._pass_boundary():
                    assert self._stopped is not None
                    raise self._stopped
            self.finish()
        finally:
            self._leave_loop()
            self._counts_itself = False
            self._total = None

    def boundary(self) -> bool:
        """Say that a step is complete; True means: leave the loop now.

        At the end of a loop of your own call `run.finish()`; `run.steps` does it itself.
        """
        self._require_open()
        if self._counts_itself:
            raise HoldfastError(
                "run.boundary() inside run.steps(): run.steps passes the boundaries itself.\n"
                "Use one of the two."
            )
        self._generators = None  # the step that ends here has drawn from them already
        self._enter_loop()
        leave = self._pass_boundary()
        if leave:
            self._leave_loop()
        return leave

    def _pass_boundary(self) -> bool:
        self.step = step = self.step + 1
        now = time.monotonic()
        words = self._words
        words[STEP] = step
        words[BOUNDARY_NS] = int(now * 1e9)
        if now < self._next_look and step < self._next_checkpoint_step and not self._noted:
            return False
        return self._work(now)

    def _work(self, now: float) -> bool:
        """A boundary at which there is something to do, or to look after."""
        self._next_look = now + _LOOK_SECONDS
        self._custody.look_after_keeper()
        self._guard.mend(is_alone=not self._custody.has_keeper)
        if self._trouble is not None:
            raise self._trouble
        if self._total is None or self.step < self._total:  # else it is finished anyway
            request = self._guard.request() or self._asked
            if request is not None:
                self._stop_for(request)
                return True
        self._saver.pass_boundary(now, self.step)
        self._next_look = min(self._next_look, self._cadence.next_look())
        self._next_checkpoint_step = self._cadence.next_step()
        return False

    def _stop_for(self, request: StopRequest) -> None:
        """Make this boundary durable and note why the run leaves."""
        durable = self._saver.save_and_wait(self.step, f"stop: {request.reason}")
        status = request.status if durable else statuses.NOT_DURABLE
        self._stopped = Stopped(status, request.reason, self.step)
        self._note("stop", step=self.step, reason=request.reason, status=status)
        if durable:
            say(
                f"step {self.step} is durable; leaving with status {status} ({request.reason}). "
                "Start the same command again to go on."
            )
        self._guard.call_users_handler(request.number)

    def finish(self) -> None:
        """Say that training is complete: this step becomes durable, as the last one."""
        self._require_open()
        if not self._saver.save_and_wait(self.step, "finished"):
            raise SaveFailed(
                f"{self._folder}: trained to step {self.step}, but the last checkpoint was not "
                "made.\nMake room and start the same command again: little is left to repeat."
            )
        self._asked = None
        self._noted.clear()  # a stop that came in the last step is no interruption
        self._note("finished", step=self.step, total=self._total or self.step)
        say(f"{self._folder}: trained to step {self.step}; the last checkpoint is durable.")
        if not self._counts_itself:
            self._leave_loop()

    def _hear(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "noted":
            newest = self._saver.newest
            kept = None if newest is None else newest.step
            announce_signal(message["signal"], message["grace"], self.step + 1, kept)
        elif kind == "request" and message["request"] == "stop":
            self._asked = self._asked or stop_from_file(message["details"])
            say(f"asked to stop: {self._asked.reason}. Finishing step {self.step + 1}.")
        elif kind == "request":
            self._saver.want(Handle("holdfast save"))
        elif kind == "failed":
            say(f"a checkpoint could not be made: {message['error']}. It will be tried again.")
        elif kind == "fenced":
            text = f"{self._folder}: {message['error']}.\nThis process writes nothing any more."
            self._trouble = RunIsLive(text, pid=0, host="")
        elif kind == "leave":
            # If the keeper has written nothing, the trainer has, or an earlier attempt.
            step = message["step"] or self._custody.durable_step or self.resumed_from
            record = {"status": message["status"], "step": self.step, "durable_step": step}
            leave_at_once(self._layout, self.attempt, message["reason"], record)
        elif kind == "tick" and self._noted and not self._announced:
            self._announced = True
            announce_signal(self._noted[0], None, self.step + 1, None)
        self._next_look = 0.0

    def __enter__(self) -> Run:
        if self._is_open:
            raise HoldfastError(f"{self._folder}: this Run is open already.")
        self._layout, run_id = open_folder(self._folder)
        start = Start(self._layout, run_id, self._folder)
        self.attempt = 0
        try:
            self.attempt = claim(self._layout, self._folder, say)
            self._open(start, run_id)
        except BaseException as error:
            start.close()
            if self.attempt:
                self._abort(error)
            if isinstance(error, OSError):
                raise cannot_write(self._folder, error) from error
            raise
        return self

    def _open(self, start: Start, run_id: str) -> None:
        self._stopped = self._asked = self._trouble = None
        self._announced, self._next_look = False, 0.0
        with beating(self._layout, self.attempt):
            found = resume(start, self.attempt, self._state)
        self._generators = found.generators
        self.step = found.step
        self.resumed_from = found.resumed_from
        self._metrics.restore(found.metrics)
        settings = self._settings
        policy = Policy(
            layout=self._layout,
            run_id=run_id,
            attempt=self.attempt,
            line=found.line,
            keep_last=settings.keep_last,
            best=settings.best_metric,
            version=holdfast.__version__,
        )
        self._custody = Custody(policy, settings.grace_seconds, settings.signal_numbers, self._hear)
        self._words = self._custody.words
        self._words[STEP] = self.step
        self._cadence = Cadence(settings, time.monotonic(), self.step)
        self._saver = Saver(self._state, self._metrics, self._custody, self._cadence)
        found.hand_over(self._custody)
        self._next_checkpoint_step = self._cadence.next_step()
        self._pid = os.getpid()
        stacks = self._layout.stacks(self.attempt)
        self._guard = Guard(settings.signal_numbers, self._custody.wakeup, stacks)
        self._is_open = True
        self._guard.defer(False)
        self._noted = self._guard.noted
        self._note(
            "start",
            attempt=self.attempt,
            step=self.step,
            source=found.source,
            pid=self._pid,
            keep_last=settings.keep_last,
            keep_best=settings.keep_best,
        )
        if self._generators is not None:
            for lost in restore_generators(self._generators):
                say(f"not restored: {lost}. The run goes on, but not to the same bits.")

    def _enter_loop(self) -> None:
        if self._words[IN_LOOP]:
            return
        if self._generators is not None:
            # Again: what the script drew between `with` and the loop, it drew before too.
            restore_generators(self._generators)
            self._generators = None
        self._words[IN_LOOP] = 1
        self._guard.defer(True)

    def _leave_loop(self) -> None:
        # The loop's generator may be closed after the run, or by a forked child.
        if not self._is_open or os.getpid() != self._pid:
            return
        self._words[IN_LOOP] = 0
        self._guard.defer(False)

    def _record_exit(self, status: int, how: str, durable_step: int | None) -> None:
        record = {"status": status, "how": how, "step": self.step, "durable_step": durable_step}
        record_exit(self._layout, self.attempt, record)

    def _note(self, event: str, **fields: Any) -> None:
        journal.append(self._layout.journal, event, **fields)

    def _require_open(self) -> None:
        if not self._is_open:
            raise HoldfastError(
                f"{self._folder}: the run is not open.\nUse it as `with holdfast.Run(…) as run:`."
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid:
            return  # a forked child that leaves the block: the run is its parent's
        self._guard.defer(True)  # our own work is not to be cut in two
        durable = self._saver.keep_last("exception" if error is not None else "closed")
        leaving = error or self._stopped
        answered = len(self._noted)
        if self._stopped is None and not isinstance(error, Stopped):
            leaving = self._answer_late(error) or error
        if not durable and isinstance(leaving, Stopped | None):
            reason = leaving.reason if leaving is not None else "closed"
            leaving = Stopped(statuses.NOT_DURABLE, reason, self.step)
        self._record_exit(status_of(leaving), reason_of(leaving), self._custody.durable_step)
        self._close(leaving)
        self._stopped = None  # else whoever catches it would keep it for ever
        if leaving is not None and leaving is not error:
            raise leaving from error
        for number in self._noted[answered:] if leaving is None else ():
            signal.raise_signal(number)  # it came while we were closing: let it act now

    def _answer_late(self, error: BaseException | None) -> Stopped | None:
        request = self._guard.request() or self._asked
        asked = None if request is None else (request.reason, request.status)
        durable_step = self._custody.durable_step
        if durable_step is None:
            durable_step = self.resumed_from
        stopped = answer_late(asked, error, self.step, durable_step)
        if stopped is not None and error is not None:
            record_trouble(self._layout, self.attempt, error)
        elif request is not None:
            self._guard.call_users_handler(request.number)
        return stopped

    def _close(self, error: BaseException | None) -> None:
        seconds = self._settings.grace_seconds or _LEAVE_SECONDS
        if isinstance(error, Stopped):
            self._custody.close(leaving=(error.status, seconds))
            bound_leaving(error, seconds, self._custody.stay)
        else:
            self._custody.close()
        self._saver.close()
        self._guard.remove()
        self._custody.release()
        self._is_open = False

    def _abort(self, error: BaseException) -> None:
        """Opening failed: leave the run as it was found."""
        self._record_exit(status_of(error), f"could not start: {reason_of(error)}", None)
        if self._custody is not None:
            self._custody.close()
        if self._is_open:
            self._guard.remove()
            self._is_open = False
