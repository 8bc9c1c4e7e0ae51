"""The loops that a script writes: which may stand in which, and how one is left."""

from __future__ import annotations

import inspect
import opcode
from collections.abc import Generator, Iterator
from types import FrameType
from typing import Any

from holdfast._errors import HoldfastError

# What a frame does as it lets a loop's iterator go: `break` and `return`, or the end of the loop
# where something around the iterator (islice, zip) ends it. None of these is an exception.
_LEAVING = frozenset({"POP_TOP", "POP_ITER", "FOR_ITER"})


class LoopMark:
    """A loop that is running, told apart from others of its name."""

    def __init__(self, name: str) -> None:
        self.name = name


def refuse_nested(name: str, outer: str | None) -> None:
    """Refuse a loop where its boundaries would make no sense."""
    if outer is None or (outer == "run.epochs" and name == "run.batches"):
        return
    remedy = "Put the inner one into `with run.phase('eval'):`, where it counts no steps."
    if "run.steps" in (name, outer) or name == "run.epochs":
        remedy = "Use `for epoch in run.epochs(n): for batch in run.batches(loader):`."
    raise HoldfastError(
        f"{name}() inside {outer}(): a step of the inner loop would be saved in the "
        f"middle of a step of the outer one.\n{remedy}"
    )


class Batches(Iterator[Any]):
    """An iterator over the batches that are left; its length is that of the loaders."""

    def __init__(self, batches: Generator[Any, None, None], sources: tuple[Any, ...]) -> None:
        self._batches = batches
        self._sources = sources

    def __iter__(self) -> Generator[Any, None, None]:
        return self._batches  # so that it is closed as soon as a loop over it is left

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        """All batches of a pass: the same number in every life."""
        return min(len(source) for source in self._sources)

    def __bool__(self) -> bool:
        return True

    def close(self) -> None:
        self._batches.close()


def is_left_by_script(frame: FrameType | None) -> bool:
    """Whether a generator that `frame` is closing was left by `break`, `return` or the like.

    An exception that leaves a loop closes the generator too, and a step that failed is no step.
    """
    while frame is not None:
        code = frame.f_code
        if opcode.opname[code.co_code[frame.f_lasti]] in _LEAVING:
            return True
        if not code.co_flags & inspect.CO_GENERATOR:
            return False
        frame = frame.f_back  # a generator around ours, such as tqdm's, that is closed itself
    return False
