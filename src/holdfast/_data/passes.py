"""A pass over a source: away from what the training draws, and behind what was used."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from holdfast._data.seeds import Seeds, apart, mix_all, put_globals, take_globals
from holdfast._say import say

_SAY_AFTER_SECONDS = 5.0


class Stream:
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


def next_pass(source: Any) -> Iterator[Any]:
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


def each_apart(source: Any, seeds: Seeds) -> Iterator[Any]:
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


def replay(batches: Iterator[Any], count: int, source: Any) -> None:
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
