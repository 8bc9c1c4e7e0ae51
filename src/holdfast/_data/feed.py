"""Where batches come from, and how a pass over them goes on in the middle."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holdfast._data.course import Lap
from holdfast._data.seeds import (
    Seeding,
    apart,
    digest_states,
    generator_states,
    held_generators,
    reseed,
)
from holdfast._data.seeds import mix as mix_seeds
from holdfast._errors import HoldfastError
from holdfast._save.capture import is_stateful
from holdfast._say import say

if TYPE_CHECKING:
    from holdfast.torch.loader import Tickets

_SAY_AFTER_SECONDS = 5.0


class Feed:
    """A source of batches; this one replays it from its beginning."""

    length: int | None = None
    base: Any = 0  # a seed from the generators that the source holds, as they were given

    def __init__(self, source: Any, owned: list[Any]) -> None:
        self.source = source
        self.owned = owned  # generators that travel with the run's state
        self.is_used = False  # outside of epochs, where a second lap could not be told apart
        self._held: list[Any] = []
        with contextlib.suppress(TypeError):
            self.length = len(source)
        self._hold([source], [])

    def open(self, lap: Lap, seed: int) -> Iterator[Any]:
        """The batches of this lap that are left; all that is drawn to get there is drawn now."""
        self._reseed_held(lap)
        batches = _each_apart(self.source, seed)
        _replay(batches, lap.skip, self.source)
        return batches

    def state(self) -> Any:
        """The source's own state, if it is what a position is found by."""
        return None

    def refuse_second_lap(self) -> None:
        """Outside of epochs a source is gone through once."""
        if self.is_used:
            raise HoldfastError(
                "run.batches() over the same loader a second time, outside of run.epochs(): after "
                "a restart nobody could tell which of the two it was.\n"
                "Write `for epoch in run.epochs(n):` around it."
            )
        self.is_used = True

    def _hold(self, holders: list[Any], without: list[Any]) -> None:
        """Find the generators that decide on the order, and remember how they were given."""
        self._held = held_generators(holders, [*without, *self.owned])
        self.base = digest_states(generator_states(self._held)) if self._held else 0

    def _reseed_held(self, lap: Lap, *more: int) -> None:
        # A generator of the source's own is the same in every life when the script has made
        # it, and never again: so each pass seeds it anew.
        reseed(self._held, mix_seeds(self.base, lap.epoch, lap.number, *more))


class SequenceFeed(Feed):
    """Batches that can be had by index."""

    def open(self, lap: Lap, seed: int) -> Iterator[Any]:  # noqa: ARG002  nothing is drawn
        for number in range(lap.skip, len(self.source)):
            self._reseed_held(lap, number)
            yield self.source[number]


class StatefulFeed(Feed):
    """A source that gives and takes its own position."""

    def open(self, lap: Lap, seed: int) -> Iterator[Any]:  # noqa: ARG002  it has its own
        if lap.goal is not None:
            self.source.load_state_dict(lap.goal.state)
        return iter(self.source)

    def state(self) -> Any:
        return self.source.state_dict()


class LoaderFeed(Feed):
    """A torch DataLoader."""

    def __init__(self, source: Any, owned: list[Any]) -> None:
        from holdfast.torch import loader

        self.source = source
        self.owned = owned
        self.is_used = False
        self._torch = loader
        self._tickets: Tickets | None
        self.length = loader.length_of(source)
        self._way = loader.way_of(source)
        ahead = source.num_workers > 0
        away = loader.draws_by_itself(source)
        if loader.can_be_copied(source):
            stream = _Stream() if away else None
            mine, self._tickets = loader.copy_loader(source, Seeding(), stream)
            self._mine: Any = mine
            self._stream = stream
        else:
            self._mine, self._tickets, self._stream = source, None, None
        deciding = [source.generator, *loader.samplers_of(source)]
        if self._way == loader.REPLAYS:
            self._hold([*deciding, source.dataset, source.collate_fn], [])
        else:
            self._hold(deciding, [source.dataset])
        if ahead and not getattr(source, "in_order", True):
            say(
                "the loader has in_order=False, so the order of its batches depends on which "
                "worker is quicker: it cannot be the same after a restart.\n"
                "Use in_order=True, DataLoader's default."
            )

    def open(self, lap: Lap, seed: int) -> Iterator[Any]:
        self._reseed_held(lap)
        self._torch.set_epoch(self.source, lap.epoch)
        way, skip, goal = self._way, lap.skip, lap.goal
        batches: Iterator[Any]
        if self._stream is not None:
            self._stream.begin(mix_seeds(seed, lap.number))
        if self._tickets is not None:
            drawn = skip if way == self._torch.SKIPS else 0
            self._tickets.aim(lap.epoch, seed, drawn, mix_seeds)
        if way == self._torch.SKIPS:
            batches = iter(self._mine)
            if self._tickets is not None:
                self._tickets.catch_up()
            return batches
        if goal is not None and way == self._torch.KEEPS:
            self._mine.load_state_dict(goal.state)
        elif goal is not None and way == self._torch.DATA_KEEPS:
            self.source.dataset.load_state_dict(goal.state)
        elif way == self._torch.REPLAYS:
            alone = self.source.num_workers == 0
            batches = _each_apart(self._mine, seed) if alone else iter(self._mine)
            _replay(batches, skip, self.source)
            return batches
        batches = iter(self._mine)
        return batches

    def state(self) -> Any:
        if self._way == self._torch.KEEPS:
            return self._mine.state_dict()
        if self._way == self._torch.DATA_KEEPS:
            return self.source.dataset.state_dict()
        return None


