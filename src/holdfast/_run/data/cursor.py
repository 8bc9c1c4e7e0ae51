"""Where in its data a session is, and what of that a snapshot stores."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from holdfast._errors import name_place
from holdfast._run.data.course import Course, Lap, Position
from holdfast._run.data.feed import Feed, begin_fresh, begin_in_the_middle
from holdfast._run.data.feeds import Feeds

END = object()  # in place of a batch


class DataCursor:
    """The course through the data, and the feed that is being read."""

    def __init__(self, position: Position | None, state: list[Any], rank: int, size: int) -> None:
        self.course = Course(position, size)
        self.feeds = Feeds(state, rank, size)
        self.feed: Feed | None = None  # of the lap that is running
        self._lap: tuple[Lap, int | None, Any] | None = None  # as Course.use wants it
        # Of the last loader that keeps its own position:
        self._loader_state: Any = None if position is None else position.state
        self._has_position = position is not None  # else the run has no loops over data

    def begin_epochs(self, step: int) -> None:
        self._has_position = True
        self.course.begin_epochs(step)

    def begin_lap(self) -> Lap:
        self._has_position = True
        return self.course.begin_lap()

    def open(self, feed: Feed, lap: Lap) -> tuple[Any, Iterator[Any]]:
        """The batches of a lap that are left, and the states to begin it again."""
        if lap.goal is not None:
            start, batches = begin_in_the_middle(feed, lap)
        elif lap.is_over:
            start, batches = None, iter(())
        else:
            start, batches = begin_fresh(feed, lap)
        if not lap.is_over:
            self.feed, self._lap = feed, (lap, feed.length, start)
        return start, batches

    def close(self, feed: Feed) -> None:
        if self.feed is feed:
            self.feed, self._lap = None, None

    @property
    def is_in_lap(self) -> bool:
        return self._lap is not None

    def take(self, batches: Iterator[Any], number: int) -> Any:
        """The next batch, or END; an error says where in the data it came from."""
        try:
            return next(batches, END)
        except Exception as error:
            name_place(error, self.course.epoch, number)
            raise

    def uncounted(self, feed: Feed) -> Generator[Any, None, None]:
        """All batches, in a phase: it is repeated as a whole, so nothing is counted."""
        _, batches = begin_fresh(feed, Lap(self.course.epoch, -1))
        number = 0
        while (batch := self.take(batches, number)) is not END:
            yield batch
            number += 1

    def use_batch_at_hand(self) -> None:
        """The step of the batch that was given last is complete."""
        if self._lap is not None:
            lap, length, start = self._lap
            self.course.use(lap, self.course.batch + 1, length, start)

    def tree(self) -> dict[str, Any] | None:
        return self.course.position.to_tree() if self._has_position else None

    def stored(self) -> dict[str, Any] | None:
        """The position for a snapshot, with the state of a loader that keeps its own."""
        tree = self.tree()
        if tree is not None:
            if self.feed is not None and not self.course.position.is_over:
                self._loader_state = self.feed.state()
            # After a lap its last state stays, unused: another layout would need a new arena.
            tree["state"] = self._loader_state
        return tree

    def release(self) -> None:
        self.feeds = Feeds([])  # with the old ones go the workers that outlive an epoch
