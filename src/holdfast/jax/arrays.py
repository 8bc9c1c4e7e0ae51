"""One array of JAX: how it is described, read, and restored.

Besides its values an array has properties that change the bits of the next step: a key has its
implementation, a number that came from Python has a weak type, and an array that was committed to a
device is computed on there. All of them are kept.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from holdfast._adapters import numpy as shared
from holdfast._adapters.adapter import StoredArray
from holdfast._adapters.numpy import Box
from holdfast._store.format.image import TensorSpec

KIND = "jax"
_WIDE = ("int64", "uint64", "float64", "complex128")
_Axes: Any = PartitionSpec  # it is not annotated
_NUMBER_BYTES = 4  # of the numbers behind keys


def setting(name: str) -> Any:
    return getattr(jax.config, name, None)


def is_key(value: Any) -> bool:
    """Whether an array is one of typed random keys (jax.random.key)."""
    return _name_and_size(value.dtype) is None


@functools.cache  # NumPy computes the name of a type each time, in ten microseconds
def _name_and_size(dtype: Any) -> tuple[str, int] | None:
    """Of a type of numbers; None for a type of keys."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return None
    found = np.dtype(dtype)
    return found.name, found.itemsize


def numbers_of(value: Any) -> Any:
    """The array of numbers behind an array of keys; any other array itself."""
    return jax.random.key_data(value) if is_key(value) else value


def refuse_unreadable(value: Any) -> None:
    """ValueError for an array without values."""
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            "a tracer, which stands for an array while a function is being compiled.\n"
            "Hand over what the compiled function returns, outside of it: run.update(…)."
        )
    if value.is_deleted():
        raise ValueError(
            "the memory of this array was given away (donated to a compiled function, or "
            "deleted).\nHand over what the function returned, before the step ends: run.update(…)."
        )


def describe(name: str, value: Any) -> TensorSpec:
    refuse_unreadable(value)
    numbers = _name_and_size(value.dtype)
    dtype = f"key<{jax.random.key_impl(value)}>" if numbers is None else numbers[0]
    return made_spec(name, dtype, _item_bytes(value), value.shape, where(value))


def made_spec(
    name: str, dtype: str, item_bytes: int, shape: tuple[int, ...], device: str
) -> TensorSpec:
    return shared.spec_of(name, KIND, dtype, item_bytes, shape, device)


def _item_bytes(value: Any) -> int:
    numbers = _name_and_size(value.dtype)
    if numbers is not None:
        return numbers[1]
    return _NUMBER_BYTES * int(math.prod(numbers_of(value).shape[value.ndim :]))


def item_bytes(dtype: str) -> int:
    """The size of one item; ValueError if there is no such type here."""
    if dtype.startswith("key<"):
        return _NUMBER_BYTES * math.prod(key_shape(dtype))
    if dtype in _WIDE and not setting("jax_enable_x64"):
        raise ValueError(
            "JAX has its 64-bit types switched off here, and had them on then: set JAX_ENABLE_X64=1"
        )
    return int(shared.numpy_dtype(dtype).itemsize)


def key_shape(dtype: str) -> tuple[int, ...]:
    """The shape of the numbers behind one key; () for other types."""
    if not dtype.startswith("key<"):
        return ()
    try:
        made = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=_impl(dtype))))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"this JAX has no random keys of type {_impl(dtype)}") from error
    return tuple(made.shape)


def _impl(dtype: str) -> str:
    return dtype.removeprefix("key<").removesuffix(">")


def numpy_view(spec: TensorSpec, data: memoryview) -> shared.Array:
    """A view of the stored values; of keys, the numbers behind them."""
    values = item_view(spec, data)
    if not spec.dtype.startswith("key<"):
        return values
    shape = (*spec.shape, *key_shape(spec.dtype))
    return values.reshape(-1).view(np.uint32).reshape(shape)


def read(value: Any) -> shared.Array:
    numbers = np.asarray(numbers_of(value))
    if not is_key(value):
        return numbers
    flat = np.ascontiguousarray(numbers).reshape(-1)
    return flat.view(np.uint8).view(f"V{_item_bytes(value)}").reshape(value.shape)


def copy_to(target: shared.Array, value: Any) -> None:
    """Copy an array's values to the host, part by part if it is on several devices."""
    if len(value.sharding.device_set) == 1 or value.is_fully_replicated:
        np.copyto(target, read(value), casting="no")
        return
    for shard in value.addressable_shards:
        if shard.replica_id == 0:
            # The numbers behind keys have more dimensions than the keys.
            np.copyto(target[shard.index[: value.ndim]], read(shard.data), casting="no")


