"""How far apart two arrays are, in a few words and as one number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_CHUNK = 1 << 20  # elements: as float64 they fit in a processor's cache or nearly so


@dataclass
class _Gap:
    """What two arrays of numbers have between them."""

    most: float = 0.0  # of the differences
    squares: float = 0.0  # of the differences, in all
    norm_squares: float = 0.0  # of what was expected
    unlike: int = 0  # elements that are NaN or infinite, and not the same on both sides

    def add(self, expected: Array, found: Array) -> None:
        with np.errstate(all="ignore"):
            alike = (expected == found) | (np.isnan(expected) & np.isnan(found))
            finite = np.isfinite(expected) & np.isfinite(found)
            self.unlike += int(np.count_nonzero(~alike & ~finite))
            apart = np.abs(np.where(finite, found - expected, 0))
            self.most = max(self.most, float(apart.max(initial=0.0)))
            self.squares += float(np.sum(apart**2))
            known = np.abs(np.where(np.isfinite(expected), expected, 0))
            self.norm_squares += float(np.sum(known**2))

    @property
    def share(self) -> float:
        """The norm of the difference in relation to the norm of what was expected."""
        if self.unlike:
            return math.inf
        if self.squares == 0:
            return 0.0
        if self.norm_squares == 0 or not math.isfinite(self.squares):
            return math.inf
        return math.sqrt(self.squares) / math.sqrt(self.norm_squares)


def distance(expected: Array, found: Array) -> str:
    """How far apart two arrays are.

    >>> distance(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    'up to 0.5, 10% of its norm'
    """
    if expected.shape != found.shape:
        return f"shape {shape_words(found.shape)} in place of {shape_words(expected.shape)}"
    if expected.dtype != found.dtype:
        return f"{found.dtype.name} in place of {expected.dtype.name}"
    if expected.dtype.kind not in "fc":
        return _count_words(expected, found)
    gap = _Gap()
    for one, other in _chunks(expected, found):
        gap.add(one, other)
    words = []
    if gap.unlike:
        words.append(f"{gap.unlike} of {expected.size} are NaN or infinite on one side only")
    if gap.most:
        words.append(f"up to {gap.most:.2g}{_share_words(gap)}")
    if not words:
        same = expected.tobytes() == found.tobytes()
        return "not at all" if same else "only by the signs of zeros or the bits of NaNs"
    return ", ".join(words)


def relative_distance(pairs: Iterable[tuple[Array, Array]]) -> float:
    """The norm of all differences in relation to the norm of all that was expected.

    Infinite where shapes differ, or where NaN and infinity stand on one side only.
    """
    gap = _Gap()
    for expected, found in pairs:
        if expected.shape != found.shape:
            return math.inf
        for one, other in _chunks(expected, found):
            gap.add(one, other)
    return gap.share


def _chunks(expected: Array, found: Array) -> Iterator[tuple[Array, Array]]:
    """Both as float64 (complex128), a piece at a time: whole ones would take thrice the memory."""
    flat_expected, flat_found = expected.reshape(-1), found.reshape(-1)
    wide = np.complex128 if "c" in (expected.dtype.kind, found.dtype.kind) else np.float64
    for start in range(0, flat_expected.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        yield flat_expected[part].astype(wide), flat_found[part].astype(wide)


def _share_words(gap: _Gap) -> str:
    if gap.norm_squares == 0:
        return ", and all of it should be zero"
    share = math.sqrt(gap.squares) / math.sqrt(gap.norm_squares)
    if not math.isfinite(share) or share == 0:  # the squares are beyond what a float can hold
        return ""
    if share < 1e-4:
        return f", {share:.1e} of its norm"
    if share < 10:
        return f", {share * 100:.2g}% of its norm" if share < 1 else f", {share:.0%} of its norm"
    return f", {share:.2g} times its norm"


def _count_words(expected: Array, found: Array) -> str:
    unlike = int(np.count_nonzero(expected != found))
    return f"{unlike} of {expected.size} elements" if unlike else "not at all"


def shape_words(shape: tuple[int, ...]) -> str:
    """A shape as one says it: 3×4."""
    return "×".join(map(str, shape)) or "of one number"
