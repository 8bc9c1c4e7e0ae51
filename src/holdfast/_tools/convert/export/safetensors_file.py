"""A .safetensors file: it needs no framework, neither to be written nor to be read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import IO, Any

from holdfast._store.commit.fault_points import pass_point
from holdfast._store.format.image import TensorSpec
from holdfast._store.read.verify import Loaded
from holdfast._tools.convert.export.chosen import Selected
from holdfast._tools.convert.export.stored_tree import NamedTensors

_CHUNK_BYTES = 16 << 20


def write_safetensors(file: IO[bytes], selected: Selected, *, strip: bool) -> int:
    """Write tensors under plain names, and all that is no tensor as JSON; returns their number."""
    loaded, state = selected.loaded, selected.state
    # A state that is a tensor itself has no prefix to drop, and keeps its name.
    named = NamedTensors(loaded.plan.specs, prefix=f"{next(iter(state))}." if strip else "")
    tree = {name: named.walk(encoded, name) for name, encoded in state.items()}
    specs = [(name, loaded.plan.specs[number]) for name, number in named.names.items()]
    return write_named(file, loaded, named.names, _metadata(loaded, tree, specs))


def write_named(
    file: IO[bytes], loaded: Loaded, names: Mapping[str, int], metadata: dict[str, str]
) -> int:
    """Write these tensors, each by its number; returns how many they are."""
    specs = loaded.plan.specs
    # Large items first, so that each tensor is aligned although there are no gaps.
    order = sorted(names, key=lambda name: (-_item_bytes(specs[names[name]]), name))
    entries = [(name, specs[names[name]]) for name in order]
    file.write(_header(entries, metadata))
    total, done = sum(spec.size_bytes for _, spec in entries), 0
    for name in order:
        for piece in _pieces(loaded.data(names[name])):
            file.write(piece)
            done += piece.nbytes
            if done * 2 >= total:
                pass_point("export-half-written")
    return len(order)


def is_raw(spec: TensorSpec) -> bool:
    """Whether safetensors has no such type, so that its bytes are all that is written."""
    return spec.stored_as == "U8" and spec.dtype.removeprefix("scalar ") not in ("uint8", "|u1")


def _item_bytes(spec: TensorSpec) -> int:
    return 1 if spec.stored_as == "U8" else spec.item_bytes


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, data.nbytes, _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]


def _metadata(
    loaded: Loaded, tree: dict[str, Any], specs: list[tuple[str, TensorSpec]]
) -> dict[str, str]:
    """All that is no tensor: safetensors has room for text, so it is JSON."""
    head = loaded.head
    about = {key: head[key] for key in ("step", "attempt", "at_turn", "metrics") if key in head}
    return {
        # Readers of other projects ask for it.
        "format": "pt" if any(spec.kind == "torch" for _, spec in specs) else "np",
        "holdfast": json.dumps(about),
        "holdfast.state": json.dumps(tree),
        # Of what is stored as plain bytes.
        "holdfast.dtypes": json.dumps({name: spec.dtype for name, spec in specs if is_raw(spec)}),
    }


def _header(entries: list[tuple[str, TensorSpec]], metadata: dict[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, spec in entries:
        end = position + spec.size_bytes
        table[name] = {
            "dtype": spec.stored_as,
            "shape": spec.stored_shape,
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    padded = -(-len(text) // 8) * 8
    return padded.to_bytes(8, "little") + text.ljust(padded)
