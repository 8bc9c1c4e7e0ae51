"""How much time a run has: what a signal leaves, and the end of its job."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast._keeper.storage import Storage
from holdfast._keeper.trainer import Trainer
from holdfast._store.memory import control

if TYPE_CHECKING:
    from holdfast._keeper.decider import Decider
    from holdfast._keeper.job import JobWatch

_TERM_GRACE_SECONDS = 10.0
_WARNING_GRACE_SECONDS = 30.0
# What a stop by the clock leaves besides step and save: for agreement, exit and requeue.
_EXIT_SECONDS = 10.0
_LEAST_SECONDS = 20.0
_DECAY_PER_POLL = 0.9995  # four polls a second: half of it in six minutes


class StepPace:
    """How long a step takes, on the safe side: the longest of recent ones."""

    def __init__(self) -> None:
        self.step_seconds: float | None = None
        self._seen: tuple[float, int] | None = None

    def rest(self) -> None:
        """No step is being made."""
        self._seen = None

    def observe(self, now: float, step: int, boundary_ns: int) -> None:
        """Record the trainer's step within its loop."""
        before, self._seen = self._seen, (now, step)
        if before is None or boundary_ns == 0:
            return
        if step > before[1]:
            # The mean: the observed step may have taken longer than those in between.
            seconds = (now - before[0]) / (step - before[1])
        else:
            seconds = now - max(before[0], boundary_ns / 1e9)
            self._seen = before
        self.step_seconds = max(seconds, _DECAY_PER_POLL * (self.step_seconds or 0.0))


@dataclass(eq=False)
class TimeLimit:
    """The end of the job, against what a step and its save take."""

    job: JobWatch | None
    _grace_seconds: float | None
    _trainer: Trainer
    _storage: Storage
    _journal: Callable[..., Any]
    pace: StepPace = field(default_factory=StepPace)
    _is_over: bool = False
    _has_warned: bool = False

    def is_requeued(self) -> bool:
        """True once the job is requeued: SLURM then ends what is left of this attempt."""
        return self.job is not None and self.job.is_requeued()

    def grace_of(self, number: int) -> float | None:
        """The seconds that a signal leaves; None: no limit, as a person waits."""
        if self._grace_seconds is not None or number == signal.SIGINT:
            return self._grace_seconds
        known = self.job.grace_of(number) if self.job is not None else None
        if known is not None:
            return known
        is_end = number in (signal.SIGTERM, signal.SIGHUP)
        return _TERM_GRACE_SECONDS if is_end else _WARNING_GRACE_SECONDS

    def needed_seconds(self) -> float:
        """For the current step, its save, and the exit."""
        needed = (self.pace.step_seconds or 0.0) + 2 * (self._storage.save_seconds or 0.0)
        return max(_LEAST_SECONDS, needed + _EXIT_SECONDS)

    def poll(self, now: float, decider: Decider) -> None:
        """Stop in time for the job's end: SLURM's warning can be lost."""
        words = self._trainer.words
        if words[control.IN_LOOP] and not words[control.REST]:
            self.pace.observe(now, int(words[control.STEP]), int(words[control.BOUNDARY_NS]))
        else:
            self.pace.rest()
        if self.job is None or self._trainer.is_leaving:
            return
        from holdfast._environment.slurm.controller import EndingCause  # only where there is a job

        self.job.poll(now)
        left = self.job.seconds_left()
        if left is not None:
            may_stop = not self._is_over and not decider.is_stopping
            if may_stop and self.job.is_at_its_end(self.needed_seconds()):
                self._is_over = True
                self._journal("job-ends", seconds_left=round(left, 1))
                decider.on_time_short(EndingCause.TIME_LIMIT.value, left)
            else:
                decider.on_time_left(left)
        status = decider.stop_status()
        if status is not None and not self._trainer.stays:
            self.job.requeue_in_time(status, self._storage.durable_step)
        self._warn_of_short_warning()

    def _warn_of_short_warning(self) -> None:
        """Once it is measured: does a save fit into the time that SLURM's warning leaves?"""
        warning = None if self.job is None else self.job.warning
        save_seconds = self._storage.save_seconds
        if self._has_warned or warning is None or save_seconds is None:
            return
        needed = (self.pace.step_seconds or 0.0) + save_seconds
        if needed > warning:
            self._has_warned = True
            self._trainer.tell.short_warning(warning=warning, needed=needed)
