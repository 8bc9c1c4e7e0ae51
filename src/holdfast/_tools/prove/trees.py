"""Two trees of containers, values and tensors: the first place where they differ.

Tensors are compared as bytes, so that nothing is equal that is not equal to the bit.
Numbers are too: a NaN is itself, and minus zero is not zero.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast._tools.prove.distance import Array, distance, shape_words

WHOLE = "the whole file"
_MOST_WORDS = 60
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
class Stored:
    """A tensor as a file has it: its bytes, whatever framework they are from."""

    dtype: str  # e.g. "bfloat16"
    shape: tuple[int, ...]
    data: Array  # of uint8, flat and in C order

    def values(self) -> Array:
        """As numbers where NumPy has such, else as items without a meaning, else as bytes."""
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


def stored_array(array: Array) -> Stored:
    """An array of NumPy as it would be in a file."""
    flat = np.frombuffer(array.tobytes(), np.uint8)
    dtype = array.dtype.newbyteorder("=") if not array.dtype.isnative else array.dtype
    if dtype != array.dtype:
        return stored_array(array.astype(dtype))
    return Stored(dtype.name, array.shape, flat)


def first_difference(file: str, expected: Any, found: Any, item: str = "") -> FileDifference | None:
    """The first difference in the order of the expected tree; None if there is none."""
    return next(_differences(file, item, expected, found), None)


def _differences(file: str, item: str, expected: Any, found: Any) -> Iterator[FileDifference]:
    expected, found = _simple(expected), _simple(found)
    if isinstance(expected, Stored) and isinstance(found, Stored):
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
    elif _is_row(expected) and _is_row(found) and type(expected) is type(found):
        for index, (one, other) in enumerate(zip(expected, found, strict=False)):
            yield from _differences(file, f"{item}[{index}]", one, other)
        if len(expected) != len(found):
            counts = f"{len(expected)} items", f"{len(found)} items"
            yield FileDifference(file, item or WHOLE, *counts, "another length")
    elif not _is_same(expected, found):
        apart = _apart(expected, found)
        yield FileDifference(file, item or WHOLE, _words(expected), _words(found), apart)


def _simple(value: Any) -> Any:
    """What is compared in place of a value."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return repr(array.tolist()) if array.dtype.hasobject else stored_array(array)
    if isinstance(value, set | frozenset):
        return sorted(value, key=lambda one: (type(one).__name__, repr(one)))
    if isinstance(value, tuple):
        return list(value)
    return value


def _is_row(value: Any) -> bool:
    return isinstance(value, list)


def _is_same(expected: Any, found: Any) -> bool:
    if type(expected) is not type(found):
        return False
    if isinstance(expected, float):
        return struct.pack("<d", expected) == struct.pack("<d", found) or (
            expected != expected and found != found
        )
    return bool(expected == found)


def _of_tensors(file: str, item: str, expected: Stored, found: Stored) -> Iterator[FileDifference]:
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        what = "another shape" if expected.dtype == found.dtype else "another type of number"
        yield FileDifference(file, item or WHOLE, _words(expected), _words(found), what)
    elif not np.array_equal(expected.data, found.data):
        one, other = expected.values(), found.values()
        values = _at_first(expected, found, one, other)
        yield FileDifference(file, item or WHOLE, *values, distance(one, other))


def _at_first(expected: Stored, found: Stored, one: Array, other: Array) -> tuple[str, str]:
    """The first elements that differ."""
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
    if isinstance(value, Stored):
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
    return text if len(text) <= _MOST_WORDS else f"{text[: _MOST_WORDS - 1]}…"
