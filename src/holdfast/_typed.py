"""Arrays of frameworks that share their memory with NumPy, in the mapping and out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from holdfast._record.image import STORED_AS, TensorSpec

Array = np.ndarray[Any, Any]


def spec_of(name: str, kind: str, dtype: np.dtype[Any], shape: Sequence[int]) -> TensorSpec:
    """The description of an array in C order."""
    count = 1
    for size in shape:
        count *= size
    return TensorSpec(
        name=name,
        kind=kind,
        dtype=dtype.name,
        stored_as=STORED_AS.get(dtype.name, "U8"),
        shape=tuple(shape),
        strides=None,
        item_bytes=dtype.itemsize,
        size_bytes=count * dtype.itemsize,
    )


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The type of this name, among them those of ml_dtypes (bfloat16, …)."""
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


def views(buffer: Any, places: Sequence[tuple[TensorSpec, int]], start: int) -> list[Array]:
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
