"""The series of all attempts: metrics, step times, memory and snapshots, each kept short.

However many rows come, neighbours are merged so that a page can draw them. That costs little, needs
no second reading of the rows, and keeps the lowest and the highest values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast._report.attempts import AttemptHistory
from holdfast._report.gpus import GpuLevels
from holdfast._report.json_lines import Lines, parse
from holdfast._report.thinned import Thinned
from holdfast._report.view import Event
from holdfast._store.folder import series
from holdfast._store.folder.layout import RunLayout
from holdfast._text import real, record, whole

MOST_POINTS = 1500
_MOST_BAD = 200
_MOST_TIMES = 600
_MOST_MARKS = 400  # of snapshots
_MOST_METRICS = 200
_RATE_SECONDS = 60.0
_HUGE = 1e300  # beyond it nothing is drawn

_OF_CGROUP = "the limit of its cgroup"
_OF_MACHINE = "the memory of the machine"

Number = float | None


class CurvePoint(NamedTuple):
    attempt: int
    step: int
    value: Number
    low: Number
    high: Number


def _merge_values(first: CurvePoint, second: CurvePoint) -> CurvePoint | None:
    if first[0] != second[0]:
        return None
    return CurvePoint(
        *second[:2],
        first[2] if second[2] is None else second[2],
        _least(first[3], second[3]),
        _most(first[4], second[4]),
    )


class Curve:
    """One metric over all attempts, in their order."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._thinned = Thinned(most, _merge_values)
        self.bad: list[tuple[int, int]] = []  # (attempt, step) of values that were not finite

    @property
    def points(self) -> list[CurvePoint]:
        return self._thinned.points

    def add(self, attempt: int, step: int, values: Sequence[Any], *, is_bad: bool = False) -> None:
        """What one row has of it: the last value, the lowest and the highest."""
        last, low, high = values[:3]
        # Nearly all are plain floats, and the first reading may have a hundred thousand.
        if not type(last) is type(low) is type(high) is float or not -_HUGE < low <= high < _HUGE:
            last, low, high = _finite(last), _finite(low), _finite(high)
        if is_bad:
            self.bad.append((attempt, step))
            if len(self.bad) > 2 * _MOST_BAD:
                del self.bad[1:-1:2]
        self._thinned.add(CurvePoint(attempt, step, last, low, high))


@dataclass(slots=True)
class _TimesPoint:
    t: float
    attempt: int
    histogram: dict[int, int]
    quantiles: tuple[Number, Number, Number] | None = None  # computed when asked for


def _merge_times(first: _TimesPoint, second: _TimesPoint) -> _TimesPoint | None:
    if first.attempt != second.attempt:
        return None
    series.add_buckets(first.histogram, second.histogram.items())
    return _TimesPoint(second.t, second.attempt, first.histogram)


class Times:
    """How long steps took, over time."""

    def __init__(self) -> None:
        self._thinned = Thinned(_MOST_TIMES, _merge_times)
        self.of: dict[int, dict[int, int]] = {}  # by attempt

    def add(self, attempt: int, t: float, pairs: Iterable[Any]) -> None:
        """The histogram of one row."""
        if found := _counts(pairs):
            series.add_buckets(self.of.setdefault(attempt, {}), found.items())
            self._thinned.add(_TimesPoint(t, attempt, found))

    def columns(self) -> tuple[list[float], list[Number], list[Number], list[Number]]:
        """Times, medians, 99th percentiles and greatest; None between two attempts."""
        rows: list[tuple[float, Number, Number, Number]] = []
        before = None
        for point in self._thinned.points:
            if before is not None and before != point.attempt:
                rows.append((point.t, None, None, None))
            before = point.attempt
            if point.quantiles is None:
                point.quantiles = _quantiles(point.histogram)
            rows.append((point.t, *point.quantiles))
        t, p50, p99, most = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [])
        return t, p50, p99, most


def _quantiles(histogram: dict[int, int]) -> tuple[Number, Number, Number]:
    found = [series.quantile(histogram, share) for share in (0.5, 0.99)]
    median, late, longest = (
        None if each is None else float(f"{each:.4g}")
        for each in (*found, series.seconds_of(max(histogram)))
    )
    return median, late, longest


def _counts(pairs: Iterable[Any]) -> dict[int, int]:
    found: dict[int, int] = {}
    for pair in pairs:
        if isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is type(pair[1]) is int:
            bucket, count = pair
            if 0 <= bucket < 1000 and 0 < count < _HUGE:
                found[bucket] = found.get(bucket, 0) + count
    return found


Level = tuple[float, Number, Number, Number, Number]  # t, used, limit, GPU, this run


def _merge_levels(first: Level, second: Level) -> Level:
    limit = first[2] if second[2] is None else second[2]
    gpu, run = _most(first[3], second[3]), _most(first[4], second[4])
    return second[0], _most(first[1], second[1]), limit, gpu, run


class Levels:
    """Memory over time; of neighbours the highest."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._thinned: Thinned[Level] = Thinned(most, _merge_levels)

    def add(self, t: float, used: Number, limit: Number, gpu: Number, run: Number = None) -> None:
        self._thinned.add((t, used, limit, gpu, run))

    def columns(self) -> tuple[list[float], list[Any], list[Any], list[Any], list[Any]]:
        """Times, used, limit, GPU and what the run's own processes use."""
        columns: tuple[list[float], list[Any], list[Any], list[Any], list[Any]]
        columns = ([], [], [], [], [])
        for t, *figures in self._thinned.points:
            columns[0].append(t)
            for column, figure in zip(columns[1:], figures, strict=True):
                column.append(None if figure is None else int(figure))
        return columns


