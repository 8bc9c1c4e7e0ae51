"""Random generators of the data.

A worker's generators advance with every batch that it makes, ahead of the batch that is used, and
cannot be set back. So each batch is made from a seed of its own: from the generators as they were
at the beginning of the lap, and its number.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import xxhash

from holdfast._adapters.adapter import Adapter
from holdfast._adapters.registry import adapters
from holdfast._state.capture import capture

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
    """A seed from the states of generators."""
    captured = capture({"states": states})
    hasher = xxhash.xxh3_64(repr(captured.tree).encode())
    for spec, value in zip(captured.specs, captured.values, strict=True):
        adapter = next(a for a in adapters() if spec.kind == a.kind)
        hasher.update(adapter.bytes_of(value))
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
        adapter.seed_global(seeds.get(adapter.global_generator, seeds["python"]))


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
    return [(adapter, adapter.global_state()) for adapter in adapters()]


def put_globals(states: list[tuple[Adapter, Any]]) -> None:
    for adapter, state in states:
        adapter.set_global_state(state)


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
        if any(adapter.is_generator(item) for adapter in adapters()):
            if not any(adapter.is_global(item) for adapter in adapters()):
                found.append(item)
        else:
            waiting += _parts_of(item)
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
    slots = [name for each in kind.__mro__ for name in _names(getattr(each, "__slots__", ()))]
    makers = [getattr(kind, name, None) for name in _MAKERS]
    return [
        *getattr(item, "__dict__", {}).values(),
        *(getattr(item, name, None) for name in slots),
        *(maker for maker in makers if isinstance(maker, FunctionType)),
    ]


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def reseed(generators: list[Any], seed: int) -> None:
    """Seed each generator differently."""
    for number, generator in enumerate(generators):
        adapter = next(a for a in adapters() if a.is_generator(generator))
        adapter.reseed(generator, mix(seed, number))


def generator_states(generators: list[Any]) -> list[Any]:
    return [next(a for a in adapters() if a.is_generator(g)).generator_state(g) for g in generators]


def restore_held(generators: list[Any], states: list[Any]) -> None:
    for generator, state in zip(generators, states, strict=False):
        adapter = next(a for a in adapters() if a.is_generator(generator))
        adapter.restore_generator(generator, state)


class Bases:
    """A seed for each generator that a source holds, from its state when first seen."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, int]] = []

    def of(self, generator: Any) -> int:
        for known, base in self._known:
            if known is generator:
                return base
        return self.know(generator, digest_states(generator_states([generator])))

    def know(self, generator: Any, base: int) -> int:
        self._known = [pair for pair in self._known if pair[0] is not generator]
        self._known.append((generator, base))
        return base


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
