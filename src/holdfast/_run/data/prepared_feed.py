"""Batches of a loader that Accelerate has prepared.

What is inside the shell is a DataLoader as any other, and its position is kept as such. The shell
itself looks a batch ahead, which would be one ahead of the state; its other duties are done here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from holdfast._errors import HoldfastError
from holdfast._run.data.course import Lap
from holdfast._run.data.feed import Feed, FeedAround, Kit
from holdfast._run.data.generators import Seeds
from holdfast._run.data.loader_feed import LoaderFeed

_END = object()


class PreparedFeed(FeedAround):
    """A loader of which each rank reads its own share. The shell is not held."""

    def __init__(self, source: Any, kit: Kit) -> None:
        from holdfast.torch import prepared

        self._accelerate = prepared
        self._weak = weakref.ref(source)
        if any(value is source for value in kit.state):
            raise HoldfastError(
                "the prepared loader is part of the run's state and is given to run.batches too: "
                "its position would be put back twice.\n"
                "Take it out of the state; run.batches keeps it."
            )
        prepared.share_generator(source)
        super().__init__(LoaderFeed(source.base_dataloader, kit))

    def expect(self, accumulate: int) -> None:
        source = self._weak()
        assert source is not None  # whoever opens it has it
        refuse_other_counts(self._accelerate, source, accumulate, self.usual_length)

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:
        source = self._weak()
        assert source is not None
        self._accelerate.set_epoch(source, lap.epoch)
        self._accelerate.share_globals(source)
        batches = self._inner.open(lap, seeds)
        self.length = self._inner.length
        return self._each(source, batches, lap.skip)

    def _each(self, source: Any, batches: Iterator[Any], number: int) -> Iterator[Any]:
        self._accelerate.begin(source)
        try:
            found = (
                self._look_ahead(batches) if self.length is None else self._count(batches, number)
            )
            for batch, is_last in found:
                self._accelerate.tell_last(source, is_last)
                yield self._accelerate.put_in_place(source, batch)
        finally:
            self._accelerate.end(source)

    def _count(self, batches: Iterator[Any], number: int) -> Iterator[tuple[Any, bool]]:
        for batch in batches:
            number += 1
            yield batch, number == self.length

    def _look_ahead(self, batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
        ahead = next(batches, _END)
        while ahead is not _END:
            batch, self._state = ahead, self._inner.state()
            ahead = next(batches, _END)
            yield batch, ahead is _END
        self._state = None


class DispatchedFeed(Feed):
    """A loader that rank 0 reads for all: made again from its beginning."""

    def expect(self, accumulate: int) -> None:
        from holdfast.torch import prepared

        refuse_other_counts(prepared, self._source, accumulate, self.usual_length)

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:
        from holdfast.torch import prepared

        prepared.set_epoch(self._source, lap.epoch)
        return super().open(lap, seeds)


def refuse_other_counts(accelerate: Any, source: Any, accumulate: int, length: int | None) -> None:
    """A boundary must stand where the accelerator steps, and nowhere else."""
    count = accelerate.accumulated(source)
    if count != accumulate:
        raise HoldfastError(
            f"the accelerator makes one step of {count} batches, and run.batches of {accumulate}: "
            "gradients would be lost at a restart.\n"
            f"Say the same to both: run.batches(loader, accumulate={count})."
        )
    if count == 1:
        return
    if not accelerate.begins_anew_with_epochs(source):
        raise HoldfastError(
            "the accelerator carries gradients over the end of an epoch "
            "(sync_with_dataloader=False), where they would be lost at a restart.\n"
            "Leave it at its default, GradientAccumulationPlugin(sync_with_dataloader=True)."
        )
    if length is None:
        raise HoldfastError(
            f"{count} batches are one step, and how many batches there are is not known: the "
            "accelerator and run.batches would end the epoch's last step at different ones.\n"
            "Give the data set a length, or accumulate by hand (accumulate= of run.batches alone)."
        )


def feed_of_prepared(source: Any, kit: Kit) -> PreparedFeed | None:
    """The feed for a loader that each rank reads its share of; None if rank 0 reads for all."""
    from holdfast.torch import prepared

    return PreparedFeed(source, kit) if prepared.has_shares(source) else None
