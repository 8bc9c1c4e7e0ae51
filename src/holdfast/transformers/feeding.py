"""The batches of a training, by the feeds of `run.batches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from holdfast._run.data.course import Lap
from holdfast._run.data.feed import Feed, FeedAround, Seeds
from holdfast._run.data.feeds import Feeds


class TrainData:
    """What `run.batches` is given: the loader of one epoch."""

    def __init__(self, loader: Any, first_epoch: int) -> None:
        self._loader = loader
        self._first_epoch = first_epoch

    def holdfast_feed(self, feeds: Feeds) -> Feed:
        return TrainFeed(feeds.of((self._loader,)), self._first_epoch)


class TrainFeed(FeedAround):
    """Another feed, whose epochs begin where the Trainer's own checkpoint was."""

    def __init__(self, inner: Feed, first_epoch: int) -> None:
        super().__init__(inner)
        self._first_epoch = first_epoch

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:
        told = replace(lap, epoch=lap.epoch + self._first_epoch)
        batches = self._inner.open(told, seeds)
        lap.tally, self.length = told.tally, self._inner.length
        return batches


class TrainLoader:
    """Stands where the Trainer's loader stood: it asks this for each batch, and begins it once."""

    def __init__(self, take: Callable[[], Any], end: object) -> None:
        self._take = take
        self._end = end

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = self._take()
        if batch is self._end:
            raise StopIteration
        return batch


def passing_ours(skip: Callable[..., Any]) -> Callable[..., Any]:
    """Accelerate's `skip_first_batches`, for all loaders but ours, which are there already."""

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, TrainLoader):
            return dataloader
        return skip(dataloader, num_batches)

    return skip_first_batches
