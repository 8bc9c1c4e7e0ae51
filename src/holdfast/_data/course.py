"""The way through epochs and loops over data: arithmetic only.

An epoch is run anew from its top after a restart: the script's own code before,
between and after its loops runs again. So a position is counted in laps, the loops
over data in the order in which an epoch comes to them. Laps that were over before the
position are passed over, the lap of the position goes on behind the batches that were
used, and only there the state is as it was stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Position:
    """Where a run is at a boundary."""

    epoch: int = 0
    lap: int = 0  # which of the epoch's loops over data
    batches: int = 0  # of that lap, used; 0 stands for the top of the epoch
    is_over: bool = False  # the lap has no more batches
    length: int | None = None  # of the lap, to notice a loader that has changed
    top: Any = None  # the generators when the epoch began
    start: Any = None  # the generators when the lap began
    state: Any = None  # of a loader that keeps its own position
    states: Any = None  # of such loaders at the end of their last lap, by the lap's number

    def to_tree(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Position:
        return cls(**{name: tree[name] for name in cls.__dataclass_fields__ if name in tree})


@dataclass(frozen=True)
class Lap:
    """One loop over data, as a life comes to it."""

    epoch: int
    number: int
    is_over: bool = False  # all its batches were used before: nothing to do
    goal: Position | None = None  # set for the lap that goes on in the middle
    state: Any = None  # a loader's own, from the end of its last lap in the life before

    @property
    def skip(self) -> int:
        """The batches that are behind us already."""
        return self.goal.batches if self.goal is not None else 0


class Course:
    """Counts epochs, laps and batches of one life, from where the life before had been."""

    def __init__(self, position: Position | None = None) -> None:
        start = position or Position()
        self.epoch = start.epoch
        self.batch = max(0, start.batches - 1)
        self._goal = start if start.batches else None
        self._lap = -1
        self._here = start
        self._steps_at_top = 0
        self._top = start.top
        self._states: dict[int, Any] = dict(start.states or {})
        self._former_states = dict(self._states)  # not given back to their loaders yet

    @property
    def is_on_the_way(self) -> bool:
        """Whether the place where the life before had been is still ahead."""
        return self._goal is not None

    @property
    def position(self) -> Position:
        """Where the last boundary was."""
        return self._here

    def begin_lap(self) -> Lap:
        """The epoch has come to its next loop over data."""
        self._lap += 1
        goal = self._goal
        if goal is None:
            state = self._former_states.pop(self._lap, None)
            return Lap(self.epoch, self._lap, state=state)
        if self._lap < goal.lap:
            return Lap(self.epoch, self._lap, is_over=True)
        self._goal = None
        if not goal.is_over:
            self._former_states.pop(self._lap, None)
        return Lap(self.epoch, self._lap, goal.is_over, goal)

    def use(self, lap: Lap, batches: int, length: int | None, start: Any) -> None:
        """At a boundary: so many batches of the lap are used."""
        self._here = Position(
            lap.epoch,
            lap.number,
            batches,
            length=length,
            top=self._top,
            start=start,
            states=self._known_states(),
        )

    def end_lap(self, lap: Lap, state: Any) -> None:
        """The lap has no more batches; only a boundary that passed its last one knows."""
        if state is not None:
            self._states[lap.number] = state
        if self._here.batches:
            self._here = replace(self._here, is_over=True, states=self._known_states())

    def turn(self, step: int) -> bool:
        """The epoch is over; True if a step was made in it, else the turn itself is one."""
        has_stepped = step > self._steps_at_top
        self._begin_epoch(self.epoch + 1, step if has_stepped else step + 1)
        return has_stepped

    def note_top(self, generators: Any) -> Any:
        """An epoch begins; gives the generators with which it is to begin, if it began before."""
        if self._goal is not None and self._top is not None:
            return self._top
        self._top = generators
        return None

    def begin_epochs(self, step: int) -> None:
        """The epochs begin; of an epoch that goes on in the middle, steps were made before."""
        self._steps_at_top = step - 1 if self._goal is not None else step

    def _begin_epoch(self, epoch: int, step: int) -> None:
        self.epoch = epoch
        self.batch = 0
        self._lap = -1
        self._goal = None
        self._steps_at_top = step
        # The generators of the last lap stay, unused: a state whose layout changes costs memory.
        self._here = Position(
            epoch, top=self._top, start=self._here.start, states=self._known_states()
        )

    def _known_states(self) -> dict[int, Any] | None:
        return dict(self._states) or None


def completes_step(number: int, accumulate: int, is_last: bool) -> bool:
    """Whether batch `number` of a lap is the last of its optimizer step.

    >>> [completes_step(n, 4, n == 9) for n in range(10)].count(True)
    3
    """
    return is_last or (number + 1) % accumulate == 0


def steps_of_lap(length: int, accumulate: int) -> int:
    """The optimizer steps of a lap: the last may have fewer batches.

    >>> steps_of_lap(10, 4)
    3
    """
    return -(-length // accumulate)


def expect_steps(
    step: int, length: int | None, accumulate: int, lap: Lap, epochs: int | None
) -> int | None:
    """The steps that a run will have in the end, if every epoch has this one lap.

    >>> expect_steps(step=3, length=10, accumulate=4, lap=Lap(epoch=1, number=0), epochs=3)
    9
    """
    if length is None or lap.number > 0:
        return None
    left = (epochs or lap.epoch + 1) - lap.epoch
    return step + left * steps_of_lap(length, accumulate) - steps_of_lap(lap.skip, accumulate)