class SnapshotMark(NamedTuple):
    attempt: int
    t: float
    until: float
    number: int
    step: int | None


def _merge_marks(first: SnapshotMark, second: SnapshotMark) -> SnapshotMark | None:
    if first.attempt != second.attempt:
        return None
    number, step = first.number + second.number, second.step or first.step
    return SnapshotMark(first.attempt, first.t, second.until, number, step)


class SnapshotMarks:
    """They come every other second, so a mark stands for many."""

    def __init__(self) -> None:
        self._thinned = Thinned(_MOST_MARKS, _merge_marks)

    def add(self, attempt: int, t: float, count: int, step: int | None) -> None:
        self._thinned.add(SnapshotMark(attempt, t, t, count, step))

    def events(self) -> list[Event]:
        return [
            Event(
                t=each.t,
                kind="snapshot",
                attempt=each.attempt,
                step=each.step,
                level="info",
                title="A snapshot" if each.number == 1 else f"{each.number:,} snapshots",
                text="" if each.step is None else f"step {each.step} is then in memory",
                count=each.number,
                until=each.until,
            )
            for each in self._thinned.points
        ]


class Rows:
    """The rows of all attempts of a run."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._lines: dict[int, Lines] = {}
        self.curves: dict[str, Curve] = {}
        self.times = Times()
        self.levels = Levels()
        self.limit_name = ""
        self.has_gpu = False
        self.gpus = GpuLevels()
        self.snapshots = SnapshotMarks()
        self._recent: deque[tuple[float, int]] = deque()
        self._newest = 0

    def read(self, history: AttemptHistory) -> bool | None:
        """Whether there was something new; None if the file was replaced: all starts over."""
        lines = self._lines.get(history.number)
        if lines is None:
            lines = self._lines[history.number] = Lines(self._layout.series(history.number))
        is_new = False
        for piece in lines.read():
            if lines.has_started_over:
                return None
            for row in parse(piece):
                if series.is_row(row):
                    self._take(history, row)
                    is_new = True
        return is_new

    def rate(self, now: float) -> float | None:
        """Steps in a second, in the last minute; None if none was made."""
        recent = self._recent
        while recent and recent[0][0] < recent[-1][0] - _RATE_SECONDS:
            recent.popleft()
        if len(recent) < 2 or now - recent[-1][0] > 2 * _RATE_SECONDS:
            return None
        first, last = recent[0], recent[-1]
        if last[0] <= first[0] or last[1] <= first[1]:
            return None
        return (last[1] - first[1]) / (last[0] - first[0])

    def _take(self, history: AttemptHistory, row: dict[str, Any]) -> None:
        t, step = real(row["t"]), whole(row["s"])
        if t is None or step is None or step < 0:
            return
        history.take_row(t, step, row)
        if history.number != self._newest:
            self._newest = history.number
            self._recent.clear()
        self._recent.append((t, step))
        histogram = row.get("h")
        if isinstance(histogram, list) and histogram:
            self.times.add(history.number, t, histogram)
        if "m" in row:
            self._take_metrics(history.number, step, record(row["m"]))
        if isinstance(memory := row.get("mem"), dict):
            self._take_memory(t, memory)
        if count := whole(row.get("snaps")):
            self.snapshots.add(history.number, t, count, whole(row.get("mem_step")))

    def _take_metrics(self, attempt: int, step: int, found: dict[str, Any]) -> None:
        for name, values in found.items():
            curve = self.curves.get(name)
            if curve is None:
                if len(self.curves) >= _MOST_METRICS:
                    continue
                curve = self.curves[name] = Curve()
            if type(values) is not list or len(values) < 4:
                continue
            at = values[5] if len(values) > 5 else None
            is_bad = len(values) > 4 and bool(values[4])
            curve.add(attempt, at if type(at) is int else step, values, is_bad=is_bad)

    def _take_memory(self, t: float, memory: dict[str, Any]) -> None:
        limit, used = real(memory.get("limit")), real(memory.get("cgroup"))
        if limit and used is not None:
            self.limit_name = _OF_CGROUP
        else:
            limit, available = real(memory.get("total")), real(memory.get("available"))
            if limit and available is not None:
                self.limit_name, used = _OF_MACHINE, limit - available
            else:
                known = [real(memory.get(name)) for name in ("rss", "workers")]
                used, limit = sum(each for each in known if each is not None) or None, None
        gpu = _gpu(memory.get("gpu"))
        self.has_gpu = self.has_gpu or gpu is not None
        own = [real(memory.get(name)) for name in ("rss", "workers")]
        run = sum(each for each in own if each is not None) or None
        self.levels.add(t, used, limit, gpu, run)
        self.gpus.add(t, memory.get("gpu"))


def _gpu(value: object) -> float | None:
    """What is held on all GPUs: by the run's own processes, where the driver says that."""
    if not isinstance(value, list):
        return real(value)
    known = [each for each in value if isinstance(each, list) and len(each) >= 4]
    found = [real(each[1] if each[3] is None else each[3]) for each in known]
    return sum(each or 0.0 for each in found) if found else None


def _finite(value: object) -> Number:
    """A metric may be far greater than any step or time."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < _HUGE else None  # NaN is not less, either


def _least(one: Number, other: Number) -> Number:
    return other if one is None else one if other is None else min(one, other)


def _most(one: Number, other: Number) -> Number:
    return other if one is None else one if other is None else max(one, other)
