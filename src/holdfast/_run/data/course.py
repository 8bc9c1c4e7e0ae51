"""The position in epochs and loops over data: arithmetic only.

After a restart the epoch is replayed from its beginning, with the script's own code before, between
and after its loops. So a position counts laps: the loops over data in the order of the epoch. Laps
before the position are skipped. The lap of the position continues after the used batches, and there
the stored state is restored.

With another number of ranks all batches differ. Then the rest of the lap is a part of its own, and
its batches are counted from 0 again: `before` or `passed` say where in the lap it began.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast._errors import DamagedCheckpoint
from holdfast._store.format.schema import is_whole

_TRAINER = -1  # in place of the number of a lap


@dataclass(frozen=True)
class Position:
    epoch: int = 0
    lap: int = 0  # which of the epoch's loops over data
    batches: int = 0  # used in that lap; 0: the top of the epoch
    is_over: bool = False  # the lap has no more batches
    length: int | None = None  # of the lap, to notice a loader that has changed
    top: Any = None  # the generators when the epoch began
    start: Any = None  # the generators when the lap began
    state: Any = None  # of a loader that keeps its position itself
    states: Any = None  # of such loaders at the end of their last lap, by its number
    world: int = 1  # the number of ranks
    # Lists, if several loaders are read side by side:
    before: Any = 0  # samples of all ranks, used before the number of ranks changed
    samples: Any = None  # of all ranks, used since then, if they can be counted
    passed: Any = 0  # batches of this rank, in place of `before` where samples are not known
    order: Any = None  # the order that the ranks share out, if they do

    def to_tree(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Position:
        found = cls(**{name: tree[name] for name in cls.__dataclass_fields__ if name in tree})
        counts = (found.epoch, found.lap, found.batches, found.world, found.length or 0)
        if not all(map(is_whole, counts)):
            raise DamagedCheckpoint(f"the checkpoint has no place in its data: {counts}.")
        return found


@dataclass
class Lap:
    """One loop over data in this attempt."""

    epoch: int
    number: int
    is_over: bool = False  # all its batches were used before: nothing to do
    goal: Position | None = None  # set for the lap that resumes in the middle
    state: Any = None  # a loader's own, from the end of its last lap in the attempt before
    # Set where the lap begins. A tally counts samples: its `order`, and `after(batches)` of all
    # ranks, None if that is not known.
    tally: Any = field(default=None, compare=False)
    usual_length: int | None = field(default=None, compare=False)  # of the next laps

    @property
    def skip(self) -> int:
        return self.goal.batches if self.goal is not None else 0

    @property
    def before(self) -> int:
        """Samples used before the number of ranks changed."""
        return 0 if self.goal is None else one_number(self.goal.before)

    @property
    def batches_to_skip(self) -> int:
        return 0 if self.goal is None else one_number(self.goal.passed) + self.skip


def one_number(value: Any) -> int:
    """A count of one loader: the script may have had several before it was changed."""
    return value if isinstance(value, int) else 0


class Course:
    """Counts the epochs, laps and batches of an attempt, from the stored position."""

    def __init__(self, position: Position | None = None, world: int = 1) -> None:
        start = position or Position(world=world)
        self._world = world
        self.is_used = position is not None  # else the run has no loops over data
        self.epoch = start.epoch
        self.batch = max(0, start.batches - 1)
        self._goal = start if start.batches else None
        self._lap = -1
        self._here = start
        # Made into a position only when that is read: a boundary is faster than that.
        self._used: tuple[Lap, int, int | None, Any] | None = None
        self._steps_at_top = 0
        self._top = start.top
        self._states: dict[int, Any] = dict(start.states or {})
        self._former_states = dict(self._states)  # not loaded yet

    @property
    def is_on_the_way(self) -> bool:
        return self._goal is not None

    @property
    def position(self) -> Position:
        if self._used is not None:
            self._here = self._position_in(*self._used)
            self._used = None
        return self._here

    def begin_lap(self) -> Lap:
        self.is_used = True
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
        """At a boundary: the number of batches that are used."""
        self._used = lap, batches, length, start

    def end_lap(self, lap: Lap, state: Any) -> None:
        here = self.position
        if state is not None:
            self._states[lap.number] = state
        if here.batches:
            self._here = replace(here, is_over=True, states=dict(self._states) or None)

    def end_epoch(self, step: int) -> bool:
        """True if a step was made in the epoch; else its end counts as one."""
        has_stepped = step > self._steps_at_top
        self.epoch += 1
        self.batch, self._lap, self._goal = 0, -1, None
        self._steps_at_top = step if has_stepped else step + 1
        # The generators of the last lap stay, unused: another layout would need a new arena.
        common = {"top": self._top, "states": dict(self._states) or None, "world": self._world}
        self._here = Position(self.epoch, start=self.position.start, **common)
        return has_stepped

    def note_top(self, generators: Any) -> Any:
        """An epoch begins; returns the generators to begin with, if it is the stored one."""
        if self._goal is not None and self._top is not None:
            return self._top
        self._top = generators
        return None

    def trainer_state(self) -> dict[str, Any]:
        """What a trainer, such as Keras' fit, stores with every position; it writes into it."""
        found: dict[str, Any] = self._states.setdefault(_TRAINER, {})
        return found

    def begin_epochs(self, step: int) -> None:
        """The epochs begin; a stored epoch already has steps."""
        self.is_used = True
        self._steps_at_top = step - 1 if self._goal is not None else step

    def _position_in(self, lap: Lap, batches: int, length: int | None, start: Any) -> Position:
        goal, tally = lap.goal, lap.tally
        return Position(
            *(lap.epoch, lap.number, batches),
            length=length,
            top=self._top,
            start=start,
            states=dict(self._states) or None,
            world=self._world,
            before=0 if goal is None else goal.before,
            samples=None if tally is None else tally.after(batches),
            passed=0 if goal is None else goal.passed,
            order=None if tally is None else tally.order,
        )


def completes_step(number: int, accumulate: int, is_last: bool) -> bool:
    """True if batch `number` of a lap is the last of its optimizer step.

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
    """The steps that a run will have in all, if every epoch has this one lap.

    >>> expect_steps(step=3, length=10, accumulate=4, lap=Lap(epoch=1, number=0), epochs=3)
    9
    """
    if length is None or lap.number > 0:
        return None
    usual = length if lap.usual_length is None else lap.usual_length
    later = (epochs or lap.epoch + 1) - lap.epoch - 1
    here = steps_of_lap(length, accumulate) - steps_of_lap(lap.skip, accumulate)
    return step + here + later * steps_of_lap(usual, accumulate)
