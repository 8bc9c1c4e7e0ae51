"""The feeds of one life: one for each loader, as long as the user has it."""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Hashable
from types import CodeType
from typing import Any

from holdfast._errors import HoldfastError
from holdfast._run.data.feed import Feed, Kit, SideBySide, feed_of
from holdfast._run.data.loader_feed import LoaderFeed
from holdfast._run.data.prepared_feed import DispatchedFeed, feed_of_prepared
from holdfast._run.data.tensorflow_feed import feed_of_tensorflow


class Feeds:
    """Finds the feed for what `run.batches` is given."""

    def __init__(self, state: list[Any], rank: int = 0, world: int = 1) -> None:
        self.kit = Kit(state, rank, world)
        # Its workers may outlive a pass, so a loader has the same feed in the next one. A script
        # that makes a new loader for each epoch must not find the old ones in its memory.
        self._loaders: weakref.WeakKeyDictionary[Any, Feed] = weakref.WeakKeyDictionary()
        self._once: list[Any] = []  # gone through outside of epochs

    def of(self, sources: tuple[Any, ...]) -> Feed:
        """The feed for one source, or for several side by side."""
        found = [self._of_one(source) for source in sources]
        return found[0] if len(found) == 1 else SideBySide(found, self.kit)

    def refuse_second_lap(self, sources: tuple[Any, ...]) -> None:
        """Outside of epochs a source is gone through once."""
        if any(source is other for source in sources for other in self._once):
            raise HoldfastError(
                "run.batches() over the same loader a second time, outside of run.epochs(): after "
                "a restart nobody could tell which of the two it was.\n"
                "Write `for epoch in run.epochs(n):` around it."
            )
        self._once += sources

    def warn_of_looking_ahead(self, caller: CodeType, is_elsewhere: bool) -> None:
        """Whoever takes a batch early makes the position run ahead of the state."""
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
        if hasattr(type(source), "holdfast_feed"):  # another's loop, which knows its data better
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
        with contextlib.suppress(TypeError):  # not everything can be referred to weakly
            if source not in self._loaders:
                feed = feed_of_tensorflow(source, self.kit)
                if feed is None:
                    return None
                self._loaders[source] = feed
            return self._loaders[source]
        return None
