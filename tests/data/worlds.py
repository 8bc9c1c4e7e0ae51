"""Runs of many ranks without processes: each rank lives alone, one after the other."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from holdfast._run.data.course import Course, Lap, Position, completes_step, expect_steps
from holdfast._run.data.feed import Feed, begin_fresh, begin_in_the_middle
from holdfast._run.data.session_feeds import Feeds
from holdfast._state.capture import capture

Make = Callable[[int, int], Any]  # from rank and world, the loader or several
_NONE = object()


def distributed(
    count: int,
    batch_size: int | None = 4,
    *,
    shuffle: bool = True,
    drop_last: bool = False,
    seed: int = 5,
    data: Any = None,
    sampler: type[Any] = DistributedSampler,
    loader: type[Any] = DataLoader,
    **options: Any,
) -> Make:
    """Loaders of ranks that share out their samples."""

    def make(rank: int, world: int) -> Any:
        samples = TensorDataset(torch.arange(count)) if data is None else data
        order = sampler(samples, world, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        return loader(samples, batch_size=batch_size, sampler=order, **options)

    return make


@dataclass
class Rank:
    """One life of one rank, which goes through its epochs as `Run` does."""

    rank: int
    world: int
    accumulate: int
    epochs: int
    position: Position | None
    step: int
    given: list[tuple[int, int, Any]] = field(default_factory=list)  # epoch, number, batch
    expected: list[int | None] = field(default_factory=list)  # steps in the end, by lap

    def __post_init__(self) -> None:
        self.course = Course(self.position, self.world)
        self.feeds = Feeds([], self.rank, self.world)

    def live(self, make: Make, steps: int | None) -> None:
        """Train so many steps, or to the end."""
        torch.manual_seed(100 + self.rank)
        made = make(self.rank, self.world)
        sources = made if isinstance(made, tuple) else (made,)
        left = itertools.count(1)
        self.course.begin_epochs(self.step)
        while self.course.epoch < self.epochs:
            for _ in self._lap(self.feeds.of(sources)):
                if next(left) == steps:
                    return
            self.course.end_epoch(self.step)

    def _lap(self, feed: Feed) -> Iterator[None]:
        """One loop over data; gives control at each boundary."""
        course, lap = self.course, self.course.begin_lap()
        begin = begin_fresh if lap.goal is None else begin_in_the_middle
        start, batches = begin(feed, lap)
        if lap.is_over:
            return
        length, number, ahead = feed.length, lap.skip, _NONE
        self.expected.append(expect_steps(self.step, length, self.accumulate, lap, self.epochs))
        is_complete = True
        while True:
            batch = next(batches, _NONE) if ahead is _NONE else ahead
            ahead = _NONE
            if batch is _NONE:
                break
            is_last = length is not None and number + 1 >= length
            if length is None and (number + 1) % self.accumulate:
                ahead = next(batches, _NONE)
                is_last = ahead is _NONE
            course.batch = number
            is_complete = completes_step(number, self.accumulate, is_last)
            self.given.append((lap.epoch, number, batch))
            number += 1
            if is_complete:
                course.use(lap, number, length, start)
                self.step += 1
                yield
        assert is_complete, "the last batches of a lap are a step too"
        assert length is None or number == length
        self._end(lap, feed)

    def _end(self, lap: Lap, feed: Feed) -> None:
        self.course.end_lap(lap, feed.state())

    def stored(self) -> Position:
        """The position as another life finds it."""
        tree = self.course.position.to_tree()
        capture({"position": tree})
        return Position.from_tree(copy.deepcopy(tree))


class Job:
    """All ranks of a run, and what they were given in all its lives."""

    def __init__(self, make: Make, *, epochs: int = 2, accumulate: int = 1) -> None:
        self.make = make
        self.epochs = epochs
        self.accumulate = accumulate
        self.positions: list[Position] = []
        self.step = 0
        self.given: list[dict[int, list[tuple[int, Any]]]] = []  # by life and epoch
        self.ranks: list[Rank] = []

    def live(self, world: int, steps: int | None = None) -> list[Rank]:
        """One life with so many ranks; they stop after so many steps, or at the end."""
        self.ranks = []
        of_life: dict[int, list[tuple[int, Any]]] = {}
        for number in range(world):
            position = self.positions[number % len(self.positions)] if self.positions else None
            rank = Rank(number, world, self.accumulate, self.epochs, position, self.step)
            rank.live(self.make, steps)
            self.ranks.append(rank)
            for epoch, at, batch in rank.given:
                of_life.setdefault(epoch, []).append((at, batch))
        assert len({rank.step for rank in self.ranks}) == 1, "the ranks would wait for each other"
        assert len({tuple(rank.expected) for rank in self.ranks}) == 1
        self.positions = [rank.stored() for rank in self.ranks]
        self.step = self.ranks[0].step
        self.given.append(of_life)
        return self.ranks

    def samples(self, epoch: int) -> Counter[int]:
        """How often each sample was given in an epoch, in all lives."""
        batches = [batch for life in self.given for _, batch in life.get(epoch, [])]
        return Counter(index for batch in batches for index in indices_of(batch))


def indices_of(batch: Any) -> list[int]:
    while isinstance(batch, list | tuple):
        batch = batch[0]
    return [int(index) for index in batch.flatten()]
