"""The adapter for NumPy."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from holdfast._adapters.adapter import Adapter, Places
from holdfast._adapters.shared import Array, as_bytes, view, views
from holdfast._store.format.image import STORED_AS, TensorSpec


class NumpyAdapter(Adapter):
    kind = "numpy"
    global_generator = "numpy"

    def is_array(self, value: object) -> bool:
        return isinstance(value, np.ndarray | np.generic)

    def alias_key(self, value: Any) -> Hashable | None:
        if isinstance(value, np.generic) or value.size == 0:
            return None
        return (
            "numpy",
            value.__array_interface__["data"][0],
            value.dtype,  # and not its code: those of ml_dtypes share one
            value.shape,
            value.strides,
        )

    def spec(self, name: str, value: Any) -> TensorSpec:
        dtype = value.dtype
        if dtype.hasobject:
            raise ValueError("an array of Python objects cannot be stored; use numbers or a list.")
        if dtype.names is not None:
            raise ValueError("a structured array cannot be stored; store its fields one by one.")
        if isinstance(value, np.ma.MaskedArray):
            raise ValueError("a masked array cannot be stored; store its data and its mask.")
        native = dtype.isnative and dtype.byteorder != ">"
        in_order = isinstance(value, np.generic) or value.flags.c_contiguous
        return TensorSpec(
            name=name,
            kind=self.kind,
            # The dtype distinguishes a scalar from an array of no dimensions.
            dtype=("scalar " if isinstance(value, np.generic) else "") + _dtype_name(dtype),
            stored_as=STORED_AS.get(dtype.name, "U8") if native else "U8",
            shape=tuple(value.shape),
            strides=None if in_order else tuple(value.strides),
            item_bytes=dtype.itemsize,
            size_bytes=value.nbytes,
        )

    def item_bytes(self, dtype: str) -> int:
        try:
            found = _dtype(dtype)
        except TypeError as error:
            raise ValueError(f"this NumPy has no dtype {dtype!r}") from error
        if found.hasobject or found.names is not None:
            raise ValueError(f"no array of dtype {dtype!r} is ever stored")
        return int(found.itemsize)

    def destinations(self, buffer: Any, places: Places, start: int) -> list[Array]:
        return views(buffer, places, start)

    def copy_all(self, targets: Sequence[Array], values: Sequence[Any]) -> None:
        for target, value in zip(targets, values, strict=True):
            np.copyto(target, value, casting="no")

    def bytes_of(self, value: Any) -> memoryview:
        return as_bytes(value)

    def borrow(self, spec: TensorSpec, data: memoryview) -> Any:
        array = view(data, spec)
        return array[()] if spec.dtype.startswith("scalar ") else array

    def own(self, spec: TensorSpec, data: memoryview) -> Any:
        array = view(data, spec)
        if spec.dtype.startswith("scalar "):
            return array[()]
        strides = spec.strides
        if strides is None:
            return array.copy()
        order = sorted(range(array.ndim), key=lambda axis: -abs(strides[axis]))
        fresh = np.empty([array.shape[axis] for axis in order], array.dtype)
        back = np.argsort(order)
        target: Array = fresh.transpose(back)
        target[...] = array
        return target

    def load_in_place(self, live: object, spec: TensorSpec, data: memoryview) -> bool:
        if not isinstance(live, np.ndarray) or spec.dtype.startswith("scalar "):
            return False
        if live.dtype != _dtype(spec.dtype) or live.shape != spec.shape or not live.flags.writeable:
            return False
        np.copyto(live, view(data, spec), casting="no")
        return True

    def is_generator(self, value: object) -> bool:
        return isinstance(value, np.random.Generator | np.random.RandomState)

    def generator_state(self, value: Any) -> Any:
        if isinstance(value, np.random.Generator):
            return value.bit_generator.state
        return value.get_state(legacy=False)

    def restore_generator(self, value: Any, state: Any) -> None:
        if isinstance(value, np.random.Generator):
            value.bit_generator.state = state
        else:
            value.set_state(state)

    def is_global(self, value: object) -> bool:
        return value is np.random.mtrand._rand

    def global_state(self) -> Any:
        return np.random.get_state(legacy=False)

    def set_global_state(self, state: Any) -> None:
        np.random.set_state(state)

    def seed_global(self, seed: int) -> None:
        # Called for every batch: seeding by a list of words costs 30 times more.
        np.random.seed(_folded(seed))

    def reseed(self, value: Any, seed: int) -> None:
        if isinstance(value, np.random.Generator):
            value.bit_generator.state = type(value.bit_generator)(seed).state
        else:
            value.seed(_folded(seed))

    def generators(self, *, devices: bool) -> dict[str, Any]:  # noqa: ARG002
        return {"numpy": np.random.get_state(legacy=False)}

    def restore_generators(self, states: Mapping[str, Any]) -> list[str]:
        np.random.set_state(states["numpy"])
        return []


ADAPTER = NumpyAdapter()


def _dtype_name(dtype: np.dtype[Any]) -> str:
    # Types of ml_dtypes (bfloat16, …) have a name and no code of their own.
    for name in (dtype.str, dtype.name):
        with contextlib.suppress(TypeError):
            if np.dtype(name) == dtype:
                return name
    raise ValueError(f"an array of dtype {dtype} cannot be stored; view it as uint8.")


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(name.removeprefix("scalar "))


def _folded(seed: int) -> int:
    """Fold a seed into the 32 bits that the old generator takes."""
    return (seed ^ seed >> 32) & 0xFFFFFFFF
