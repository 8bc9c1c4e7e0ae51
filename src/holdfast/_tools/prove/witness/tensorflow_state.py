"""Everything that decides an update of a Keras optimizer, as fingerprints by name.

A training inside a tf.function cannot be observed: only afterwards the optimizer's count shows
whether a call was an update. So the state is read before each call, and used if it was one.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from types import FrameType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from holdfast._run.witness.observer import Leaf, Observer, leaf_of, whole_leaf
from holdfast._tools.prove.witness import recorder
from holdfast.tensorflow.distribute import copies

Around = dict[str, tuple[int, Leaf]]  # each with the identity of its variable

_ALL = "all"  # in place of a parameter's number: of the optimizer as a whole


@dataclass(frozen=True)
class StateBefore:
    counts: list[int]  # of the updates of each optimizer
    leaves: dict[int, Leaf]  # of variables, by their identity
    settings: list[recorder.Items]
    around: Around
    counters: dict[str, int | float]


class KerasStateReader(recorder.StateReader):
    def __init__(self, observer: Observer) -> None:
        super().__init__(observer, _is_leaf, _is_closed)
        self.optimizers: list[Any] = []
        self.variables: list[weakref.ref[Any]] = []  # all of Keras that can be trained
        self._stepped: list[int] = []

    def add_optimizer(self, optimizer: Any) -> None:
        # One that wraps another shares its count with it, and is part of it.
        is_wrapper = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if not is_wrapper and not any(known is optimizer for known in self.optimizers):
            self.optimizers.append(optimizer)

    def add_variable(self, variable: Any) -> None:
        if variable.trainable:
            self.variables.append(weakref.ref(variable))

    def read(self, frames: list[FrameType]) -> StateBefore:
        counters = self.find(frames)
        leaves: dict[int, Leaf] = {}
        for variable in self._all_variables():
            if id(variable) not in leaves and (leaf := _leaf_of(variable)) is not None:
                leaves[id(variable)] = leaf
        return StateBefore(
            counts=[_count(optimizer) for optimizer in self.optimizers],
            leaves=leaves,
            settings=[_settings_of(o, number) for number, o in enumerate(self.optimizers)],
            around=self._around(),
            counters=counters,
        )

    def updated_since(self, before: StateBefore) -> list[int]:
        counts = [_count(optimizer) for optimizer in self.optimizers]
        then = [*before.counts, *[0] * (len(counts) - len(before.counts))]
        return [n for n, pair in enumerate(zip(then, counts, strict=True)) if pair[0] != pair[1]]

    def update_state(
        self, before: StateBefore, number: int, gradients: Leaf | None
    ) -> dict[str, Any]:
        """What decided an update of this optimizer.

        Without gradients, the weights after the update stand for them.
        """
        if number not in self._stepped:
            self._stepped.append(number)
        optimizer = self.optimizers[number]
        trained = _trained(optimizer)
        items = dict(before.settings[number]) if number < len(before.settings) else {}
        for index, variable in enumerate(trained):
            if id(variable) in before.leaves:
                items[f"weight/{number}/{index}"] = before.leaves[id(variable)]
        moments = _moments_of(optimizer, number)
        known = {k: before.leaves[id(v)] for k, v in moments.items() if id(v) in before.leaves}
        items |= known
        items |= _without(before.around, trained)
        if gradients is None:
            gradients = whole_leaf([_leaf_of(variable) for variable in trained])
        items[f"gradient/{number}"] = gradients
        paths = (str(getattr(v, "path", None) or v.name) for v in trained)
        names = {f"{number}/{index}": path for index, path in enumerate(paths)}
        return {
            "optimizer": number,
            "items": items,
            "counters": before.counters,
            "names": self.changed_names(names | {f"{number}/{_ALL}": "all weights"}),
            # Built by this very update: its moments from before are not known.
            "unbuilt": len(known) < len(moments),
        }

    def read_last(self) -> dict[str, Any]:
        """The state when the script is over, of all that it has trained."""
        last = self.read(self._frames)
        items: recorder.Items = {}
        trained: list[Any] = []
        for number in self._stepped:
            optimizer = self.optimizers[number]
            items |= last.settings[number]
            trained += _trained(optimizer)
            held = {f"weight/{number}/{i}": v for i, v in enumerate(_trained(optimizer))}
            held |= _moments_of(optimizer, number)
            items |= {k: last.leaves[id(v)] for k, v in held.items() if id(v) in last.leaves}
        items |= _without(last.around, trained)
        arrays = [_array_of(variable) for variable in trained]
        if arrays:
            self.dump(sum(array.size for array in arrays), lambda: arrays)
        return {"items": items}

    def _all_variables(self) -> list[Any]:
        living = [found for known in self.variables if (found := known()) is not None]
        self.variables = [weakref.ref(variable) for variable in living]
        for number, optimizer in enumerate(self.optimizers):
            living += [*_trained(optimizer), *_moments_of(optimizer, number).values()]
        for value in self._found.values():
            if _is_variable(value):
                living.append(value)
            elif isinstance(value, tf.Module) and not isinstance(value, keras.Layer):
                living += value.variables
        return living

    def _around(self) -> Around:
        """All but the optimizers: generators, and other variables of models and of the script.

        Those of the script come first: they are a likelier cause than the global generators.
        """
        items: Around = {}

        def add(item: str, value: Any) -> None:
            leaf = _leaf_of(value)
            if leaf is not None:
                items.setdefault(item, (id(value), leaf))

        for path, value in self._found.items():
            if isinstance(value, keras.Layer):
                for kind, name, variable in _parts_of(value):
                    add(f"{kind}/{path}.{name}", variable)
            elif isinstance(value, tf.Module):
                for number, variable in enumerate(value.variables):
                    add(f"module/{path}.{number}", variable)
            elif isinstance(value, keras.random.SeedGenerator | tf.random.Generator):
                add(f"generator/{path}", value.state)
            elif isinstance(value, keras.optimizers.LossScaleOptimizer):
                continue  # a scaler, below
            elif (state := recorder.generator_state(value)) is not None:
                items[f"generator/{path}"] = (0, state)
            else:
                kind = "value" if tf.as_dtype(value.dtype).is_floating else "index"
                add(f"{kind}/{path}", value)
        known = list(self._found.values())
        known += [getattr(v, "optimizer", None) for v in known if isinstance(v, keras.Model)]
        scaling = keras.optimizers.LossScaleOptimizer
        scalers = {id(v): v for v in known if isinstance(v, scaling)}
        for number, optimizer in enumerate(scalers.values()):
            add(f"scaler/{number}/dynamic_scale", optimizer.dynamic_scale)
            add(f"scaler/{number}/step_counter", optimizer.step_counter)
        return items | {item: (0, leaf) for item, leaf in self.global_generators().items()}


def _without(around: Around, trained: list[Any]) -> recorder.Items:
    """Without the trained weights, which are sent as such."""
    own = {id(variable) for variable in trained}
    own |= {id(variable.value) for variable in trained if hasattr(variable, "value")}
    return {item: leaf for item, (owner, leaf) in around.items() if owner not in own}


def _count(optimizer: Any) -> int:
    return int(_array_of(optimizer._iterations).flat[0])


def _trained(optimizer: Any) -> list[Any]:
    return list(optimizer._trainable_variables or ())


def _moments_of(optimizer: Any, number: int) -> dict[str, Any]:
    """Its variables other than the count and the rate, each with the weight it belongs to."""
    found: dict[str, Any] = {}
    if not optimizer.built:
        return found
    count = len(_trained(optimizer))
    known = {id(optimizer._iterations), id(getattr(optimizer, "_learning_rate", None))}
    for name, value in vars(optimizer).items():
        if name in ("_variables", "_trainable_variables") or not isinstance(value, list | tuple):
            continue
        if len(value) == count and all(_is_variable(item) for item in value):
            for index, variable in enumerate(value):
                found[f"moment/{number}/{index}/{name.strip('_')}"] = variable
                known.add(id(variable))
    rest = [variable for variable in optimizer.variables if id(variable) not in known]
    for index, variable in enumerate(rest):
        found[f"moment/{number}/{_ALL}/{index}"] = variable
    return found


def _settings_of(optimizer: Any, number: int) -> recorder.Items:
    """The count and the plain numbers, which an optimizer has before it is built."""
    items = {f"moment/{number}/{_ALL}/iterations": leaf_of(_count(optimizer))}
    rate = _array_of(optimizer.learning_rate)
    items[f"setting/{number}/0/learning_rate"] = leaf_of(float(rate.flat[0]))
    for name, value in vars(optimizer).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not name.startswith("_") and is_number:
            items[f"setting/{number}/0/{name}"] = leaf_of(value)
    return items


def _parts_of(layer: Any) -> list[tuple[str, str, Any]]:
    """The variables of a layer or model: its weights, what it counts by, what it draws from."""
    found = [("module", variable.path, variable) for variable in layer.trainable_weights]
    found += [("buffer", variable.path, variable) for variable in layer.non_trainable_weights]
    for number, part in enumerate(layer._flatten_layers()):
        for place, generator in enumerate(part._seed_generators):
            found.append(("generator", f"{part.name}.{number}.{place}", generator.state))
    return found


def _is_variable(value: Any) -> bool:
    return isinstance(value, tf.Variable | keras.Variable)


def _array_of(value: Any) -> np.ndarray[Any, Any]:
    inner = value.value if isinstance(value, keras.Variable) else value
    if isinstance(inner, tf.distribute.DistributedValues):
        # Each copy: reading the sum over workers would need a collective.
        return np.stack([np.asarray(copy.numpy()) for copy in copies(inner)])
    return np.asarray(keras.ops.convert_to_numpy(inner))


def _leaf_of(value: Any) -> Leaf | None:
    """None for a variable that has no value yet, or no longer."""
    try:
        return leaf_of(_array_of(value))
    except (ValueError, TypeError, AttributeError, NotImplementedError, tf.errors.OpError):
        return None


def _is_leaf(value: Any) -> bool:
    if isinstance(value, keras.Metric):
        return False
    if _is_variable(value) or isinstance(value, tf.Tensor):
        dtype = tf.as_dtype(value.dtype)
        is_number = dtype.is_floating or dtype.is_integer
        has_value = _is_variable(value) or hasattr(value, "numpy")  # else it is of a graph
        size = math.prod(value.shape) if None not in tuple(value.shape) else 0
        return bool(is_number and has_value and 0 < size <= recorder.MOST_VALUES)
    kinds = (keras.Layer, tf.Module, keras.random.SeedGenerator, tf.random.Generator)
    if isinstance(value, (*kinds, keras.optimizers.LossScaleOptimizer)):
        return not isinstance(value, keras.Optimizer) or hasattr(value, "dynamic_scale")
    return recorder.is_numpy_leaf(value)


_CLOSED = (
    *(keras.Layer, keras.Optimizer, keras.Metric, keras.Variable),
    *(tf.Module, tf.Variable, tf.Tensor, tf.data.Dataset),
    *(tf.train.Checkpoint, tf.distribute.Strategy),
)


def _is_closed(value: Any) -> bool:
    return isinstance(value, _CLOSED)