def item_view(spec: TensorSpec, data: memoryview) -> shared.Array:
    """A view of stored values, typed as `read` returns them."""
    if not spec.dtype.startswith("key<"):
        return shared.view(data, spec)
    if spec.size_bytes == 0:
        return np.empty(spec.shape, f"V{spec.item_bytes}")
    return np.frombuffer(data, np.uint8).view(f"V{spec.item_bytes}").reshape(spec.shape)


# -- Placement ----------------------------------------------------------------


def is_committed(value: Any) -> bool:
    """Whether the script has chosen the devices of an array."""
    return bool(getattr(value, "committed", getattr(value, "_committed", True)))


def where(value: Any) -> str:
    """Placement and weak type of an array as JSON; empty for the defaults."""
    found: dict[str, Any] = {}
    if getattr(value, "weak_type", False):
        found["weak"] = True
    if is_committed(value):
        found |= _place(value.sharding) or {}
    return json.dumps(found, separators=(",", ":")) if found else ""


def _place(sharding: Any) -> dict[str, Any] | None:
    """A sharding as JSON; None if it could not be restored from that."""
    if isinstance(sharding, SingleDeviceSharding):
        device: Any = next(iter(sharding.device_set))
        place: dict[str, Any] = {"device": device.id}
    elif isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        mesh = sharding.mesh
        spec = [list(axes) if isinstance(axes, tuple) else axes for axes in sharding.spec]
        if not all(axes is None or isinstance(axes, str | list) for axes in spec):
            return None
        place = {
            "mesh": [[str(name), size] for name, size in mesh.shape.items()],
            "devices": [int(device.id) for device in mesh.devices.flat],
            "spec": spec,
        }
        types = getattr(mesh, "axis_types", None)
        if types is not None:
            place["types"] = [each.name for each in types]
    else:
        return None
    if sharding.memory_kind not in (None, "device", "unpinned_host"):
        place["memory"] = sharding.memory_kind
    return place


def sharding_from(where: str, *, is_in_parts: bool = False) -> Any:
    """The described sharding; None if it is not possible on the devices of this process.

    With `is_in_parts`, it may use the devices of other processes.
    """
    place = json.loads(where) if where else {}
    if "device" not in place and "mesh" not in place:
        return None
    here: list[Any] = jax.devices() if is_in_parts else jax.local_devices()
    known = {device.id: device for device in here}
    kind = {"memory_kind": place["memory"]} if "memory" in place else {}
    try:
        if "device" in place:
            return SingleDeviceSharding(known[place["device"]], **kind)
        names, sizes = zip(*place["mesh"], strict=True) if place["mesh"] else ((), ())
        devices = np.array([known[number] for number in place["devices"]]).reshape(sizes)
        types = {}
        if "types" in place:
            types["axis_types"] = tuple(jax.sharding.AxisType[each] for each in place["types"])
        mesh = Mesh(devices, names, **types)
        spec = [tuple(axes) if isinstance(axes, list) else axes for axes in place["spec"]]
        return NamedSharding(mesh, _Axes(*spec), **kind)
    except (KeyError, ValueError, TypeError):
        return None  # fewer devices, other axes


# -- Restored -----------------------------------------------------------------


def layout(where: str, near: object, *, is_in_parts: bool = False) -> Any:
    """The sharding of the live array if the script has chosen it; else the stored one.

    On the same mesh it is the stored one, too: a step may return arrays in other parts than the
    script began with, and sums over other parts differ in their last bits.
    """
    then = sharding_from(where, is_in_parts=is_in_parts)
    if not isinstance(near, jax.Array):
        return then
    if near.is_fully_addressable and not is_committed(near):
        return then
    now: Any = near.sharding
    is_same_mesh = isinstance(now, NamedSharding) and isinstance(then, NamedSharding)
    return then if is_same_mesh and then.mesh == now.mesh else now


def make(spec: TensorSpec, data: memoryview, sharding: Any) -> Any:
    """A new array with the stored values; on JAX's default device if `sharding` is None."""
    # A copy: JAX may keep using the memory, which belongs to the checkpoint.
    values = np.array(numpy_view(spec, data))
    if sharding is None:
        made = jax.numpy.array(values)
    else:
        made = jax.device_put(values, of_numbers(sharding, spec.shape, spec.dtype))
    return finish(made, spec.dtype, spec.device)


def of_numbers(sharding: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """The sharding of the numbers behind keys: those of one key are not split."""
    more = len(key_shape(dtype))
    if not more or not isinstance(sharding, NamedSharding):
        return sharding
    padded = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec) + more)]
    return sharding.update(spec=_Axes(*padded))


