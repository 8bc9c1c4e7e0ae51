"""The adapter for TensorFlow: variables, tensors, modules, random generators and datasets."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from holdfast import _typed
from holdfast._errors import missing_framework
from holdfast._record.image import TensorSpec

try:
    import tensorflow as tf
except ImportError as error:
    raise missing_framework("tensorflow", "TensorFlow") from error

KIND = "tensorflow"
GENERATOR = "tensorflow"  # the name of its global generator


def is_array(value: object) -> bool:
    return isinstance(value, tf.Tensor | tf.Variable)


def alias_key(value: Any) -> Hashable | None:
    """Variables are told apart by themselves; a tensor never changes, so two may be one."""
    return ("tensorflow", id(value)) if isinstance(value, tf.Variable) else None


def spec(name: str, value: Any) -> TensorSpec:
    dtype = value.dtype
    if dtype in (tf.string, tf.resource, tf.variant):
        raise ValueError(f"a tensor of type {dtype.name} cannot be stored; keep it as Python data.")
    return _typed.spec_of(name, KIND, np.dtype(dtype.as_numpy_dtype), value.shape.as_list())


def item_bytes(dtype: str) -> int:
    """The size of one item; ValueError if there is no such type here."""
    return int(_typed.numpy_dtype(dtype).itemsize)


def encode_other(value: object) -> dict[str, str] | None:
    return {"$tensorflow.dtype": value.name} if isinstance(value, tf.DType) else None


def decode_other(_: str, value: str) -> Any:
    return tf.dtypes.as_dtype(value)


destinations = _typed.views
borrow_view = _typed.view


def copy_all(targets: Sequence[_typed.Array], values: Sequence[Any]) -> None:
    _typed.copy_into(targets, values, _read)


def _read(value: Any) -> _typed.Array:
    return np.asarray(value.numpy())


def bytes_of(value: Any) -> memoryview:
    return _typed.as_bytes(_read(value))


def borrow(spec: TensorSpec, data: memoryview) -> Any:
    return own(spec, data)


def own(spec: TensorSpec, data: memoryview) -> Any:
    return tf.constant(_typed.view(data, spec).copy())


def load_in_place(live: object, spec: TensorSpec, data: memoryview) -> bool:
    if not isinstance(live, tf.Variable):
        return False
    values = _typed.view(data, spec)
    if live.dtype.as_numpy_dtype != values.dtype or tuple(live.shape) != spec.shape:
        return False
    live.assign(values.copy())
    return True


def is_object(value: object) -> bool:
    """A module: its variables are its state."""
    return isinstance(value, tf.Module)


def object_state(value: Any) -> dict[str, Any]:
    # By the place in the tree of objects, which is the same in every life; names need not be.
    found = dict(value._flatten(predicate=_is_variable, with_path=True))
    return {".".join(map(str, path)): variable for path, variable in found.items()}


def _is_variable(value: object) -> bool:
    return isinstance(value, tf.Variable)


def load_object(value: Any, state: Mapping[str, Any]) -> None:
    for name, variable in object_state(value).items():
        variable.assign(state[name])


def strict_tensors(value: object) -> dict[str, Any] | None:
    """The tensors that a stored state must match, name by name."""
    return object_state(value) if is_object(value) else None


def is_generator(value: object) -> bool:
    return isinstance(value, tf.random.Generator)


def generator_state(value: Any) -> Any:
    return {"algorithm": int(value.algorithm), "state": value.state.numpy()}


def restore_generator(value: Any, state: Mapping[str, Any]) -> None:
    value.state.assign(state["state"])


def is_global(value: object) -> bool:
    """Whether a generator is the one that TensorFlow gives to whoever asks for any."""
    return value is tf.random.get_global_generator()


def reseed(value: Any, seed: int) -> None:
    """Seed a generator that somebody holds."""
    value.reset_from_seed(seed & 0x7FFFFFFFFFFFFFFF)


def global_state() -> Any:
    return None


def set_global_state(_: Any) -> None:
    return None


def seed_global(_: int) -> None:
    return None


def generators(*, devices: bool) -> dict[str, Any]:  # noqa: ARG001
    return {}


def restore_generators(_: Mapping[str, Any]) -> list[str]:
    return []