class SideBySide(Feed):
    """Several sources, gone through as `zip` does: it ends with the shortest."""

    def __init__(self, feeds: list[Feed]) -> None:
        self.source = [feed.source for feed in feeds]
        self.owned = feeds[0].owned
        self.is_used = False
        self._feeds = feeds
        lengths = [feed.length for feed in feeds]
        known = [length for length in lengths if length is not None]
        self.length = min(known) if len(known) == len(lengths) else None

    @property
    def base(self) -> Any:
        return [feed.base for feed in self._feeds]

    @base.setter
    def base(self, bases: Any) -> None:
        for feed, base in zip(self._feeds, bases, strict=True):
            feed.base = base

    def open(self, lap: Lap, seed: int) -> Iterator[Any]:
        opened = []
        for number, feed in enumerate(self._feeds):
            goal = lap.goal
            if goal is not None and goal.state is not None:
                goal = replace(goal, state=goal.state[number])
            opened.append(feed.open(replace(lap, goal=goal), mix_seeds(seed, number)))
        return zip(*opened, strict=False)

    def state(self) -> Any:
        return [feed.state() for feed in self._feeds]


class _Stream:
    """A stream of random numbers beside the global one; called, it is entered."""

    def __init__(self) -> None:
        self._states: Mapping[str, Any] | None = None
        self._seed = 0

    def begin(self, seed: int) -> None:
        self._states, self._seed = None, seed

    def __call__(self) -> AbstractContextManager[None]:
        return self._enter()

    @contextlib.contextmanager
    def _enter(self) -> Iterator[None]:
        from holdfast._save.capture import capture_generators, restore_generators

        with apart(self._seed if self._states is None else None):
            if self._states is not None:
                restore_generators(self._states)
            yield
            self._states = capture_generators(devices=False)


def feed_of(source: Any, owned: list[Any]) -> Feed:
    """The feed for a loader, or for anything that can be looped over."""
    if "torch" in sys.modules:
        from holdfast.torch import loader

        if loader.is_loader(source):
            return LoaderFeed(source, owned)
    if is_stateful(source) and hasattr(source, "__iter__"):
        return StatefulFeed(source, owned)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        if not isinstance(source, Mapping):
            return SequenceFeed(source, owned)
    elif hasattr(source, "__next__") or isinstance(source, set | frozenset):
        what = "an iterator, which" if hasattr(source, "__next__") else "a set, whose order"
        say(
            f"run.batches was given {what} may be another after a restart: the run will go on "
            "behind as many batches as it had used, counted from its beginning.\n"
            "To be exact, give it a DataLoader, a list, an object whose __iter__ begins anew, "
            "or one with state_dict and load_state_dict."
        )
    elif not hasattr(source, "__iter__"):
        raise HoldfastError(
            f"run.batches({type(source).__name__}): this cannot be looped over.\n"
            "Give it a DataLoader, a list of batches, or anything else that `for` takes."
        )
    return Feed(source, owned)


def _each_apart(source: Any, seed: int) -> Iterator[Any]:
    """Each batch made from its own seed, away from what the training draws in between."""
    with apart(mix_seeds(seed, -1)):
        batches = iter(source)
    number = 0
    while True:
        with apart(mix_seeds(seed, number)):
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch
        number += 1


def _replay(batches: Iterator[Any], count: int, source: Any) -> None:
    """Make the first batches again and throw them away, saying how long that takes."""
    if not count:
        return
    name = type(getattr(source, "dataset", source)).__name__
    began = said = time.monotonic()
    for number in range(count):
        if next(batches, batches) is batches:
            say(f"{name} ended after {number} batches; {count} had been used before.")
            return
        now = time.monotonic()
        if now - said > _SAY_AFTER_SECONDS:
            said = now
            left = (now - began) / (number + 1) * (count - number - 1)
            say(f"replaying {name}: {number + 1} of {count} batches, about {left:.0f} s left.")
    say(
        f"replayed {count} batches of {name} in {time.monotonic() - began:.2f} s, to go on where "
        "the run was."
    )
