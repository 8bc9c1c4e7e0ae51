"""Sources of batches, and how a pass over them resumes in the middle."""

from __future__ import annotations

import contextlib
import functools
import itertools
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import CellType, FunctionType, MethodType
from typing import Any

import xxhash

from holdfast._adapters.adapter import Adapter, Generators
from holdfast._adapters.registry import adapter_of, adapters, generators_of
from holdfast._errors import HoldfastError
from holdfast._run.data.course import Lap, Position, one_number
from holdfast._state.capture import capture, capture_generators, is_stateful, restore_generators
from holdfast._text import say

# -- A pass over a source, with random numbers of its own ------------------------------------------


_SAY_AFTER_SECONDS = 5.0


class Stream:
    """A stream of random numbers apart from the global one; call it for a context manager."""

    def __init__(self, seeds: Seeds) -> None:
        self._states: Any = None
        self._seeds = seeds

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with apart(self._seeds if self._states is None else None):
            if self._states is not None:
                put_globals(self._states)
            yield
            self._states = take_globals()


def next_pass(source: Any) -> Iterator[Any]:
    """The pass after the one whose last state the source was given.

    Some sources begin again at their end; others give an empty pass first.
    """
    before = take_globals()
    batches = iter(source)
    for first in batches:
        return itertools.chain([first], batches)
    put_globals(before)  # on its second beginning it draws what it drew before
    return iter(source)


def each_apart(source: Any, seeds: Seeds) -> Iterator[Any]:
    """Make each batch from its own seed, apart from what the training draws."""
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


def replay(batches: Iterator[Any], count: int, source: Any) -> None:
    """Make the first batches again and drop them; say how long that takes."""
    if not count:
        return
    is_name = isinstance(source, str)
    name = source if is_name else type(getattr(source, "dataset", source)).__name__
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


class FeedContext:
    def __init__(self, state: list[Any], rank: int = 0, world: int = 1) -> None:
        self.state = state
        self.rank = rank
        self.world = world
        # The generators of the state, which are saved with it:
        self.owned = [value for value in state if generators_of(value) is not None]
        self._bases: list[tuple[Any, int]] = []
        self._said: set[str] = set()

    def base_seed(self, generator: Any) -> int:
        """A seed for a generator that a source holds, from its state when first seen."""
        for known, base in self._bases:
            if known is generator:
                return base
        return self.know_base(generator, digest_states(generator_states([generator])))

    def know_base(self, generator: Any, base: int) -> int:
        self._bases = [pair for pair in self._bases if pair[0] is not generator]
        self._bases.append((generator, base))
        return base

    def warn_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(text)

    def warn_once_for_all(self, text: str) -> None:
        """Warn on rank 0 of what is the same on all ranks."""
        if self.rank == 0:
            self.warn_once(text)


