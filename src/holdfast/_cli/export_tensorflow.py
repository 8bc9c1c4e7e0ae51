"""A checkpoint of a run as files of tf.train.Checkpoint, in a folder of their own.

The folder has its name only when all of it is whole and durable.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast._cli.adopt_files import load_tensorflow
from holdfast._cli.stored_tree import NamedTensors
from holdfast._errors import FolderError, HoldfastError
from holdfast._record.atomic import publish_folder, remove_folder, sync_folder
from holdfast._resume.verify import Loaded
from holdfast._save.beside import OBJECTS
from holdfast._save.capture import adapter_of

_OURS = ("checkpoint", "ckpt-1.index", "ckpt-1.data-00000-of-00001")


@dataclass(frozen=True)
class Written:
    """What was written, and what TensorFlow's checkpoints have no place for."""

    variables: int
    size_bytes: int
    left_out: list[str]


def check_folder(out: Path, *, force: bool) -> None:
    """Refuse what cannot be before gigabytes are read."""
    if not (out.exists() or out.is_symlink()):
        return
    if not force:
        raise FolderError(
            f"{out}: is there already, and was left as it is.\n"
            "To replace what an export has left there: --force. Or choose another name."
        )
    if not out.is_dir() or any(each.name not in _OURS for each in out.iterdir()):
        raise FolderError(
            f"{out}: holds what no export to TensorFlow has left there, and was left as it is.\n"
            "Choose another name."
        )


def write_folder(
    out: Path, loaded: Loaded, names: Sequence[str], *, strip: bool, force: bool
) -> Written:
    """Write these states."""
    checkpoints = load_tensorflow()
    encoded = loaded.head["tree"]["extra"].get(OBJECTS)
    if encoded is None:
        raise HoldfastError(
            "this checkpoint has no graph of TensorFlow's objects: it has no variables of "
            "TensorFlow, or they could not be described when it was stored.\n"
            "Export to a .safetensors file, which takes any state."
        )
    graph = checkpoints.Graph.from_bytes(bytes(loaded.data(encoded["$t"])))
    held = [name for name in names if _holds_tensors(graph, name)]
    by_name = {spec.name: number for number, spec in enumerate(loaded.plan.specs)}

    def read(name: str) -> Any:
        spec = loaded.plan.specs[by_name[name]]
        return adapter_of(spec.kind).own(spec, loaded.data(by_name[name]))

    prepared = out.with_name(f".{out.name}.{os.getpid()}.unfinished")
    try:
        prepared.mkdir()
        written = checkpoints.write_bundle(prepared, graph, held, read, strip=strip)
        if not written:
            instead = "Leave out --strip: it is a variable itself, and needs its name."
            if not held:
                instead = "Export to a .safetensors file, which takes any state."
            raise HoldfastError(f"{', '.join(names)}: no variable to be written.\n{instead}")
        _make_durable(prepared)
        size_bytes = sum(each.stat().st_size for each in prepared.iterdir())
        if force and out.exists():
            remove_folder(out)
        if not publish_folder(prepared, out):
            check_folder(out, force=False)
    finally:
        remove_folder(prepared)
    return Written(len(written), size_bytes, _left_out(loaded, names, held, written))


def _holds_tensors(graph: Any, name: str) -> bool:
    start = graph.nodes[0].children.get(name)
    return start is not None and any(graph.nodes[n].tensor for _, n in graph.below(start))


def _make_durable(folder: Path) -> None:
    for each in folder.iterdir():
        with each.open("rb+") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def _left_out(
    loaded: Loaded, names: Sequence[str], held: list[str], written: set[str]
) -> list[str]:
    """The states that are no objects of TensorFlow, and the tensors that it does not track."""
    found = [name for name in names if name not in held]
    for name in held:
        tensors = NamedTensors(loaded.plan.specs)
        tensors.walk(loaded.head["tree"]["state"][name], name)
        numbers = dict.fromkeys(tensors.names.values())
        found += [s for n in numbers if (s := loaded.plan.specs[n].name) not in written]
    return found
