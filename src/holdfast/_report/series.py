"""The series of all attempts: metrics, step times, memory, GPUs and snapshots, each kept short.

However many rows come, neighbours are merged so that a page can draw them. That costs little, needs
no second reading of the rows, and keeps the lowest and the highest values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from holdfast._report.attempts import AttemptHistory
from holdfast._report.json_lines import Lines, parse
from holdfast._report.view import Event, GpuView, MemoryView
from holdfast._store.folder import series
from holdfast._store.folder.layout import RunLayout
from holdfast._text import real, record, whole

MOST_POINTS = 1500
_MOST_BAD = 200
_MOST_TIMES = 600
_MOST_METRICS = 200
_HUGE = 1e300  # beyond it nothing is drawn

_OF_CGROUP = "the limit of its cgroup"
_OF_MACHINE = "the memory of the machine"

Number = float | None
P = TypeVar("P")


class Thinned(Generic[P]):
    """Points in order; each stands for up to `stride` of those that were put in.

    When there are too many, each two neighbours are merged and the stride doubles.
    """

    def __init__(self, most: int) -> None:
        self.points: list[P] = []
        self._most = most
        self._stride, self._filled = 1, 0

    def merge(self, first: P, second: P) -> P | None:
        """One point for two neighbours; None if they are of two attempts."""
        raise NotImplementedError

    def put(self, point: P) -> None:
        if self._filled < self._stride and self.points:
            merged = self.merge(self.points[-1], point)
            if merged is not None:
                self.points[-1] = merged
                self._filled += 1
                return
        if len(self.points) >= self._most:
            self._halve()
        self.points.append(point)
        self._filled = 1

    def _halve(self) -> None:
        old, self.points = self.points, []
        at = 0
        while at < len(old):
            merged = self.merge(old[at], old[at + 1]) if at + 1 < len(old) else None
            self.points.append(old[at] if merged is None else merged)
            at += 1 if merged is None else 2
        self._stride *= 2
        # Of many attempts with one point each, none can be merged.
        self._most = max(self._most, len(self.points) + len(self.points) // 2)


class CurvePoint(NamedTuple):
    attempt: int
    step: int
    value: Number
    low: Number
    high: Number


class Curve(Thinned[CurvePoint]):
    def __init__(self, most: int = MOST_POINTS) -> None:
        super().__init__(most)
        self.bad: list[tuple[int, int]] = []  # (attempt, step) of values that were not finite

    def merge(self, first: CurvePoint, second: CurvePoint) -> CurvePoint | None:
        if first[0] != second[0]:
            return None
        value = first[2] if second[2] is None else second[2]
        low, high = _least(first[3], second[3]), _most(first[4], second[4])
        return CurvePoint(second[0], second[1], value, low, high)

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
        self.put(CurvePoint(attempt, step, last, low, high))


@dataclass(slots=True)
class _TimesPoint:
    t: float
    attempt: int
    histogram: dict[int, int]
    quantiles: tuple[Number, ...] | None = None  # computed when asked for


class Times(Thinned[_TimesPoint]):
    def __init__(self) -> None:
        super().__init__(_MOST_TIMES)
        self.of: dict[int, dict[int, int]] = {}  # by attempt

    def merge(self, first: _TimesPoint, second: _TimesPoint) -> _TimesPoint | None:
        if first.attempt != second.attempt:
            return None
        series.add_buckets(first.histogram, second.histogram.items())
        return _TimesPoint(second.t, second.attempt, first.histogram)

    def add(self, attempt: int, t: float, pairs: Iterable[Any]) -> None:
        found: dict[int, int] = {}
        for pair in pairs:
            if isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is type(pair[1]) is int:
                bucket, count = pair
                if 0 <= bucket < 1000 and 0 < count < _HUGE:
                    found[bucket] = found.get(bucket, 0) + count
        if found:
            series.add_buckets(self.of.setdefault(attempt, {}), found.items())
            self.put(_TimesPoint(t, attempt, found))

    def columns(self) -> tuple[list[Any], ...]:
        """Times, medians, 99th percentiles and greatest; None between two attempts."""
        rows: list[tuple[Number, ...]] = []
        before = None
        for point in self.points:
            if before is not None and before != point.attempt:
                rows.append((point.t, None, None, None))
            before = point.attempt
            if point.quantiles is None:
                point.quantiles = _quantiles(point.histogram)
            rows.append((point.t, *point.quantiles))
        return _columns(rows, 4)


def _columns(rows: Sequence[tuple[Number, ...]], width: int) -> tuple[list[Any], ...]:
    return tuple(map(list, zip(*rows, strict=True))) or tuple([] for _ in range(width))


def _quantiles(histogram: dict[int, int]) -> tuple[Number, ...]:
    found = [series.quantile(histogram, share) for share in (0.5, 0.99)]
    found.append(series.seconds_of(max(histogram)))
    return tuple(None if each is None else float(f"{each:.4g}") for each in found)


class Levels(Thinned[tuple[Number, ...]]):
    """Times, each with values; of neighbours the later time, and the highest of each value."""

    def merge(
        self, first: tuple[Number, ...], second: tuple[Number, ...]
    ) -> tuple[Number, ...] | None:
        return second[0], *map(_most, first[1:], second[1:])

    def columns(self, width: int) -> tuple[list[Any], ...]:
        return _columns(self.points, width)


class Rows:
    def __init__(self, layout: RunLayout, mark: Callable[[Event], None]) -> None:
        self._layout = layout
        self._mark = mark  # gets the snapshots
        self._lines: dict[int, Lines] = {}
        self.curves: dict[str, Curve] = {}
        self.times = Times()
        self._memory = Levels(MOST_POINTS)  # used, limit, GPU, this run
        self._limit_name = ""
        self._gpus = Levels(MOST_POINTS)  # as read_gpus has them

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

    def memory_view(self) -> MemoryView:
        t, used, limit, gpu, run = self._memory.columns(5)
        found = MemoryView(t=t, used=used, limit=limit, run=run, limit_name=self._limit_name)
        if any(each is not None for each in gpu):
            found["gpu"] = gpu
        return found

    def gpu_view(self) -> GpuView | None:
        t, busy, used, totals, watts, celsius = self._gpus.columns(6)
        total = max((each for each in totals if each is not None), default=None)
        found = GpuView(t=t, busy=busy, used=used, total=total, watts=watts, celsius=celsius)
        return found if t else None

    def _take(self, history: AttemptHistory, row: dict[str, Any]) -> None:
        t, step = real(row["t"]), whole(row["s"])
        if t is None or step is None or step < 0:
            return
        history.take_row(t, step, row)
        histogram = row.get("h")
        if isinstance(histogram, list) and histogram:
            self.times.add(history.number, t, histogram)
        if "m" in row:
            self._take_metrics(history.number, step, record(row["m"]))
        if isinstance(memory := row.get("mem"), dict):
            self._take_memory(t, memory)
        if count := whole(row.get("snaps")):
            in_memory = whole(row.get("mem_step"))
            self._mark(
                Event(
                    t=t,
                    kind="snapshot",
                    attempt=history.number,
                    step=in_memory,
                    level="info",
                    title="A snapshot",
                    text="" if in_memory is None else f"step {in_memory} is then in memory",
                    count=count,
                )
            )

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
        own = sum(real(memory.get(name)) or 0.0 for name in ("rss", "workers")) or None
        limit, used = real(memory.get("limit")), real(memory.get("cgroup"))
        if limit and used is not None:
            self._limit_name = _OF_CGROUP
        else:
            limit, available = real(memory.get("total")), real(memory.get("available"))
            if limit and available is not None:
                self._limit_name, used = _OF_MACHINE, limit - available
            else:
                used, limit = own, None
        levels = (used, limit, _gpu(memory.get("gpu")), own)
        self._memory.put((t, *(None if each is None else int(each) for each in levels)))
        if (gpus := read_gpus(memory.get("gpu"))) is not None:
            self._gpus.put((t, *gpus))


def _gpu(value: object) -> float | None:
    """What is held on all GPUs: by the run's own processes, where the driver says that."""
    if not isinstance(value, list):
        return real(value)
    known = [each for each in value if isinstance(each, list) and len(each) >= 4]
    found = [real(each[1] if each[3] is None else each[3]) for each in known]
    return sum(each or 0.0 for each in found) if found else None


