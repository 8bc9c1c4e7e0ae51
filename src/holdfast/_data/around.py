"""A feed around another one, for what belongs to a trainer: the position is the inner one's."""

from __future__ import annotations

from typing import Any

from holdfast._data.course import Position
from holdfast._data.feed import Feed


class FeedAround(Feed):
    """Whoever derives from it says how a lap is opened."""

    def __init__(self, inner: Feed) -> None:
        self.kit = inner.kit
        self._inner = inner
        self._state: Any = None  # of the inner one, before it looked ahead
        self.length = self.usual_length = inner.usual_length

    @property
    def bases(self) -> Any:
        return self._inner.bases

    @bases.setter
    def bases(self, bases: Any) -> None:
        self._inner.bases = bases

    def fits(self, goal: Position) -> bool:
        return self._inner.fits(goal)

    def carry_over(self, goal: Position) -> Position:
        return self._inner.carry_over(goal)

    def state(self) -> Any:
        return self._inner.state() if self._state is None else self._state
