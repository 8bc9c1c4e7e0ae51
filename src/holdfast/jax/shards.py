"""Arrays of several processes: which part is here, and how parts are restored.

A process holds the parts on its own devices. They are stored in a row, with the box of each; a part
that several devices hold is stored by the first of them. Nothing here communicates, so a rank can
be captured and restored while the others do something else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from holdfast._adapters import numpy as shared
from holdfast._adapters.adapter import StoredArray
from holdfast._adapters.numpy import Box
from holdfast._store.format.image import TensorSpec
from holdfast.jax import arrays


@dataclass(frozen=True)
class ArrayPart:
    """What this process holds of an array, on its devices or in the memory of the host."""

    pieces: Sequence[Any]
    dtype: str
    item_bytes: int
    shape: tuple[int, ...]  # of the piece if there is one; else of all in a row

    def spec(self, name: str) -> TensorSpec:
        return arrays.made_spec(name, self.dtype, self.item_bytes, self.shape, "")

    def copy_to(self, target: shared.Array) -> None:
        flat, position = target.reshape(-1), 0
        for piece in self.pieces:
            values = arrays.read(piece) if isinstance(piece, jax.Array) else piece
            flat[position : position + values.size] = values.reshape(-1)
            position += values.size

    def bytes(self) -> memoryview:
        views = [
            shared.as_bytes(arrays.read(piece) if isinstance(piece, jax.Array) else piece)
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
    arrays.refuse_unreadable(value)
    found: dict[Box, Any] = {}
    for shard in value.addressable_shards:
        # The numbers behind keys have more dimensions than the keys.
        box = shared.box_of(shard.index[: value.ndim], value.shape)
        if (replicas or shard.replica_id == 0) and 0 not in box[1]:
            found.setdefault(box, shard.data)
    spec = arrays.describe("", value)
    boxes = sorted(found)
    description = {
        "kind": arrays.KIND,
        "size": list(spec.shape),
        "dtype": spec.dtype,
        "item_bytes": spec.item_bytes,
        "boxes": [[list(corner), list(sizes)] for corner, sizes in boxes],
        "where": spec.device,
    }
    if not boxes:
        return description, None
    return description, _part([found[box] for box in boxes], spec.dtype, spec.item_bytes)


# -- Restored -----------------------------------------------------------------


def assemble(stored: StoredArray, near: object, path: str) -> tuple[Any, ArrayPart] | None:
    """A stored array, sharded as `near` is, and the part that is here."""
    about, shape = stored.description, shared.shape_of(stored)
    item_bytes = shared.item_bytes_of(stored)
    dtype, where = str(about["dtype"]), str(about.get("where", ""))
    sharding = arrays.layout(where, near, is_in_parts=not stored.is_whole)
    pieces: dict[Box, shared.Array] = {}
    if sharding is None or sharding.is_fully_addressable:
        box = shared.whole_box(shape)
        pieces[box] = shared.read_box(stored, box, path)
        spec = arrays.made_spec("", dtype, item_bytes, shape, where)
        value = arrays.make(spec, shared.as_bytes(pieces[box]), sharding)
    else:
        numbers, on_devices = arrays.of_numbers(sharding, shape, dtype), []
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            box = shared.box_of(index, shape)
            if box not in pieces:
                pieces[box] = shared.read_box(stored, box, path)
            on_devices.append(_put(pieces[box], dtype, item_bytes, device, sharding))
        full = (*shape, *arrays.key_shape(dtype))
        made = jax.make_array_from_single_device_arrays(full, numbers, on_devices)
        value = arrays.finish(made, dtype, where)
    held = [pieces[box] for box in sorted(pieces) if 0 not in box[1]]
    return value, _part(held or [np.empty(0, f"V{item_bytes}")], dtype, item_bytes)


def _put(piece: shared.Array, dtype: str, item_bytes: int, device: Any, sharding: Any) -> Any:
    spec = arrays.made_spec("", dtype, item_bytes, piece.shape, "")
    values = arrays.numpy_view(spec, shared.as_bytes(piece))
    place = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
    # A copy: on a CPU, JAX may keep using the memory.
    return jax.device_put(np.array(values), place)


def load_in_place(_live: object, _value: Any) -> bool:
    return False
