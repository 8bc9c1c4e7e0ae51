"""How fast the steps come now.

Measured over the last half minute of this life: a slow first step (a compilation) and a phase in
which no step is made (an evaluation) are forgotten at once, and steps of a former life never count.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from holdfast._progress.standing import Standing

WINDOW_SECONDS = 30.0
# Steps slower than the window still need a few of them to tell their pace.
_FEWEST_CHANGES = 3
_SHORTEST_MEASURE_SECONDS = 0.5
_IDLE_SECONDS = 10.0


class Pace:
    """Fed with what is seen now and then; the steps need not be seen one by one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changes: deque[tuple[float, int]] = deque()
        self._step: int | None = None
        self._seen = self._moved = clock()
        self._paused = 0.0

    def note(self, standing: Standing) -> None:
        now = self._clock()
        step = standing.step
        if self._step is None or step < self._step:
            self._changes.clear()  # the first look, or another loop: nothing to compare with
        elif step == self._step:
            if standing.phase is not None:
                self._paused += now - self._seen
        else:
            # The first change starts the measure, since the first step is not like the others.
            self._changes.append((now - self._paused, step))
        if step != self._step or standing.phase is not None:
            self._moved = now
        self._step, self._seen = step, now
        self._forget(now - self._paused - WINDOW_SECONDS)

    def _forget(self, oldest: float) -> None:
        while len(self._changes) > _FEWEST_CHANGES and self._changes[0][0] < oldest:
            self._changes.popleft()

    @property
    def rate(self) -> float | None:
        """Steps per second; None until there is something to measure."""
        if len(self._changes) < 2:
            return None
        (began, first), (ended, last) = self._changes[0], self._changes[-1]
        seconds = ended - began
        return (last - first) / seconds if seconds >= _SHORTEST_MEASURE_SECONDS else None

    @property
    def idle_seconds(self) -> float | None:
        """How long no step has come, if that is much longer than a step takes."""
        idle = self._seen - self._moved
        usual = 10 / self.rate if self.rate else 0.0
        return idle if idle > max(_IDLE_SECONDS, usual) else None
