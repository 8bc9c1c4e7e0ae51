"""When to take a snapshot and when a checkpoint: arithmetic on measured costs."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from holdfast import _errors
from holdfast._settings import Settings
from holdfast._store.commit.write import Policy
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.memory.control import RING, RING_MASK
from holdfast._text import count, duration, say

# -- The interval between checkpoints in closed form -----------------------------------------------
# Young, "A first order approximation to the optimum checkpoint interval" (CACM 17, 1974), and
# Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (FGCS 22,
# 2006). `cost_seconds` is the training time that one checkpoint takes, `mtbf_seconds` the mean time
# between interruptions, which come at random. The interval is the training between two checkpoints.


def young_interval(cost_seconds: float, mtbf_seconds: float) -> float:
    """The interval at which checkpoints take as much time as is lost with interruptions.

    >>> round(young_interval(2.0, 10_000.0))
    200
    """
    return math.sqrt(2.0 * cost_seconds * mtbf_seconds)


def daly_interval(cost_seconds: float, mtbf_seconds: float) -> float:
    """The same to a higher order: a checkpoint may itself be interrupted.

    >>> round(daly_interval(2.0, 10_000.0), 1)
    198.7
    """
    if math.isinf(mtbf_seconds):
        return math.inf
    if cost_seconds >= 2.0 * mtbf_seconds:
        return mtbf_seconds
    ratio = cost_seconds / (2.0 * mtbf_seconds)
    series = 1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0
    return young_interval(cost_seconds, mtbf_seconds) * series - cost_seconds


# -- The expected time to the next death, and the interval that follows ----------------------------
# The prior is one death a day with the weight of half a death (Jeffreys' prior for a rate), so the
# run's own deaths soon count for more: two of them are four fifths of the estimate, and a week
# without one makes it fifteen times longer. At one death a day a checkpoint that costs half a
# second comes every five minutes, the default of `checkpoint_every`.


SHORTEST_SECONDS = 30.0
LONGEST_SECONDS = 3600.0
FIRST_SECONDS = 60.0  # until the first checkpoint has shown what it costs
_PRIOR_DEATHS = 0.5
_PRIOR_SECONDS = 43_200.0
_LEAST_COST_SECONDS = 0.001  # below it a measurement is noise
_WRITING_SHARE = 0.5  # of the time, at most, a checkpoint is being written


@dataclass(frozen=True)
class PastAttempts:
    deaths: int = 0
    seconds: float = 0.0


def expected_mtbf(deaths: int, seconds: float) -> float:
    """The mean time to the next death, by the prior and the run's own past.

    >>> expected_mtbf(0, 0.0) / 3600, expected_mtbf(2, 3600.0) / 3600
    (24.0, 5.2)
    """
    return (_PRIOR_SECONDS + seconds) / (_PRIOR_DEATHS + deaths)


def live_interval(cost_seconds: float, write_seconds: float, mtbf_seconds: float) -> float:
    """The training between two checkpoints, within sensible bounds.

    >>> round(live_interval(0.5, 2.0, 86_400.0)), live_interval(0.0, 0.0, 600.0)
    (294, 30.0)
    """
    best = daly_interval(max(cost_seconds, _LEAST_COST_SECONDS), mtbf_seconds)
    # A checkpoint begins when the previous one is on disk, and the disk has other work too.
    slowest = write_seconds / _WRITING_SHARE
    return max(slowest, min(LONGEST_SECONDS, max(SHORTEST_SECONDS, best)))


_MOST_ATTEMPTS = 200  # older ones ran on other machines


def read_past_attempts(layout: RunLayout, before: int) -> PastAttempts:
    """Read once, when a run is opened.

    An attempt that was asked to stop, or left by an exception, has made its state durable and is no
    death. One that was killed, or whose host is gone, is.
    """
    deaths, seconds = 0, 0.0
    for number in [each for each in layout.attempt_numbers() if each < before][-_MOST_ATTEMPTS:]:
        paths = (layout.exit(number), layout.heartbeat(number), layout.death(number))
        ended, *others = map(read_json, paths)
        deaths += ended.get("status") in (None, _errors.HUNG)  # ended in the middle of a step
        began = read_json(layout.lease(number)).get("since")
        ends = [each.get("time") for each in (ended, *others)]
        last = max((each for each in ends if isinstance(each, int | float)), default=0.0)
        seconds += max(0.0, last - began) if isinstance(began, int | float) else 0.0
    return PastAttempts(deaths, seconds)


# -- checkpoint_every="auto": the interval between checkpoints, from their cost and the deaths -----
# It is computed once per checkpoint. A checkpoint costs the time for which it stops training, and
# the slowdown while it is written, where enough steps are made meanwhile to measure it.


_INTERVALS_REMEMBERED = 8
_ENOUGH_STEPS = 20  # fewer would make one step more or less look like a change
_MUCH = 1.25


@dataclass(frozen=True)
class WriteTiming:
    """The times and steps at which writing one checkpoint began and ended."""

    began: float
    began_step: int
    ended: float
    ended_step: int

    def slowed_seconds(self, now: float, step: int) -> float:
        """Training time lost while it was written, by the pace of the steps since."""
        during, since = self.ended_step - self.began_step, step - self.ended_step
        if min(during, since) < _ENOUGH_STEPS:
            return 0.0
        wanted = during * (now - self.ended) / since
        return min(max(self.ended - self.began - wanted, 0.0), self.ended - self.began)


class AutoInterval:
    """The interval, computed with each checkpoint; `tell` is called with large changes."""

    def __init__(
        self, past: PastAttempts, now: float, tell: Callable[[AutoInterval], None] = lambda _: None
    ) -> None:
        self.past = past
        self.seconds = FIRST_SECONDS
        self.cost_seconds = 0.0
        self.mtbf_seconds = expected_mtbf(past.deaths, past.seconds)
        self.is_known = False  # True once `tell` was called
        self._began = now
        self._tell = tell
        self._told = 0.0
        self._writes: deque[float] = deque(maxlen=_INTERVALS_REMEMBERED)
        self._slowed: deque[float] = deque(maxlen=_INTERVALS_REMEMBERED)

    def note_written(self, writing: WriteTiming, now: float, step: int) -> None:
        self._writes.append(writing.ended - writing.began)
        self._slowed.append(writing.slowed_seconds(now, step))

    def next_interval(self, now: float, stall_seconds: float) -> float:
        """The time until the next checkpoint; `stall_seconds` is the usual stall of one."""
        slowed = statistics.median(self._slowed) if self._slowed else 0.0
        write = statistics.median(self._writes) if self._writes else 0.0
        self.cost_seconds = stall_seconds + slowed
        self.mtbf_seconds = expected_mtbf(
            self.past.deaths, self.past.seconds + max(0.0, now - self._began)
        )
        self.seconds = live_interval(self.cost_seconds, write, self.mtbf_seconds)
        if not self._told / _MUCH <= self.seconds <= self._told * _MUCH:
            self._told = self.seconds
            self._tell(self)
            self.is_known = True
        return self.seconds


# -- How much longer training takes because of a snapshot, by the times of its boundaries ----------
# Training waits while a snapshot is copied. It is also slower while a device copies to the host and
# while the keeper hashes. So the steps from the boundary of a snapshot until all of that is over
# are compared with the steps after them. The building of the slots is measured once in that way.
# The times are in a ring of the last 256 boundaries, which the trainer writes anyway.
#
# On a busy machine some steps are ten times as long as others. The moment at which a snapshot is
# hashed falls into a long one more often than into a short one. So the steps after it are cut into
# windows that end in the same way: at the first boundary after as much time.


_MOST_QUIET_STEPS = 64  # after a window; more of them take time, and say little
_ENOUGH_QUIET_STEPS = 8  # to know what the building of the slots has cost
_MEASURED = 32
_ENOUGH = 8
_TRIMMED = 8  # this fraction at each end is left out: other things make a step long, too,
_FEW, _TRIMMED_OF_FEW = 16, 4  # in the first seconds of an attempt most of all


def _without_extremes(values: Collection[float]) -> list[float]:
    trimmed = len(values) // (_TRIMMED_OF_FEW if len(values) < _FEW else _TRIMMED)
    return sorted(values)[trimmed : len(values) - trimmed]


@dataclass
class _Window:
    """Steps that something disturbs, from one boundary until the first one after a moment."""

    step: int
    began: float
    end_step: int | None = None
    ended: float = 0.0
    seconds: float = 0.0  # from its beginning to that moment

    def end(self, moment: float, step: int, ended: float) -> None:
        self.seconds, self.end_step, self.ended = moment - self.began, step, ended

    def excess(self, usual_step: float) -> float:
        assert self.end_step is not None
        return self.ended - self.began - (self.end_step - self.step) * usual_step


class SlowdownMeter:
    """Compares steps around snapshots with other steps; times are monotonic, in seconds."""

    def __init__(self, time_of: Callable[[int], float]) -> None:
        self._time_of = time_of  # of the boundary of a step, one of the last 256
        self._found: deque[float] = deque(maxlen=_MEASURED)
        # Training time lost per snapshot; None while too few were measured. Minus the standard
        # error, so that noisy steps do not exaggerate it.
        self.cost_seconds: float | None = None
        self._snapshot: _Window | None = None
        self._building: _Window | None = None
        self._quiet_steps, self._quiet_seconds = 0, 0.0  # since the slots are built

    def begin_snapshot(self, step: int) -> None:
        """A snapshot was taken at this boundary, the newest one."""
        window, self._snapshot = self._snapshot, _Window(step, self._time_of(step))
        if window is None or window.end_step is None or self._is_building():
            return
        steps, seconds = self._quiet_between(window, step)
        self._quiet_steps += steps
        self._quiet_seconds += seconds
        if steps:
            self._found.append(window.excess(seconds / steps))
            if len(self._found) >= _ENOUGH:
                found = _without_extremes(self._found)
                error = statistics.stdev(found) / math.sqrt(len(found))
                self.cost_seconds = statistics.fmean(found) - error

    def end_snapshot(self, step: int, ended: float) -> None:
        """The last snapshot was copied and hashed at this moment; the newest boundary is `step`."""
        window = self._snapshot
        if window is None or window.end_step is not None or self._time_of(step) < ended:
            return
        oldest = max(window.step + 1, step - RING_MASK)
        if oldest <= step and (oldest == window.step + 1 or self._time_of(oldest) <= ended):
            step = next(each for each in range(oldest, step + 1) if self._time_of(each) >= ended)
        window.end(ended, step, self._time_of(step))

    def begin_building(self, step: int) -> None:
        if self._building is None:
            self._building = _Window(step, self._time_of(step))
            self._snapshot = None  # the building disturbs its steps too

    def end_building(self, step: int) -> None:
        """At this boundary, the newest one, all slots have their memory."""
        if self._building is not None and self._is_building():
            self._building.end(self._time_of(step), step, self._time_of(step))

    def take_building_cost(self) -> float:
        """The time that the building of the slots has cost, once it is known; then 0."""
        window = self._building
        if window is None or self._is_building() or self._quiet_steps < _ENOUGH_QUIET_STEPS:
            return 0.0
        self._building = None
        return max(0.0, window.excess(self._quiet_seconds / self._quiet_steps))

    def _is_building(self) -> bool:
        return self._building is not None and self._building.end_step is None

    def _quiet_between(self, window: _Window, step: int) -> tuple[int, float]:
        """Steps since this window, and their seconds: in windows as long as it, if one fits."""
        assert window.end_step is not None
        first = began = max(window.end_step, step - RING_MASK)
        last = min(step, first + _MOST_QUIET_STEPS)
        times = [self._time_of(number) for number in range(first, last + 1)]
        for number, moment in enumerate(times, start=first):
            if moment - times[began - first] >= window.seconds:
                began = number
        if began > first:
            last = began
        return last - first, times[last - first] - times[0]


# -- When the next snapshot and the next checkpoint are due ----------------------------------------


_SHORTEST_SECONDS = 0.05
# The first snapshots are cold, and predict little: the pauses after them grow from this one.
_FIRST_PAUSE_SECONDS, _COLD = 0.1, 4
_CREDIT_SECONDS = 0.5  # stall that an attempt may be ahead of its share
_PAY_SECONDS = 60.0  # in which a small debt is paid off
_SHORT_PAUSE_SECONDS, _SHORT_STRETCHED_SECONDS = 0.4, 0.48  # a shorter pause grows to that at most
_STRETCHED_SECONDS = 0.85  # a longer one at most to this, so that a kill costs less than a second,
_LONGEST_STRETCH = 1.25  # or by this
# For the same reason a pause that is not much longer is this short at first.
_SOON_SECONDS, _NEAR_SECONDS = 0.75, 1.35
_SOON_STALL_SECONDS = 0.1  # of an attempt: what that may cost beyond its share
_REMEMBERED = 8
_MANY = 16
_REMEMBERED_LONG = 64
_SMALL_SECONDS = 0.02
_REST_SHARE = 0.05


class Cadence:
    """Decides at each boundary; times are of one monotonic clock, in seconds.

    A snapshot costs the time for which it stalls training, and by which it slows down the steps
    after it (SlowdownMeter), whichever is found to be more. If that is c seconds, c / max_overhead
    seconds pass between snapshots: they cost at most that share of the time.

    Whatever costs more than expected is a debt: a slower snapshot (another process ran), one that
    found no slot, the first one with its setup, the building of the slots. Since a kill would lose
    a long pause after it, a debt is paid off over minutes, by slightly longer pauses, and an
    attempt is never more than half a second of stall ahead of its share.
    """

    def __init__(
        self,
        settings: Settings,
        now: float,
        step: int,
        interval: AutoInterval | None = None,
        meter: SlowdownMeter | None = None,
    ) -> None:
        self.meter = meter or SlowdownMeter(lambda _: 0.0)
        self._max_overhead = max_overhead = settings.max_overhead
        self._checkpoint_seconds = settings.checkpoint_seconds
        self._checkpoint_steps = settings.checkpoint_steps
        self._interval = None
        if settings.is_auto:
            self._interval = interval or AutoInterval(PastAttempts(), now)
            self._checkpoint_seconds = self._interval.seconds
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)
        self._next_snapshot = now if max_overhead > 0 else float("inf")
        self._paid_until = now
        self._long: deque[float] = deque(maxlen=_REMEMBERED_LONG)
        self._told_seconds: list[float] | None = []  # the costs, until the meter knows more
        self._debt_seconds = 0.0
        self._soon_stall_seconds = 0.0  # beyond the share, by pauses that are shorter
        self._earned_at = now  # until when the debt is paid off
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
        """True if checkpoints come by the number of steps, not by the clock."""
        return self._checkpoint_steps is not None

    def next_due(self) -> float:
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
        """True if a snapshot may be taken early, since no boundary comes for a while.

        A small one always; a large one if it costs a small share of the time since the last.
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
        self._long.append(seconds)
        self._last_snapshot = now
        pause = self.snapshot_seconds
        if pause is None:
            return
        self._owe(now, self._cost_now(seconds) + self.meter.take_building_cost())
        if len(self._costs) == 1:
            self._next_snapshot = now + min(pause, _FIRST_PAUSE_SECONDS)
            return
        self._paid_until = max(self._paid_until, now) + seconds / self._max_overhead
        credit = _CREDIT_SECONDS / self._max_overhead
        pause = self._stretched(pause)
        if (taken := len(self._long)) <= _COLD:
            pause = min(pause, _FIRST_PAUSE_SECONDS * 2 ** (taken - 1))
        self._next_snapshot = max(now + pause, self._paid_until - credit)

    def missed_snapshot(self, now: float, seconds: float = 0.0) -> None:
        """No slot was free, which was found out in `seconds`: try again soon."""
        self._owe(now, seconds)
        self._next_snapshot = max(self._next_snapshot, now + _SHORTEST_SECONDS)

    def _owe(self, now: float, seconds: float) -> None:
        earned = self._max_overhead * max(0.0, now - self._earned_at)
        self._debt_seconds = max(0.0, self._debt_seconds - earned) + seconds
        self._earned_at = now

    def _cost_now(self, seconds: float) -> float:
        """Of a snapshot by what is known now, and of those before it that were underestimated."""
        measured = self.meter.cost_seconds
        if measured is None:
            if self._told_seconds is not None:
                self._told_seconds.append(seconds)
            return seconds
        before, self._told_seconds = self._told_seconds or [], None
        # A snapshot that is told to cost more than the usual one makes up for those that cost less.
        untold = max(0.0, measured - statistics.fmean(_without_extremes(self._long)))
        return seconds + untold + sum(max(0.0, measured - each) for each in before)

    def _stretched(self, pause: float) -> float:
        """A pause, longer by a part of the debt beyond what the pause itself pays off."""
        beyond = max(0.0, self._debt_seconds - self._max_overhead * pause)
        wanted = pause * (1.0 + beyond / (_PAY_SECONDS * self._max_overhead))
        if pause <= _SHORT_PAUSE_SECONDS:
            return min(wanted, _SHORT_STRETCHED_SECONDS)
        if pause <= _NEAR_SECONDS and self._soon_stall_seconds < _SOON_STALL_SECONDS:
            self._soon_stall_seconds += self._max_overhead * max(0.0, pause - _SOON_SECONDS)
            return min(wanted, _SOON_SECONDS)
        return min(wanted, max(_STRETCHED_SECONDS, _LONGEST_STRETCH * pause))

    def forget_snapshots(self) -> None:
        self._next_snapshot = float("inf")

    def took_checkpoint(self, now: float, step: int, seconds: float | None = None) -> None:
        """A checkpoint began; `seconds` is how long the trainer waited, if it wrote it itself."""
        self._last_checkpoint = now
        self._last_checkpoint_step = step
        if seconds is None and self._costs:
            seconds = self._expected_cost()
        if self._interval is not None and seconds is not None:
            self._checkpoint_seconds = self._interval.next_interval(now, seconds)

    def wrote_checkpoint(self, writing: WriteTiming, now: float, step: int) -> None:
        if self._interval is not None:
            self._interval.note_written(writing, now, step)

    def _expected_cost(self) -> float:
        """By the median of the last ones, since one slow snapshot predicts nothing; by the mean
        of many, since slow ones that keep coming do."""
        usual = sorted(self._costs)[(len(self._costs) - 1) // 2]
        if len(self._long) >= _MANY:
            usual = max(usual, (sum(self._long) - max(self._long)) / (len(self._long) - 1))
        return max(usual, self.meter.cost_seconds or 0.0)


# -- The cadence of an attempt, and the line that explains an automatic interval -------------------


def begin_cadence(
    settings: Settings, policy: Policy, step: int, note: Callable[..., None], words: Any
) -> Cadence:
    now = time.monotonic()
    meter = SlowdownMeter(lambda step: words[RING | step & RING_MASK] / 1e9)
    if not settings.is_auto:
        return Cadence(settings, now, step, meter=meter)

    def tell(interval: AutoInterval) -> None:
        if not interval.is_known:
            say(sentence_of(interval))
        note("cadence", **facts_of(interval))

    # Only rank 0 proposes checkpoints.
    past = PastAttempts() if policy.rank else read_past_attempts(policy.layout, policy.attempt)
    return Cadence(settings, now, step, AutoInterval(past, now, tell), meter)


def sentence_of(interval: AutoInterval) -> str:
    deaths = f" after {count(interval.past.deaths, 'death')} so far" if interval.past.deaths else ""
    return (
        f"a checkpoint every {duration(interval.seconds)}: one takes "
        f"{duration(interval.cost_seconds)} from training, and a death is expected every "
        f"{duration(interval.mtbf_seconds)}{deaths}."
    )


def facts_of(interval: AutoInterval) -> dict[str, Any]:
    return {
        "seconds": round(interval.seconds, 3),
        "cost_seconds": round(interval.cost_seconds, 6),
        "mtbf_seconds": round(interval.mtbf_seconds, 1),
        "deaths": interval.past.deaths,
    }
