"""The objects of a script as in TensorFlow's own checkpoints, and the files of tf.train.Checkpoint.

TensorFlow finds a variable by its path (`model/_functional/_operations/1/_kernel`), not by its
name, so one checkpoint fits any objects that are made of the same parts. Each state of a run has
the graph with its tensors, so that it can become such a checkpoint. Files are read for `adopt`,
written for `export`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from holdfast._errors import DamagedCheckpoint, FolderError, HoldfastError
from holdfast.tensorflow import distribute

_COUNTER = "save_counter"  # counts files, not training


@dataclass
class GraphNode:
    """One object: its parts by name, and the tensor that it is, if it is a variable."""

    children: dict[str, int] = field(default_factory=dict)
    tensor: str | None = None  # its name in the state
    full_name: str = ""
    # If the copies on the replicas differ: the tensors of the others, and how they are merged.
    others: list[str] = field(default_factory=list)
    merged_by: str = ""  # "sum" or "mean"; else the first stands for all


@dataclass(frozen=True)
class Graph:
    """All objects of a state; the first node is the root, with the names of the state."""

    nodes: list[GraphNode]

    def to_bytes(self) -> bytes:
        rows = [list(vars(node).values()) for node in self.nodes]
        return zlib.compress(json.dumps(rows, separators=(",", ":")).encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> Graph:
        return cls([GraphNode(*row) for row in json.loads(zlib.decompress(data))])

    def below(self, start: int) -> Iterator[tuple[str, int]]:
        """Every node that is reachable from one, nearest first, with its path."""
        seen, queue = {start}, [("", start)]
        for way, number in queue:
            yield way, number
            for name, child in self.nodes[number].children.items():
                if child not in seen:
                    seen.add(child)
                    queue.append((f"{way}/{name}" if way else name, child))


def parts_of(value: Any) -> dict[str, Any]:
    """The children of an object in TensorFlow's checkpoints."""
    try:
        return dict(tf.train.TrackableView.children(value))
    except ValueError:  # a dict with keys other than strings: it cannot be in a checkpoint
        return {}


def trackable_of(value: Any) -> Any:
    """A state as TensorFlow tracks it, lists and dicts too; None if it cannot."""
    try:
        return parts_of(tf.train.Checkpoint(state=value))["state"]
    except (ValueError, TypeError):  # a number, or an object of another library
        return None


def variable_of(part: Any) -> Any:
    """The variable of a part, for a Keras variable that of its backend; else None."""
    if isinstance(part, tf.Variable):
        return part
    inner = getattr(part, "_value", None)
    return inner if isinstance(inner, tf.Variable) else None


def keys_of(variable: Any) -> list[int]:
    """The ids of a variable and of its copies on the replicas of a strategy."""
    return [id(variable), *map(id, distribute.copies(variable))]


def merged_by(variable: Any) -> str:
    """How differing copies of a variable are merged; empty: the first one counts."""
    if not distribute.is_apart(variable):
        return ""
    ways = {tf.VariableAggregation.SUM: "sum", tf.VariableAggregation.MEAN: "mean"}
    return ways.get(variable.aggregation, "")


def describe(state: Mapping[str, Any], names: Sequence[str], values: Sequence[Any]) -> bytes | None:
    """The graph of a state with these tensors; None if it has no variables."""
    by_key = {id(value): name for name, value in zip(names, values, strict=True)}
    known = set(names)
    nodes = [GraphNode()]
    numbers: dict[int, int] = {}
    queue: list[tuple[str, Any, int]] = []

    def number_of(path: str, part: Any) -> int:
        if id(part) not in numbers:
            numbers[id(part)] = len(nodes)
            nodes.append(GraphNode())
            queue.append((path, part, numbers[id(part)]))
        return numbers[id(part)]

    for name, value in state.items():
        part = trackable_of(value)
        if part is not None:
            nodes[0].children[name] = number_of(name, part)
    for path, part, number in queue:  # it grows in the loop, and keeps the parts alive
        node, variable = nodes[number], variable_of(part)
        if variable is not None:
            stored = [by_key[key] for key in dict.fromkeys(keys_of(variable)) if key in by_key]
            node.tensor = stored[0] if stored else None
            node.merged_by = merged_by(variable)
            node.others = stored[1:] if node.merged_by else []
            node.full_name = str(getattr(part, "path", "") or variable.name.partition(":")[0])
            if node.tensor is None and f"{path.removesuffix('._state_var')}.state" in known:
                node.tensor = f"{path.removesuffix('._state_var')}.state"  # of a generator
        for name, child in parts_of(part).items():
            node.children[name] = number_of(f"{path}.{name}", child)
    if not any(node.tensor for node in nodes):
        return None
    return Graph(nodes).to_bytes()


# -- A stored graph, matched with the live objects ---------------------------------------
# As TensorFlow restores: from one object to its parts by their names, regardless of the names of
# variables. An optimizer without variables is built for those that it was built for, but only when
# everything else is known to fit.


@dataclass
class Match:
    """Which tensor of the stored state belongs to which variable."""

    by_key: dict[int, str] = field(default_factory=dict)  # see `graph.keys_of`
    zeros: set[int] = field(default_factory=set)  # copies that must be zero
    by_path: dict[str, str] = field(default_factory=dict)  # of numbers and generators
    missing: list[str] = field(default_factory=list)  # variables that are only here
    unexpected: list[str] = field(default_factory=list)  # tensors that are only there
    unlike: list[str] = field(default_factory=list)  # values that are not variables
    fresh: list[str] = field(default_factory=list)  # states that stay as the script made them
    unbuilt: list[str] = field(default_factory=list)  # optimizers that could be built
    unused: list[str] = field(default_factory=list)  # names that only the checkpoint has
    kept_alive: list[Any] = field(default_factory=list)  # so that ids are not reused


