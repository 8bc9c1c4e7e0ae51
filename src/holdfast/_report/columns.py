"""Columns that stay short however many rows come: neighbours are put together.

A point stands for `stride` rows. Where there are too many points, each two become one and the
stride doubles: that costs little, needs no second look at the rows, and keeps what is lowest and
highest, which is what an eye looks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from holdfast._report.json_lines import real
from holdfast._store.folder import series

MOST_POINTS = 1500
_MOST_BAD = 200
_MOST_TIMES = 600
_HUGE = 1e300  # beyond it nothing is drawn

Number = float | None


class Curve:
    """One metric over all attempts, in the order in which they were."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._stride, self._filled = 1, 0
        self.attempt: list[int] = []
        self.step: list[int] = []
        self.value: list[Number] = []
        self.low: list[Number] = []
        self.high: list[Number] = []
        self.bad: list[tuple[int, int]] = []  # (attempt, step)

    def add(self, attempt: int, step: int, values: Sequence[Any], *, is_bad: bool = False) -> None:
        """What one row has of it: the last value, the lowest and the highest."""
        last, low, high = values[:3]
        # Nearly all are, and a first look may have a hundred thousand of them.
        if not type(last) is type(low) is type(high) is float or not -_HUGE < low <= high < _HUGE:
            last, low, high = real(last), real(low), real(high)
        if is_bad:
            self.bad.append((attempt, step))
            if len(self.bad) > 2 * _MOST_BAD:
                del self.bad[1:-1:2]
        if self._filled < self._stride and self.attempt and self.attempt[-1] == attempt:
            self._filled += 1
            self.step[-1] = step
            if last is not None:
                self.value[-1] = last
            if low is not None and ((known := self.low[-1]) is None or low < known):
                self.low[-1] = low
            if high is not None and ((known := self.high[-1]) is None or high > known):
                self.high[-1] = high
            return
        if len(self.attempt) >= self._most:
            self._halve()
        self._append(attempt, step, last, low, high)
        self._filled = 1

    def _append(self, attempt: int, step: int, value: Number, low: Number, high: Number) -> None:
        self.attempt.append(attempt)
        self.step.append(step)
        self.value.append(value)
        self.low.append(low)
        self.high.append(high)

    def _halve(self) -> None:
        old = list(zip(self.attempt, self.step, self.value, self.low, self.high, strict=True))
        for column in (self.attempt, self.step, self.value, self.low, self.high):
            column.clear()
        at = 0
        while at < len(old):
            point = old[at]
            if at + 1 < len(old) and old[at + 1][0] == point[0]:
                after = old[at + 1]
                value = point[2] if after[2] is None else after[2]
                low, high = _least(point[3], after[3]), _most(point[4], after[4])
                point = (point[0], after[1], value, low, high)
                at += 1
            self._append(*point)
            at += 1
        self._stride *= 2
        # Of many attempts with a point each, none can be put together.
        self._most = max(self._most, len(self.attempt) + len(self.attempt) // 2)


class Times:
    """How long steps took, over time."""

    def __init__(self) -> None:
        self._stride, self._filled, self._most = 1, 0, _MOST_TIMES
        self._points: list[tuple[float, int, dict[int, int]]] = []
        self._known: list[tuple[Number, Number, Number]] = []  # of all but the last
        self.of: dict[int, dict[int, int]] = {}  # by attempt

    def add(self, attempt: int, moment: float, pairs: Iterable[Any]) -> None:
        """What one row has of them."""
        found = _counts(pairs)
        if not found:
            return
        _add(self.of.setdefault(attempt, {}), found)
        if self._filled < self._stride and self._points and self._points[-1][1] == attempt:
            _add(self._points[-1][2], found)
            self._points[-1] = (moment, attempt, self._points[-1][2])
            self._filled += 1
            return
        if len(self._points) >= self._most:
            self._halve()
        self._points.append((moment, attempt, found))
        self._filled = 1

    def columns(self) -> tuple[list[float], list[Number], list[Number], list[Number]]:
        """Times, medians, 99th percentiles and greatest; None between two attempts."""
        done = max(0, len(self._points) - 1)
        self._known += [_of(point[2]) for point in self._points[len(self._known) : done]]
        told = [*self._known, *(_of(point[2]) for point in self._points[done:])]
        t: list[float] = []
        columns: tuple[list[Number], list[Number], list[Number]] = ([], [], [])
        before = None
        for (moment, attempt, _), figures in zip(self._points, told, strict=True):
            if before is not None and before != attempt:
                t.append(moment)
                for column in columns:
                    column.append(None)
            before = attempt
            t.append(moment)
            for column, figure in zip(columns, figures, strict=True):
                column.append(figure)
        return t, *columns

    def _halve(self) -> None:
        old, self._points, self._known = self._points, [], []
        at = 0
        while at < len(old):
            moment, attempt, found = old[at]
            if at + 1 < len(old) and old[at + 1][1] == attempt:
                at += 1
                moment = old[at][0]
                _add(found, old[at][2])
            self._points.append((moment, attempt, found))
            at += 1
        self._stride *= 2
        self._most = max(self._most, len(self._points) + len(self._points) // 2)


class Levels:
    """Memory over time; of neighbours the highest."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most, self._stride, self._filled = most, 1, 0
        self._points: list[tuple[float, Number, Number, Number]] = []  # t, used, limit, gpu

    def add(self, moment: float, used: Number, limit: Number, gpu: Number) -> None:
        if self._filled < self._stride and self._points:
            self._points[-1] = _higher(self._points[-1], (moment, used, limit, gpu))
            self._filled += 1
            return
        if len(self._points) >= self._most:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            odd = self._points[-1:] if len(self._points) % 2 else []
            self._points = [_higher(*pair) for pair in pairs] + odd
            self._stride *= 2
        self._points.append((moment, used, limit, gpu))
        self._filled = 1

    def columns(self) -> tuple[list[float], list[Any], list[Any], list[Any]]:
        """Times, used, limit and GPU."""
        columns: tuple[list[float], list[Any], list[Any], list[Any]] = ([], [], [], [])
        for t, *figures in self._points:
            columns[0].append(t)
            for column, figure in zip(columns[1:], figures, strict=True):
                column.append(None if figure is None else int(figure))
        return columns


def _higher(
    first: tuple[float, Number, Number, Number], second: tuple[float, Number, Number, Number]
) -> tuple[float, Number, Number, Number]:
    limit = first[2] if second[2] is None else second[2]
    return second[0], _most(first[1], second[1]), limit, _most(first[3], second[3])


def _of(histogram: dict[int, int]) -> tuple[Number, Number, Number]:
    longest = series.seconds_of(max(histogram))
    return (
        _short(series.quantile(histogram, 0.5)),
        _short(series.quantile(histogram, 0.99)),
        _short(longest),
    )


def _counts(pairs: Iterable[Any]) -> dict[int, int]:
    found: dict[int, int] = {}
    for pair in pairs:
        if isinstance(pair, list) and len(pair) == 2:
            bucket, count = pair
            if (
                type(bucket) is int
                and type(count) is int
                and 0 <= bucket < 1000
                and 0 < count < _HUGE
            ):
                found[bucket] = found.get(bucket, 0) + count
    return found


def _short(seconds: Number) -> Number:
    return None if seconds is None else float(f"{seconds:.4g}")


def _add(into: dict[int, int], more: dict[int, int]) -> None:
    for bucket, count in more.items():
        into[bucket] = into.get(bucket, 0) + count


def _least(one: Number, other: Number) -> Number:
    return other if one is None else one if other is None else min(one, other)


def _most(one: Number, other: Number) -> Number:
    return other if one is None else one if other is None else max(one, other)