class Feed:
    """A source of batches; this class replays it from its beginning."""

    length: int | None = None  # of the lap that is open
    usual_length: int | None = None  # of a lap that no other number of ranks began

    def __init__(self, source: Any, context: FeedContext) -> None:
        self._source = source
        with contextlib.suppress(TypeError):
            self.length = self.usual_length = len(source)
        self._hold(context, [source], [])

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:
        """The batches of this lap that are left; random numbers for the way there are drawn now."""
        self._set_length(lap)
        self._reseed_held(lap)
        # A pass leaves the global generators alone, so its number makes passes differ.
        batches = each_apart(self._source, mix_all(seeds, lap.epoch, lap.number))
        replay(batches, lap.batches_to_skip, self._source)
        return batches

    def expect(self, accumulate: int) -> None:
        """So many batches are one step; a feed that counts steps itself may refuse that."""

    def state(self) -> Any:
        """The source's own state, if it keeps its position itself."""
        return None

    def fits(self, goal: Position) -> bool:
        """True if the batches of the position are also those of today's ranks."""
        return goal.world == self.context.world

    def carry_over(self, goal: Position) -> Position:
        """The position for today's ranks, with its batches counted from 0."""
        self._warn_of_unknown(goal, self._why_unknown(goal))
        return self._behind_batches(goal, scale_batches(goal, self.context.world))

    @property
    def base_seeds(self) -> Any:
        """Seeds from the generators that the source holds, as the script gave them."""
        return [self.context.base_seed(generator) for generator in self._held]

    @base_seeds.setter
    def base_seeds(self, bases: Any) -> None:
        # A generator that the script did not seed differs in each attempt.
        for generator, base in zip(self._held, bases, strict=False):
            self.context.know_base(generator, base)

    @property
    def _name(self) -> str:
        return f"a {type(self._source).__name__}"

    def _hold(self, context: FeedContext, holders: list[Any], without: list[Any]) -> None:
        """Find the generators that decide the order, and remember their first states."""
        self.context = context
        self._held = held_generators(holders, [*without, *context.owned])
        _ = self.base_seeds

    def _reseed_held(self, lap: Lap, *more: int) -> None:
        # A generator of the source has the same state in every attempt only when the script has
        # just made it. So each pass seeds it.
        for number, (generator, base) in enumerate(zip(self._held, self.base_seeds, strict=True)):
            reseed([generator], mix(base, number, lap.epoch, lap.number, *more))

    def _set_length(self, lap: Lap) -> None:
        passed = lap.batches_to_skip - lap.skip
        usual = self.usual_length
        self.length = None if usual is None else max(0, usual - passed)

    def _behind_batches(self, goal: Position, passed: int) -> Position:
        if is_at_the_end(goal) and self.usual_length is not None:
            passed = self.usual_length
        return replace(
            goal,
            batches=0,
            length=None,
            state=None,  # it was for another number of ranks
            world=self.context.world,
            before=0,
            samples=None,
            passed=passed,
            order=None,
        )

    def _why_unknown(self, goal: Position) -> str:  # noqa: ARG002  used by a loader
        return f"which samples each has used cannot be known of {self._name}"

    def _warn_of_unknown(self, goal: Position, why: str) -> None:
        self.context.warn_once_for_all(
            f"this epoch was begun by {processes(goal.world)} and goes on with "
            f"{processes(self.context.world)}: {why}. It goes on after as many as were used, but "
            "some samples of it will be trained twice and some not at all.\n"
            "The next epoch has every sample once again. To be exact in such an epoch too, give "
            "run.batches a DataLoader with a DistributedSampler, with one process too."
        )


def scale_batches(goal: Position, world: int) -> int:
    """The batches for each of today's ranks, if all batches have one size."""
    return (one_number(goal.passed) + goal.batches) * goal.world // world


def is_at_the_end(goal: Position) -> bool:
    """True if all batches of the lap were used, though it was not left yet."""
    return goal.length is not None and goal.batches >= goal.length


def processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"


class SequenceFeed(Feed):
    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:  # noqa: ARG002  nothing is drawn
        self._set_length(lap)
        return self._each(lap)

    def _each(self, lap: Lap) -> Iterator[Any]:
        for number in range(lap.batches_to_skip, len(self._source)):
            self._reseed_held(lap, number)
            yield self._source[number]


class StatefulFeed(Feed):
    """A source that saves and restores its own position."""

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:  # noqa: ARG002  it has its own
        self._set_length(lap)
        if lap.goal is not None and lap.goal.state is not None:
            self._source.load_state_dict(lap.goal.state)
            return iter(self._source)
        if lap.state is not None:
            self._source.load_state_dict(lap.state)
        batches = iter(self._source) if lap.state is None else next_pass(self._source)
        replay(batches, lap.batches_to_skip, self._source)
        return batches

    def state(self) -> Any:
        return self._source.state_dict()


