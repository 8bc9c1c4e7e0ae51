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
