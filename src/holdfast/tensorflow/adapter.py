"""The adapter for TensorFlow: variables, tensors, modules, random generators and datasets."""

from __future__ import annotations

import base64
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from holdfast._adapters import numpy as shared
from holdfast._adapters.adapter import Adapter, Generators, Objects, Places
from holdfast._store.format.image import TensorSpec
from holdfast.tensorflow import distribute, objects, randomness

_OF_PARTS = (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices, tf.experimental.ExtensionType)
_GRAPH = (
    "it belongs to a graph, and only a Session could read it. TensorFlow 1 code, and code inside "
    "a tf.function, cannot be saved; call holdfast from eager code."
)


class TensorFlowObjects(Objects):
    def is_object(self, value: object) -> bool:
        return objects.is_object(value)

    def object_state(self, value: Any) -> dict[str, Any]:
        return objects.object_state(value)

    def load_object(self, value: Any, state: Mapping[str, Any]) -> None:
        objects.load_object(value, state)

    def object_parts(self, value: object) -> dict[str, Any] | None:
        return objects.parts_of(value)

    def refuse(self, value: object) -> str | None:
        if isinstance(value, tf.compat.v1.Session | tf.compat.v1.train.Saver | tf.Graph):
            return (
                f"a {type(value).__name__} of TensorFlow 1 keeps its variables in a graph, where "
                "no other code can read them.\n"
                "Use eager code: tf.Module or Keras models, with tf.GradientTape or fit. Old "
                "checkpoints can be taken over: see `holdfast adopt --help`."
            )
        if isinstance(value, tf.compat.v1.train.Optimizer):
            return (
                "an optimizer of TensorFlow 1 makes its slots when it is first used, so there is "
                "nothing that they could be put back into.\nUse one of keras.optimizers."
            )
        is_ours = isinstance(value, tf.Variable | tf.Tensor) or objects.is_object(value)
        return _GRAPH if is_ours and not tf.executing_eagerly() else None


class TensorFlowGenerators(Generators):
    global_generator = "tensorflow"

    def is_generator(self, value: object) -> bool:
        return randomness.is_generator(value)

    def generator_state(self, value: Any) -> dict[str, Any]:
        return randomness.generator_state(value)

    def restore_generator(self, value: Any, state: Mapping[str, Any]) -> None:
        randomness.restore_generator(value, state)

    def reseed(self, value: Any, seed: int) -> None:
        value.reset_from_seed(seed & 0x7FFFFFFFFFFFFFFF)

    def is_global(self, value: object) -> bool:
        return value is randomness.global_generator()

    def global_state(self) -> Any:
        return randomness.global_state()

    def set_global_state(self, state: Any) -> None:
        randomness.set_global_state(state)

    def seed_global(self, seed: int) -> None:
        randomness.seed_global(seed)

    def states(self, *, devices: bool) -> dict[str, Any]:  # noqa: ARG002  they are on the host
        return randomness.generators()

    def restore_states(self, states: Mapping[str, Any]) -> list[str]:
        return randomness.restore_generators(states)


class TensorFlowAdapter(Adapter):
    kind = "tensorflow"
    objects = TensorFlowObjects()
    generators = TensorFlowGenerators()

    def destinations(self, buffer: Any, places: Places, start: int) -> list[shared.Array]:
        return shared.views(buffer, places, start)

    def is_array(self, value: object) -> bool:
        if isinstance(value, tf.Tensor):
            return bool(value.dtype != tf.string)
        return distribute.is_variable(value) and not distribute.is_apart(value)

    def alias_key(self, value: Any) -> Hashable | None:
        # A tensor never changes, so two names may be one tensor or two.
        if isinstance(value, tf.Tensor) or distribute.refuse(value) is not None:
            return None
        return ("tensorflow", id(value), value.dtype, tuple(_shape(value)))

    def spec(self, name: str, value: Any) -> TensorSpec:
        if (reason := distribute.refuse(value)) is not None:
            raise ValueError(reason)
        if not _can_be_read(value):
            raise ValueError(_GRAPH)
        dtype = value.dtype
        native = np.dtype(dtype.as_numpy_dtype)
        if dtype in (tf.string, tf.resource, tf.variant) or native.names is not None:
            raise ValueError(
                f"a tensor of type {dtype.name} cannot be stored; keep it as Python data."
            )
        return shared.spec_of(name, self.kind, native, _shape(value))

    def item_bytes(self, dtype: str) -> int:
        return int(shared.numpy_dtype(dtype).itemsize)

    def bytes_of(self, value: Any) -> memoryview:
        return shared.as_bytes(_read(value))

    def copy_all(self, targets: Sequence[shared.Array], values: Sequence[Any]) -> None:
        shared.copy_into(targets, values, _read)

    def own(self, spec: TensorSpec, data: memoryview) -> Any:
        return tf.constant(shared.view(data, spec).copy())

    def load_in_place(self, live: object, spec: TensorSpec, data: memoryview) -> bool:
        if not isinstance(live, tf.Variable):
            return False
        values, fits = shared.view(data, spec), live.shape.is_compatible_with(spec.shape)
        if live.dtype.as_numpy_dtype != values.dtype or not fits:
            return False
        distribute.assign(live, tf.constant(values.copy()))
        return True

    def holds_array(self, value: object) -> bool:
        # Also if its copies on the replicas differ.
        return isinstance(value, tf.Variable)

    def takes_size(self, value: object, size: list[int]) -> bool:
        if not isinstance(value, tf.Variable) or value.shape.is_fully_defined():
            return False
        return bool(value.shape.is_compatible_with(size))

    # -- Values made of parts, and other values --------------------------------------

    def is_node(self, value: object) -> bool:
        return isinstance(value, _OF_PARTS)

    def node_parts(self, value: Any) -> dict[str, Any]:
        flat = tf.nest.flatten(value, expand_composites=True)
        return {str(number): part for number, part in enumerate(flat)}

    def node_from(self, live: Any, parts: Mapping[str, Any]) -> Any:
        return tf.nest.pack_sequence_as(live, list(parts.values()), expand_composites=True)

    def encode_other(self, value: object) -> dict[str, Any] | None:
        if isinstance(value, tf.DType):
            return {"$tensorflow.dtype": value.name}
        if isinstance(value, tf.Tensor) and value.dtype == tf.string and _can_be_read(value):
            items = [
                base64.b64encode(item).decode("ascii") for item in tf.reshape(value, [-1]).numpy()
            ]
            return {"$tensorflow.string": {"shape": value.shape.as_list(), "items": items}}
        return None

    def decode_other(self, tag: str, value: Any) -> Any:
        if tag == "$tensorflow.dtype":
            return tf.dtypes.as_dtype(value)
        items = [base64.b64decode(item) for item in value["items"]]
        return tf.reshape(tf.constant(items, tf.string), value["shape"])


ADAPTER = TensorFlowAdapter()


def _can_be_read(value: Any) -> bool:
    if not tf.executing_eagerly():
        return False
    return isinstance(value, tf.Variable) or hasattr(value, "numpy")


def _shape(value: Any) -> list[int]:
    shape = value.shape
    if not shape.is_fully_defined() and _can_be_read(value):
        shape = distribute.first(value).read_value().shape  # the variable may change its size
    found: list[int] = shape.as_list() if shape.is_fully_defined() else []
    return found


def _read(value: Any) -> shared.Array:
    return np.asarray(distribute.first(value).numpy())
