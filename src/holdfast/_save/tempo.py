"""checkpoint_every="auto": the interval between checkpoints, from what they cost and the deaths.

Asked once for each checkpoint, and never at a boundary without one. What a checkpoint costs is
the time for which it stops training, and what its writing slows down, where enough steps are made
meanwhile to see that.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from holdfast._plan.rate import FIRST_SECONDS, Lives, expected_mtbf, live_interval

_REMEMBERED = 8
_ENOUGH_STEPS = 20  # so that one more or less is no news
_MUCH = 1.25


@dataclass(frozen=True)
class Writing:
    """The course of one checkpoint: where training stood when it began, and when it was durable."""

    began: float
    began_step: int
    ended: float
    ended_step: int

    def slowed_seconds(self, now: float, step: int) -> float:
        """The training lost while it was written, by the pace of the steps since."""
        during, since = self.ended_step - self.began_step, step - self.ended_step
        if min(during, since) < _ENOUGH_STEPS:
            return 0.0
        wanted = during * (now - self.ended) / since
        return min(max(self.ended - self.began - wanted, 0.0), self.ended - self.began)


class Tempo:
    """The interval, which is settled anew with each checkpoint; `tell` hears of large changes."""

    def __init__(
        self, lives: Lives, now: float, tell: Callable[[Tempo], None] = lambda _: None
    ) -> None:
        self.lives = lives
        self.seconds = FIRST_SECONDS
        self.cost_seconds = 0.0
        self.mtbf_seconds = expected_mtbf(lives.deaths, lives.seconds)
        self.is_known = False  # whether it was told once
        self._began = now
        self._tell = tell
        self._told = 0.0
        self._writes: deque[float] = deque(maxlen=_REMEMBERED)
        self._slowed: deque[float] = deque(maxlen=_REMEMBERED)

    def note_written(self, writing: Writing, now: float, step: int) -> None:
        """A checkpoint is durable, and training has gone on since."""
        self._writes.append(writing.ended - writing.began)
        self._slowed.append(writing.slowed_seconds(now, step))

    def settle(self, now: float, stall_seconds: float) -> float:
        """The time until the next checkpoint, after one that usually stops training so long."""
        slowed = statistics.median(self._slowed) if self._slowed else 0.0
        write = statistics.median(self._writes) if self._writes else 0.0
        self.cost_seconds = stall_seconds + slowed
        self.mtbf_seconds = expected_mtbf(
            self.lives.deaths, self.lives.seconds + max(0.0, now - self._began)
        )
        self.seconds = live_interval(self.cost_seconds, write, self.mtbf_seconds)
        if not self._told / _MUCH <= self.seconds <= self._told * _MUCH:
            self._told = self.seconds
            self._tell(self)
            self.is_known = True
        return self.seconds
