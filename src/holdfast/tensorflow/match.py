"""A stored graph of objects, matched with the live objects.

As TensorFlow restores: from one object to its parts by their names, regardless of the names of
variables. An optimizer that has no variables yet is built for those that it was built for, but only
when all else is known to fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from holdfast.tensorflow.graph import Graph, keys_of, merged_by, parts_of, trackable_of, variable_of

_COUNTER = "save_counter"  # counts files, not training


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
        if name in fresh or (name not in names and not _has_variables(part)):
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
        if not _is_known(found, part):  # else it is part of another state
            found.missing.append(name)
    if all(number for _, number, _ in pairs):
        found.unused = [name for name in names if name not in state or name in fresh]
    return found


def _has_variables(part: Any) -> bool:
    return part is not None and any(variable_of(each) is not None for _, each in _all_parts(part))


def _is_known(found: Match, part: Any) -> bool:
    variables = [variable_of(each) for _, each in _all_parts(part)]
    return all(set(keys_of(v)) & found.by_key.keys() for v in variables if v is not None)


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
            elif f"{name}{way}" not in found.missing:
                found.missing.append(path)


def number_in(tensor: Any, live: Any) -> int | float:
    """The number of a stored variable, for a live Python number."""
    value = tensor.numpy().item()
    exact = type(live)(value)
    if exact != value:
        raise ValueError(f"{value!r} is no {type(live).__name__}")
    return exact  # type: ignore[no-any-return]  # of int or float
