"""An image in memory that is to be committed: its ranges and their checksums."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash

from holdfast._store.commit.chunks import WorkQueue
from holdfast._store.format.checksum import SMALL_BYTES, digest, portions
from holdfast._store.format.image import Extent

# -- The checksums of an image's ranges, computed in chunks ---------------------------------

_LARGE_BYTES = 8 << 20
_MOST_THREADS = 8
_WORTH_A_THREAD_BYTES = 16 << 20


def threads_for(sizes: Sequence[int]) -> int:
    """How many threads hash these ranges: hashing small ones holds the GIL."""
    large = sum(size for size in sizes if size >= SMALL_BYTES)
    return max(1, min(os.cpu_count() or 1, _MOST_THREADS, large // _WORTH_A_THREAD_BYTES))


class Begun(NamedTuple):
    """A large range that is partly hashed."""

    number: int
    done: int
    hasher: xxhash.xxh3_128


class Hashing(WorkQueue[Sequence[int] | Begun]):
    """Computes the checksums of all ranges; `then` is called with them at the end."""

    def __init__(
        self,
        view: Callable[[int], memoryview],
        sizes: Sequence[int],
        taken_as: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(portions(sizes) if taken_as is None else taken_as)
        self._view = view
        self._sizes = sizes
        self.then: Callable[[list[bytes]], None] | None = None
        self.found: list[bytes] = [b""] * len(sizes)

    @classmethod
    def known(cls, digests: list[bytes]) -> Hashing:
        """For checksums that are known already."""
        hashing = cls(lambda _: memoryview(b""), [])
        hashing.found = digests
        return hashing

    def do(self, piece: Sequence[int] | Begun) -> Begun | None:
        if not isinstance(piece, Begun):
            if len(piece) > 1 or self._sizes[piece[0]] <= _LARGE_BYTES:
                for index in piece:
                    self.found[index] = digest(self._view(index))
                return None
            piece = Begun(piece[0], 0, xxhash.xxh3_128())
        index, done, hasher = piece
        view = self._view(index)
        hasher.update(view[done : done + _LARGE_BYTES])
        done += _LARGE_BYTES
        if done < self._sizes[index]:
            return Begun(index, done, hasher)
        self.found[index] = hasher.digest()
        return None

    def end(self) -> None:
        if self.then is not None:
            self.then(self.found)

    def digests(self) -> list[bytes]:
        """All checksums; waits until they are complete."""
        self.finish()
        return self.found


class Ranges(NamedTuple):
    """The ranges of an image, column by column: header, tensors, scalars."""

    names: list[str]
    offsets: list[int]
    sizes: list[int]
    taken_as: list[Sequence[int]]  # the order of hashing

    @classmethod
    def of(cls, extents: Sequence[Extent]) -> Ranges:
        sizes = [extent.size_bytes for extent in extents]
        names, offsets = [e.name for e in extents], [e.offset for e in extents]
        return cls(names, offsets, sizes, portions(sizes))


def _view(views: Sequence[memoryview], ranges: Ranges, index: int) -> memoryview:
    if len(views) > 1:
        return views[index]
    start = ranges.offsets[index]
    return views[0][start : start + ranges.sizes[index]]


class Source:
    """An image as its views, one after another: a single one, or one for each range."""

    def __init__(
        self, views: Sequence[memoryview], ranges: Ranges, hashing: Hashing | None = None
    ) -> None:
        self.views = views
        self.ranges = ranges
        self.size_bytes = sum(view.nbytes for view in views)
        # Not a method: a reference cycle would be collected late, and with it the memory of an
        # arena that is gone.
        self.view = functools.partial(_view, views, ranges)
        self.hashing = hashing or Hashing(self.view, ranges.sizes, ranges.taken_as)
