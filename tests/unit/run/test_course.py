"""Wherever a course is interrupted, its lives together visit what one life would have."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._run.data.course import (
    Course,
    Lap,
    Position,
    completes_step,
    expect_steps,
    steps_of_lap,
)

Visit = tuple[int, int, int]  # epoch, lap, batch


@dataclass(frozen=True)
class Loop:
    """One loop over data in a script's epoch."""

    length: int
    accumulate: int
    is_known: bool  # whether the loader has a length


Program = list[list[Loop]]  # of each epoch its loops: they may differ from epoch to epoch

loops = st.builds(Loop, st.integers(0, 7), st.integers(1, 4), st.booleans())
programs = st.lists(st.lists(loops, max_size=3), min_size=1, max_size=4)


class Interrupted(Exception):
    pass


@dataclass
class Story:
    """What all lives have done: kept is what the last boundary that counts has seen."""

    kept: list[Visit] = field(default_factory=list)
    kept_step: int = 0
    position: Position | None = None
    lives: int = 0


class Life:
    """Runs a program as `Run` does, with nothing but the arithmetic."""

    def __init__(self, story: Story, program: Program, snapshots: list[bool], die_at: int) -> None:
        self.story = story
        self.program = program
        self.snapshots = snapshots
        self.die_at = die_at  # boundaries that this life passes
        self.course = Course(story.position)
        self.step = story.kept_step
        self.visits = list(story.kept)
        self.boundaries = 0

    def run(self) -> None:
        course = self.course
        course.begin_epochs(self.step)
        while course.epoch < len(self.program):
            for loop in self.program[course.epoch]:
                self._run_lap(loop)
            if course.end_epoch(self.step):
                self._look()
            else:
                self._pass_boundary()

    def _run_lap(self, loop: Loop) -> None:
        lap = self.course.begin_lap()
        if not lap.is_over:
            for number in range(lap.skip, loop.length):
                assert self.course.epoch == lap.epoch
                self.visits.append((lap.epoch, lap.number, number))
                self.course.batch = number
                if completes_step(number, loop.accumulate, number + 1 == loop.length):
                    length = loop.length if loop.is_known else None
                    self.course.use(lap, number + 1, length, f"start of {lap.number}")
                    self._pass_boundary()
        self.course.end_lap(lap, None)

    def _pass_boundary(self) -> None:
        self.step += 1
        self._look()

    def _look(self) -> None:
        """A boundary: perhaps a snapshot, perhaps the end of this life."""
        self.boundaries += 1
        is_last = self.boundaries >= self.die_at
        if self.snapshots[self.boundaries % len(self.snapshots)] or is_last:
            # As it is stored: nothing of it may need the objects of this life.
            tree = json.loads(json.dumps(self.course.position.to_tree()))
            self.story.position = Position.from_tree(tree)
            self.story.kept, self.story.kept_step = list(self.visits), self.step
        if is_last:
            raise Interrupted


def undisturbed(program: Program) -> tuple[list[Visit], int]:
    visits = [
        (epoch, lap, batch)
        for epoch, laps in enumerate(program)
        for lap, loop in enumerate(laps)
        for batch in range(loop.length)
    ]
    steps = sum(
        max(1, sum(steps_of_lap(loop.length, loop.accumulate) for loop in laps)) for laps in program
    )
    return visits, steps


@given(
    program=programs,
    deaths=st.lists(st.integers(1, 9), max_size=12),
    snapshots=st.lists(st.booleans(), min_size=1, max_size=5),
)
def test_interrupted_at_any_boundaries_the_same_batches_are_visited(program, deaths, snapshots):
    visits, steps = undisturbed(program)
    story = Story()
    for die_at in [*deaths, 1 << 30]:
        life = Life(story, program, snapshots, die_at)
        try:
            life.run()
        except Interrupted:
            continue
        assert life.visits == visits
        assert life.step == steps
        return
    raise AssertionError("the last life is not interrupted")


