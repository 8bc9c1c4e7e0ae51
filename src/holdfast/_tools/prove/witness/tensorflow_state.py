"""All that decides an update of a Keras optimizer, as fingerprints by name.

What is trained inside a tf.function is never seen while it is: whether a call was an update shows
only afterwards, by the optimizer's count. So a look is taken before each call, and becomes a sight
when the call turns out to have been an update.
"""

from __future__ import annotations

import math
import random
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from holdfast._run.witness.eye import Eye
from holdfast._run.witness.leaves import Leaf, leaf_of, whole_leaf
from holdfast._state.capture import capture_generators
from holdfast._tools.prove.witness.arrive import FRESH
from holdfast._tools.prove.witness.variables import Finder
from holdfast.tensorflow.distribute import copies

_MOST_VALUES = 4 << 20  # elements: whatever is larger is data
_MOST_DUMPED = 1 << 28
_UNTOUCHED: Leaf = ("untouched", None, 1)
_ALL = "all"  # in place of a parameter's number: of the optimizer as a whole
Items = dict[str, Leaf]


@dataclass(frozen=True)
class Look:
    """What there was before something that may be an update."""

    counts: list[int]  # of the updates of each optimizer
    leaves: dict[int, Leaf]  # of variables, by their identity
    settings: list[Items]
    around: Items
    counters: dict[str, int | float]


