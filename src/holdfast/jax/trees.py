"""Values that are made of parts: immutable pytrees, and flax.nnx objects, which are mutable.

What a node has besides its parts (static fields, functions, an optimizer's transformations) stays
as the script has made it: only the parts are stored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

_PLAIN = (dict, list, tuple, set, frozenset, str, bytes, int, float, complex)


def is_node(value: object) -> bool:
    """A pytree node of a class of its own: a flax or equinox module, a registered dataclass."""
    if isinstance(value, _PLAIN) or value is None:
        return False
    return not jax.tree_util.all_leaves([value])


def node_parts(value: Any) -> dict[str, Any]:
    """The parts by name, without functions, which cannot be stored."""
    pairs, _ = _take_apart(value)
    return {name: part for name, part in pairs if not _stays(part)}


def node_from(live: Any, parts: Mapping[str, Any]) -> Any:
    """The same node with other parts."""
    pairs, tree = _take_apart(live)
    return jax.tree_util.tree_unflatten(tree, [parts.get(name, part) for name, part in pairs])


def _take_apart(value: Any) -> tuple[list[tuple[str, Any]], Any]:
    found, tree = jax.tree_util.tree_flatten_with_path(
        value, is_leaf=lambda item: item is not value
    )
    pairs: list[tuple[str, Any]] = []
    taken: set[str] = set()
    for path, part in found:
        wanted = name = "/".join(_key(entry) for entry in path)
        count = 1
        while name in taken:  # a number and its digits as a string look the same
            count += 1
            name = f"{wanted}~{count}"
        taken.add(name)
        pairs.append((name, part))
    return pairs, tree


def _key(entry: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(entry, attribute):
            # "$" begins a tag of the stored tree.
            return str(getattr(entry, attribute)).replace("$", "_")
    return str(entry)


def _stays(part: Any) -> bool:
    return callable(part) and jax.tree_util.all_leaves([part]) and not isinstance(part, jax.Array)


# -- flax.nnx: mutable objects ----------------------------------------------------


def _nnx() -> Any:
    """flax.nnx, where the script has imported it."""
    found = sys.modules.get("flax.nnx")
    return found if hasattr(found, "Module") else None


def is_object(value: object) -> bool:
    """A module, an optimizer, generators or a variable of flax.nnx."""
    nnx = _nnx()
    if nnx is None or isinstance(value, type | nnx.State):
        return False
    kinds = (getattr(nnx, name, None) for name in ("Module", "Object", "Pytree", "Variable"))
    return isinstance(value, tuple(kind for kind in kinds if isinstance(kind, type)))


def object_state(value: Any) -> dict[str, Any]:
    """The arrays of an object, by their paths."""
    return dict(_flat(_pure(value), ""))


def load_object(value: Any, stored: Mapping[str, Any]) -> None:
    """Put arrays into the variables of an object."""
    nnx = _nnx()
    if isinstance(value, nnx.Variable):
        _set_variable(value, stored["value"])
        return
    state = nnx.state(value)
    nnx.replace_by_pure_dict(state, _filled(_pure(value), stored, ""))
    nnx.update(value, state)


def _pure(value: Any) -> dict[Any, Any]:
    nnx = _nnx()
    if isinstance(value, nnx.Variable):
        return {"value": _variable(value)}
    found: dict[Any, Any] = nnx.to_pure_dict(nnx.state(value))
    return found


def _variable(value: Any) -> Any:
    return value.get_value() if hasattr(value, "get_value") else value.value


def _set_variable(variable: Any, value: Any) -> None:
    if hasattr(variable, "set_value"):
        variable.set_value(value)
    else:
        variable.value = value


def _flat(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        yield path, tree
        return
    for key, item in tree.items():
        yield from _flat(item, _below(path, key))


def _filled(tree: Any, stored: Mapping[str, Any], path: str) -> Any:
    if not isinstance(tree, dict):
        return stored.get(path, tree)
    return {key: _filled(item, stored, _below(path, key)) for key, item in tree.items()}


def _below(path: str, key: Any) -> str:
    name = str(key).replace("$", "_")
    return f"{path}.{name}" if path else name
