"""The batches of a fit, by the feeds of `run.batches`.

Lightning asks its fetcher for a batch when it begins with it, and wants to know then whether that
is the last of the epoch. A boundary is passed between, so what `run.batches` gives are promises of
batches: each is made when it is asked for, not when the boundary is passed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from holdfast._errors import name_place
from holdfast._run.data.course import Lap, Position
from holdfast._run.data.feed import Feed, FeedAround, Seeds, SideBySide, apart, mix_all
from holdfast._run.data.feeds import Feeds

_END = object()


class Promise:
    """A batch that is made when it is asked for."""

    def __init__(self, make: Callable[[], Any], *, is_last: bool) -> None:
        self.make = make
        self.is_last = is_last


class LightningData:
    """What `run.batches` is given: the loaders of one fit."""

    def __init__(
        self, combined: Any, length: int | None, unflatten: Callable[[list[Any], Any], Any]
    ) -> None:
        self.combined = combined
        self._unflatten = unflatten
        self.length = length  # of an epoch, as Lightning counts it
        self.first_epoch = 0  # where Lightning's own checkpoint has begun the run
        self.behind = 0  # batches that were used before the run began, in its first epoch

    def holdfast_feed(self, feeds: Feeds) -> Feed:
        combined = self.combined
        loaders = tuple(combined.flattened)
        inner: Feed
        if len(loaders) == 1 or combined._mode == "min_size":
            inner = feeds.of(loaders)
        else:
            each = [feeds.of((loader,)) for loader in loaders]
            if any(feed.usual_length is None for feed in each):
                return FitFeed(feeds.of((_Combined(combined),)), self, lambda batch: batch)
            inner = InTurn(each, cycles=combined._mode == "max_size_cycle")
        return FitFeed(inner, self, self._combine)

    def _combine(self, batch: Any) -> Any:
        flat = list(batch) if len(self.combined.flattened) > 1 else [batch]
        return self._unflatten(flat, self.combined._spec)


class _Combined:
    """Loaders of unknown length side by side, as Lightning goes through them; no counts."""

    def __init__(self, combined: Any) -> None:
        self._combined = combined

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
        told = replace(lap, epoch=lap.epoch + self._data.first_epoch)
        batches = self._inner.open(told, seeds)
        lap.tally = told.tally
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
            yield Promise(make, is_last=number == length)

    def _look_ahead(self, batches: Iterator[Any], lap: Lap, seeds: Seeds) -> Iterator[Promise]:
        """Where only the data know their end: each batch is made apart, one before it is used."""
        number = lap.skip
        ahead = self._take_apart(batches, lap, number, seeds)
        while ahead is not _END:
            batch, number = ahead, number + 1
            self._state = self._inner.state()
            ahead = self._take_apart(batches, lap, number, seeds)
            make = functools.partial(self._combine, batch)
            yield Promise(make, is_last=ahead is _END)
        self._state = None

    def _take_apart(self, batches: Iterator[Any], lap: Lap, number: int, seeds: Seeds) -> Any:
        with apart(mix_all(seeds, lap.epoch, lap.number, number)):
            try:
                return next(batches, _END)
            except Exception as error:  # it goes on, with the place in its words
                name_place(error, lap.epoch, number)
                raise


class InTurn(SideBySide):
    """Several loaders until the longest ends; the others begin again, or give None."""

    def __init__(self, feeds: list[Feed], *, cycles: bool) -> None:
        super().__init__(feeds, feeds[0].kit)
        self._cycles = cycles
        self.length = self.usual_length = max(feed.usual_length or 0 for feed in feeds)

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:
        opened = [self._open_one(number, lap, seeds) for number in range(len(self._feeds))]
        self.length = self.usual_length
        return self._each(opened, lap.behind)

    def state(self) -> Any:
        return None

    def _each(self, opened: list[Iterator[Any]], number: int) -> Iterator[Any]:
        while number < (self.length or 0):
            yield [next(batches) for batches in opened]
            number += 1

    def _open_one(self, which: int, lap: Lap, seeds: Seeds) -> Iterator[Any]:
        """One loader from this batch on, for ever.

        Its first pass draws as any lap does; each other from seeds of its own, so that it can be
        begun in the middle of the lap.
        """
        feed, behind = self._feeds[which], lap.behind
        length = feed.usual_length or 0
        turn, skip = divmod(behind, length) if length else (0, 0)
        if turn and not self._cycles:
            return _nothing_for_ever()
        return self._go_round(which, turn, self._begin(which, turn, skip, lap, seeds), lap, seeds)

    def _go_round(
        self, which: int, turn: int, batches: Iterator[Any], lap: Lap, seeds: Seeds
    ) -> Iterator[Any]:
        while True:
            count = 0
            for batch in batches:
                yield batch
                count += 1
            if not self._cycles or not count:
                yield from _nothing_for_ever()
            turn += 1
            batches = self._begin(which, turn, 0, lap, seeds)

    def _begin(self, which: int, turn: int, skip: int, lap: Lap, seeds: Seeds) -> Iterator[Any]:
        goal = Position(lap.epoch, lap.number, skip, world=self.kit.world) if skip else None
        part = Lap(lap.epoch, lap.number, goal=goal)
        own = mix_all(seeds, which, turn)
        with contextlib.nullcontext() if turn == 0 else apart(own):
            return self._feeds[which].open(part, own)


def _nothing_for_ever() -> Iterator[None]:
    while True:
        yield None


class Stand:
    """Stands where a loader will be while Lightning looks at its length: it would start workers."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return len(self._loader)


class Fetcher:
    """What the epoch's loop takes its batches from."""

    def __init__(self, data: LightningData) -> None:
        self.data = data
        self.length = data.length
        self.fetched = 0
        self.done = data.length == 0
        self.next: Promise | None = None  # None at the end of the epoch
        self.note: Callable[[Any], None] = lambda _: None
        self.place: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._start_profiler: Callable[[], None] = lambda: None
        self._stop_profiler: Callable[[], None] = lambda: None

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
            self.done = True  # there are fewer than the data had said
            raise
        except Exception as error:  # as above
            name_place(error, *self.place())
            raise
        finally:
            self._stop_profiler()
        self.fetched += 1
        self.done = promise.is_last
        self.note(batch)
        return batch, self.fetched - 1, 0

    def reset(self) -> None:
        self.fetched = 0
        self.done = self.length == 0

    def teardown(self) -> None:
        self.reset()
        self.next = None
        self.data.combined.reset()
