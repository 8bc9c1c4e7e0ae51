"""The adapter for TensorFlow: variables, tensors, modules, random generators and datasets."""

from __future__ import annotations

import base64
import random
import struct
import sys
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import stateful_random_ops
from tensorflow.python.trackable import data_structures

from holdfast._adapters import numpy as shared
from holdfast._adapters.adapter import Adapter, Generators, Objects, Places
from holdfast._store.format.image import TensorSpec
from holdfast.tensorflow import datasets, distribute

_OF_PARTS = (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices, tf.experimental.ExtensionType)
_GRAPH = (
    "it belongs to a graph, and only a Session could read it. TensorFlow 1 code, and code inside "
    "a tf.function, cannot be saved; call holdfast from eager code."
)
_Holder = tf.__internal__.tracking.AutoTrackable
_TABLES = (tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable)
_STRUCTURES = data_structures.TrackableDataStructure
# The script makes them the same in every attempt: they have no state.
_WITHOUT_STATE = (
    tf.types.experimental.PolymorphicFunction,
    tf.types.experimental.ConcreteFunction,
    tf.data.Dataset,
    tf.lookup.StaticHashTable,
)
_packed: weakref.WeakKeyDictionary[Any, datasets.Packed] = weakref.WeakKeyDictionary()


class TensorFlowObjects(Objects):
    # Most objects are holders: their state is that of the variables, generators and other objects
    # in them, each under its place in the holder. The place is the same in every attempt; names of
    # variables may not be.

    def is_object(self, value: object) -> bool:
        """Whether it has a state, without a state_dict()."""
        if isinstance(value, _Holder):
            return not ADAPTER.generators.is_generator(value) and not isinstance(
                value, _WITHOUT_STATE
            )
        if isinstance(value, tf.Variable):
            return True  # used only if its copies on the replicas differ; else it is an array
        return datasets.is_iterator(value) or isinstance(value, _TABLES)

    def object_state(self, value: Any) -> dict[str, Any]:
        parts = self.object_parts(value)
        if parts is not None:
            return parts
        if isinstance(value, tf.Variable):
            return {distribute.COPIES: list(distribute.copies(value))}
        if not isinstance(value, _TABLES):
            packed = _packed.setdefault(value, datasets.Packed())
            return {"iterator": packed.pack(datasets.write_state(value))}
        keys, values = value.export()
        if keys.shape.rank == 1:  # else the order is that of the table's buckets
            order = np.argsort(keys.numpy(), kind="stable")
            keys, values = tf.gather(keys, order), tf.gather(values, order)
        return {"keys": keys, "values": values}

    def load_object(self, value: Any, state: Mapping[str, Any]) -> None:
        """Restore anything but a holder: holders are loaded part by part."""
        if isinstance(value, tf.Variable):
            distribute.assign(value, state)
        elif isinstance(value, _TABLES):
            value.remove(value.export()[0])
            value.insert(state["keys"], state["values"])
        else:
            datasets.read_state(value, datasets.unpack(state["iterator"]))

    def object_parts(self, value: object) -> dict[str, Any] | None:
        """The parts of a holder, by their place in it; None if it is not a holder."""
        if not isinstance(value, _Holder) or not self.is_object(value):
            return None
        if isinstance(value, tf.Module):
            found = value._flatten(predicate=self._is_part, with_path=True)
            return {".".join(map(str, path)): _plain(part) for path, part in found}
        return {name: _plain(part) for name, part in _children(value)}

    def _is_part(self, value: object) -> bool:
        """Whether it is a part by itself; modules inside a module are flattened."""
        keras = _keras()
        if keras is not None and isinstance(
            value,
            keras.Layer
            | keras.Optimizer
            | keras.Metric
            | keras.Variable
            | keras.random.SeedGenerator,
        ):
            return True
        if distribute.is_variable(value) or ADAPTER.generators.is_generator(value):
            return True
        return self.is_object(value) and not isinstance(value, tf.Module)

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
        is_ours = isinstance(value, tf.Variable | tf.Tensor) or self.is_object(value)
        return _GRAPH if is_ours and not tf.executing_eagerly() else None


