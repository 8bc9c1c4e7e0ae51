"""Points that are kept short enough to be drawn, however many come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

P = TypeVar("P")


class Thinned(Generic[P]):
    """Points in order; each stands for up to `stride` of those that were added.

    When there are too many, each two neighbours are merged and the stride doubles. `merge` takes
    the earlier and the later, and returns None if they must stay apart (of two attempts).
    """

    def __init__(self, most: int, merge: Callable[[P, P], P | None]) -> None:
        self.points: list[P] = []
        self._most = most
        self._merge = merge
        self._stride, self._filled = 1, 0

    def add(self, point: P) -> None:
        if self._filled < self._stride and self.points:
            merged = self._merge(self.points[-1], point)
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
            merged = self._merge(old[at], old[at + 1]) if at + 1 < len(old) else None
            self.points.append(old[at] if merged is None else merged)
            at += 1 if merged is None else 2
        self._stride *= 2
        # Of many attempts with one point each, none can be merged.
        self._most = max(self._most, len(self.points) + len(self.points) // 2)
