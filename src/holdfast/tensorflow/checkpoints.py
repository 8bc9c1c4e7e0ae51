"""Files of tf.train.Checkpoint: read for `adopt`, written for `export`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from holdfast._errors import DamagedCheckpoint, FolderError, HoldfastError
from holdfast.tensorflow.graph import Graph, GraphNode

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "VARIABLE_VALUE"
_COUNTER = "save_counter"
_NAMED = 8


@dataclass(frozen=True)
class Bundle:
    prefix: str
    graph: Graph  # each variable is named after its key in the checkpoint
    values: dict[str, Any]  # tensors by that key
    left_out: list[str]  # the paths of other objects than variables


def find_prefix(path: Path) -> str:
    """The newest checkpoint of a folder, or the named one."""
    if path.is_dir():
        newest = tf.train.latest_checkpoint(str(path))
        if newest is not None:
            return str(newest)
        inside = sorted(each.stem for each in path.glob("*.index"))
        raise FolderError(
            f"{path}: its file `checkpoint`, which says what is the newest, names none that is "
            f"there.\n{_choice(path, inside)}"
        )
    prefix = path.with_suffix("") if path.suffix == ".index" else path
    if Path(f"{prefix}.index").is_file():
        return str(prefix)
    if path.suffix in (".h5", ".keras"):
        raise FolderError(
            f"{path}: this is a file of Keras, and no checkpoint of tf.train.Checkpoint.\n"
            "Load it in the script before Run is opened: the run begins with what is there."
        )
    inside = sorted(each.stem for each in path.parent.glob("*.index"))
    raise FolderError(
        f"{path}: there is no checkpoint of TensorFlow ({path.name}.index).\n"
        f"{_choice(path.parent, inside)}"
    )


def _choice(folder: Path, names: list[str]) -> str:
    if not names:
        return "Name the folder that tf.train.CheckpointManager was given, or one checkpoint in it."
    return f"Name one: {', '.join(str(folder / name) for name in names[-_NAMED:])}."


def read_bundle(prefix: str) -> Bundle:
    """Read a checkpoint; TensorFlow verifies the checksum of every tensor."""
    try:
        reader = tf.train.load_checkpoint(prefix)
        types = reader.get_variable_to_dtype_map()
        if _GRAPH not in types:
            raise HoldfastError(
                f"{prefix}: has no graph of objects, so it was written by tf.compat.v1's Saver.\n"
                "Restore it once into tf.train.Checkpoint(model=…) and save that; then adopt it."
            )
        proto = TrackableObjectGraph.FromString(reader.get_tensor(_GRAPH))
        nodes, left_out = _nodes(proto, types)
        keys = [node.tensor for node in nodes if node.tensor is not None]
        found = tf.raw_ops.RestoreV2(
            prefix=prefix,
            tensor_names=keys,
            shape_and_slices=[""] * len(keys),
            dtypes=[types[key] for key in keys],
        )
    except HoldfastError:
        raise
    except Exception as error:  # a damaged file makes the reader fail in many ways
        reason = (getattr(error, "message", "") or str(error)).splitlines()[0]
        raise DamagedCheckpoint(
            f"{prefix}: cannot be read ({reason}).\nNothing was changed. Adopt the previous one."
        ) from error
    graph = Graph(nodes)
    ways = {number: way for way, number in graph.below(0)}
    values = dict(zip(keys, found, strict=True))
    return Bundle(prefix, graph, values, [ways[n] for n in left_out if n in ways])


def _nodes(proto: Any, types: Mapping[str, Any]) -> tuple[list[GraphNode], list[int]]:
    nodes, left_out = [], []
    for number, each in enumerate(proto.nodes):
        node = GraphNode({child.local_name: child.node_id for child in each.children})
        for attribute in each.attributes:
            key = attribute.checkpoint_key
            if attribute.name == _VALUE and types.get(key) not in (None, tf.string):
                node.tensor, node.full_name = key, attribute.full_name
            else:
                left_out.append(number)  # an iterator, or a variable of strings
        for slot in each.slot_variables:  # of optimizers before Keras 3
            name = f".slot/{slot.slot_name}/{slot.original_variable_node_id}"
            node.children[name] = slot.slot_variable_node_id
        nodes.append(node)
    return nodes, left_out


def write_bundle(
    folder: Path,
    graph: Graph,
    names: list[str],
    read: Callable[[str], Any],
    *,
    strip: bool = False,
) -> set[str]:
    """Write `ckpt-1` of these states into a folder, like tf.train.CheckpointManager.

    `read` returns a tensor by its name in the state. Returns the names of the written tensors. With
    `strip` the one state is the root of the checkpoint: tf.train.Checkpoint(model).
    """
    proto = TrackableObjectGraph()
    children = {name: graph.nodes[0].children[name] for name in names}
    if strip:
        children = dict(graph.nodes[children[names[0]]].children) if children else {}
    root = Graph([GraphNode(children), *graph.nodes[1:]])
    ways = list(root.below(0))
    numbers = {old: new for new, (_, old) in enumerate(ways)}
    written: dict[str, GraphNode] = {}  # by key
    for way, old in ways:
        node, made = root.nodes[old], proto.nodes.add()
        for name, child in node.children.items():
            made.children.add(node_id=numbers[child], local_name=name)
        if node.tensor is not None:
            key = _key(way)
            written[key] = node
            made.attributes.add(name=_VALUE, full_name=node.full_name, checkpoint_key=key)
    # TensorFlow expects its counter of saves.
    proto.nodes[0].children.add(node_id=len(ways), local_name=_COUNTER)
    proto.nodes.add().attributes.add(name=_VALUE, full_name=_COUNTER, checkpoint_key=_key(_COUNTER))
    _mark_nodes_with_values(proto)
    tf.raw_ops.SaveV2(
        prefix=str(folder / "ckpt-1"),
        tensor_names=[*written, _key(_COUNTER), _GRAPH],
        shape_and_slices=[""] * (len(written) + 2),
        tensors=[
            *(_value(node, read) for node in written.values()),
            tf.constant(1, tf.int64),
            tf.constant(proto.SerializeToString()),
        ],
    )
    # Relative, so that the folder can be moved.
    (folder / "checkpoint").write_text(
        'model_checkpoint_path: "ckpt-1"\nall_model_checkpoint_paths: "ckpt-1"\n'
    )
    return {name for node in written.values() for name in (str(node.tensor), *node.others)}


def _value(node: GraphNode, read: Callable[[str], Any]) -> Any:
    """The value of a variable, with copies merged as TensorFlow does."""
    assert node.tensor is not None
    values = [tf.convert_to_tensor(read(name)) for name in (node.tensor, *node.others)]
    if len(values) == 1:
        return values[0]
    total = tf.add_n(values)
    return total if node.merged_by == "sum" else total / tf.cast(len(values), total.dtype)


def _key(way: str) -> str:
    return f"{way}/.ATTRIBUTES/{_VALUE}"


def _mark_nodes_with_values(proto: Any) -> None:
    """Mark each object that has a value, or a part with one: TensorFlow restores no other."""
    has = [bool(node.attributes) for node in proto.nodes]
    is_settled = False
    while not is_settled:
        is_settled = True
        for number in reversed(range(len(has))):
            if not has[number] and any(has[c.node_id] for c in proto.nodes[number].children):
                has[number], is_settled = True, False
    for node, value in zip(proto.nodes, has, strict=True):
        node.has_checkpoint_values.value = value
