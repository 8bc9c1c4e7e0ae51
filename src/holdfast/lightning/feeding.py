"""The batches of a fit, by the feeds of `run.batches`.

Lightning takes a batch from its fetcher when it begins to train on it, and asks then whether it is
the last one of the epoch. The boundary is earlier. So `run.batches` gives promises of batches: a
batch is made when Lightning takes it, not at the boundary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from holdfast._errors import name_place
from holdfast._run.data.course import Lap
from holdfast._run.data.feed import Feed, FeedAround, Seeds, apart, mix_all
from holdfast._run.data.session_feeds import Feeds

_END = object()


@dataclass(frozen=True)
class Promise:
    """A batch that is made when it is asked for."""

    make: Callable[[], Any]
    is_last: bool


@dataclass(eq=False)
class LightningData:
    """What `run.batches` is given: the loaders of one fit."""

    combined: Any
    length: int | None  # of an epoch, as Lightning counts it
    unflatten: Callable[[list[Any], Any], Any]
    first_epoch: int  # where Lightning's own checkpoint has begun the run
    behind: int  # batches of the first epoch that were used before the run began

    def holdfast_feed(self, feeds: Feeds) -> Feed:
        combined = self.combined
        loaders = tuple(combined.flattened)
        if len(loaders) == 1 or combined._mode == "min_size":
            return FitFeed(feeds.of(loaders), self, self._combine)
        return FitFeed(feeds.of((_Combined(combined),)), self, lambda batch: batch)

    def _combine(self, batch: Any) -> Any:
        flat = list(batch) if len(self.combined.flattened) > 1 else [batch]
        return self.unflatten(flat, self.combined._spec)


@dataclass(eq=False)
class _Combined:
    """Loaders that do not end together, as Lightning iterates over them, without its counts.

    Some begin again in the middle of an epoch, so a restart reads all from its beginning.
    """

    _combined: Any

    def __iter__(self) -> Iterator[Any]:
        for batch, *_ in self._combined:
            yield batch


class FitFeed(FeedAround):
    """Promises of the batches of another feed."""

    def __init__(self, inner: Feed, data: LightningData, combine: Callable[[Any], Any]) -> None:
        super().__init__(inner)
        self._data = data
        self._combine = combine
        self.length = self.usual_length = data.length or inner.usual_length

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Promise]:
        shifted = replace(lap, epoch=lap.epoch + self._data.first_epoch)
        batches = self._inner.open(shifted, seeds)
        lap.tally = shifted.tally
        known = [n for n in (self._data.length, self._inner.length) if n is not None]
        self.length = min(known) if known else None
        if self.length is None:
            return self._look_ahead(batches, lap, seeds)
        if lap.epoch == 0:
            self.length -= self._data.behind
        return self._promise(batches, lap.skip, self.length)

    def _promise(self, batches: Iterator[Any], number: int, length: int) -> Iterator[Promise]:
        def make() -> Any:
            return self._combine(next(batches))

        while number < length:
            number += 1
            yield Promise(make, number == length)

    def _look_ahead(self, batches: Iterator[Any], lap: Lap, seeds: Seeds) -> Iterator[Promise]:
        """For data of unknown length: each batch is made one early, with seeds of its own."""
        number = lap.skip
        ahead = self._take_apart(batches, lap, number, seeds)
        while ahead is not _END:
            batch, number = ahead, number + 1
            self._state = self._inner.state()
            ahead = self._take_apart(batches, lap, number, seeds)
            make = functools.partial(self._combine, batch)
            yield Promise(make, ahead is _END)
        self._state = None

    def _take_apart(self, batches: Iterator[Any], lap: Lap, number: int, seeds: Seeds) -> Any:
        with apart(mix_all(seeds, lap.epoch, lap.number, number)):
            try:
                return next(batches, _END)
            except Exception as error:  # raised again, with the position in its text
                name_place(error, lap.epoch, number)
                raise


@dataclass(eq=False)
class LengthOnly:
    """In place of a loader while Lightning asks for its length: iterating would start workers."""

    _loader: Any

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return len(self._loader)


class Fetcher:
    """Gives the epoch's loop its batches."""

    # Lightning's loops set these two.
    _start_profiler: Callable[[], None] = staticmethod(lambda: None)
    _stop_profiler: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        data: LightningData,
        on_batch: Callable[[Any], None],
        position: Callable[[], tuple[int, int]],
    ) -> None:
        self.data = data
        self.length = data.length
        self.fetched = 0
        self.done = data.length == 0
        self.next: Promise | None = None  # None at the end of the epoch
        self._on_batch = on_batch
        self._position = position

    def __iter__(self) -> Fetcher:
        self.reset()
        return self

    def __next__(self) -> tuple[Any, int, int]:
        promise, self.next = self.next, None
        if promise is None:
            self.done = True
            raise StopIteration
        self._start_profiler()
        try:
            batch = promise.make()
        except StopIteration:
            self.done = True  # there are fewer batches than the length of the data says
            raise
        except Exception as error:  # raised again, as above
            name_place(error, *self._position())
            raise
        finally:
            self._stop_profiler()
        self.fetched += 1
        self.done = promise.is_last
        self._on_batch(batch)
        return batch, self.fetched - 1, 0

    def reset(self) -> None:
        self.fetched = 0
        self.done = self.length == 0

    def teardown(self) -> None:
        self.reset()
        self.next = None
        self.data.combined.reset()
