"""The adapter for TensorFlow: variables, tensors, modules, random generators and datasets."""

from __future__ import annotations

import base64
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from holdfast._adapters import shared
from holdfast._errors import missing_framework
from holdfast._store.format.image import TensorSpec

try:
    import tensorflow as tf
except ImportError as error:
    raise missing_framework("tensorflow", "TensorFlow") from error

from holdfast.tensorflow import distribute
from holdfast.tensorflow.objects import is_object as is_object
from holdfast.tensorflow.objects import load_object as load_object
from holdfast.tensorflow.objects import object_state as object_state
from holdfast.tensorflow.objects import parts_of as object_parts
from holdfast.tensorflow.randomness import generator_state as generator_state
from holdfast.tensorflow.randomness import generators as generators
from holdfast.tensorflow.randomness import global_state as global_state
from holdfast.tensorflow.randomness import is_generator as is_generator
from holdfast.tensorflow.randomness import is_global as is_global
from holdfast.tensorflow.randomness import reseed as reseed
from holdfast.tensorflow.randomness import restore_generator as restore_generator
from holdfast.tensorflow.randomness import restore_generators as restore_generators
from holdfast.tensorflow.randomness import seed_global as seed_global
from holdfast.tensorflow.randomness import set_global_state as set_global_state

__all__ = ["object_parts"]

KIND = "tensorflow"
GENERATOR = "tensorflow"  # the name of its global generator
_OF_PARTS = (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices, tf.experimental.ExtensionType)
_GRAPH = (
    "it belongs to a graph, and only a Session could read it. TensorFlow 1 code, and code inside "
    "a tf.function, cannot be saved; call holdfast from eager code."
)


def is_array(value: object) -> bool:
    if isinstance(value, tf.Tensor):
        return bool(value.dtype != tf.string)
    return distribute.is_variable(value) and not distribute.is_apart(value)


def holds_array(value: object) -> bool:
    """Whether a stored array can be put into it: into a variable with copies that differ, too."""
    return isinstance(value, tf.Variable)


def takes_size(value: object, size: list[int]) -> bool:
    """Whether a variable was made for values of several sizes, and this is one of them."""
    if not isinstance(value, tf.Variable) or value.shape.is_fully_defined():
        return False
    return bool(value.shape.is_compatible_with(size))


def alias_key(value: Any) -> Hashable | None:
    """Variables are told apart by themselves; a tensor never changes, so two may be one."""
    if isinstance(value, tf.Tensor) or distribute.refuse(value) is not None:
        return None
    return ("tensorflow", id(value), value.dtype, tuple(_shape(value)))


def spec(name: str, value: Any) -> TensorSpec:
    if (reason := distribute.refuse(value)) is not None:
        raise ValueError(reason)
    if not _can_be_read(value):
        raise ValueError(_GRAPH)
    dtype = value.dtype
    native = np.dtype(dtype.as_numpy_dtype)
    if dtype in (tf.string, tf.resource, tf.variant) or native.names is not None:
        raise ValueError(f"a tensor of type {dtype.name} cannot be stored; keep it as Python data.")
    return shared.spec_of(name, KIND, native, _shape(value))


def _can_be_read(value: Any) -> bool:
    if not tf.executing_eagerly():
        return False
    return isinstance(value, tf.Variable) or hasattr(value, "numpy")


def _shape(value: Any) -> list[int]:
    shape = value.shape
    if not shape.is_fully_defined() and _can_be_read(value):
        shape = (
            distribute.first(value).read_value().shape
        )  # a variable whose values may be of another size
    found: list[int] = shape.as_list() if shape.is_fully_defined() else []
    return found


def item_bytes(dtype: str) -> int:
    """The size of one item; ValueError if there is no such type here."""
    return int(shared.numpy_dtype(dtype).itemsize)


def refuse(value: object) -> str | None:
    """Why a value cannot be part of a state, if there is more to say than its type."""
    if isinstance(value, tf.compat.v1.Session | tf.compat.v1.train.Saver | tf.Graph):
        return (
            f"a {type(value).__name__} of TensorFlow 1 keeps its variables in a graph, where "
            "nobody else can read them.\n"
            "Use eager code: tf.Module or Keras models, with tf.GradientTape or fit. Old "
            "checkpoints can be taken over: see `holdfast adopt --help`."
        )
    if isinstance(value, tf.compat.v1.train.Optimizer):
        return (
            "an optimizer of TensorFlow 1 makes its slots when it is first used, so there is "
            "nothing that they could be put back into.\nUse one of keras.optimizers."
        )
    is_ours = isinstance(value, tf.Variable | tf.Tensor) or is_object(value)
    return _GRAPH if is_ours and not tf.executing_eagerly() else None


def encode_other(value: object) -> dict[str, Any] | None:
    if isinstance(value, tf.DType):
        return {"$tensorflow.dtype": value.name}
    if isinstance(value, tf.Tensor) and value.dtype == tf.string and _can_be_read(value):
        items = [base64.b64encode(item).decode("ascii") for item in tf.reshape(value, [-1]).numpy()]
        return {"$tensorflow.string": {"shape": value.shape.as_list(), "items": items}}
    return None


def decode_other(tag: str, value: Any) -> Any:
    if tag == "$tensorflow.dtype":
        return tf.dtypes.as_dtype(value)
    items = [base64.b64decode(item) for item in value["items"]]
    return tf.reshape(tf.constant(items, tf.string), value["shape"])


destinations = shared.views
borrow_view = shared.view


def copy_all(targets: Sequence[shared.Array], values: Sequence[Any]) -> None:
    shared.copy_into(targets, values, _read)


def _read(value: Any) -> shared.Array:
    return np.asarray(distribute.first(value).numpy())


def bytes_of(value: Any) -> memoryview:
    return shared.as_bytes(_read(value))


def borrow(spec: TensorSpec, data: memoryview) -> Any:
    return own(spec, data)


def own(spec: TensorSpec, data: memoryview) -> Any:
    return tf.constant(shared.view(data, spec).copy())


def load_in_place(live: object, spec: TensorSpec, data: memoryview) -> bool:
    if not isinstance(live, tf.Variable):
        return False
    values = shared.view(data, spec)
    if live.dtype.as_numpy_dtype != values.dtype or not live.shape.is_compatible_with(spec.shape):
        return False
    distribute.assign(live, tf.constant(values.copy()))
    return True


def is_node(value: object) -> bool:
    """Whether it is made of tensors, and made anew to change."""
    return isinstance(value, _OF_PARTS)


def node_parts(value: Any) -> dict[str, Any]:
    flat = tf.nest.flatten(value, expand_composites=True)
    return {str(number): part for number, part in enumerate(flat)}


def node_from(live: Any, parts: Mapping[str, Any]) -> Any:
    return tf.nest.pack_sequence_as(live, list(parts.values()), expand_composites=True)
