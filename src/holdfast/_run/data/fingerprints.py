"""A fingerprint of a batch, by which ranks notice that they train on the same one.

Only the beginning of each array is hashed, and less of one on a device, since the copy waits for
the device.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import Any

import xxhash

from holdfast._adapters.adapter import Adapter
from holdfast._adapters.registry import adapters

_HOST_BYTES = 1 << 20
_DEVICE_BYTES = 1 << 16
_LOOKED_AT = 2000  # items of a batch


def batch_print(batch: Any) -> str | None:
    """Equal for equal batches; None if it could not tell batches apart.

    An array of a single value, such as a mask of ones, is in many batches.
    """
    hasher, is_telling = xxhash.xxh3_64(), False
    waiting, looked_at = deque([batch]), 0
    while waiting and looked_at < _LOOKED_AT:
        item = waiting.popleft()
        looked_at += 1
        adapter = next((each for each in adapters() if each.is_array(item)), None)
        if adapter is None:
            parts = _parts_of(item)
            hasher.update(_describe(item, parts))
            waiting += parts or ()
        else:
            is_telling = _add_array(hasher, adapter, item) or is_telling
    return hasher.hexdigest() if is_telling else None


def _parts_of(item: Any) -> list[Any] | None:
    """The items of a container; None for anything else."""
    if isinstance(item, Mapping):
        return [part for pair in _first(item.items()) for part in pair]
    if isinstance(item, list | tuple):
        return list(item[:_LOOKED_AT])
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, each.name, None) for each in dataclasses.fields(item)]
    if type(item).__module__ == "builtins":
        return None
    # A batch of the user's own class: its attributes.
    return list(_first(getattr(item, "__dict__", {}).values()))


def _first(items: Any) -> Any:
    return [item for _, item in zip(range(_LOOKED_AT), items, strict=False)]


def _describe(item: Any, parts: list[Any] | None) -> bytes:
    text = f"{type(item).__name__}{'' if parts is None else len(parts)};"
    if isinstance(item, str | int | float | complex | bytes):  # the repr of others has an address
        text += repr(item[:_DEVICE_BYTES] if isinstance(item, str | bytes) else item)
    return text.encode(errors="replace")


def _add_array(hasher: xxhash.xxh3_64, adapter: Adapter, array: Any) -> bool:
    """Hash an array; True if it can tell one batch from another."""
    if callable(getattr(array, "to_local", None)):
        array = array.to_local()  # the shard of this rank
    try:
        spec = adapter.spec("", array)
    except ValueError as error:  # sparse, or of objects: no bytes
        hasher.update(str(error).encode())
        return False
    hasher.update(f"{spec.kind};{spec.dtype};{spec.shape}".encode())
    limit_bytes = _DEVICE_BYTES if spec.device else _HOST_BYTES
    if spec.size_bytes > limit_bytes:
        array = _beginning(array, spec.shape, limit_bytes // spec.item_bytes)
    data = bytes(adapter.bytes_of(array))
    hasher.update(data)
    return data[spec.item_bytes :] != data[: -spec.item_bytes]


def _beginning(array: Any, shape: tuple[int, ...], items: int) -> Any:
    """About so many items of an array, by slices, so that no more is copied."""
    for axis, size in enumerate(shape):
        inner = 1
        for below in shape[axis + 1 :]:
            inner *= below
        if inner <= items:
            return array[: max(1, min(size, items // max(1, inner)))]
        array = array[0]
    return array
