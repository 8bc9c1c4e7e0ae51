"""Tensors that an object is going to keep, as an optimizer does: made and filled ahead.

By all cores at once: the first touch of new memory costs more than what is copied into it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from holdfast._record.checksum import for_each
from holdfast._resume.verify import Loaded
from holdfast._save.capture import (
    adapter_of,
    adapters,
    is_stateful,
    parts_of,
    tensor_leaves,
)

_PIECE_BYTES = 16 << 20


def fill_ahead(loaded: Loaded, numbers: Collection[int]) -> dict[int, Any]:
    """Tensors of their own for some of the stored ones, filled by several threads."""
    found: dict[int, Any] = {}
    moves: list[tuple[int, int, int]] = []
    for number in numbers:
        spec = loaded.plan.specs[number]
        view = loaded.data(number)
        if spec.kind != "torch" or view.readonly:
            continue
        tensor = adapter_of("torch").receiving().fresh(spec)
        if tensor is None:
            continue
        found[number] = tensor
        source = ctypes.addressof(ctypes.c_char.from_buffer(view))
        moves += (
            (tensor.data_ptr() + at, source + at, min(_PIECE_BYTES, view.nbytes - at))
            for at in range(0, view.nbytes, _PIECE_BYTES)
        )
    for_each(lambda index: _move(*moves[index]), [size for _, _, size in moves])
    return found


def _move(target: int, source: int, size_bytes: int) -> None:
    ctypes.memmove(target, source, size_bytes)


def kept_by_objects(stored: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[int]:
    """The numbers of the tensors that objects are going to keep as they are given them."""
    for name, encoded in stored.items():
        live = state.get(name)
        if not isinstance(encoded, dict) or "$state" not in encoded or not is_stateful(live):
            continue
        copies = (getattr(each, "copies_what_it_loads", None) for each in adapters())
        if parts_of(live) is not None or any(copy is not None and copy(live) for copy in copies):
            continue
        leaves = [leaf for _, leaf in tensor_leaves(encoded["$state"], name)]
        if any("$shard" in leaf for leaf in leaves):
            continue
        yield from {leaf["$t"]: None for leaf in leaves}
