"""Fingerprints of values: equal for equal bits, with a number for how far two are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast._adapters.adapter import Adapter
from holdfast._adapters.registry import adapters
from holdfast._store.format.checksum import digest

#: A hash, or the text of a short value; a norm, or the value itself; the count of numbers.
Leaf = tuple[str, float | None, int]


def leaf_of(value: Any) -> Leaf:
    """The fingerprint of a tensor, an array, a number or a text; of another object, its type.

    The repr of an object may hold its address, and that of a set has no fixed order.
    """
    if isinstance(value, bool) or value is None:
        return repr(value), None, 1
    if isinstance(value, int | float):  # NumPy's float is one too, and equal to Python's
        number = float(value) if abs(value) < 1e300 else None
        return repr(int(value) if isinstance(value, int) else float(value)), number, 1
    for adapter in adapters():
        if adapter.is_array(value):
            return _array_leaf(adapter, value)
    if isinstance(value, str | complex):
        text = repr(value)
        return (text if len(text) <= 40 else _hex(text.encode())), None, 1
    if isinstance(value, list | tuple) and all(isinstance(v, int | float) for v in value):
        text = repr([leaf_of(item)[0] for item in value])
        return (text if len(text) <= 40 else _hex(text.encode())), None, 1
    return type(value).__qualname__, None, 1


def _array_leaf(adapter: Adapter, value: Any) -> Leaf:
    # The local part of a sharded tensor: reading all of it would need a collective.
    value = adapter.part_here(value)
    try:
        shape = tuple(getattr(value, "shape", ()))
        described = f"{getattr(value, 'dtype', 'bytes')}{shape}"
        data = bytes(adapter.bytes_of(value))
    except (TypeError, ValueError, RuntimeError, AttributeError):  # lazy, without values
        return type(value).__qualname__, None, 0
    return _hex(described.encode() + data), _norm(value), math.prod(shape)


def _norm(value: Any) -> float | None:
    try:
        if hasattr(value, "detach"):
            flat = value.detach().double()
        else:
            flat = (value.numpy() if hasattr(value, "numpy") else value).astype("float64")
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
    elif isinstance(value, list | tuple | set | frozenset):
        ordered = value if isinstance(value, list | tuple) else sorted(value, key=repr)
        for index, item in enumerate(ordered):
            yield from walk(item, f"{path}[{index}]", depth + 1)
    elif hasattr(value, "__dict__") and not hasattr(value, "dtype") and not callable(value):
        for key, item in vars(value).items():
            yield from walk(item, f"{path}.{key}" if path else key, depth + 1)
    else:
        yield path, value
