"""The GPUs of a run over time: how busy they are, their memory, power and temperature.

Only the GPUs count on which the driver shows processes of the run. Where it shows none, as in a
container, all GPUs of the machine count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast._report.thinned import Thinned
from holdfast._report.view import GpuView
from holdfast._text import real

_MOST_POINTS = 1500

Number = float | None


class GpuLevel(NamedTuple):
    t: float
    busy: Number  # percent, the mean of all GPUs
    used: Number  # bytes, of all GPUs together
    total: Number
    watts: Number
    celsius: Number  # of the hottest


class GpuLevels:
    """Samples in order, thinned: of neighbours the later time, and the highest values."""

    def __init__(self) -> None:
        self._thinned: Thinned[GpuLevel] = Thinned(_MOST_POINTS, _merge)

    def add(self, t: float, sample: object) -> None:
        found = read_level(t, sample)
        if found is not None:
            self._thinned.add(found)

    def view(self) -> GpuView | None:
        points = self._thinned.points
        if not points:
            return None
        return GpuView(
            t=[each.t for each in points],
            busy=[each.busy for each in points],
            used=[each.used for each in points],
            total=max((each.total for each in points if each.total is not None), default=None),
            watts=[each.watts for each in points],
            celsius=[each.celsius for each in points],
        )


def read_level(t: float, sample: object) -> GpuLevel | None:
    """One sample: [index, used, total, of this run or null, percent, watts, celsius] of each GPU.

    Older versions wrote the first four.
    """
    if not isinstance(sample, list):
        return None
    known = [each for each in sample if isinstance(each, list) and len(each) >= 4]
    mine = [each for each in known if real(each[3]) is not None]
    gpus = mine or known
    if not gpus:
        return None
    busy = _column(gpus, 4)
    celsius = _column(gpus, 6)
    return GpuLevel(
        t,
        sum(busy) / len(busy) if busy else None,
        sum(_column(gpus, 3 if mine else 1)),
        sum(_column(gpus, 2)) or None,
        sum(watts) if (watts := _column(gpus, 5)) else None,
        max(celsius) if celsius else None,
    )


def _column(gpus: Sequence[list[object]], at: int) -> list[float]:
    found = (real(each[at]) if len(each) > at else None for each in gpus)
    return [each for each in found if each is not None]


def _merge(first: GpuLevel, second: GpuLevel) -> GpuLevel:
    highest = (_most(one, other) for one, other in zip(first[1:], second[1:], strict=True))
    return GpuLevel(second.t, *highest)


def _most(one: Number, other: Number) -> Number:
    return other if one is None else one if other is None else max(one, other)
