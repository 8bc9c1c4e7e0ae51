"""The adapter for JAX: arrays, keys, and pytrees of them.

State is a value here: `run.update(params=params)` hands it over anew after every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from holdfast._adapters import shared
from holdfast._adapters.shared import GENERATOR as GENERATOR
from holdfast._adapters.shared import encode_other as encode_other
from holdfast._adapters.shared import global_state as global_state
from holdfast._adapters.shared import is_generator as is_generator
from holdfast._adapters.shared import is_global as is_global
from holdfast._adapters.shared import seed_global as seed_global
from holdfast._adapters.shared import set_global_state as set_global_state
from holdfast._errors import missing_framework
from holdfast._store.format.image import TensorSpec

try:
    import jax
except ImportError as error:
    raise missing_framework("jax", "JAX") from error

from holdfast.jax import arrays
from holdfast.jax.arrays import KIND as KIND
from holdfast.jax.arrays import item_bytes as item_bytes
from holdfast.jax.trees import is_node as is_node
from holdfast.jax.trees import is_object as is_object
from holdfast.jax.trees import load_object as load_object
from holdfast.jax.trees import node_from as node_from
from holdfast.jax.trees import node_parts as node_parts
from holdfast.jax.trees import object_state as object_state

# What JAX has instead of generators: settings by which the same keys give other numbers.
_SETTINGS = (
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
)


def is_array(value: object) -> bool:
    return isinstance(value, jax.Array)


def is_value_array(value: object) -> bool:
    """Whether an array is state by itself, so that a stored state without it does not fit."""
    return isinstance(value, jax.Array)


def is_sharded(value: Any) -> bool:
    """Whether an array is in parts on several processes, of which this one holds its own."""
    return (
        isinstance(value, jax.Array)
        and not isinstance(value, jax.core.Tracer)
        and not value.is_fully_addressable
    )


def sharding() -> ModuleType:
    """What knows how; imported where it is needed."""
    from holdfast.jax import shards

    return shards


def check_sharded(dtype: str) -> None:
    """ValueError if a stored array of this type cannot be put together here."""
    item_bytes(dtype)


def alias_key(_: Any) -> None:
    """None: an array never changes, and two names of one may be two arrays after the next step."""


def spec(name: str, value: Any) -> TensorSpec:
    if not isinstance(value, jax.Array):  # what this process holds of an array
        found: TensorSpec = value.spec(name)
        return found
    return arrays.describe(name, value)


def destinations(
    buffer: Any, places: Sequence[tuple[TensorSpec, int]], start: int
) -> list[shared.Array]:
    """Where each array goes: views of the mapping, made once and used for every snapshot."""
    whole = memoryview(buffer)
    return [
        arrays.item_view(spec, whole[start + at : start + at + spec.size_bytes])
        for spec, at in places
    ]


def copy_all(targets: Sequence[shared.Array], values: Sequence[Any]) -> None:
    """Copy live arrays into the mapping; returns when their values are there."""
    for value in values:  # all on their way before the first is waited for
        if not isinstance(value, jax.Array):
            value.start_copies()
        else:
            arrays.numbers_of(value).copy_to_host_async()
    for target, value in zip(targets, values, strict=True):
        if not isinstance(value, jax.Array):
            value.copy_to(target)
        else:
            arrays.copy_to(target, value)


def bytes_of(value: Any) -> memoryview:
    if not isinstance(value, jax.Array):
        found: memoryview = value.bytes()
        return found
    return shared.as_bytes(arrays.read(value))


def borrow(spec: TensorSpec, data: memoryview) -> Any:
    return own(spec, data)


def own(spec: TensorSpec, data: memoryview) -> Any:
    """A new array with the stored values, where it was if there is such a place."""
    return arrays.make(spec, data, arrays.sharding_from(spec.device))


def made_like(spec: TensorSpec, data: memoryview, near: object) -> Any:
    """A new array where the one is that is there now; None if that is in parts, or no array."""
    if not isinstance(near, jax.Array) or is_sharded(near):
        return None
    return arrays.make(spec, data, arrays.layout(spec.device, near))


def load_in_place(_live: object, _spec: TensorSpec, _data: memoryview) -> bool:
    return False


def same_form(then: Any, now: Any) -> bool:
    """Whether a pytree of arrays has the form of another, so that it can be stored as that was."""
    arrays_now, tree_now = jax.tree_util.tree_flatten(now)
    arrays_then, tree_then = jax.tree_util.tree_flatten(then)
    trees: tuple[Any, Any] = tree_now, tree_then
    if not arrays_now or trees[0] != trees[1]:
        return False
    kinds = set(map(type, arrays_now))
    return kinds <= set(map(type, arrays_then)) and all(issubclass(k, jax.Array) for k in kinds)


def has_arrays(value: Any) -> bool:
    """Whether any part of a value is an array."""
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(value))


def strict_tensors(value: object) -> dict[str, Any] | None:
    """The arrays that a stored state must match, name by name: those of an nnx object."""
    if not is_object(value):
        return None
    return {key: item for key, item in object_state(value).items() if is_array(item)}


def partners(value: object) -> Any:
    """What is now where a stored state will go: it says on which devices."""
    return object_state(value) if is_object(value) else None


def generators(*, devices: bool) -> dict[str, Any]:  # noqa: ARG001  there are none
    """Keys are state of the user's; what goes with them are the settings of JAX."""
    return {"jax": {name: _setting(name) for name in _SETTINGS}}


def _setting(name: str) -> Any:
    value = arrays.setting(name)
    return value if isinstance(value, bool | str | None) else str(value)


def restore_generators(states: Mapping[str, Any]) -> list[str]:
    """Nothing is changed: a setting that is another now is said."""
    stored = states.get("jax") or {}
    return [
        f"the setting {name}, which was {then!r} and is {_setting(name)!r}"
        for name, then in stored.items()
        if name in _SETTINGS and then != _setting(name)
    ]
