"""The objects of a script as in TensorFlow's own checkpoints: a graph of names.

TensorFlow finds a variable by its path (`model/_functional/_operations/1/_kernel`), not by its
name, so one checkpoint fits any objects that are made of the same parts. Each state of a run has
the graph with its tensors, so that it can become such a checkpoint.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

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
