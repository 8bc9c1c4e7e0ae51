"""How much longer training takes because of a snapshot, by the times of its boundaries.

Training waits while a snapshot is copied. It is also slower while a device copies to the host and
while the keeper hashes. So the steps from the boundary of a snapshot until all of that is over are
compared with the other steps. The same is done once for the building of the slots.

The times are in a ring of the last 256 boundaries, which the trainer writes anyway.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable

from holdfast._store.memory.control import RING_MASK

_QUIET_STEPS = 64  # remembered, that no snapshot disturbs
_QUIET_AT_ONCE = 16  # of them from between two snapshots
_ENOUGH_STEPS = 8
_REMEMBERED = 32
_ENOUGH = 4
_TRIMMED = 8  # this fraction at each end is left out: other things make a step long, too


class _Window:
    """Steps that something disturbs, from one boundary on."""

    def __init__(self, step: int, began: float) -> None:
        self.step, self.began = step, began
        self.end_step: int | None = None
        self.ended = 0.0

    def excess(self, usual: float) -> float:
        assert self.end_step is not None
        return self.ended - self.began - (self.end_step - self.step) * usual


class SlowdownMeter:
    """Compares steps around snapshots with other steps; times are monotonic, in seconds."""

    def __init__(self, time_of: Callable[[int], float]) -> None:
        self._time_of = time_of  # of the boundary of a step, one of the last 256
        self._quiet: deque[float] = deque(maxlen=_QUIET_STEPS)
        self._found: deque[float] = deque(maxlen=_REMEMBERED)
        self._snapshot: _Window | None = None
        self._building: _Window | None = None

    @property
    def usual_step_seconds(self) -> float | None:
        return statistics.median(self._quiet) if len(self._quiet) >= _ENOUGH_STEPS else None

    @property
    def cost_seconds(self) -> float | None:
        """Training time lost per snapshot; None while too few were measured.

        Minus half the standard error, so that noisy steps do not exaggerate it.
        """
        if len(self._found) < _ENOUGH:
            return None
        trimmed = len(self._found) // _TRIMMED
        found = sorted(self._found)[trimmed : len(self._found) - trimmed]
        return statistics.fmean(found) - statistics.stdev(found) / math.sqrt(4 * len(found))

    def begin_snapshot(self, step: int) -> None:
        """A snapshot was taken at this boundary, the newest one."""
        window, self._snapshot = self._snapshot, _Window(step, self._time_of(step))
        if window is None or window.end_step is None:
            return
        first = max(window.end_step, step - _QUIET_AT_ONCE)
        if self._building is None or self._building.end_step is not None:
            self._quiet.extend(
                self._time_of(number + 1) - self._time_of(number) for number in range(first, step)
            )
        usual = self.usual_step_seconds
        if usual is not None:
            self._found.append(window.excess(usual))

    def end_snapshot(self, step: int, ended: float) -> None:
        """The last snapshot was copied and hashed at this moment; the newest boundary is `step`."""
        self._end(self._snapshot, step, ended)

    def begin_building(self, step: int) -> None:
        if self._building is None:
            self._building = _Window(step, self._time_of(step))

    def end_building(self, step: int) -> None:
        """At this boundary, the newest one, all slots have their memory."""
        window = self._building
        if window is not None and window.end_step is None:
            window.end_step, window.ended = step, self._time_of(step)

    def take_building_cost(self) -> float:
        """The time that the building of the slots has cost, once it is known; then 0."""
        usual, window = self.usual_step_seconds, self._building
        if window is None or window.end_step is None or usual is None:
            return 0.0
        self._building = None
        return max(0.0, window.excess(usual))

    def _end(self, window: _Window | None, step: int, ended: float) -> None:
        """The window reaches to the first boundary after `ended`."""
        if window is None or window.end_step is not None or self._time_of(step) < ended:
            return
        oldest = max(window.step + 1, step - RING_MASK)
        if oldest > step or (oldest > window.step + 1 and self._time_of(oldest) > ended):
            window.end_step, window.ended = step, self._time_of(step)
            return
        found = next(each for each in range(oldest, step + 1) if self._time_of(each) >= ended)
        window.end_step, window.ended = found, self._time_of(found)
