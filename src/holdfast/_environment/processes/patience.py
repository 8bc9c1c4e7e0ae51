"""How long a run may stand still before its processes are inspected.

The limit is learned from the run: a step is compared with earlier steps, an evaluation with earlier
ones of the same name. Half an hour is allowed where there is no measure: for the first step, which
may compile, and outside of the loop. Time in which a person held the run, it was saving, or it was
not polled is neither learned nor counted. The wait of the main thread for a processor does not
count either.

This is no verdict: at the limit the processes are inspected, and only a run that neither moves nor
computes is called a hang.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

STEP = "step"
FRESH = "first step of a loop"  # loader workers start, caches are cold
FIRST = "first step"
PHASE = "phase"
OUTSIDE = "outside of the loop"
WORK = "work of holdfast"  # a save, the start, waiting for other ranks: these have bounds
UNJUDGED = "unjudged"

_LEAST_SECONDS = 20.0
_LEAST_FRESH_SECONDS = 60.0
_LEAST_PHASE_SECONDS = 600.0
_UNKNOWN_SECONDS = 1800.0
_LEAST_SLOWED_SECONDS = 600.0
_USUAL_TIMES = 10.0
_LONGEST_TIMES = 3.0
_PHASE_TIMES = 5.0
_GIVEN_TIMES = 10.0  # of the given limit of a step: for phases, first steps, outside of the loop
_SLOWED_TIMES = 30.0
_FEWEST_STEPS = 3  # until there is a measure
_SAMPLES = 64
_NEWEST = 8
_FORGETS = 0.9999  # of the longest step, at each poll with a new step: half in half an hour
_AWAY_SECONDS = 5.0  # between two polls: this process was stopped, or its machine asleep


@dataclass(frozen=True)
class Sight:
    """The state of a trainer at one poll; times are monotonic."""

    now: float
    step: int
    boundary: float  # the time of the last one; 0: none yet
    in_loop: bool
    loop_began: float = 0.0  # 0: not known
    loop_step: int = 0  # at which it began
    rests: bool = False
    phase: str | None = None
    epoch: int = 0
    is_judged: bool = True  # neither leaving nor done
    is_ours: bool = False  # holdfast works in its main thread
    is_held: bool = False  # by a person, or stopped
    is_slowed: bool = False  # by a profiler or a debugger
    waited: float | None = None  # for a processor, since its start; None: not read

    @property
    def steps_in_loop(self) -> int:
        return self.step - self.loop_step if self.loop_began > 0 else 0


class Patience:
    """The usual times of one trainer, and how long it has stood now."""

    def __init__(self, given_seconds: float | None = None) -> None:
        self.given_seconds = given_seconds
        self.kind = UNJUDGED
        self._key: tuple[object, ...] = ()
        self._since = 0.0
        self._waited_before: float | None = None  # at the first poll since then that knew it
        self._waited = 0.0  # since then
        self._last: Sight | None = None
        self._steps = 0  # observed
        self._is_fresh = True
        self._is_tainted = True  # the time since the last boundary does not measure a step
        self._late: deque[float] = deque(maxlen=_SAMPLES)
        self._undisturbed: deque[float] = deque(maxlen=_SAMPLES)
        self.best: float | None = None  # the lowest undisturbed median
        self._longest = 0.0
        self._longest_fresh = 0.0
        self._phases: dict[str, float] = {}

    def see(self, sight: Sight) -> None:
        """Learn from one poll."""
        last, self._last = self._last, sight
        is_away = last is not None and sight.now - last.now > _AWAY_SECONDS
        is_let_go = last is not None and last.is_held and not sight.is_held
        if last is None:
            # This process may have started late, or have replaced another one.
            self._is_fresh = sight.steps_in_loop < _FEWEST_STEPS
        elif sight.epoch != last.epoch or (sight.in_loop and not last.in_loop):
            self._is_fresh = True
        has_moved = last is not None and sight.step != last.step
        if is_away or sight.is_held or is_let_go:
            self._is_tainted = True
        if last is not None and has_moved:
            is_whole = not (is_away or sight.is_held or last.is_held)
            self._learn(last, sight, is_whole=is_whole)
        before, self.kind = self.kind, self._kind_of(sight)
        if self.kind not in (STEP, FRESH, FIRST):
            self._is_tainted = True  # the time of an evaluation or a save is no step's time
        key = (self.kind, sight.phase, sight.rests, sight.boundary)
        if key != self._key:
            if before == PHASE and last is not None and last.phase and not is_away:
                longest = self._phases.get(last.phase, 0.0)
                self._phases[last.phase] = max(sight.now - self._since, longest)
            self._key = key
            self._count_from(sight.now)
        if is_away or is_let_go:
            self._count_from(sight.now)
        if sight.waited is not None:
            if self._waited_before is None:
                self._waited_before = sight.waited
            self._waited = max(0.0, sight.waited - self._waited_before)

    def _count_from(self, now: float) -> None:
        self._since, self._waited_before, self._waited = now, None, 0.0

    def restart(self, now: float) -> None:
        """Count from now: the wait had a cause outside of the trainer."""
        self._count_from(now)
        self.taint()

    def taint(self) -> None:
        """The time of this step does not measure a step."""
        self._is_tainted = True

    def stood(self, now: float) -> float:
        return max(0.0, now - self._since - self._waited)

    def is_over(self, now: float) -> bool:
        limit = None if self._last is None else self.limit()
        return limit is not None and self.stood(now) > limit

    def limit(self) -> float | None:
        """The seconds that it may stand; None: no limit."""
        if self.kind == UNJUDGED:
            return None
        found = self._learned() if self.given_seconds is None else self._given(self.given_seconds)
        if self._last is not None and self._last.is_slowed:
            found = max(_LEAST_SLOWED_SECONDS, _SLOWED_TIMES * found)
        return found

    @property
    def usual(self) -> float | None:
        return _middle(self._undisturbed)

    @property
    def newest(self) -> float | None:
        return _middle(list(self._late)[-_NEWEST:])

    def _kind_of(self, sight: Sight) -> str:
        if not sight.is_judged:
            return UNJUDGED
        if sight.is_ours:
            return WORK
        if sight.rests or (sight.phase is not None and not sight.in_loop):
            return PHASE
        if not sight.in_loop:
            return OUTSIDE
        if max(self._steps, sight.steps_in_loop) < _FEWEST_STEPS:
            return FIRST
        return FRESH if self._is_fresh else STEP

    def _learn(self, last: Sight, sight: Sight, *, is_whole: bool) -> None:
        made, began = sight.step - last.step, last.boundary
        was_fresh, was_tainted = self._is_fresh, self._is_tainted
        self._is_fresh = self._is_tainted = False
        if made >= _FEWEST_STEPS and is_whole:
            # All of them were made since the last poll.
            began = max(began, last.now) if was_fresh or was_tainted else began
            was_fresh = was_tainted = False
        seconds = sight.boundary - began
        if made <= 0 or began <= 0 or seconds <= 0:
            return
        self._steps += made
        if was_tainted:
            return
        each = seconds / made
        # One of them may have taken nearly all of the time.
        longest = max(each, seconds - (made - 1) * (_middle(self._late) or 0.0))
        if was_fresh:
            self._longest_fresh = max(longest, _FORGETS * self._longest_fresh)
            return
        self._late.append(each)
        if not sight.is_slowed:
            self._undisturbed.append(each)
            if len(self._undisturbed) >= _NEWEST:
                self.best = min(self.best or math.inf, _middle(self._undisturbed) or math.inf)
        self._longest = max(longest, _FORGETS * self._longest)

    def _learned(self) -> float:
        if self.kind == PHASE:
            name = "" if self._last is None else self._last.phase or ""
            return max(_LEAST_PHASE_SECONDS, _PHASE_TIMES * self._phases.get(name, 0.0))
        usual = _middle(self._late) or self._mean()
        if self.kind in (FIRST, OUTSIDE, WORK) or usual is None:
            return _UNKNOWN_SECONDS
        found = max(_LEAST_SECONDS, _USUAL_TIMES * usual, _LONGEST_TIMES * self._longest)
        if self.kind == FRESH:
            fresh = _LONGEST_TIMES * self._longest_fresh
            return max(_LEAST_FRESH_SECONDS, _LONGEST_TIMES * found, fresh)
        return found

    def _mean(self) -> float | None:
        """The mean of the loop so far, if no step was observed. Its first step makes it longer."""
        last = self._last
        if last is None or last.steps_in_loop < _FEWEST_STEPS or last.boundary <= last.loop_began:
            return None
        return (last.boundary - last.loop_began) / last.steps_in_loop

    def _given(self, seconds: float) -> float:
        if self.kind in (STEP, FRESH):
            return seconds
        return max(_GIVEN_TIMES * seconds, _UNKNOWN_SECONDS if self.kind == WORK else 0.0)


def _middle(samples: deque[float] | list[float]) -> float | None:
    return sorted(samples)[len(samples) // 2] if samples else None
