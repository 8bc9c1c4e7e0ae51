"""The adapter for JAX: arrays, keys, and pytrees of them.

State is a value here: `run.update(params=params)` hands over a new one after every step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from holdfast._adapters import numpy as shared
from holdfast._adapters.adapter import Adapter, Generators, Objects, Places, Sharding
from holdfast._store.format.image import TensorSpec
from holdfast._text import unique_names
from holdfast.jax import arrays

# JAX has no generators, but settings that change which numbers a key gives.
_SETTINGS = (
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
)
_PLAIN = (dict, list, tuple, set, frozenset, str, bytes, int, float, complex)


class JaxObjects(Objects):
    def load_targets(self, value: object) -> Any:
        return self.object_state(value) if self.is_object(value) else None

    # -- Objects of flax.nnx, which are mutable --------------------------------------

    def overrides_state_dict(self, value: object) -> bool:
        # nnx.Rngs makes a stream of any attribute: calling its "state_dict" would draw a key.
        return self.is_object(value) and not hasattr(type(value), "state_dict")

    def is_object(self, value: object) -> bool:
        """A module, an optimizer, generators or a variable of flax.nnx."""
        nnx = _nnx()
        if nnx is None or isinstance(value, type | nnx.State):
            return False
        kinds = (getattr(nnx, name, None) for name in ("Module", "Object", "Pytree", "Variable"))
        return isinstance(value, tuple(kind for kind in kinds if isinstance(kind, type)))

    def object_state(self, value: Any) -> dict[str, Any]:
        """The arrays of an object, by their paths."""
        return dict(_flat(_pure(value), ""))

    def load_object(self, value: Any, stored: Mapping[str, Any]) -> None:
        nnx = _nnx()
        if isinstance(value, nnx.Variable):
            if hasattr(value, "set_value"):
                value.set_value(stored["value"])
            else:
                value.value = stored["value"]
            return
        state = nnx.state(value)
        nnx.replace_by_pure_dict(state, _filled(_pure(value), stored, ""))
        nnx.update(value, state)

    def strict_tensors(self, value: object) -> dict[str, Any] | None:
        if not self.is_object(value):
            return None
        state = self.object_state(value)
        return {key: item for key, item in state.items() if ADAPTER.is_array(item)}


class JaxGenerators(Generators):
    def states(self, *, devices: bool) -> dict[str, Any]:  # noqa: ARG002  no devices
        # Keys are part of the user's state.
        return {"jax": {name: _setting(name) for name in _SETTINGS}}

    def restore_states(self, states: Mapping[str, Any]) -> list[str]:
        # Nothing is changed: a setting that differs now is only reported.
        stored = states.get("jax") or {}
        return [
            f"the setting {name}, which was {then!r} and is {_setting(name)!r}"
            for name, then in stored.items()
            if name in _SETTINGS and then != _setting(name)
        ]


class JaxAdapter(Adapter):
    kind = arrays.KIND
    objects = JaxObjects()
    generators = JaxGenerators()
    arrays_are_values = True

    def alias_key(self, value: Any) -> None:  # noqa: ARG002  the same call for all adapters
        # An array never changes, and two names of one may be two arrays after the next step.
        return None

    def item_bytes(self, dtype: str) -> int:
        return arrays.item_bytes(dtype)

    def is_array(self, value: object) -> bool:
        return isinstance(value, jax.Array)

    def spec(self, name: str, value: Any) -> TensorSpec:
        if not isinstance(value, jax.Array):  # what this process holds of an array
            found: TensorSpec = value.spec(name)
            return found
        return arrays.describe(name, value)

    def destinations(self, buffer: Any, places: Places, start: int) -> list[shared.Array]:
        whole = memoryview(buffer)
        return [
            arrays.item_view(spec, whole[start + at : start + at + spec.size_bytes])
            for spec, at in places
        ]

    def copy_all(self, targets: Sequence[shared.Array], values: Sequence[Any]) -> None:
        for value in values:  # start all copies before waiting for the first
            for piece in [value] if isinstance(value, jax.Array) else value.pieces:
                arrays.numbers_of(piece).copy_to_host_async()
        for target, value in zip(targets, values, strict=True):
            if isinstance(value, jax.Array):
                arrays.copy_to(target, value)
            else:  # what this process holds of an array
                value.copy_to(target)

    def bytes_of(self, value: Any) -> memoryview:
        if not isinstance(value, jax.Array):
            found: memoryview = value.bytes()
            return found
        return shared.as_bytes(arrays.read(value))

    def new_array(self, spec: TensorSpec, data: memoryview) -> Any:
        return arrays.make(spec, data, arrays.sharding_from(spec.device))

    def made_like(self, spec: TensorSpec, data: memoryview, near: object) -> Any:
        if not isinstance(near, jax.Array) or self.is_sharded(near):
            return None
        return arrays.make(spec, data, arrays.layout(spec.device, near))

    def is_sharded(self, value: Any) -> bool:
        return (
            isinstance(value, jax.Array)
            and not isinstance(value, jax.core.Tracer)
            and not value.is_fully_addressable
        )

    def check_sharded(self, dtype: str) -> None:
        self.item_bytes(dtype)

    def sharding(self) -> Sharding:
        return arrays

    # -- Pytrees: immutable values made of parts ------------------------------------
    # What a node has besides its parts (static fields, functions, an optimizer's
    # transformations) stays as the script has made it.

    def is_node(self, value: object) -> bool:
        """A pytree node of a class of its own: a flax or equinox module, a registered dataclass."""
        if isinstance(value, _PLAIN) or value is None:
            return False
        return not jax.tree_util.all_leaves([value])

    def node_parts(self, value: Any) -> dict[str, Any]:
        parts, _ = _take_apart(value)
        return {
            name: part
            for name, part in parts.items()
            # A function cannot be stored.
            if isinstance(part, jax.Array)
            or not callable(part)
            or not jax.tree_util.all_leaves([part])
        }

    def node_from(self, live: Any, parts: Mapping[str, Any]) -> Any:
        own, tree = _take_apart(live)
        return jax.tree_util.tree_unflatten(tree, [parts.get(n, part) for n, part in own.items()])

    def same_form(self, then: Any, now: Any) -> bool:
        arrays_now, tree_now = jax.tree_util.tree_flatten(now)
        arrays_then, tree_then = jax.tree_util.tree_flatten(then)
        trees: tuple[Any, Any] = tree_now, tree_then
        if not arrays_now or trees[0] != trees[1]:
            return False
        kinds = set(map(type, arrays_now))
        return kinds <= set(map(type, arrays_then)) and all(issubclass(k, jax.Array) for k in kinds)

    def has_arrays(self, value: Any) -> bool:
        return any(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(value))


ADAPTER = JaxAdapter()


def _setting(name: str) -> Any:
    value = arrays.setting(name)
    return value if isinstance(value, bool | str | None) else str(value)


def _take_apart(value: Any) -> tuple[dict[str, Any], Any]:
    found, tree = jax.tree_util.tree_flatten_with_path(
        value, is_leaf=lambda item: item is not value
    )
    # A number and its digits as a string have the same name.
    return unique_names(("/".join(map(_key, path)), part) for path, part in found), tree


def _key(entry: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(entry, attribute):
            # "$" begins a tag of the stored tree.
            return str(getattr(entry, attribute)).replace("$", "_")
    return str(entry)


def _nnx() -> Any:
    """flax.nnx, where the script has imported it."""
    found = sys.modules.get("flax.nnx")
    return found if hasattr(found, "Module") else None


def _pure(value: Any) -> dict[Any, Any]:
    nnx = _nnx()
    if isinstance(value, nnx.Variable):
        return {"value": value.get_value() if hasattr(value, "get_value") else value.value}
    found: dict[Any, Any] = nnx.to_pure_dict(nnx.state(value))
    return found


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


# -- The processes of jax.distributed ----------------------------------------------------


def rank_and_size() -> tuple[int, int] | None:
    """Those of this process, if jax.distributed.initialize() was called; starts no device."""
    # Public in versions before 0.6.
    from jax._src import distributed

    state: object = distributed.global_state
    if getattr(state, "client", None) is None:
        return None
    # Not jax.process_index(): it would initialize the devices before the script does.
    rank, size = getattr(state, "process_id", None), getattr(state, "num_processes", None)
    if rank is None or size is None:
        return jax.process_index(), jax.process_count()
    return int(rank), int(size)