def match(graph: Graph, state: Mapping[str, Any], fresh: list[str], *, builds: bool) -> Match:
    """Find the variable of each tensor; with `builds`, optimizers are built first."""
    found = Match()
    names = graph.nodes[0].children
    pairs: list[tuple[str, int, Any]] = []
    nameless: dict[str, Any] = {}
    for name, value in state.items():
        part = None if name in fresh else trackable_of(value)
        if name in fresh or (name not in names and not _variables(part)):
            found.fresh.append(name)
        elif name not in names and isinstance(value, tf.train.Checkpoint):
            pairs.append((name, 0, part))  # as it was given to tf.train.CheckpointManager
        elif name not in names:
            nameless[name] = part
        elif part is not None:
            pairs.append((name, names[name], part))
        elif type(value) in (int, float) and (tensor := graph.nodes[names[name]].tensor):
            found.by_path[name] = tensor
        else:
            found.unlike.append(f"{name} (is a {type(value).__name__})")
    met = _walk(graph, pairs)
    waiting = _unbuilt(graph, met)
    if builds and waiting:
        for _, part, variables in waiting.values():
            part.build(variables)
        met, waiting = _walk(graph, pairs), {}
    found.unbuilt = [path for path, _, _ in waiting.values()]
    _record_pairs(found, graph, met)
    _record_rest(found, graph, pairs, met, fresh, set(waiting))
    for name, part in nameless.items():
        # Else it is part of another state.
        if not all(set(keys_of(v)) & found.by_key.keys() for v in _variables(part)):
            found.missing.append(name)
    if all(number for _, number, _ in pairs):
        found.unused = [name for name in names if name not in state or name in fresh]
    return found


def _variables(part: Any) -> list[Any]:
    parts = [] if part is None else _all_parts(part)
    return [v for _, each in parts if (v := variable_of(each)) is not None]


def _all_parts(part: Any) -> list[tuple[str, Any]]:
    seen, queue = {id(part)}, [("", part)]
    for way, each in queue:
        for name, child in parts_of(each).items():
            if id(child) not in seen:
                seen.add(id(child))
                queue.append((f"{way}.{name}", child))
    return queue


def _walk(graph: Graph, pairs: list[tuple[str, int, Any]]) -> list[tuple[str, int, Any]]:
    """Each stored object with the live one at the same path."""
    queue = list(pairs)
    seen = {(number, id(part)) for _, number, part in queue}
    for path, number, part in queue:
        parts = parts_of(part)
        for name, child in graph.nodes[number].children.items():
            if name in parts and (child, id(parts[name])) not in seen:
                seen.add((child, id(parts[name])))
                queue.append((f"{path}.{name}", child, parts[name]))
    return queue


def _unbuilt(
    graph: Graph, met: list[tuple[str, int, Any]]
) -> dict[int, tuple[str, Any, list[Any]]]:
    """The optimizers without variables, each with the variables that it was built for."""
    of_node: dict[int, Any] = {}
    for _, number, part in met:
        of_node.setdefault(number, part)
    found = {}
    for path, number, part in met:
        listed = graph.nodes[number].children.get("_trainable_variables")
        if listed is None or getattr(part, "built", True):
            continue
        numbered = sorted((int(n), c) for n, c in graph.nodes[listed].children.items())
        variables = [of_node.get(child) for _, child in numbered]
        if variables and all(variable_of(each) is not None for each in variables):
            found[number] = (path, part, variables)
    return found


def _record_pairs(found: Match, graph: Graph, met: list[tuple[str, int, Any]]) -> None:
    for path, number, part in met:
        tensor, variable = graph.nodes[number].tensor, variable_of(part)
        found.kept_alive.append(part)
        if tensor is None or variable is None:
            continue
        for key in keys_of(variable):
            found.by_key[key] = tensor
        if merged_by(variable) == "sum":
            found.zeros |= set(keys_of(variable)[2:])
        if path.endswith("._state_var"):  # a generator: its state is captured as a copy
            found.by_path[f"{path.removesuffix('._state_var')}.state"] = tensor


def _record_rest(
    found: Match,
    graph: Graph,
    pairs: list[tuple[str, int, Any]],
    met: list[tuple[str, int, Any]],
    fresh: list[str],
    waiting: set[int],
) -> None:
    bound = {number for _, number, part in met if variable_of(part) is not None}
    named = {below for number in waiting for _, below in graph.below(number)}
    for name, number, part in pairs:
        for way, below in graph.below(number):
            is_counter = way.rpartition("/")[2] == _COUNTER
            if graph.nodes[below].tensor and below not in bound | named and not is_counter:
                named.add(below)
                found.unexpected.append(f"{name}.{way.replace('/', '.')}".rstrip("."))
        if variable_of(part) is not None and not graph.nodes[number].tensor:
            found.unlike.append(f"{name} (is a {type(part).__name__})")
        for way, each in _all_parts(part):
            variable = variable_of(each)
            if variable is None or set(keys_of(variable)) & found.by_key.keys():
                continue
            if way.endswith(f".{_COUNTER}"):
                continue
            path = f"{name}{way}"
            if any(path == known or path.startswith(f"{known}.") for known in fresh):
                found.fresh.append(path)
            elif path not in found.missing:
                found.missing.append(path)


def number_in(tensor: Any, live: Any) -> int | float:
    """The number of a stored variable, for a live Python number."""
    value = tensor.numpy().item()
    exact = type(live)(value)
    if exact != value:
        raise ValueError(f"{value!r} is no {type(live).__name__}")
    return exact  # type: ignore[no-any-return]  # of int or float


# -- Files of tf.train.Checkpoint --------------------------------------------------------


_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "VARIABLE_VALUE"
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
