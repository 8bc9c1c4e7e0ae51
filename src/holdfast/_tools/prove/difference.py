"""Two trees of containers, values and tensors: the first place where they differ, and how far.

Tensors are compared as bytes, and so are numbers: a NaN equals itself, and minus zero is not zero.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

WHOLE = "the whole file"
_MOST_CHARACTERS = 60
_CHUNK = 1 << 20  # elements: as float64 they nearly fit into a processor's cache
_NUMPY = frozenset(("bool", "float16", "float32", "float64", "complex64", "complex128"))
_NUMPY |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


@dataclass(frozen=True)
class FileDifference:
    """The first place where two files of results differ."""

    file: str
    item: str  # where in it, e.g. "optimizer.state[0].exp_avg"
    expected: str
    found: str
    apart: str  # how far, e.g. "up to 0.0031, 1.2% of its norm"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file has it: its bytes, without a framework."""

    dtype: str  # e.g. "bfloat16"
    shape: tuple[int, ...]
    data: Array  # of uint8, flat and in C order

    def values(self) -> Array:
        """As numbers where NumPy has the type, else as opaque items, else as bytes."""
        if self.dtype == "bfloat16":
            # The upper half of a float32.
            halves = self.data.view("<u2").astype("<u4") << 16
            return halves.view("<f4").reshape(self.shape)
        if self.dtype in _NUMPY:
            return self.data.view(np.dtype(self.dtype)).reshape(self.shape)
        count = math.prod(self.shape)
        if count == 0 or self.data.size % count or self.data.size == 0:
            return self.data  # several of them share a byte
        return self.data.view(f"V{self.data.size // count}").reshape(self.shape)


def stored_bytes(data: memoryview) -> Array:
    return np.frombuffer(data, np.uint8) if data.nbytes else np.empty(0, np.uint8)


def stored_array(array: Array) -> StoredTensor:
    """An array of NumPy as it would be in a file."""
    flat = np.frombuffer(array.tobytes(), np.uint8)
    dtype = array.dtype.newbyteorder("=") if not array.dtype.isnative else array.dtype
    if dtype != array.dtype:
        return stored_array(array.astype(dtype))
    return StoredTensor(dtype.name, array.shape, flat)


def first_difference(file: str, expected: Any, found: Any, item: str = "") -> FileDifference | None:
    """The first difference in the order of the expected tree; None if there is none."""
    return next(_differences(file, item, expected, found), None)


def _differences(file: str, item: str, expected: Any, found: Any) -> Iterator[FileDifference]:
    expected, found = _simple(expected), _simple(found)
    if isinstance(expected, StoredTensor) and isinstance(found, StoredTensor):
        yield from _of_tensors(file, item, expected, found)
    elif isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key, value in expected.items():
            if key in found:
                yield from _differences(file, _below(item, key), value, found[key])
            else:
                yield FileDifference(
                    file, _below(item, key), _words(value), "nothing", "it is missing"
                )
        for key in found:
            if key not in expected:
                apart = "it should not be there"
                yield FileDifference(file, _below(item, key), "nothing", _words(found[key]), apart)
    elif isinstance(expected, list) and isinstance(found, list) and type(expected) is type(found):
        for index, (one, other) in enumerate(zip(expected, found, strict=False)):
            yield from _differences(file, f"{item}[{index}]", one, other)
        if len(expected) != len(found):
            counts = f"{len(expected)} items", f"{len(found)} items"
            yield FileDifference(file, item or WHOLE, *counts, "another length")
    elif not _is_same(expected, found):
        apart = _apart(expected, found)
        yield FileDifference(file, item or WHOLE, _words(expected), _words(found), apart)


def _simple(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return repr(array.tolist()) if array.dtype.hasobject else stored_array(array)
    if isinstance(value, set | frozenset):
        return sorted(value, key=lambda one: (type(one).__name__, repr(one)))
    if isinstance(value, tuple):
        return list(value)
    return value


def _is_same(expected: Any, found: Any) -> bool:
    if type(expected) is not type(found):
        return False
    if isinstance(expected, float):
        return struct.pack("<d", expected) == struct.pack("<d", found) or (
            expected != expected and found != found
        )
    return bool(expected == found)


def _of_tensors(
    file: str, item: str, expected: StoredTensor, found: StoredTensor
) -> Iterator[FileDifference]:
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        what = "another shape" if expected.dtype == found.dtype else "another type of number"
        yield FileDifference(file, item or WHOLE, _words(expected), _words(found), what)
    elif not np.array_equal(expected.data, found.data):
        one, other = expected.values(), found.values()
        values = _at_first(expected, found, one, other)
        yield FileDifference(file, item or WHOLE, *values, distance(one, other))


def _at_first(
    expected: StoredTensor, found: StoredTensor, one: Array, other: Array
) -> tuple[str, str]:
    item_bytes = expected.data.size // one.size  # as stored: some are wider as numbers
    index = int(np.argmax(expected.data != found.data)) // item_bytes
    where = ""
    if one.size > 1:
        place = np.unravel_index(index, one.shape)
        where = f" at [{', '.join(str(int(axis)) for axis in place)}]"
    numbers = [f"{_number(array.reshape(-1)[index])}{where}" for array in (one, other)]
    return numbers[0], numbers[1]


def _number(item: Any) -> str:
    return f"0x{item.tobytes().hex()}" if item.dtype.kind == "V" else str(item)


def _apart(expected: Any, found: Any) -> str:
    if type(expected) is not type(found):
        return "another kind of value"
    if isinstance(expected, float):
        return distance(np.array([expected]), np.array([found]))
    if isinstance(expected, int) and not isinstance(expected, bool):
        return f"by {abs(expected - found)}" if abs(expected - found) < 10**20 else "far"
    return "another value"


def _below(item: str, key: Any) -> str:
    if not isinstance(key, str):
        return f"{item}[{key!r}]"
    return f"{item}.{key}" if item else key


def _words(value: Any) -> str:
    value = _simple(value)
    if isinstance(value, StoredTensor):
        return f"{value.dtype}, {shape_words(value.shape)}"
    if isinstance(value, Mapping):
        return f"{len(value)} names"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return f"{len(value)} items"
    if isinstance(value, bytes | bytearray):
        return f"{len(value)} bytes"
    try:
        text = repr(value)
    except ValueError:  # Python makes no text of a number of a few thousand digits
        return f"a number of {value.bit_length()} bits"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


# -- how far apart ----------------------------------------------------------------


@dataclass
class _Gap:
    """The difference between two arrays of numbers, summed up chunk by chunk."""

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
        """The norm of the difference relative to the norm of the expected values."""
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
        unlike = int(np.count_nonzero(expected != found))
        return f"{unlike} of {expected.size} elements" if unlike else "not at all"
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
    """The norm of all differences relative to the norm of all expected values.

    Infinite where shapes differ, or where only one side is NaN or infinite.
    """
    gap = _Gap()
    for expected, found in pairs:
        if expected.shape != found.shape:
            return math.inf
        for one, other in _chunks(expected, found):
            gap.add(one, other)
    return gap.share


def _chunks(expected: Array, found: Array) -> Iterator[tuple[Array, Array]]:
    """Both as float64 (complex128), in chunks: at once they would take three times the memory."""
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


def shape_words(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "of one number"
