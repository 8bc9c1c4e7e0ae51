"""Whether memory will grow to its limit, and when.

The rule: the growth of the last seconds, repeated once, would reach the limit. So a forecast is no
longer than the observation, and growth that takes less than half of the free memory is no leak. The
memory must have grown in every part of that time: the load of a model is one jump.

Memory that rises and falls repeatedly has shown its peaks: below them there is no forecast. A slow
leak under them shows in the peaks, over a longer time.

Three limits are watched: of the cgroup, of the machine and of /dev/shm. None counts page cache:
`MemoryCgroup` and the kernel's MemAvailable leave it out.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

# Seconds of observation; the shortest first, since it says most about the present.
_SPANS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_PARTS = 5  # of a span, which are compared
_STRETCH = 1.5  # the most that the points may cover, in spans
_EVEN = 0.4  # of the mean growth: the least growth from each part to the next
_FOR_NOISE = 0.25  # of the growth
_FALL = 0.3  # of the last rise: a larger decrease is a fall
_PEAKS = 16
_SAME_SECONDS = 1.0
_KEPT_SECONDS = 600.0
_COURSE_STEPS = ((10.0, 0.1), (60.0, 1.0), (_KEPT_SECONDS, 6.0))
_HISTORY_STEPS = ((10.0, 0.1), (300.0, 6.04))  # 150 points
_MOST_POINTS = 300
_THIN_AFTER = 64  # new points
_CLOSE = 0.25  # of the limit is free
_FAST_SECONDS = 60.0  # until the limit
_FAST_SPAN_SECONDS = 5.0


@dataclass(frozen=True)
class Forecast:
    seconds: float
    bytes_per_second: float
    used: int
    limit: int
    what: str  # "cgroup", "machine" or "shm"


class Growth:
    def __init__(self) -> None:
        self._all = {what: _Course() for what in ("cgroup", "machine", "shm")}

    def add(self, sample: dict[str, Any]) -> None:
        """The samples come in the order of their times."""
        at = sample.get("t")
        if at is None:
            return
        for what, (used, limit) in _levels(sample).items():
            if used is not None and limit:
                self._all[what].add(float(at), used, limit)

    def forecast(self) -> Forecast | None:
        """The nearest limit that steady growth will reach; None without such growth."""
        found: list[Forecast] = []
        for what, course in self._all.items():
            if (expected := course.until_full()) is not None:
                found.append(Forecast(*expected, course.used, course.limit, what))
        return min(found, key=lambda each: each.seconds, default=None)

    def is_close(self) -> bool:
        """True if samples are needed more often: little memory is free, or it fills fast."""
        return any(course.is_close() for course in self._all.values())


def _levels(sample: dict[str, Any]) -> dict[str, tuple[int | None, int | None]]:
    total, available = sample.get("total"), sample.get("available")
    shm, free = sample.get("shm"), sample.get("shm_free")
    return {
        "cgroup": (sample.get("cgroup"), sample.get("limit")),
        "machine": (None if total is None or available is None else total - available, total),
        "shm": (shm, None if shm is None or free is None else shm + free),
    }


class _Course:
    def __init__(self) -> None:
        self.used = self.limit = 0
        self._times: list[float] = []
        self._values: list[int] = []
        self._unthinned = 0
        # Times and heights of falls.
        self._peaks: list[tuple[float, int]] = []
        self._high = self._low = 0

    def add(self, at: float, used: int, limit: int) -> None:
        if self._times and at <= self._times[-1]:
            if self._times[-1] - at < _SAME_SECONDS:
                return
            # The clock was set back: earlier times are useless.
            self._times, self._values, self._peaks = [], [], []
        self.used, self.limit = used, limit
        self._note_fall(at)
        self._times.append(at)
        self._values.append(used)
        self._unthinned += 1
        if self._unthinned > _THIN_AFTER:
            self._thin(at)

    def until_full(self) -> tuple[float, float] | None:
        """Seconds, and bytes per second."""
        if not self._values:
            return None
        highest = max(self._values)
        if highest - min(self._values) < self.limit - highest:
            return None  # the usual case, at almost no cost
        for span in _SPANS:
            rate, height = self._steady(span)
            if rate > 0:
                return max(0, self.limit - height) / rate, rate
        return None

    def is_close(self) -> bool:
        if not self._values:
            return False
        room = self.limit - self.used
        if room < _CLOSE * self.limit:
            return True
        now = self._times[-1]
        before = bisect.bisect_left(self._times, now - _FAST_SPAN_SECONDS)
        seconds, grown = now - self._times[before], self.used - self._values[before]
        return seconds > 0 and grown * _FAST_SECONDS > room * seconds

    def _steady(self, span: float) -> tuple[float, int]:
        """Bytes per second and the height, if the last `span` seconds show a leak; else 0."""
        times = self._times
        first = bisect.bisect_right(times, times[-1] - span) - 1
        length = times[-1] - times[first]
        if first < 0 or len(times) - first < _PARTS or length > _STRETCH * span:
            return 0.0, 0  # too short an observation, or too few points
        edges = [
            first,
            *(
                bisect.bisect_right(times, times[first] + part * length / _PARTS)
                for part in range(1, _PARTS)
            ),
            len(times),
        ]
        began, low = self._highest(edges[0], edges[1])
        ended, high = self._highest(edges[-2], edges[-1])
        if high <= low or ended <= began:
            return 0.0, 0
        rate = (high - low) / (ended - began)
        if rate * span < self.limit - high or self._is_known(
            low + _FOR_NOISE * (high - low), began
        ):
            return 0.0, 0
        heights = [self._highest(*each) for each in itertools.pairwise(edges)]
        for (t0, v0), (t1, v1) in itertools.pairwise(heights):
            if t1 <= t0 or v1 - v0 < _EVEN * rate * (t1 - t0):
                return 0.0, 0
        return rate, high

    def _highest(self, begin: int, end: int) -> tuple[float, int]:
        """The time and height of the highest of some points."""
        if begin >= end:
            return 0.0, 0
        height = max(self._values[begin:end])
        return self._times[self._values.index(height, begin, end)], height

    def _is_known(self, height: float, until: float) -> bool:
        """True if it has fallen from a greater height before; once may be a load at the start."""
        return sum(at <= until and peak > height for at, peak in self._peaks) > 1

    def _note_fall(self, at: float) -> None:
        if not self._values:
            self._high = self._low = self.used
        self._high = max(self._high, self.used)
        if self._high - self.used > _FALL * (self._high - self._low):
            if self._high > self._low:
                self._peaks.append((at, self._high))
                if len(self._peaks) > _PEAKS:
                    self._peaks.remove(min(self._peaks, key=lambda each: each[1]))
            self._high = self._low = self.used

    def _thin(self, now: float) -> None:
        self._unthinned = 0
        points = _thinned(zip(self._times, self._values, strict=True), now, _COURSE_STEPS)
        self._times = [at for at, _ in points]
        self._values = [value for _, value in points]
        self._peaks = [each for each in self._peaks if now - each[0] < _KEPT_SECONDS]


_Point = TypeVar("_Point", bound=tuple[Any, ...])  # its time and height, and more


def _thinned(
    points: Iterable[_Point], now: float, steps: Sequence[tuple[float, float]]
) -> list[_Point]:
    """The highest point of each time step; `steps` has the (age, step) of each part."""
    kept: dict[tuple[float, int], _Point] = {}
    for point in points:
        step = next((step for age, step in steps if now - point[0] < age), None)
        if step is not None:
            key = step, round(point[0] / step)
            if key not in kept or point[1] >= kept[key][1]:
                kept[key] = point
    return list(kept.values())


class MemoryHistory:
    """The samples of the last minutes; of older ones the highest: it was nearest to the limit."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int, dict[str, Any]]] = []

    def add(self, sample: dict[str, Any]) -> None:
        """The samples come in the order of their times."""
        height = int(sample.get("cgroup") or 0) or int(sample.get("rss") or 0)
        self._points.append((sample["t"], height, sample))
        if len(self._points) > _MOST_POINTS:
            self.recent()

    def recent(self) -> list[dict[str, Any]]:
        """The last five minutes, oldest first; all samples of the last ten seconds."""
        if self._points:
            self._points = _thinned(self._points, self._points[-1][0], _HISTORY_STEPS)
        return [sample for _, _, sample in self._points]