class Sights:
    """Takes them, and keeps hold of what it saw until the script is over."""

    def __init__(self, eye: Eye) -> None:
        self._eye = eye
        self.optimizers: list[Any] = []
        self.variables: list[weakref.ref[Any]] = []  # all of Keras that can be trained
        self._finder = Finder(_is_leaf, _is_closed)
        self._stepped: list[int] = []
        self._found: dict[str, Any] = {}
        self._frames: list[FrameType] = []  # a frame keeps its variables when its function is over
        self._named: dict[str, str] = {}

    def note_optimizer(self, optimizer: Any) -> None:
        """One that wraps another shares its count with it, and is part of it."""
        if any(known is optimizer for known in self.optimizers):
            return
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            self.optimizers.append(optimizer)

    def note_variable(self, variable: Any) -> None:
        if variable.trainable:
            self.variables.append(weakref.ref(variable))

    # -- before, and after ------------------------------------------------------------

    def look(self, frames: list[FrameType]) -> Look:
        """The state now."""
        self._frames = frames
        self._found, counters = self._finder.find(frames)
        leaves: dict[int, Leaf] = {}
        for variable in self._all_variables():
            if id(variable) not in leaves and (leaf := _leaf_of(variable)) is not None:
                leaves[id(variable)] = leaf
        return Look(
            counts=[_count(optimizer) for optimizer in self.optimizers],
            leaves=leaves,
            settings=[_settings_of(o, number) for number, o in enumerate(self.optimizers)],
            around=self._around(),
            counters=counters,
        )

    def updated(self, look: Look) -> list[int]:
        """The optimizers that have made an update since."""
        counts = [_count(optimizer) for optimizer in self.optimizers]
        before = [*look.counts, *[0] * (len(counts) - len(look.counts))]
        return [n for n, pair in enumerate(zip(before, counts, strict=True)) if pair[0] != pair[1]]

    def sight(self, look: Look, number: int, gradients: Leaf | None) -> dict[str, Any]:
        """What decided an update of this optimizer, which is made by now if it says no gradients.

        What the update has made of the weights stands for them then.
        """
        if number not in self._stepped:
            self._stepped.append(number)
        optimizer = self.optimizers[number]
        trained = _trained(optimizer)
        items = dict(look.settings[number]) if number < len(look.settings) else {}
        for index, variable in enumerate(trained):
            if id(variable) in look.leaves:
                items[f"weight/{number}/{index}"] = look.leaves[id(variable)]
        moments = _moments_of(optimizer, number)
        before = {k: look.leaves[id(v)] for k, v in moments.items() if id(v) in look.leaves}
        items |= before
        # Where it was built only by this update nobody knows its moments from before.
        is_unbuilt = len(before) < len(moments)
        items |= self._without(look.around, trained)
        if gradients is None:
            gradients = whole_leaf([_leaf_of(variable) for variable in trained])
        items[f"gradient/{number}"] = gradients
        names = {f"{number}/{index}": _name(v) for index, v in enumerate(trained)}
        names[f"{number}/{_ALL}"] = "all weights"
        fresh = {k: v for k, v in names.items() if self._named.get(k) != v}
        self._named |= names
        return {
            "optimizer": number,
            "items": items,
            "counters": look.counters,
            "names": fresh,
            "unbuilt": is_unbuilt,
        }

    def take_last(self) -> dict[str, Any]:
        """The state when the script is over, of all that it has trained."""
        look = self.look(self._frames)
        items: Items = {}
        trained: list[Any] = []
        for number in self._stepped:
            optimizer = self.optimizers[number]
            items |= look.settings[number]
            trained += _trained(optimizer)
            told = {f"weight/{number}/{i}": v for i, v in enumerate(_trained(optimizer))}
            told |= _moments_of(optimizer, number)
            items |= {k: look.leaves[id(v)] for k, v in told.items() if id(v) in look.leaves}
        items |= self._without(look.around, trained)
        self._dump(trained)
        return {"items": items}

    # -- what there is ----------------------------------------------------------------

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

    def _around(self) -> Items:
        """All but the optimizers: generators, and other variables of models and of the script.

        Those of the script first: what it draws from is a better guess than what all share.
        """
        items: Items = {}
        for path, value in self._found.items():
            if isinstance(value, keras.Layer):
                for kind, name, variable in _parts_of(value):
                    leaf = _leaf_of(variable)
                    if leaf is not None:
                        items.setdefault(f"{kind}/{path}.{name}", leaf)
            elif isinstance(value, tf.Module):
                for number, variable in enumerate(value.variables):
                    _add(items, "module", f"{path}.{number}", variable)
            elif isinstance(value, keras.random.SeedGenerator | tf.random.Generator):
                _add(items, "generator", path, value.state)
            elif isinstance(value, random.Random):
                items[f"generator/{path}"] = whole_leaf(value.getstate())
            elif isinstance(value, keras.optimizers.LossScaleOptimizer):
                continue  # a scaler, below
            elif hasattr(value, "bit_generator"):
                items[f"generator/{path}"] = whole_leaf(value.bit_generator.state)
            else:
                kind = "value" if _is_floating(value) else "index"
                _add(items, kind, path, value)
        for number, optimizer in enumerate(_scalers_among(self._found)):
            items[f"scaler/{number}/dynamic_scale"] = leaf_of(_array_of(optimizer.dynamic_scale))
            items[f"scaler/{number}/step_counter"] = leaf_of(_array_of(optimizer.step_counter))
        for name, state in capture_generators().items():
            leaf = whole_leaf(state)
            items[f"generator/{name}"] = _UNTOUCHED if leaf[0] == FRESH.get(name) else leaf
        return items

    def _without(self, around: Items, trained: list[Any]) -> Items:
        """Without the weights that are told as such."""
        own = {id(variable) for variable in trained}
        own |= {id(variable.value) for variable in trained if hasattr(variable, "value")}
        known = set()
        for path, value in self._found.items():
            if isinstance(value, keras.Layer):
                known |= {f"{k}/{path}.{n}" for k, n, v in _parts_of(value) if id(v) in own}
            elif isinstance(value, tf.Module):
                enumerated = enumerate(value.variables)
                known |= {f"module/{path}.{n}" for n, v in enumerated if id(v) in own}
            elif id(value) in own:
                known |= {f"value/{path}"}
        return {item: leaf for item, leaf in around.items() if item not in known}

    def _dump(self, trained: list[Any]) -> None:
        """The weights themselves, so that it can be said how far apart two ends are."""
        arrays = [_array_of(variable) for variable in trained]
        if not arrays or sum(array.size for array in arrays) > _MOST_DUMPED:
            return
        flat = [array.astype(np.float64).ravel() for array in arrays]
        np.concatenate(flat).tofile(Path(self._eye.errand.end) / f"{self._eye.rank}.float64")


# -- optimizers -----------------------------------------------------------------------


def _count(optimizer: Any) -> int:
    return int(_array_of(optimizer._iterations).flat[0])