class TensorFlowGenerators(Generators):
    global_generator = "tensorflow"

    # After `tf.random.set_seed` every eager op without a seed of its own draws one, from a Python
    # generator in the context. The op's kernel counts its draws, and is cached for the next op with
    # the same seed: so when seeds are drawn again, the kernels must be new too.

    def is_generator(self, value: object) -> bool:
        return isinstance(value, tf.random.Generator)

    def generator_state(self, value: Any) -> dict[str, Any]:
        return {"algorithm": int(value.algorithm), "state": distribute.first(value.state).numpy()}

    def restore_generator(self, value: Any, state: Mapping[str, Any]) -> None:
        if int(value.algorithm) != state["algorithm"]:
            raise ValueError(f"its algorithm is {value.algorithm}, and was {state['algorithm']}")
        if tuple(value.state.shape) != state["state"].shape:
            raise ValueError(f"its state has {value.state.shape}, and had {state['state'].shape}")
        distribute.assign(value.state, tf.constant(state["state"]))

    def reseed(self, value: Any, seed: int) -> None:
        value.reset_from_seed(seed & 0x7FFFFFFFFFFFFFFF)

    def is_global(self, value: object) -> bool:
        # Not by tf.random.get_global_generator: that would make one.
        return value is stateful_random_ops.global_generator

    def global_state(self) -> Any:
        """The seed, and the state of the generator of op seeds."""
        held = context.context()
        return None if held._seed is None else (held._seed, held._rng.getstate())

    def set_global_state(self, state: Any) -> None:
        held = context.context()
        if state is None:
            held._seed = None
            return
        held._seed = state[0]
        held._rng = random.Random()
        held._rng.setstate(state[1])

    def seed_global(self, seed: int) -> None:
        """Seed what eager ops draw, unless the script has set no seed."""
        held = context.context()
        if held._seed is not None:
            held._seed = seed & 0x7FFFFFFF
            held._rng = random.Random(held._seed)

    def states(self, *, devices: bool) -> dict[str, Any]:  # noqa: ARG002  they are on the host
        states: dict[str, Any] = {"tensorflow": None}
        now = self.global_state()
        if now is not None:
            seed, (version, words, gauss) = now
            states["tensorflow"] = (seed, version, struct.pack(f"<{len(words)}I", *words), gauss)
        if stateful_random_ops.global_generator is not None:
            generator = stateful_random_ops.global_generator
            states["tensorflow.generator"] = self.generator_state(generator)
        datasets.find_hidden_draws()
        return states

    def restore_states(self, states: Mapping[str, Any]) -> list[str]:
        then = states.get("tensorflow")
        if then is not None:
            seed, version, packed, gauss = then
            then = (seed, (version, struct.unpack(f"<{len(packed) // 4}I", packed), gauss))
        if then != self.global_state():
            self.set_global_state(then)
            if not datasets.drawing_functions:  # these would restart their sequences each time
                context.context().clear_kernel_cache()
        stored, live = states.get("tensorflow.generator"), stateful_random_ops.global_generator
        if stored is not None and live is None:
            fresh = tf.random.Generator.from_state(stored["state"], stored["algorithm"])
            tf.random.set_global_generator(fresh)
        elif stored is not None:
            try:
                # In place: a tf.function may have captured it.
                self.restore_generator(live, stored)
            except ValueError as error:
                return [f"TensorFlow's global generator ({error})"]
        return []


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
        return shared.spec_of(name, self.kind, native.name, native.itemsize, _shape(value))

    def item_bytes(self, dtype: str) -> int:
        return int(shared.numpy_dtype(dtype).itemsize)

    def bytes_of(self, value: Any) -> memoryview:
        return shared.as_bytes(_read(value))

    def copy_all(self, targets: Sequence[shared.Array], values: Sequence[Any]) -> None:
        for target, value in zip(targets, values, strict=True):
            np.copyto(target, _read(value), casting="no")

    def new_array(self, spec: TensorSpec, data: memoryview) -> Any:
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


def _children(holder: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, child in holder._trackable_children().items():
        if isinstance(child, _STRUCTURES):  # a list or a dict among the attributes
            yield from _children(child, f"{prefix}{name}.")
        elif not isinstance(child, _WITHOUT_STATE):
            yield f"{prefix}{name}", child


def _keras() -> Any:
    keras = sys.modules.get("keras")
    return keras if hasattr(keras, "__version__") else None  # else nothing is of Keras


def _plain(part: Any) -> Any:
    keras = _keras()
    return part.value if keras is not None and isinstance(part, keras.Variable) else part
