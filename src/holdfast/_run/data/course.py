"""The way through epochs and loops over data: arithmetic only.

An epoch is run anew from its top after a restart: the script's own code before,
between and after its loops runs again. So a position is counted in laps, the loops
over data in the order in which an epoch comes to them. Laps that were over before the
position are passed over, the lap of the position goes on behind the batches that were
used, and only there the state is as it was stored.

With another number of ranks no batch is the same as before. Then what is left of the lap is
a part of its own, and its batches are counted from 0 again: `before` or `passed` say where in
the lap it began.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from holdfast._errors import DamagedCheckpoint
from holdfast._store.format.schema import is_whole

_BESIDE = -1  # the number of no lap


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
    world: int = 1  # the ranks that have made it
    # These are lists where several loaders are gone through side by side:
    before: Any = 0  # samples of all ranks, used before the number of ranks was another
    samples: Any = None  # of all ranks, used since then, if they can be counted
    passed: Any = 0  # instead of `before`, where samples are not known: batches of this rank
    order: Any = None  # which order the ranks share out among them, if they do

    def to_tree(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Position:
        found = cls(**{name: tree[name] for name in cls.__dataclass_fields__ if name in tree})
        counts = (found.epoch, found.lap, found.batches, found.world, found.length or 0)
        if not all(map(is_whole, counts)):
            raise DamagedCheckpoint(f"the checkpoint has no place in its data: {counts}.")
        return found


class Tally(Protocol):
    """Counts the samples of a lap."""

    @property
    def order(self) -> Any: ...

    def after(self, batches: int) -> Any:
        """The samples that so many batches of all ranks have taken; None if nobody knows."""


@dataclass
class Lap:
    """One loop over data, as a life comes to it."""

    epoch: int
    number: int
    is_over: bool = False  # all its batches were used before: nothing to do
    goal: Position | None = None  # set for the lap that goes on in the middle
    state: Any = None  # a loader's own, from the end of its last lap in the life before
    # Set where the lap begins:
    tally: Tally | None = field(default=None, compare=False)
    usual_length: int | None = field(default=None, compare=False)  # of the next laps

    @property
    def skip(self) -> int:
        """The batches that are behind us already."""
        return self.goal.batches if self.goal is not None else 0

    @property
    def before(self) -> int:
        """The samples behind which the part begins that the batches are counted in."""
        return 0 if self.goal is None else one_number(self.goal.before)

    @property
    def behind(self) -> int:
        """The batches of the source that are not to be given any more."""
        return 0 if self.goal is None else one_number(self.goal.passed) + self.skip


def one_number(value: Any) -> int:
    """A count of one loader: a script may have had several side by side before it was changed."""
    return value if isinstance(value, int) else 0


class Course:
    """Counts epochs, laps and batches of one life, from where the life before had been."""

    def __init__(self, position: Position | None = None, world: int = 1) -> None:
        start = position or Position(world=world)
        self._world = world
        self.epoch = start.epoch
        self.batch = max(0, start.batches - 1)
        self._goal = start if start.batches else None
        self._lap = -1
        self._here = start
        # Most boundaries are not looked at, and to write out a position takes longer than to pass.
        self._used: tuple[Lap, int, int | None, Any] | None = None
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
        if self._used is not None:
            self._here = self._position_in(*self._used)
            self._used = None
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
        state = None if goal.is_over else self._former_states.pop(self._lap, None)
        return Lap(self.epoch, self._lap, goal.is_over, goal, state)

    def use(self, lap: Lap, batches: int, length: int | None, start: Any) -> None:
        """At a boundary: so many batches of the lap are used."""
        self._used = lap, batches, length, start

    def end_lap(self, lap: Lap, state: Any) -> None:
        """The lap has no more batches; only a boundary that passed its last one knows."""
        here = self.position
        if state is not None:
            self._states[lap.number] = state
        if here.batches:
            self._here = replace(here, is_over=True, states=self._known_states())

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

    def beside(self) -> dict[str, Any]:
        """What another's loop, such as model.fit, keeps with every position; it writes into it."""
        found: dict[str, Any] = self._states.setdefault(_BESIDE, {})
        return found

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
            epoch,
            top=self._top,
            start=self.position.start,
            states=self._known_states(),
            world=self._world,
        )

    def _position_in(self, lap: Lap, batches: int, length: int | None, start: Any) -> Position:
        goal, tally = lap.goal, lap.tally
        return Position(
            lap.epoch,
            lap.number,
            batches,
            length=length,
            top=self._top,
            start=start,
            states=self._known_states(),
            world=self._world,
            before=0 if goal is None else goal.before,
            samples=None if tally is None else tally.after(batches),
            passed=0 if goal is None else goal.passed,
            order=None if tally is None else tally.order,
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
    usual = length if lap.usual_length is None else lap.usual_length
    later = (epochs or lap.epoch + 1) - lap.epoch - 1
    here = steps_of_lap(length, accumulate) - steps_of_lap(lap.skip, accumulate)
    return step + here + later * steps_of_lap(usual, accumulate)
