"""Where batches come from, and how a pass over them goes on in the middle."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holdfast._data.course import Lap
from holdfast._data.seeds import (
    Bases,
    Seeding,
    Seeds,
    apart,
    digest_states,
    generator_states,
    held_generators,
    mix_all,
    put_globals,
    reseed,
    take_globals,
)
from holdfast._data.seeds import mix as mix_seeds
from holdfast._errors import HoldfastError
from holdfast._save.capture import adapters, is_stateful
from holdfast._say import say

if TYPE_CHECKING:
    from holdfast.torch.loader import Tickets

_SAY_AFTER_SECONDS = 5.0


class Kit:
    """What all feeds of one life share."""

    def __init__(self, state: list[Any]) -> None:
        self.state = state
        # The generators among it, which travel with it:
        self.owned = [v for v in state if any(a.is_generator(v) for a in adapters())]
        self.bases = Bases()
        self._said: set[str] = set()

    def warn_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(text)


class Feed:
    """A source of batches; this one replays it from its beginning."""

    length: int | None = None

    def __init__(self, source: Any, kit: Kit) -> None:
        self._source = source
        with contextlib.suppress(TypeError):
            self.length = len(source)
        self._hold(kit, [source], [])

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:
        """The batches of this lap that are left; all that is drawn to get there is drawn now."""
        self._reseed_held(lap)
        batches = _each_apart(self._source, seeds)
        _replay(batches, lap.skip, self._source)
        return batches

    def state(self) -> Any:
        """The source's own state, if it is what a position is found by."""
        return None

    @property
    def bases(self) -> Any:
        """Seeds from the generators that the source holds, as they were given."""
        return [self.kit.bases.of(generator) for generator in self._held]

    @bases.setter
    def bases(self, bases: Any) -> None:
        # A generator that the script did not seed is another in each life.
        for generator, base in zip(self._held, bases, strict=False):
            self.kit.bases.know(generator, base)

    def _hold(self, kit: Kit, holders: list[Any], without: list[Any]) -> None:
        """Find the generators that decide on the order, and remember how they were given."""
        self.kit = kit
        self._held = held_generators(holders, [*without, *kit.owned])
        _ = self.bases

    def _reseed_held(self, lap: Lap, *more: int) -> None:
        # A generator of the source's own is the same in every life when the script has made
        # it, and never again: so each pass seeds it anew.
        for number, (generator, base) in enumerate(zip(self._held, self.bases, strict=True)):
            reseed([generator], mix_seeds(base, number, lap.epoch, lap.number, *more))


class SequenceFeed(Feed):
    """Batches that can be had by index."""

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:  # noqa: ARG002  nothing is drawn
        for number in range(lap.skip, len(self._source)):
            self._reseed_held(lap, number)
            yield self._source[number]


class StatefulFeed(Feed):
    """A source that gives and takes its own position."""

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:  # noqa: ARG002  it has its own
        state = lap.state if lap.goal is None else lap.goal.state
        if state is not None:
            self._source.load_state_dict(state)
        return iter(self._source) if lap.state is None else _next_pass(self._source)

    def state(self) -> Any:
        return self._source.state_dict()


