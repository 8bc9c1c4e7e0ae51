"""When to take a snapshot and when a checkpoint: arithmetic on measured costs."""

from __future__ import annotations

import statistics
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from holdfast._run.past import FIRST_SECONDS, Lives, expected_mtbf, live_interval
from holdfast._settings import Settings

# -- checkpoint_every="auto": the interval between checkpoints, from what they cost and the deaths.
# Asked once for each checkpoint, and never at a boundary without one. What a checkpoint costs is
# the time for which it stops training, and what its writing slows down, where enough steps are made
# meanwhile to see that.


_INTERVALS_REMEMBERED = 8
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
        self._writes: deque[float] = deque(maxlen=_INTERVALS_REMEMBERED)
        self._slowed: deque[float] = deque(maxlen=_INTERVALS_REMEMBERED)

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


_SHORTEST_SECONDS = 0.05
_FIRST_PAUSE_SECONDS = 0.1  # the first snapshot of a life is cold, and says little of the next
_CREDIT_SECONDS = 0.5  # stall that a life may be ahead of its share
_REMEMBERED = 8
_SMALL_SECONDS = 0.02
_REST_SHARE = 0.05


class Cadence:
    """Decides at each boundary; times are of one monotonic clock, in seconds.

    Between snapshots that usually stall training for c seconds, c / max_overhead
    seconds pass, so that they cost no more than that share of the run's time. One
    that took longer (a cold start, another process's turn) is paid off over the next
    ones: a pause of seconds after it would be lost by a kill. So a life is never more
    than half a second of stall ahead of its share. The first snapshot of a life is not paid
    off: it finds its tensors and their devices for the first time, and that comes once.
    """

    def __init__(
        self, settings: Settings, now: float, step: int, tempo: Tempo | None = None
    ) -> None:
        self._max_overhead = max_overhead = settings.max_overhead
        self._checkpoint_seconds = settings.checkpoint_seconds
        self._checkpoint_steps = settings.checkpoint_steps
        self._tempo = None
        if settings.is_auto:
            self._tempo = tempo or Tempo(Lives(), now)
            self._checkpoint_seconds = self._tempo.seconds
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)
        self._next_snapshot = now if max_overhead > 0 else float("inf")
        self._paid_until = now
        self._last_snapshot = now
        self._last_checkpoint = now
        self._last_checkpoint_step = step

    @property
    def snapshot_seconds(self) -> float | None:
        """The time between snapshots, once one was measured; None while unknown or off."""
        if not self._costs or self._max_overhead == 0:
            return None
        return max(_SHORTEST_SECONDS, self._expected_cost() / self._max_overhead)

    @property
    def counts_steps(self) -> bool:
        """Whether checkpoints come by the number of steps, and not by the clock."""
        return self._checkpoint_steps is not None

    def next_look(self) -> float:
        """The first moment at which a timed snapshot or checkpoint can be due."""
        if self._checkpoint_seconds is None:
            return self._next_snapshot
        return min(self._next_snapshot, self._last_checkpoint + self._checkpoint_seconds)

    def next_step(self) -> int:
        """The step at which a checkpoint is due by count."""
        every = self._checkpoint_steps
        if every is None:
            return sys.maxsize
        return (self._last_checkpoint_step // every + 1) * every

    def snapshot_due(self, now: float) -> bool:
        return now >= self._next_snapshot

    def affords_rest(self, now: float) -> bool:
        """Whether a snapshot may be taken before its turn, since no boundary comes for a while.

        A small one always; a large one if it costs a small share of the time since the last, or
        if all time may go into snapshots.
        """
        if self._next_snapshot == float("inf"):
            return False
        if self._max_overhead >= 1:
            return True
        if not self._costs or self._expected_cost() <= _SMALL_SECONDS:
            return True
        return now - self._last_snapshot >= self._expected_cost() / _REST_SHARE

    def checkpoint_due(self, now: float, step: int) -> bool:
        if self._checkpoint_steps is not None:
            return step >= self.next_step()
        assert self._checkpoint_seconds is not None
        return now - self._last_checkpoint >= self._checkpoint_seconds

    def took_snapshot(self, now: float, seconds: float) -> None:
        """A snapshot ended at `now` and had stalled training for `seconds`."""
        self._costs.append(seconds)
        self._last_snapshot = now
        pause = self.snapshot_seconds
        if pause is None:
            return
        if len(self._costs) == 1:
            self._next_snapshot = now + min(pause, _FIRST_PAUSE_SECONDS)
            return
        self._paid_until = max(self._paid_until, now) + seconds / self._max_overhead
        credit = _CREDIT_SECONDS / self._max_overhead
        self._next_snapshot = max(now + pause, self._paid_until - credit)

    def missed_snapshot(self, now: float) -> None:
        """There was no slot for it: the next try is soon, and not at every boundary."""
        self._next_snapshot = max(self._next_snapshot, now + _SHORTEST_SECONDS)

    def forget_snapshots(self) -> None:
        """There is no memory for them."""
        self._next_snapshot = float("inf")

    def took_checkpoint(self, now: float, step: int, seconds: float | None = None) -> None:
        """One was begun; `seconds` is how long training has waited, if it wrote by itself."""
        self._last_checkpoint = now
        self._last_checkpoint_step = step
        if seconds is None and self._costs:
            seconds = self._expected_cost()
        if self._tempo is not None and seconds is not None:
            self._checkpoint_seconds = self._tempo.settle(now, seconds)

    def wrote_checkpoint(self, writing: Writing, now: float, step: int) -> None:
        """The one before was durable a while ago."""
        if self._tempo is not None:
            self._tempo.note_written(writing, now, step)

    def _expected_cost(self) -> float:
        return sorted(self._costs)[(len(self._costs) - 1) // 2]
