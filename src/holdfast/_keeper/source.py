"""What is to be made durable: an image in memory, its ranges and their checksums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast._keeper.hashing import Hashing, portions
from holdfast._record.image import Extent


class Ranges(NamedTuple):
    """The ranges of an image, column by column: header, tensors, scalars."""

    names: list[str]
    offsets: list[int]
    sizes: list[int]
    taken_as: list[Sequence[int]]  # by whoever hashes them

    @classmethod
    def of(cls, extents: Sequence[Extent]) -> Ranges:
        sizes = [extent.size_bytes for extent in extents]
        names, offsets = [e.name for e in extents], [e.offset for e in extents]
        return cls(names, offsets, sizes, portions(sizes))


class _Views:
    """The bytes of each range: apart from the source, so that nothing goes round in a circle.

    What does is let go of late, and with it the memory of an arena that is gone.
    """

    def __init__(self, views: Sequence[memoryview], ranges: Ranges) -> None:
        self._views = views
        self._image = views[0] if len(views) == 1 else None
        self._offsets, self._sizes = ranges.offsets, ranges.sizes

    def __call__(self, index: int) -> memoryview:
        if self._image is None:
            return self._views[index]
        start = self._offsets[index]
        return self._image[start : start + self._sizes[index]]


class Source:
    """An image as its views, one after another: a single one, or one for each range."""

    def __init__(
        self, views: Sequence[memoryview], ranges: Ranges, hashing: Hashing | None = None
    ) -> None:
        self.views = views
        self.ranges = ranges
        self.size_bytes = sum(view.nbytes for view in views)
        self.view = _Views(views, ranges)  # of one range
        self.hashing = hashing or Hashing(self.view, ranges.sizes, ranges.taken_as)