class LoaderFeed(Feed):
    """A torch DataLoader. It is not held: with the user's last reference it goes, and this too."""

    def __init__(self, source: Any, kit: Kit) -> None:
        from holdfast.torch import loader

        self._torch = loader
        self.length = loader.length_of(source)
        self._way = loader.way_of(source)
        self._data = source.dataset
        self._samplers = loader.samplers_of(source)
        self._generator = source.generator
        self._is_alone = source.num_workers == 0
        self._tickets: Tickets | None = None
        self._draws_by_itself = loader.draws_by_itself(source)
        self._seeds: Seeds = {}
        self._mine: Any = source
        if loader.can_be_copied(source):
            stream = self._begin_stream if self._draws_by_itself else None
            self._mine, self._tickets = loader.copy_loader(source, Seeding(), stream)
        if any(value is mine for value in kit.state for mine in (source, *self._samplers)):
            raise HoldfastError(
                "the loader, or its sampler, is part of the run's state and is given to "
                "run.batches too: its position would be put back twice.\n"
                "Take it out of the state; run.batches keeps it."
            )
        deciding = [self._generator, *self._samplers]
        if self._way == loader.REPLAYS:
            self._hold(kit, [*deciding, self._data, source.collate_fn], [])
        else:
            self._hold(kit, deciding, [self._data])
        if not self._is_alone and not getattr(source, "in_order", True):
            kit.warn_once(
                "the loader has in_order=False, so the order of its batches depends on which "
                "worker is quicker: it cannot be the same after a restart.\n"
                "Use in_order=True, DataLoader's default."
            )

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:
        self._reseed_held(lap)
        self._torch.set_epoch([*self._samplers, self._data], lap.epoch)
        way, skip, goal = self._way, lap.skip, lap.goal
        batches: Iterator[Any]
        self._seeds = seeds
        if self._tickets is not None:
            drawn = skip if way == self._torch.SKIPS else 0
            self._tickets.aim(lap.epoch, self._seed_of_workers(seeds), drawn, mix_seeds)
        if way == self._torch.SKIPS:
            batches = iter(self._mine)
            if self._tickets is not None:
                self._tickets.catch_up()
            return batches
        # A pass with workers of its own begins with a fresh copy of the data set, as ever.
        ended = lap.state if self._is_alone else None
        state = ended if goal is None else goal.state
        if state is not None and way == self._torch.KEEPS:
            self._mine.load_state_dict(state)
        elif state is not None and way == self._torch.DATA_KEEPS:
            self._data.load_state_dict(state)
        elif way == self._torch.REPLAYS:
            batches = _each_apart(self._mine, seeds) if self._is_alone else iter(self._mine)
            _replay(batches, skip, self._data)
            return batches
        batches = iter(self._mine) if ended is None else _next_pass(self._mine)
        return batches

    def _begin_stream(self) -> _Stream:
        return _Stream(mix_all(self._seeds, -2))

    def _seed_of_workers(self, seeds: Seeds) -> int:
        """One for all generators in them, as torch does: from the loader's own, or the global."""
        if self._generator is None:
            return seeds["torch"]
        return digest_states(generator_states([self._generator]))

    def state(self) -> Any:
        if self._way == self._torch.KEEPS:
            return self._mine.state_dict()
        if self._way == self._torch.DATA_KEEPS:
            return self._data.state_dict()
        return None


class SideBySide(Feed):
    """Several sources, gone through as `zip` does: it ends with the shortest."""

    def __init__(self, feeds: list[Feed], kit: Kit) -> None:
        self.kit = kit
        self._feeds = feeds
        lengths = [feed.length for feed in feeds]
        known = [length for length in lengths if length is not None]
        self.length = min(known) if len(known) == len(lengths) else None

    @property
    def bases(self) -> Any:
        return [feed.bases for feed in self._feeds]

    @bases.setter
    def bases(self, bases: Any) -> None:
        for feed, of_feed in zip(self._feeds, bases, strict=False):
            feed.bases = of_feed

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:
        opened = []
        for number, feed in enumerate(self._feeds):
            goal = lap.goal
            if goal is not None:
                goal = replace(goal, state=_part(goal.state, number))
            part = replace(lap, goal=goal, state=_part(lap.state, number))
            opened.append(feed.open(part, mix_all(seeds, number)))
        return zip(*opened, strict=False)

    def state(self) -> Any:
        return [feed.state() for feed in self._feeds]


def _next_pass(source: Any) -> Iterator[Any]:
    """The pass after the one whose last state the source was given.

    Some sources begin anew when they are at the end; others go on from there first, and so
    have nothing left, once.
    """
    before = take_globals()
    batches = iter(source)
    for first in batches:
        return itertools.chain([first], batches)
    put_globals(before)  # beginning once more, it draws what it drew in the life before
    return iter(source)


def _part(state: Any, number: int) -> Any:
    return None if state is None else state[number]


class _Stream:
    """A stream of random numbers beside the global one; called, it is entered."""

    def __init__(self, seeds: Seeds) -> None:
        self._states: Any = None
        self._seeds = seeds

    def __call__(self) -> AbstractContextManager[None]:
        return self._enter()

    @contextlib.contextmanager
    def _enter(self) -> Iterator[None]:
        with apart(self._seeds if self._states is None else None):
            if self._states is not None:
                put_globals(self._states)
            yield
            self._states = take_globals()


def feed_of(source: Any, kit: Kit) -> Feed:
    """The feed for anything that can be looped over and is no DataLoader."""
    if is_stateful(source) and hasattr(source, "__iter__"):
        return StatefulFeed(source, kit)
    if _is_sequence(source):
        return SequenceFeed(source, kit)
    if hasattr(source, "__next__") or isinstance(source, set | frozenset):
        what = "an iterator, which" if hasattr(source, "__next__") else "a set, whose order"
        kit.warn_once(
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
    return Feed(source, kit)


def _is_sequence(source: Any) -> bool:
    """Whether its batches are what its indices give: a home-made loader may mean samples."""
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        return False
    is_array = hasattr(source, "__array__")
    return isinstance(source, Sequence) or is_array or not hasattr(source, "__iter__")


def _each_apart(source: Any, seeds: Seeds) -> Iterator[Any]:
    """Each batch made from its own seed, away from what the training draws in between."""
    with apart(mix_all(seeds, -1)):
        batches = iter(source)
    number = 0
    while True:
        with apart(mix_all(seeds, number)):
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