class SideBySide(Feed):
    """Several sources, read as `zip` does: it ends with the shortest."""

    def __init__(self, feeds: list[Feed], context: FeedContext) -> None:
        self.context = context
        self._feeds = feeds
        self.length = self.usual_length = _shortest([feed.usual_length for feed in feeds])

    @property
    def base_seeds(self) -> Any:
        return [feed.base_seeds for feed in self._feeds]

    @base_seeds.setter
    def base_seeds(self, bases: Any) -> None:
        for feed, of_feed in zip(self._feeds, bases, strict=False):
            feed.base_seeds = of_feed

    def fits(self, goal: Position) -> bool:
        return all(feed.fits(part) for feed, part in self._parts(goal))

    def carry_over(self, goal: Position) -> Position:
        parts = [feed.carry_over(part) for feed, part in self._parts(goal)]
        return replace(
            parts[0], before=[part.before for part in parts], passed=[part.passed for part in parts]
        )

    def _parts(self, goal: Position) -> list[tuple[Feed, Position]]:
        return [(feed, _part_of(goal, number)) for number, feed in enumerate(self._feeds)]

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:
        opened, tallies = [], []
        for number, feed in enumerate(self._feeds):
            goal = None if lap.goal is None else _part_of(lap.goal, number)
            part = replace(lap, goal=goal, state=_nth(lap.state, number), tally=None)
            opened.append(feed.open(part, mix_all(seeds, number)))
            tallies.append(part.tally)
        self.length = _shortest([feed.length for feed in self._feeds])
        lap.tally = _Tallies(tallies)
        return zip(*opened, strict=False)

    def state(self) -> Any:
        states = [feed.state() for feed in self._feeds]
        return states if any(state is not None for state in states) else None


class _Tallies:
    def __init__(self, tallies: list[Any]) -> None:
        self._tallies = tallies
        self.order = [None if tally is None else tally.order for tally in tallies]

    def after(self, batches: int) -> list[int | None]:
        return [None if tally is None else tally.after(batches) for tally in self._tallies]


def _part_of(goal: Position, number: int) -> Position:
    return replace(
        goal,
        state=_nth(goal.state, number),
        before=_nth(goal.before, number) or 0,
        samples=_nth(goal.samples, number),
        passed=_nth(goal.passed, number) or 0,
        order=_nth(goal.order, number),
    )


def _nth(values: Any, number: int) -> Any:
    return values[number] if isinstance(values, list) and number < len(values) else None


def _shortest(lengths: list[int | None]) -> int | None:
    known = [length for length in lengths if length is not None]
    return min(known) if len(known) == len(lengths) else None


def feed_of(source: Any, context: FeedContext) -> Feed:
    """The feed for any iterable but a DataLoader."""
    if is_stateful(source) and hasattr(source, "__iter__"):
        return StatefulFeed(source, context)
    # A loader of the user's own may index samples: then its items are not its batches.
    is_list = isinstance(source, Sequence) or hasattr(source, "__array__")
    is_list = is_list or not hasattr(source, "__iter__")
    if is_list and hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return SequenceFeed(source, context)
    if hasattr(source, "__next__") or isinstance(source, set | frozenset):
        what = "an iterator, which" if hasattr(source, "__next__") else "a set, whose order"
        context.warn_once(
            f"run.batches was given {what} may be another after a restart: the run will go on "
            "behind as many batches as it had used, counted from its beginning.\n"
            "To be exact, give it a DataLoader, a list, an object whose __iter__ starts over, "
            "or one with state_dict and load_state_dict."
        )
    elif not hasattr(source, "__iter__"):
        raise HoldfastError(
            f"run.batches({type(source).__name__}): this cannot be looped over.\n"
            "Give it a DataLoader, a list of batches, or anything else that `for` takes."
        )
    return Feed(source, context)


# -- A feed around another one, for a trainer: the position is the inner feed's --------------------


class FeedAround(Feed):
    def __init__(self, inner: Feed) -> None:
        self.context = inner.context
        self._inner = inner
        self._state: Any = None  # of the inner feed, before it read ahead
        self.length = self.usual_length = inner.usual_length

    @property
    def base_seeds(self) -> Any:
        return self._inner.base_seeds

    @base_seeds.setter
    def base_seeds(self, bases: Any) -> None:
        self._inner.base_seeds = bases

    def fits(self, goal: Position) -> bool:
        return self._inner.fits(goal)

    def carry_over(self, goal: Position) -> Position:
        return self._inner.carry_over(goal)

    def state(self) -> Any:
        return self._inner.state() if self._state is None else self._state