def _trained(optimizer: Any) -> list[Any]:
    return list(optimizer._trainable_variables or ())


def _moments_of(optimizer: Any, number: int) -> dict[str, Any]:
    """Its variables beside the count and the rate, each with the weight it belongs to."""
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


def _settings_of(optimizer: Any, number: int) -> Items:
    """What can be told of one that is not built as well."""
    items = {f"moment/{number}/{_ALL}/iterations": leaf_of(_count(optimizer))}
    rate = _array_of(optimizer.learning_rate)
    items[f"setting/{number}/0/learning_rate"] = leaf_of(float(rate.flat[0]))
    for name, value in vars(optimizer).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not name.startswith("_") and is_number:
            items[f"setting/{number}/0/{name}"] = leaf_of(value)
    return items


def _scalers_among(found: dict[str, Any]) -> list[Any]:
    kind = keras.optimizers.LossScaleOptimizer
    compiled = [getattr(v, "optimizer", None) for v in found.values() if isinstance(v, keras.Model)]
    seen = {id(v): v for v in [*found.values(), *compiled] if isinstance(v, kind)}
    return list(seen.values())


# -- variables ------------------------------------------------------------------------


def _parts_of(layer: Any) -> list[tuple[str, str, Any]]:
    """The variables of a layer or model: its weights, what it counts by, what it draws from."""
    found = [("module", variable.path, variable) for variable in layer.trainable_weights]
    found += [("buffer", variable.path, variable) for variable in layer.non_trainable_weights]
    for number, part in enumerate(layer._flatten_layers()):
        for place, generator in enumerate(part._seed_generators):
            found.append(("generator", f"{part.name}.{number}.{place}", generator.state))
    return found


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


def _is_variable(value: Any) -> bool:
    return isinstance(value, tf.Variable | keras.Variable)


def _is_floating(value: Any) -> bool:
    return bool(tf.as_dtype(value.dtype).is_floating)


def _array_of(value: Any) -> np.ndarray[Any, Any]:
    inner = value.value if isinstance(value, keras.Variable) else value
    if isinstance(inner, tf.distribute.DistributedValues):
        # Each copy: to read one that is summed up over workers, all of them would have to meet.
        return np.stack([np.asarray(copy.numpy()) for copy in copies(inner)])
    return np.asarray(keras.ops.convert_to_numpy(inner))


def _leaf_of(value: Any) -> Leaf | None:
    """None for what has no value yet, or is given up already."""
    try:
        return leaf_of(_array_of(value))
    except (ValueError, TypeError, AttributeError, NotImplementedError, tf.errors.OpError):
        return None


def _add(items: Items, kind: str, path: str, value: Any) -> None:
    leaf = _leaf_of(value)
    if leaf is not None:
        items[f"{kind}/{path}"] = leaf


def _is_leaf(value: Any) -> bool:
    if isinstance(value, keras.Metric):
        return False
    if _is_variable(value) or isinstance(value, tf.Tensor):
        dtype = tf.as_dtype(value.dtype)
        is_number = dtype.is_floating or dtype.is_integer
        has_value = _is_variable(value) or hasattr(value, "numpy")  # else it is of a graph
        size = math.prod(value.shape) if None not in tuple(value.shape) else 0
        return bool(is_number and has_value and 0 < size <= _MOST_VALUES)
    kinds = (keras.Layer, tf.Module, keras.random.SeedGenerator, tf.random.Generator)
    if isinstance(value, (*kinds, keras.optimizers.LossScaleOptimizer)):
        return not isinstance(value, keras.Optimizer) or hasattr(value, "dynamic_scale")
    if isinstance(value, np.random.Generator | np.random.RandomState):
        return isinstance(value, np.random.Generator)
    return (
        isinstance(value, np.ndarray) and value.dtype.kind in "fiu" and value.size <= _MOST_VALUES
    )


def _is_closed(value: Any) -> bool:
    """Whether what is inside is not looked at: data, and what is told in another way."""
    return isinstance(
        value,
        keras.Layer
        | keras.Optimizer
        | keras.Metric
        | tf.Module
        | tf.Variable
        | keras.Variable
        | tf.Tensor
        | tf.data.Dataset
        | tf.train.Checkpoint
        | tf.distribute.Strategy,
    )
