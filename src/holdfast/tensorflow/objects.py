"""Objects of TensorFlow with a state: modules, checkpoints, iterators and tables.

Most are holders: their state is that of the variables, generators and other objects that they hold,
each under its place in the holder. That is the same in every attempt; names of variables may not
be.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.trackable import data_structures

from holdfast.tensorflow import datasets, distribute, randomness

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


def is_object(value: object) -> bool:
    """Whether it has a state, without a state_dict()."""
    if isinstance(value, _Holder):
        return not randomness.is_generator(value) and not isinstance(value, _WITHOUT_STATE)
    if isinstance(value, tf.Variable):
        return True  # used only if its copies on the replicas differ; else it is an array
    return datasets.is_iterator(value) or isinstance(value, _TABLES)


def object_state(value: Any) -> dict[str, Any]:
    parts = parts_of(value)
    if parts is not None:
        return parts
    if isinstance(value, tf.Variable):
        return distribute.state(value)
    if isinstance(value, _TABLES):
        return _table_state(value)
    packed = _packed.setdefault(value, datasets.Packed())
    return {"iterator": packed.pack(datasets.write_state(value))}


def _table_state(table: Any) -> dict[str, Any]:
    keys, values = table.export()
    if keys.shape.rank == 1:  # else the order is that of the table's buckets
        order = np.argsort(keys.numpy(), kind="stable")
        keys, values = tf.gather(keys, order), tf.gather(values, order)
    return {"keys": keys, "values": values}


def load_object(value: Any, state: Mapping[str, Any]) -> None:
    """Restore anything but a holder: holders are loaded part by part."""
    if isinstance(value, tf.Variable):
        distribute.assign(value, state)
    elif isinstance(value, _TABLES):
        value.remove(value.export()[0])
        value.insert(state["keys"], state["values"])
    else:
        datasets.read_state(value, datasets.unpack(state["iterator"]))


def parts_of(value: object) -> dict[str, Any] | None:
    """The parts of a holder, by their place in it; None if it is not a holder."""
    if not isinstance(value, _Holder) or not is_object(value):
        return None
    if isinstance(value, tf.Module):
        found = value._flatten(predicate=_is_part, with_path=True)
        return {".".join(map(str, path)): _plain(part) for path, part in found}
    return {name: _plain(part) for name, part in _children(value)}


def _children(holder: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, child in holder._trackable_children().items():
        if isinstance(child, _STRUCTURES):  # a list or a dict among the attributes
            yield from _children(child, f"{prefix}{name}.")
        elif not isinstance(child, _WITHOUT_STATE):
            yield f"{prefix}{name}", child


def _is_part(value: object) -> bool:
    """Whether it is a part by itself; modules inside a module are flattened."""
    if distribute.is_variable(value) or randomness.is_generator(value) or _is_of_keras(value):
        return True
    return is_object(value) and not isinstance(value, tf.Module)


def _is_of_keras(value: object) -> bool:
    keras = sys.modules.get("keras")  # without it there are none
    if not hasattr(keras, "__version__"):
        return False
    assert keras is not None
    kinds = (keras.Layer, keras.Optimizer, keras.Metric, keras.Variable, keras.random.SeedGenerator)
    return isinstance(value, kinds)


def _plain(part: Any) -> Any:
    keras = sys.modules.get("keras")
    is_wrapped = hasattr(keras, "__version__") and isinstance(part, keras.Variable)  # type: ignore[union-attr]  # its version says that it is loaded
    return part.value if is_wrapped else part
