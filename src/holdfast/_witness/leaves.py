"""Fingerprints of values: equal for equal bits, and with a number that says how far apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast._record.checksum import digest
from holdfast._save.capture import adapters

#: The hash of a leaf, or its text if it is short; its norm, or its value; how many numbers it has.
Leaf = tuple[str, float | None, int]


def leaf_of(value: Any) -> Leaf:
    """The fingerprint of a tensor, an array, or anything whose repr says all of it."""
    for adapter in adapters():
        if adapter.is_array(value):
            return _array_leaf(adapter, value)
    number = float(value) if isinstance(value, int | float) and abs(value) < 1e300 else None
    text = repr(value)
    return (text if len(text) <= 40 else _hex(text.encode())), number, 1


def _array_leaf(adapter: Any, value: Any) -> Leaf:
    described = f"{getattr(value, 'dtype', 'bytes')}{tuple(getattr(value, 'shape', ()))}"
    try:
        data = bytes(adapter.bytes_of(value))
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return _hex(repr(value).encode()), None, 1
    return _hex(described.encode() + data), _norm(value), math.prod(getattr(value, "shape", ()))


def _norm(value: Any) -> float | None:
    try:
        flat = value.detach().double() if hasattr(value, "detach") else value.astype("float64")
        norm = math.sqrt(float((flat * flat).sum()))
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None
    return norm if math.isfinite(norm) else None


def _hex(data: bytes) -> str:
    return digest(data).hex()[:20]


def digest_of(value: Any) -> str:
    """One hash of a whole tree, such as a batch."""
    return _hex("|".join(f"{path}={leaf_of(leaf)[0]}" for path, leaf in walk(value)).encode())


def whole_leaf(value: Any) -> Leaf:
    """A whole tree as one leaf, without a norm."""
    return digest_of(value), None, 0


def walk(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The leaves of containers, each with its path."""
    if depth > 12:
        return
    if isinstance(value, Mapping):
        for key in list(value):
            yield from walk(value[key], f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from walk(item, f"{path}[{index}]", depth + 1)
    elif hasattr(value, "__dict__") and not hasattr(value, "dtype") and not callable(value):
        for key, item in vars(value).items():
            yield from walk(item, f"{path}.{key}" if path else key, depth + 1)
    else:
        yield path, value
