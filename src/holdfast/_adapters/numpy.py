"""The adapter for NumPy."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast._adapters.adapter import Adapter, Generators, Places, StoredArray
from holdfast._errors import DamagedCheckpoint
from holdfast._store.format.image import STORED_AS, TensorSpec

if TYPE_CHECKING:
    from holdfast._store.read.verify import StoredShard


class NumpyGenerators(Generators):
    global_generator = "numpy"

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

    def states(self, *, devices: bool) -> dict[str, Any]:  # noqa: ARG002  no devices
        return {"numpy": np.random.get_state(legacy=False)}

    def restore_states(self, states: Mapping[str, Any]) -> list[str]:
        np.random.set_state(states["numpy"])
        return []


class NumpyAdapter(Adapter):
    kind = "numpy"
    generators = NumpyGenerators()

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
        # Importing numpy.ma takes a tenth of a run's opening, and without it nothing is masked.
        if "numpy.ma" in sys.modules and isinstance(value, np.ma.MaskedArray):
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
        found = numpy_dtype(dtype)
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

    def read_array(self, spec: TensorSpec, data: memoryview) -> Any:
        array = view(data, spec)
        return array[()] if spec.dtype.startswith("scalar ") else array

    def new_array(self, spec: TensorSpec, data: memoryview) -> Any:
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
        if (
            live.dtype != numpy_dtype(spec.dtype)
            or live.shape != spec.shape
            or not live.flags.writeable
        ):
            return False
        np.copyto(live, view(data, spec), casting="no")
        return True


ADAPTER = NumpyAdapter()


def _dtype_name(dtype: np.dtype[Any]) -> str:
    # Types of ml_dtypes (bfloat16, …) have a name and no code of their own.
    for name in (dtype.str, dtype.name):
        with contextlib.suppress(TypeError):
            if np.dtype(name) == dtype:
                return name
    raise ValueError(f"an array of dtype {dtype} cannot be stored; view it as uint8.")


def _folded(seed: int) -> int:
    return (seed ^ seed >> 32) & 0xFFFFFFFF


# -- Arrays that share their memory with NumPy, in a mapping and out of it, and parts of arrays ----


Array = np.ndarray[Any, Any]


def spec_of(
    name: str, kind: str, dtype: str, item_bytes: int, shape: Sequence[int], device: str = ""
) -> TensorSpec:
    return TensorSpec(
        name=name,
        kind=kind,
        dtype=dtype,
        stored_as=STORED_AS.get(dtype, "U8"),
        shape=tuple(shape),
        strides=None,
        item_bytes=item_bytes,
        size_bytes=math.prod(shape) * item_bytes,
        device=device,
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
    dtype = numpy_dtype(spec.dtype)
    if spec.size_bytes == 0:
        return np.empty(spec.shape, dtype)
    return np.frombuffer(data, np.uint8).view(dtype).reshape(spec.shape)


def views(buffer: Any, places: Places, start: int) -> list[Array]:
    """Where each array goes: views of the mapping, made once and used for every snapshot."""
    whole = memoryview(buffer)
    return [view(whole[start + at : start + at + s.size_bytes], s) for s, at in places]


def as_bytes(array: Array) -> memoryview:
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
    if target.size:
        pairs = (pair for part in stored.parts() for pair in _boxes_in(part, item_bytes))
        fill_whole(target, box, pairs, path)
    return target


def fill_whole(target: Array, box: Box, parts: Iterable[tuple[Box, Array]], path: str) -> None:
    """Copy what stored parts hold of a box; DamagedCheckpoint if that is not all of it."""
    filled, count = fill(target, box, parts)
    if not filled == count == target.size:
        raise DamagedCheckpoint(
            f"{path}: the stored parts of this array are not the whole array: {filled} of the "
            f"{target.size} values that are needed here are there, {count} in all.\n"
            "Nothing was deleted; resume with as many processes as wrote it, or from another "
            "folder."
        )


def _boxes_in(part: StoredShard, item_bytes: int) -> Iterable[tuple[Box, Array]]:
    data, kind, position = part.data, f"V{item_bytes}", 0
    flat: Array = np.frombuffer(data, np.uint8).view(kind) if data.nbytes else np.empty(0, kind)
    for corner, sizes in part.description["boxes"]:
        count = math.prod(sizes)
        yield (tuple(corner), tuple(sizes)), flat[position : position + count].reshape(sizes)
        position += count


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