def read_gpus(sample: object) -> tuple[Number, ...] | None:
    """Percent busy (the mean), bytes in use, bytes in all, watts, degrees (of the hottest).

    A sample has [index, used, total, of this run or null, percent, watts, celsius] of each GPU;
    older versions wrote the first four. Only the GPUs count on which the driver shows processes of
    the run. Where it shows none, as in a container, all GPUs of the machine count.
    """
    if not isinstance(sample, list):
        return None
    known = [each for each in sample if isinstance(each, list) and len(each) >= 4]
    mine = [each for each in known if real(each[3]) is not None]
    gpus = mine or known
    if not gpus:
        return None

    def column(at: int) -> list[float]:
        found = (real(each[at]) if len(each) > at else None for each in gpus)
        return [each for each in found if each is not None]

    busy, watts = column(4), column(5)
    return (
        sum(busy) / len(busy) if busy else None,
        sum(column(3 if mine else 1)),
        sum(column(2)) or None,
        sum(watts) if watts else None,
        max(column(6), default=None),
    )


def _finite(value: object) -> Number:
    """A metric may be far greater than any step or time."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < _HUGE else None  # NaN is not less, either


def _least(one: Number, other: Number) -> Number:
    return other if one is None else one if other is None else min(one, other)


def _most(one: Number, other: Number) -> Number:
    return other if one is None else one if other is None else max(one, other)
