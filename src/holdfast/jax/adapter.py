"""The adapter for JAX: arrays, keys, and pytrees of them.

State is a value here: `run.update(params=params)` hands over a new one after every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from holdfast._adapters import numpy as shared
from holdfast._adapters.adapter import Adapter, Generators, Objects, Places, Sharding
from holdfast._store.format.image import TensorSpec
from holdfast.jax import arrays, trees

# JAX has no generators, but settings that change which numbers a key gives.
_SETTINGS = (
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
)


class JaxObjects(Objects):
    def load_targets(self, value: object) -> Any:
        return trees.object_state(value) if trees.is_object(value) else None

    def overrides_state_dict(self, value: object) -> bool:
        # nnx.Rngs makes a stream of any attribute: calling its "state_dict" would draw a key.
        return trees.is_object(value) and not hasattr(type(value), "state_dict")

    def is_object(self, value: object) -> bool:
        return trees.is_object(value)

    def object_state(self, value: Any) -> dict[str, Any]:
        return trees.object_state(value)

    def load_object(self, value: Any, state: Mapping[str, Any]) -> None:
        trees.load_object(value, state)

    def strict_tensors(self, value: object) -> dict[str, Any] | None:
        if not trees.is_object(value):
            return None
        state = trees.object_state(value)
        return {key: item for key, item in state.items() if ADAPTER.is_array(item)}


class JaxGenerators(Generators):
    def states(self, *, devices: bool) -> dict[str, Any]:  # noqa: ARG002
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

    def alias_key(self, value: Any) -> None:  # noqa: ARG002
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
            if not isinstance(value, jax.Array):
                value.start_copies()
            else:
                arrays.numbers_of(value).copy_to_host_async()
        for target, value in zip(targets, values, strict=True):
            if not isinstance(value, jax.Array):
                value.copy_to(target)
            else:
                arrays.copy_to(target, value)

    def bytes_of(self, value: Any) -> memoryview:
        if not isinstance(value, jax.Array):
            found: memoryview = value.bytes()
            return found
        return shared.as_bytes(arrays.read(value))

    def own(self, spec: TensorSpec, data: memoryview) -> Any:
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
        from holdfast.jax import shards

        return shards

    # -- Pytrees -------------------------------------------------------------------

    def is_node(self, value: object) -> bool:
        return trees.is_node(value)

    def node_parts(self, value: Any) -> dict[str, Any]:
        return trees.node_parts(value)

    def node_from(self, live: Any, parts: Mapping[str, Any]) -> Any:
        return trees.node_from(live, parts)

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
