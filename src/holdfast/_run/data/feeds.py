"""The feeds of one session: one for each loader, as long as the script holds it."""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Hashable, Iterator
from types import CodeType
from typing import Any

from holdfast._errors import HoldfastError
from holdfast._run.data.course import Lap
from holdfast._run.data.feed import Feed, FeedAround, Kit, SideBySide, feed_of
from holdfast._run.data.generators import Seeds
from holdfast._run.data.loader_feed import LoaderFeed
from holdfast._run.data.tensorflow_feed import feed_of_tensorflow


class Feeds:
    """Finds the feed for the arguments of `run.batches`."""

    def __init__(self, state: list[Any], rank: int = 0, world: int = 1) -> None:
        self.kit = Kit(state, rank, world)
        # A loader keeps its feed for the next pass, since its workers may outlive a pass. Weak: a
        # script may make a new loader for each epoch.
        self._loaders: weakref.WeakKeyDictionary[Any, Feed] = weakref.WeakKeyDictionary()
        self._once: list[Any] = []  # read outside epochs

    def of(self, sources: tuple[Any, ...]) -> Feed:
        """The feed for one source, or for several side by side."""
        found = [self._of_one(source) for source in sources]
        return found[0] if len(found) == 1 else SideBySide(found, self.kit)

    def refuse_second_lap(self, sources: tuple[Any, ...]) -> None:
        """Outside epochs a source is read once."""
        if any(source is other for source in sources for other in self._once):
            raise HoldfastError(
                "run.batches() over the same loader a second time, outside of run.epochs(): after "
                "a restart the two could not be told apart.\n"
                "Write `for epoch in run.epochs(n):` around it."
            )
        self._once += sources

    def warn_of_looking_ahead(self, caller: CodeType, is_elsewhere: bool) -> None:
        """Code that takes a batch early makes the position run ahead of the state."""
        if is_elsewhere:
            self.kit.warn_once(
                "run.batches is used in another thread than the one that opened the run. If the "
                "steps are not made in that thread too, they are saved in their middle: then let "
                "the thread work behind the loader, run.batches(prefetch(loader))."
            )
        if caller.co_flags & inspect.CO_GENERATOR and "tqdm" not in caller.co_filename:
            self.kit.warn_once(
                f"run.batches is used by the generator {caller.co_qualname}. If that takes a batch "
                "before the step with the last one is made, a restart loses it: then put it "
                "inside, run.batches(prefetch(loader)). Else all is well."
            )

    def _of_one(self, source: Any) -> Feed:
        if hasattr(type(source), "holdfast_feed"):  # a trainer's data
            feed: Feed = source.holdfast_feed(self)
            return feed
        if "torch" in sys.modules:
            from holdfast.torch import loader, prepared

            if prepared.is_prepared(source):
                return self._of_prepared(source)
            if loader.is_loader(source):
                known = self._loaders.get(source)
                if known is None:
                    known = self._loaders[source] = LoaderFeed(source, self.kit)
                return known
        if hasattr(sys.modules.get("tensorflow"), "__version__"):
            return self._of_tensorflow(source) or feed_of(source, self.kit)
        return feed_of(source, self.kit)

    def _of_prepared(self, source: Any) -> Feed:
        known = self._loaders.get(source)
        if known is None:
            known = feed_of_prepared(source, self.kit)
            if known is None:
                return DispatchedFeed(source, self.kit)
            self._loaders[source] = known
        return known

    def _of_tensorflow(self, source: Any) -> Feed | None:
        if not isinstance(source, Hashable):
            return None
        with contextlib.suppress(TypeError):  # not every object can be referenced weakly
            if source not in self._loaders:
                feed = feed_of_tensorflow(source, self.kit)
                if feed is None:
                    return None
                self._loaders[source] = feed
            return self._loaders[source]
        return None


# -- Batches of a loader that Accelerate has prepared ----------------------------------------------
# The DataLoader inside is read as any other. Accelerate's wrapper reads one batch ahead, which
# would be ahead of the state; the rest of its work is done here.


_END = object()


class PreparedFeed(FeedAround):
    """A loader of which each rank reads its own share; the wrapper is referenced weakly."""

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
        assert source is not None  # the caller holds it
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
    """A loader that rank 0 reads for all: replayed from its beginning."""

    def expect(self, accumulate: int) -> None:
        from holdfast.torch import prepared

        refuse_other_counts(prepared, self._source, accumulate, self.usual_length)

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:
        from holdfast.torch import prepared

        prepared.set_epoch(self._source, lap.epoch)
        return super().open(lap, seeds)


def refuse_other_counts(accelerate: Any, source: Any, accumulate: int, length: int | None) -> None:
    """A boundary must be where the accelerator steps, and nowhere else."""
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
    """None if rank 0 reads for all."""
    from holdfast.torch import prepared

    return PreparedFeed(source, kit) if prepared.has_shares(source) else None
