"""Arrays that share their memory with NumPy, in a mapping and out of it, and parts of arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from holdfast._adapters.adapter import Places, StoredArray, StoredPart
from holdfast._errors import DamagedCheckpoint
from holdfast._store.format.image import STORED_AS, TensorSpec

Array = np.ndarray[Any, Any]


def spec_of(name: str, kind: str, dtype: np.dtype[Any], shape: Sequence[int]) -> TensorSpec:
    """The description of an array in C order."""
    return TensorSpec(
        name=name,
        kind=kind,
        dtype=dtype.name,
        stored_as=STORED_AS.get(dtype.name, "U8"),
        shape=tuple(shape),
        strides=None,
        item_bytes=dtype.itemsize,
        size_bytes=math.prod(shape) * dtype.itemsize,
    )


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The type of this name, of NumPy or of ml_dtypes (bfloat16, …); "scalar " may precede it."""
    name = name.removeprefix("scalar ")
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        if not hasattr(ml_dtypes, name):
            raise ValueError(f"there is no dtype {name!r} here") from None
        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found


def view(data: memoryview, spec: TensorSpec) -> Array:
    """The stored values, in the memory that they are in."""
    dtype = numpy_dtype(spec.dtype)
    if spec.size_bytes == 0:
        return np.empty(spec.shape, dtype)
    return np.frombuffer(data, np.uint8).view(dtype).reshape(spec.shape)


def views(buffer: Any, places: Places, start: int) -> list[Array]:
    """Where each array goes: views of the mapping, made once and used for every snapshot."""
    whole = memoryview(buffer)
    return [view(whole[start + at : start + at + s.size_bytes], s) for s, at in places]


def copy_into(
    targets: Sequence[Array], values: Sequence[Any], read: Callable[[Any], Array]
) -> None:
    for target, value in zip(targets, values, strict=True):
        np.copyto(target, read(value), casting="no")


def as_bytes(array: Array) -> memoryview:
    """An array's bytes in C order."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data if flat.size else memoryview(b"")


# -- Parts of an array, put together by where they lie -----------------------------------
# A box is where a part lies in the whole: its first corner and its sizes. Bytes are moved and not
# interpreted, so the framework of the array is not needed.


Box = tuple[tuple[int, ...], tuple[int, ...]]  # the corner, the sizes


def shape_of(stored: StoredArray) -> tuple[int, ...]:
    return tuple(stored.description["size"])


def item_bytes_of(stored: StoredArray) -> int:
    return int(stored.description["item_bytes"])


def whole_box(shape: Sequence[int]) -> Box:
    """The box of all there is."""
    return (0,) * len(shape), tuple(shape)


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box of an index of plain slices, as JAX gives it for the part of a device."""
    ranges = [each.indices(size) for each, size in zip(index, shape, strict=True)]
    return tuple(r[0] for r in ranges), tuple(r[1] - r[0] for r in ranges)


def read_box(stored: StoredArray, box: Box, path: str) -> Array:
    """The stored values of one box, as items without a type."""
    item_bytes = item_bytes_of(stored)
    if stored.own is not None:  # what this rank stored itself needs no other file
        for known, values in _boxes_in(stored.own, item_bytes):
            if known == box:
                return values
    target: Array = np.empty(box[1], f"V{item_bytes}")
    if target.size == 0:
        return target
    pairs = (pair for part in stored.parts() for pair in _boxes_in(part, item_bytes))
    filled, count = fill(target, box, pairs)
    if not filled == count == target.size:
        raise DamagedCheckpoint(
            f"{path}: the stored parts of this array do not make a whole: of {target.size} values "
            f"wanted here, {filled} are there, {count} in all.\n"
            "Nothing was deleted; resume with as many processes as wrote it, or from another "
            "folder."
        )
    return target


def _boxes_in(part: StoredPart, item_bytes: int) -> Iterable[tuple[Box, Array]]:
    flat, position = as_items(part.data, item_bytes), 0
    for corner, sizes in part.description["boxes"]:
        count = math.prod(sizes)
        yield (tuple(corner), tuple(sizes)), flat[position : position + count].reshape(sizes)
        position += count


def as_items(data: memoryview, item_bytes: int) -> Array:
    """Stored bytes as items without a type."""
    if not data.nbytes:
        return np.empty(0, f"V{item_bytes}")
    return np.frombuffer(data, np.uint8).view(f"V{item_bytes}")


def fill(target: Array, wanted: Box, parts: Iterable[tuple[Box, Array]]) -> tuple[int, int]:
    """Copy what `parts` hold of `target`; how many items are filled, and how many were copied.

    Both are the size of the target, unless some are missing or stored twice.
    """
    filled = np.zeros(target.shape, np.bool_)
    count = 0
    for box, values in parts:
        first = [max(a, b) for a, b in zip(wanted[0], box[0], strict=True)]
        last = [min(a + n, b + m) for a, n, b, m in zip(*wanted, *box, strict=True)]
        if any(b <= a for a, b in zip(first, last, strict=True)):
            continue
        here = _slices(first, last, wanted[0])
        target[here] = values[_slices(first, last, box[0])]
        filled[here] = True
        count += math.prod(b - a for a, b in zip(first, last, strict=True))
    return int(filled.sum()), count


def _slices(first: list[int], last: list[int], corner: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for a, b, c in zip(first, last, corner, strict=True))