@given(
    epoch=st.integers(0, 1 << 40),
    lap=st.integers(0, 100),
    batches=st.integers(0, 1 << 40),
    is_over=st.booleans(),
    length=st.none() | st.integers(0, 1 << 40),
    start=st.none() | st.dictionaries(st.text(), st.integers()),
    world=st.integers(1, 1 << 20),
    samples=st.none() | st.integers(0, 1 << 40),
)
def test_a_position_is_the_same_after_json(
    epoch, lap, batches, is_over, length, start, world, samples
):
    position = Position(
        epoch,
        lap,
        batches,
        is_over,
        length,
        start,
        state={"at": [1, 2]},
        world=world,
        before=[samples or 0, 3],
        samples=samples,
        order={"samples": 7, "seed": None, "shares": world},
    )
    assert Position.from_tree(json.loads(json.dumps(position.to_tree()))) == position


def test_a_position_of_another_version_loses_only_what_is_unknown():
    tree = {**Position(2, 1, 7).to_tree(), "invented_later": 1}
    del tree["state"]
    assert Position.from_tree(tree) == Position(2, 1, 7)


def test_a_position_from_before_ranks_were_known_is_of_one():
    tree = Position(2, 1, 7).to_tree()
    for name in ("world", "before", "samples", "passed", "order"):
        del tree[name]
    assert Position.from_tree(tree) == Position(2, 1, 7, world=1)


def test_every_position_tells_the_number_of_ranks():
    course = Course(Position(epoch=1, lap=0, batches=4, world=4), world=2)
    assert course.position.world == 4
    lap = course.begin_lap()
    course.use(lap, 5, 9, None)
    assert course.position.world == 2
    course.end_lap(lap, None)
    assert course.position.world == 2
    course.end_epoch(9)
    assert course.position == Position(epoch=2, world=2)
    assert Course(world=3).position == Position(world=3)


@pytest.mark.parametrize(("usual", "steps"), [(None, 20 + 3 * 2), (8, 20 + 2 + 2 * 3)])
def test_a_shortened_lap_does_not_shorten_those_to_come(usual, steps):
    lap = Lap(epoch=1, number=0, usual_length=usual)
    assert expect_steps(20, 5, 3, lap, epochs=4) == steps


@given(length=st.integers(0, 200), accumulate=st.integers(1, 20))
def test_steps_of_a_lap_are_its_batches_that_complete_one(length, accumulate):
    complete = [n for n in range(length) if completes_step(n, accumulate, n + 1 == length)]
    assert len(complete) == steps_of_lap(length, accumulate)
    assert not length or complete[-1] == length - 1
    assert all(b - a <= accumulate for a, b in pairwise([-1, *complete]))


def test_a_lap_that_was_over_is_passed_and_the_next_one_goes_on():
    course = Course(Position(epoch=3, lap=1, batches=5, length=9))
    assert course.is_on_the_way
    assert course.begin_lap() == Lap(3, 0, is_over=True)
    assert course.is_on_the_way
    lap = course.begin_lap()
    assert (lap.number, lap.skip, lap.is_over) == (1, 5, False)
    assert not course.is_on_the_way
    assert course.begin_lap() == Lap(3, 2)


@pytest.mark.parametrize("batches", [1, 6])
def test_the_batch_of_a_resumed_run_is_the_last_that_was_used(batches):
    assert Course(Position(batches=batches)).batch == batches - 1


def test_a_turn_without_a_step_is_told_from_one_with():
    course = Course()
    course.begin_epochs(0)
    assert not course.end_epoch(0)
    lap = course.begin_lap()
    course.use(lap, 1, 4, None)
    assert course.end_epoch(2)  # the turn before counted as a step
    assert course.position == Position(epoch=2)


def test_an_epoch_that_goes_on_in_the_middle_has_had_steps():
    course = Course(Position(epoch=1, lap=0, batches=4, is_over=True))
    course.begin_epochs(9)
    assert course.begin_lap().is_over
    assert course.end_epoch(9)
