"""Checkpoints of torch and other libraries, read without running their code.

torch.distributed.checkpoint (DCP) is also written. Its folder is a pickled table, `.metadata`, and
files with one torch.save after the other: the table may contain only its own types, the files only
what weights_only allows.
"""

from __future__ import annotations

import io
import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch

from holdfast._store.format.image import STORED_AS, TensorSpec
from holdfast.torch.adapter import ADAPTER
from holdfast.torch.pt_file import Refused as Refused
from holdfast.torch.pt_file import load_pt, read_known

METADATA = ".metadata"
_TORCH_NAMES = {stored: name for name, stored in STORED_AS.items()}
_OF_DCP = "torch.distributed.checkpoint"
_IN_TABLE = {
    *((f"{_OF_DCP}.metadata", name) for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )),
    (f"{_OF_DCP}.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("collections", "OrderedDict"),
    *(("torch", name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)),
}  # fmt: skip


class Incomplete(Exception):
    """Some of the checkpoint is missing."""


class Unwritable(Exception):
    """The format cannot represent some of it."""


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def read_file(path: Path) -> Any:
    """What torch.save wrote; Refused if that needs running code."""
    return load_pt(path)


# -- safetensors ---------------------------------------------------------------------


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        table = json.loads(file.read(length)) if length <= path.stat().st_size else None
        if not isinstance(table, dict):
            raise Incomplete("its header is cut short")
        data = memoryview(bytearray(file.read()))
    found = {}
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        spec = _spec_of(name, entry)
        if not 0 <= first <= last <= data.nbytes or last - first != spec.size_bytes:
            raise Incomplete(f"{name} should be {spec.size_bytes} bytes, and is not")
        found[name] = ADAPTER.read_array(spec, data[first:last])
    return found


def _spec_of(name: str, entry: dict[str, Any]) -> TensorSpec:
    if entry["dtype"] not in _TORCH_NAMES:
        raise Incomplete(f"{name} is of type {entry['dtype']}, which this holdfast lacks")
    dtype, shape = _TORCH_NAMES[entry["dtype"]], tuple(entry["shape"])
    size = ADAPTER.item_bytes(dtype)
    return TensorSpec(
        name, "torch", dtype, entry["dtype"], shape, None, size, math.prod(shape) * size
    )


# -- torch.distributed.checkpoint -------------------------------------------------------


def read_dcp(folder: Path) -> dict[str, Any]:
    """The state_dict that the ranks have saved, with whole tensors."""
    with (folder / METADATA).open("rb") as file:
        table = read_known(file, _IN_TABLE)
    places: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
    for index, info in table.storage_data.items():
        places.setdefault(index.fqn, []).append((tuple(index.offset or ()), info))
    tree: dict[Any, Any] = {}
    for name, about in table.state_dict_metadata.items():
        pieces = [(offset, _piece(folder, info)) for offset, info in places.get(name, [])]
        if hasattr(about, "chunks"):
            value = _whole(name, about, pieces)
        elif len(pieces) == 1:
            value = pieces[0][1]
        else:
            raise Incomplete(f"{name} is not there")
        *folders, last = (table.planner_data or {}).get(name, (name,))
        place = tree
        for key in folders:
            place = place.setdefault(key, {})
        place[last] = value
    found: dict[str, Any] = _listed(tree)
    return found


def _piece(folder: Path, info: Any) -> Any:
    path = folder / info.relative_path
    if not path.resolve().is_relative_to(folder.resolve()):
        raise Refused("it names files outside of its folder")
    if getattr(info, "transform_descriptors", None):
        raise Refused("its files are compressed, or changed in another way")
    with path.open("rb") as file:
        file.seek(info.offset)
        data = file.read(info.length)
    if len(data) != info.length:
        raise Incomplete(f"{info.relative_path} is cut short")
    return load_pt(io.BytesIO(data))


@torch.no_grad()
def _whole(name: str, about: Any, pieces: list[tuple[tuple[int, ...], Any]]) -> torch.Tensor:
    size = tuple(about.size)
    if len(pieces) == 1 and tuple(pieces[0][1].shape) == size:
        found: torch.Tensor = pieces[0][1]
        return found
    whole = torch.empty(size, dtype=about.properties.dtype)
    filled = torch.zeros(size, dtype=torch.bool)
    for offset, piece in pieces:
        at = tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))
        whole[at] = piece
        filled[at] = True
    if not filled.all():
        raise Incomplete(f"of {name} {int(filled.sum())} of {filled.numel()} values are there")
    return whole


def _listed(tree: Any) -> Any:
    """Lists where the paths have numbers: keys of dicts are strings there."""
    if not isinstance(tree, dict):
        return tree
    inner = {key: _listed(item) for key, item in tree.items()}
    if inner and all(type(key) is int for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner


def write_dcp(folder: Path, state: dict[str, Any]) -> None:
    """Write a state_dict as one rank; any number of ranks can load it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the single process
        writer = dcp.FileSystemWriter(str(folder), single_file_per_rank=True)
        try:
            dcp.save(state, storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            first, _ = next(iter(error.failures.values()))
            if isinstance(first, OSError):
                raise first from error
            raise Unwritable(str(first).partition("\n")[0]) from error


# -- the random generators of Hugging Face's Trainer ------------------------------------


def generators_of(found: Any) -> dict[str, Any] | None:
    """The generators as a run stores them; None if those of Python or the CPU are missing."""
    if not isinstance(found, dict) or not {"python", "numpy", "cpu"} <= found.keys():
        return None
    import struct

    version, words, gauss = found["python"]
    kind, keys, position, has_gauss, cached = found["numpy"]
    states: dict[str, Any] = {
        "python": (version, struct.pack(f"<{len(words)}I", *words), gauss),
        "numpy": {
            "bit_generator": kind,
            "state": {"key": keys, "pos": int(position)},
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        },
        "torch": found["cpu"],
    }
    if "cuda" in found:
        cuda = found["cuda"]
        states["torch.cuda"] = list(cuda) if isinstance(cuda, list | tuple) else [cuda]
    return states