def finish(made: Any, dtype: str, where: str) -> Any:
    """Make keys from their numbers, and restore a weak type."""
    if dtype.startswith("key<"):
        return jax.random.wrap_key_data(made, impl=_impl(dtype))
    if not where or not json.loads(where).get("weak") or made.weak_type:
        return made
    # A weak type comes from arithmetic with Python's numbers. JAX has no function that sets it, and
    # computing it would need all processes at once.
    arrays = [shard.data for shard in made.addressable_shards]
    aval = made.aval.update(weak_type=True)
    return type(made)(aval, made.sharding, arrays, committed=is_committed(made))


# -- Arrays of several processes ---------------------------------------------------------
# A process holds the parts on its own devices. They are stored in a row, with the box of each; a
# part that several devices hold is stored by the first of them. Nothing here communicates, so a
# rank can be captured and restored while the others do something else.


@dataclass(frozen=True)
class ArrayPart:
    """What this process holds of an array, on its devices or in the memory of the host."""

    pieces: Sequence[Any]
    dtype: str
    item_bytes: int
    shape: tuple[int, ...]  # of the piece if there is one; else of all in a row

    def spec(self, name: str) -> TensorSpec:
        return made_spec(name, self.dtype, self.item_bytes, self.shape, "")

    def copy_to(self, target: shared.Array) -> None:
        flat, position = target.reshape(-1), 0
        for piece in self.pieces:
            values = read(piece) if isinstance(piece, jax.Array) else piece
            flat[position : position + values.size] = values.reshape(-1)
            position += values.size

    def bytes(self) -> memoryview:
        views = [
            shared.as_bytes(read(piece) if isinstance(piece, jax.Array) else piece)
            for piece in self.pieces
        ]
        return views[0] if len(views) == 1 else memoryview(b"".join(views))


def _part(pieces: Sequence[Any], dtype: str, item_bytes: int) -> ArrayPart:
    if len(pieces) == 1:
        return ArrayPart(pieces, dtype, item_bytes, tuple(pieces[0].shape))
    count = sum(math.prod(piece.shape) for piece in pieces)
    return ArrayPart(pieces, dtype, item_bytes, (count,))


def shard_of(value: Any, *, replicas: bool) -> tuple[dict[str, Any], ArrayPart | None]:
    """The description of this process's part, and the part itself; None if it stores none."""
    refuse_unreadable(value)
    found: dict[Box, Any] = {}
    for shard in value.addressable_shards:
        # The numbers behind keys have more dimensions than the keys.
        box = shared.box_of(shard.index[: value.ndim], value.shape)
        if (replicas or shard.replica_id == 0) and 0 not in box[1]:
            found.setdefault(box, shard.data)
    spec = describe("", value)
    boxes = sorted(found)
    description = {
        "kind": KIND,
        "size": list(spec.shape),
        "dtype": spec.dtype,
        "item_bytes": spec.item_bytes,
        "boxes": [[list(corner), list(sizes)] for corner, sizes in boxes],
        "where": spec.device,
    }
    if not boxes:
        return description, None
    return description, _part([found[box] for box in boxes], spec.dtype, spec.item_bytes)


def assemble(stored: StoredArray, near: object, path: str) -> tuple[Any, ArrayPart] | None:
    """A stored array, sharded as `near` is, and the part that is here."""
    about, shape = stored.description, shared.shape_of(stored)
    item_bytes = shared.item_bytes_of(stored)
    dtype, where = str(about["dtype"]), str(about.get("where", ""))
    sharding = layout(where, near, is_in_parts=not stored.is_whole)
    pieces: dict[Box, shared.Array] = {}
    if sharding is None or sharding.is_fully_addressable:
        box = shared.whole_box(shape)
        pieces[box] = shared.read_box(stored, box, path)
        spec = made_spec("", dtype, item_bytes, shape, where)
        value = make(spec, shared.as_bytes(pieces[box]), sharding)
    else:
        numbers, on_devices = of_numbers(sharding, shape, dtype), []
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            box = shared.box_of(index, shape)
            if box not in pieces:
                pieces[box] = shared.read_box(stored, box, path)
            on_devices.append(_put(pieces[box], dtype, item_bytes, device, sharding))
        full = (*shape, *key_shape(dtype))
        made = jax.make_array_from_single_device_arrays(full, numbers, on_devices)
        value = finish(made, dtype, where)
    held = [pieces[box] for box in sorted(pieces) if 0 not in box[1]]
    return value, _part(held or [np.empty(0, f"V{item_bytes}")], dtype, item_bytes)


def _put(piece: shared.Array, dtype: str, item_bytes: int, device: Any, sharding: Any) -> Any:
    spec = made_spec("", dtype, item_bytes, piece.shape, "")
    values = numpy_view(spec, shared.as_bytes(piece))
    place = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
    # A copy: on a CPU, JAX may keep using the memory.
    return jax.device_put(np.array(values), place)


def load_in_place(_live: object, _value: Any) -> bool:
    return False