# -- The beginning of a lap: fresh, or at the stored position --------------------------------------
# To draw the same order again, the generators are set to their states from the beginning of the
# lap, the source draws, and the generators are set to those from the boundary.


def begin_fresh(feed: Feed, lap: Lap) -> tuple[Any, Iterator[Any]]:
    """A lap from its first batch; also returns the states to begin it again."""
    states = capture_generators(devices=False)
    start = {
        "global": states,
        "owned": generator_states(feed.context.owned),
        "seeds": seeds_of(states),
        "bases": feed.base_seeds,
    }
    lap.usual_length = feed.usual_length
    return start, feed.open(lap, start["seeds"])


def begin_in_the_middle(feed: Feed, lap: Lap) -> tuple[Any, Iterator[Any]]:
    """The rest of an interrupted lap; afterwards the generators are as at the boundary."""
    assert lap.goal is not None
    start = lap.goal.start
    if lap.is_over:
        return start, iter(())
    if not feed.fits(lap.goal):
        lap.goal = feed.carry_over(lap.goal)
    lap.usual_length = feed.usual_length
    feed.base_seeds = start["bases"]
    before = capture_generators(devices=False), generator_states(feed.context.owned)
    restore_generators(start["global"])
    restore_held(feed.context.owned, start["owned"])
    try:
        batches = feed.open(lap, start["seeds"])
    finally:
        restore_generators(before[0])
        restore_held(feed.context.owned, before[1])
    # The length of a lap that other ranks began is known only once it is open.
    if lap.goal.length != feed.length and None not in (lap.goal.length, feed.length):
        say(
            f"the loader had {lap.goal.length} batches and has {feed.length} now. The run goes on "
            f"after the first {lap.skip}, which are not the batches that it had used."
        )
    return start, batches


def say_reached(made: int, total: int, unit: str = "") -> str:
    """How far the run is; an earlier attempt may have been asked for more.

    >>> say_reached(3, 3, " epochs"), say_reached(3, 2, " epochs")
    ('3 of 3 epochs', '3 epochs (2 were asked for)')
    """
    return f"{made} of {total}{unit}" if made == total else f"{made}{unit} ({total} were asked for)"


# -- Random generators of the data -----------------------------------------------------------------
# A worker's generators advance with every batch that it makes, ahead of the batch that is used, and
# cannot be set back. So each batch is made from a seed of its own: from the generators as they were
# at the beginning of the lap, and its number.


_LOOKED_AT = 2000
_ITEMS = 64  # of a container: transforms are in short lists, samples in long ones
_HOLD_NONE = str | bytes | int | float | type | Adapter | None
_EMPTY_CELL = CellType()
# The methods in which a data set makes a sample: the globals that they use are searched too.
_MAKERS = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__")

Seeds = dict[str, int]  # by the name of a generator


def mix(*numbers: int) -> int:
    """One 64-bit seed from several numbers."""
    masked = [number & 0xFFFFFFFFFFFFFFFF for number in numbers]
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(masked)}Q", *masked))


def digest_states(states: Any) -> int:
    captured = capture({"states": states})
    hasher = xxhash.xxh3_64(repr(captured.tree).encode())
    for spec, value in zip(captured.specs, captured.values, strict=True):
        hasher.update(adapter_of(spec.kind).bytes_of(value))
    return hasher.intdigest()


def seeds_of(states: Mapping[str, Any]) -> Seeds:
    """A seed for each global generator from its own state.

    Separate ones: a script may have seeded only the generator that it uses.
    """
    return {name: digest_states(state) for name, state in states.items()}


def mix_all(seeds: Seeds, *numbers: int) -> Seeds:
    return {name: mix(seed, *numbers) for name, seed in seeds.items()}


