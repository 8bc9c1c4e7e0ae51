"""The adapter for JAX: arrays, keys, and pytrees of them.

State is a value here: `run.update(params=params)` hands it over anew after every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from holdfast import _typed
from holdfast._bare import GENERATOR as GENERATOR
from holdfast._bare import encode_other as encode_other
from holdfast._bare import generators as generators
from holdfast._bare import global_state as global_state
from holdfast._bare import is_generator as is_generator
from holdfast._bare import is_global as is_global
from holdfast._bare import restore_generators as restore_generators
from holdfast._bare import seed_global as seed_global
from holdfast._bare import set_global_state as set_global_state
from holdfast._errors import missing_framework
from holdfast._record.image import TensorSpec

try:
    import jax
except ImportError as error:
    raise missing_framework("jax", "JAX") from error

KIND = "jax"


def is_array(value: object) -> bool:
    return isinstance(value, jax.Array)


def alias_key(_: Any) -> None:
    """None: an array never changes, and two names of one may be two arrays after the next step."""


def spec(name: str, value: Any) -> TensorSpec:
    return _typed.spec_of(name, KIND, np.dtype(value.dtype), value.shape)


def item_bytes(dtype: str) -> int:
    """The size of one item; ValueError if there is no such type here."""
    return int(_typed.numpy_dtype(dtype).itemsize)


destinations = _typed.views


def copy_all(targets: Sequence[_typed.Array], values: Sequence[Any]) -> None:
    _typed.copy_into(targets, values, np.asarray)


def bytes_of(value: Any) -> memoryview:
    return _typed.as_bytes(np.asarray(value))


def borrow(spec: TensorSpec, data: memoryview) -> Any:
    return own(spec, data)


def own(spec: TensorSpec, data: memoryview) -> Any:
    return jax.numpy.asarray(_typed.view(data, spec).copy())


def load_in_place(_live: object, _spec: TensorSpec, _data: memoryview) -> bool:
    return False


def is_node(value: object) -> bool:
    """A pytree node of a class of its own: a flax or equinox module, a registered dataclass."""
    if isinstance(value, dict | list | tuple | set | frozenset | str | bytes) or value is None:
        return False
    leaves = jax.tree_util.tree_leaves(value, is_leaf=lambda item: item is not value)
    return not (len(leaves) == 1 and leaves[0] is value)


def node_parts(value: Any) -> dict[str, Any]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda item: item is not value)
    return {jax.tree_util.keystr(path, simple=True, separator="."): part for path, part in pairs}


def node_from(live: Any, parts: Mapping[str, Any]) -> Any:
    pairs, tree = jax.tree_util.tree_flatten_with_path(live, is_leaf=lambda item: item is not live)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in pairs]
    return jax.tree_util.tree_unflatten(tree, [parts[name] for name in names])
