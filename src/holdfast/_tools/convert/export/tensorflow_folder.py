"""A checkpoint of a run as files of tf.train.Checkpoint, in a folder of their own.

The folder has its name only when all of it is whole and durable.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast._adapters.registry import adapter_of
from holdfast._errors import HoldfastError
from holdfast._state.tf_object_graph import OBJECTS
from holdfast._store.read.verify import Loaded
from holdfast._tools.convert.adopt.tensorflow_bundle import load_tensorflow
from holdfast._tools.convert.export.chosen import Written
from holdfast._tools.convert.export.folder import check_folder, size_of, writing_folder
from holdfast._tools.convert.export.stored_tree import NamedTensors

_OURS = ("checkpoint", "ckpt-1.index", "ckpt-1.data-00000-of-00001")


def check_tensorflow(out: Path, *, force: bool) -> None:
    """Refuse what cannot be before gigabytes are read."""
    check_folder(out, force=force, what="TensorFlow", is_ours=lambda name: name in _OURS)
    load_tensorflow()


def write_tensorflow(
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

    with writing_folder(out, force=force) as folder:
        written = checkpoints.write_bundle(folder, graph, held, read, strip=strip)
        if not written:
            instead = "Leave out --strip: it is a variable itself, and needs its name."
            if not held:
                instead = "Export to a .safetensors file, which takes any state."
            raise HoldfastError(f"{', '.join(names)}: no variable to be written.\n{instead}")
        size_bytes = size_of(folder)
    return Written(len(written), size_bytes, _left_out(loaded, names, held, written))


def _holds_tensors(graph: Any, name: str) -> bool:
    start = graph.nodes[0].children.get(name)
    return start is not None and any(graph.nodes[n].tensor for _, n in graph.below(start))


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