def seed_globals(seeds: Seeds) -> None:
    """Seed the global generators of Python, NumPy and torch, as far as they are loaded."""
    for adapter in adapters():
        adapter.generators.seed_global(
            seeds.get(adapter.generators.global_generator, seeds["python"])
        )


@contextlib.contextmanager
def apart(seeds: Seeds | None = None) -> Iterator[None]:
    """Leave the global generators as they were, whatever is drawn inside."""
    before = take_globals()
    try:
        if seeds is not None:
            seed_globals(seeds)
        yield
    finally:
        put_globals(before)


def take_globals() -> list[tuple[Adapter, Any]]:
    """The states of the global generators, for this process only: this is fast."""
    return [(adapter, adapter.generators.global_state()) for adapter in adapters()]


def put_globals(states: list[tuple[Adapter, Any]]) -> None:
    for adapter, state in states:
        adapter.generators.set_global_state(state)


def held_generators(roots: list[Any], without: list[Any]) -> list[Any]:
    """The random generators that objects hold, in attributes and short containers."""
    found: list[Any] = []
    seen = {id(item) for item in without}
    waiting = deque(roots)  # breadth first: a transform's generator before the samples
    while waiting and len(seen) < _LOOKED_AT:
        item = waiting.popleft()
        if id(item) in seen or isinstance(item, _HOLD_NONE):
            continue
        seen.add(id(item))
        if generators_of(item) is None:
            waiting += _parts_of(item)
        elif not any(adapter.generators.is_global(item) for adapter in adapters()):
            found.append(item)
    return found


def _parts_of(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return [value for _, value in zip(range(_ITEMS), item.values(), strict=False)]
    if isinstance(item, list | tuple):
        return list(item[:_ITEMS])
    if isinstance(item, MethodType):
        return [item.__self__]
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, FunctionType):
        cells = [cell.cell_contents for cell in item.__closure__ or () if cell != _EMPTY_CELL]
        names = item.__code__.co_names
        return cells + [item.__globals__[name] for name in names if name in item.__globals__]
    if callable(getattr(item, "__array__", None)):  # an array holds none, and is large
        return []
    kind = type(item)
    slots = [getattr(each, "__slots__", ()) for each in kind.__mro__]
    slot_names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    makers = [getattr(kind, name, None) for name in _MAKERS]
    return [
        *getattr(item, "__dict__", {}).values(),
        *(getattr(item, name, None) for name in slot_names),
        *(maker for maker in makers if isinstance(maker, FunctionType)),
    ]


def _of(generator: Any) -> Generators:
    found = generators_of(generator)
    assert found is not None
    return found


def reseed(generators: list[Any], seed: int) -> None:
    for number, generator in enumerate(generators):
        _of(generator).reseed(generator, mix(seed, number))


def generator_states(generators: list[Any]) -> list[Any]:
    return [_of(generator).generator_state(generator) for generator in generators]


def restore_held(generators: list[Any], states: list[Any]) -> None:
    for generator, state in zip(generators, states, strict=False):
        _of(generator).restore_generator(generator, state)


class Seeding:
    """Seeds the generators for one batch, in the process that makes it; workers get a copy."""

    def __init__(self) -> None:
        self._held: list[Any] | None = None
        self._is_sure = False

    def __reduce__(self) -> tuple[type[Seeding], tuple[()]]:
        return (Seeding, ())  # another process has other generator objects

    def __call__(self, holders: list[Any], seed: int, in_worker: bool) -> None:
        if in_worker:
            seed_globals({"python": seed})  # and all the others
        if self._held is None:
            self._held = held_generators(holders, [])
        reseed(self._held, seed)

    def has_grown(self, holders: list[Any]) -> bool:
        """True if the first batch has made a generator: then it is made again, seeded."""
        if self._is_sure:
            return False
        self._is_sure = True
        before, self._held = self._held or [], held_generators(holders, [])
        return len(self._held) > len(before)
