"""The state of Keras objects, by names that are the same in every attempt.

Keras numbers the layers of a process (`dense_3`), and a variable's path depends on how its layer
was built. So a weight is named by its layer, numbered within its own model, and a variable of an
optimizer by its role and the weight that it belongs to.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from keras.src.utils.module_utils import tensorflow as tf
from keras.src.utils.naming import to_snake_case

from holdfast._adapters.adapter import Adapter, Generators, Objects
from holdfast._errors import StateMismatch
from holdfast._text import unique_names

_SEED = "keras.seed"
# Stored values for metrics and optimizers that are not built yet.
_waiting: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
# Models whose state was captured: an optimizer that is not built yet finds its weights there.
_models: weakref.WeakSet[Any] = weakref.WeakSet()


class KerasObjects(Objects):
    def overrides_state_dict(self, value: object) -> bool:
        # On torch a layer has a state_dict(), but without its optimizer and metrics.
        return isinstance(value, keras.Layer)

    def is_object(self, value: object) -> bool:
        return isinstance(
            value, keras.Layer | keras.Optimizer | keras.Metric | keras.random.SeedGenerator
        )

    def object_state(self, value: Any) -> dict[str, Any]:
        if isinstance(value, keras.random.SeedGenerator):
            return {"state": value.state.value}
        if isinstance(value, keras.Model):
            _models.add(value)
        for model in _models:
            if hasattr(model, "jax_state_sync"):
                model.jax_state_sync()  # in a fit on JAX, the variables have no values
        if isinstance(value, keras.Optimizer):
            return {**_values(_optimizer_variables(value)), **_waiting.get(value, {})}
        if isinstance(value, keras.Metric):
            return _values(unique_names((v.name, v) for v in value.variables))
        state: dict[str, Any] = dict(_values(_weights(value)))
        if isinstance(value, keras.Model):
            state["build"] = _build_config(value)
            if (optimizer := getattr(value, "optimizer", None)) is not None:
                state["optimizer"] = _values(_optimizer_variables(optimizer))
            metrics = _values(_metric_variables(value))
            waiting = {k: v for k, v in _waiting.get(value, {}).items() if k not in metrics}
            state["metrics"] = {**metrics, **waiting}
        return state

    def load_object(self, value: Any, state: Mapping[str, Any]) -> None:
        if isinstance(value, keras.random.SeedGenerator):
            _put(value.state, state["state"])
        elif isinstance(value, keras.Optimizer):
            _load_optimizer(value, state, None)
        elif isinstance(value, keras.Metric):
            _assign(unique_names((v.name, v) for v in value.variables), state, "the metric")
        else:
            _load_layer(value, state)

    def strict_tensors(self, value: object) -> dict[str, Any] | None:
        """The tensors of a layer or model that a stored state must match.

        None for a model that is not built yet: it is built when it is loaded.
        """
        if not isinstance(value, keras.Layer) or not value.built:
            return None
        return _values(_weights(value))


class KerasGenerators(Generators):
    def states(self, *, devices: bool) -> dict[str, Any]:  # noqa: ARG002  no devices
        # Random functions of Keras that are given no seed draw from this one.
        generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
        return {} if generator is None else {_SEED: generator.state.numpy()}

    def restore_states(self, states: Mapping[str, Any]) -> list[str]:
        if _SEED in states:
            seed_generator.global_seed_generator().state.assign(states[_SEED])
        return []


class KerasAdapter(Adapter):
    """Keras 3, on any backend; arrays are those of the backend's adapter."""

    kind = "keras"
    has_own_arrays = False
    objects = KerasObjects()
    generators = KerasGenerators()


ADAPTER = KerasAdapter()


def settle_waiting(model: Any) -> None:
    """Restore metrics, now that they are built."""
    stored = _waiting.pop(model, {})
    variables = _metric_variables(model)
    _assign({k: v for k, v in variables.items() if k in stored}, stored, "the metrics")


def is_whole(model: Any) -> bool:
    """Whether all of a compiled model is built, so that the first batch builds nothing."""
    parts = [model._compile_metrics, model._compile_loss, model.optimizer]
    return all(part is None or part.built for part in [*parts, *model._flatten_layers()])


def _load_layer(value: Any, state: Mapping[str, Any]) -> None:
    weights = {key: item for key, item in state.items() if "/" in key}
    if not value.built and weights:
        _build(value, state.get("build"))
    _assign(_weights(value), weights, "the model")
    if not isinstance(value, keras.Model):
        return
    optimizer = getattr(value, "optimizer", None)
    if (optimizer is not None) != ("optimizer" in state):
        now, then = ("is", "was not") if optimizer is not None else ("is not", "was")
        raise StateMismatch(
            f"the model {now} compiled with an optimizer, and {then} when it was stored.\n"
            "Compile it as before; the checkpoint is left as it was."
        )
    if optimizer is not None:
        _load_optimizer(optimizer, state["optimizer"], value)
    stored = dict(state.get("metrics", {}))
    metrics = _metric_variables(value)
    _assign({k: v for k, v in metrics.items() if k in stored}, stored, "the metrics")
    later = {key: item for key, item in stored.items() if key not in metrics}
    if later:
        _waiting[value] = later


def _load_optimizer(optimizer: Any, state: Mapping[str, Any], model: Any | None) -> None:
    _stop_waiting(optimizer)
    known = _optimizer_variables(optimizer)
    later = {key: item for key, item in state.items() if key not in known}
    if not optimizer.built and later:
        weights = _replicated_weights(state) if model is None else model.trainable_variables
        if weights is None:
            _assign(known, {key: state[key] for key in state if key in known}, "the optimizer")
            _wait(optimizer, later)
            return
        with _scope_of(weights):
            optimizer.build(weights)
    _assign(_optimizer_variables(optimizer), state, "the optimizer")


def _wait(optimizer: Any, later: dict[str, Any]) -> None:
    """Keep the stored values until the script builds the optimizer, with its first step.

    Only then its weights and their order are known: many may have equal names and shapes.
    """
    _waiting[optimizer] = later
    of = weakref.ref(optimizer)

    def build(variables: Any) -> None:
        live = of()
        assert live is not None  # its caller has it
        stored = {**_values(_optimizer_variables(live)), **_stop_waiting(live)}
        with _outside_of_a_graph():
            live.build(variables)
            _assign(_optimizer_variables(live), stored, "the optimizer")

    optimizer.build = build


def _stop_waiting(optimizer: Any) -> dict[str, Any]:
    vars(optimizer).pop("build", None)
    return _waiting.pop(optimizer, {})


def _outside_of_a_graph() -> AbstractContextManager[Any]:
    """The first step may be traced by a tf.function: variables must be made outside of it."""
    if not _is_on_tensorflow():
        return nullcontext()
    if not tf.distribute.in_cross_replica_context() and tf.distribute.has_strategy():
        raise StateMismatch(
            "the optimizer is built only by a step of the strategy's replicas, too late for what "
            "was stored.\nBefore Run, in the scope: optimizer.build(variables)."
        )
    outside: AbstractContextManager[Any] = tf.init_scope()
    return outside


def _is_on_tensorflow() -> bool:
    return bool(keras.backend.backend() == "tensorflow")


def _scope_of(weights: Iterable[Any]) -> AbstractContextManager[Any]:
    """Variables for weights on a strategy's replicas must be made in its scope."""
    if not _is_on_tensorflow():
        return nullcontext()
    from holdfast.tensorflow import distribute

    return distribute.scope_of(weight.value for weight in weights)


def _replicated_weights(state: Mapping[str, Any]) -> list[Any] | None:
    """The weights, on a strategy's replicas, of an optimizer that is not built yet.

    It cannot be built in a step of the replicas. None if the weights are not on replicas, or not
    known.
    """
    if not _is_on_tensorflow():
        return None
    from holdfast.tensorflow import distribute

    wanted = {}
    for key in state:
        match = re.search(r"([^/]+)/(\d+)/([^/~]+)", key)
        if match:
            wanted[int(match[2])] = match[3]
    names = [wanted[number] for number in sorted(wanted)]
    fitting = [
        model.trainable_variables
        for model in _models
        if model.built and [v.name for v in model.trainable_variables] == names
    ]
    if len(fitting) != 1 or all(len(distribute.copies(v.value)) == 1 for v in fitting[0]):
        return None
    return list(fitting[0])


def _build(layer: Any, config: Any) -> None:
    strategy = getattr(layer, "distribute_strategy", None)  # of a model on TensorFlow
    try:
        with nullcontext() if strategy is None else strategy.scope():
            layer.build_from_config(_with_tuples(config))
    except Exception as error:  # a user's build may raise anything
        raise _cannot_build(layer) from error
    others = [each for each in layer._flatten_layers() if each is not layer]
    if not layer.variables or not all(each.built for each in others):
        raise _cannot_build(layer)
    layer.built = True  # for a model without build(), Keras sets it at the first call


def _cannot_build(layer: Any) -> StateMismatch:
    return StateMismatch(
        f"the model {layer.name!r} has no weights yet, and cannot be built by its shapes.\n"
        "Before Run, call it once on a batch, or give it an Input."
    )


def _build_config(model: Any) -> Any:
    try:
        config = model.get_build_config()
        json.dumps(config)
    except Exception:  # noqa: BLE001  a user's method may fail, or return objects
        return None
    return config


def _with_tuples(config: Any) -> Any:
    """A shape must be a tuple; a list of shapes stays a list."""
    if isinstance(config, dict):
        return {key: _with_tuples(item) for key, item in config.items()}
    if isinstance(config, list) and not any(isinstance(item, list | tuple) for item in config):
        return tuple(config)
    return config


def _assign(variables: Mapping[str, Any], state: Mapping[str, Any], whose: str) -> None:
    missing = [key for key in variables if key not in state]
    left = [key for key in state if key not in variables and whose != "the metrics"]
    reshaped = [
        key
        for key, variable in variables.items()
        if key in state
        and any(tuple(variable.shape) != tuple(copy.shape) for copy in _copies(state[key]))
    ]
    if missing or left or reshaped:
        what = [("not stored", missing), ("only stored", left), ("of another shape", reshaped)]
        said = "; ".join(f"{name}: {', '.join(keys[:4])}" for name, keys in what if keys)
        raise StateMismatch(
            f"{whose} of today is another ({said}).\nThe checkpoint is left as it was.",
            missing=tuple(missing),
            unexpected=tuple(left),
            reshaped=tuple(reshaped),
        )
    for key, variable in variables.items():
        _put(variable, state[key])


def _put(variable: Any, stored: Any) -> None:
    """Restore a variable, or each of its copies on a strategy's replicas."""
    if not _is_on_tensorflow():
        variable.assign(stored)
        return
    from holdfast.tensorflow import distribute

    distribute.assign(variable.value, stored)


def _copies(stored: Any) -> list[Any]:
    return stored["replicas"] if isinstance(stored, dict) else [stored]


def _values(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {key: variable.value for key, variable in variables.items()}


def _weights(layer: Any) -> dict[str, Any]:
    layers, variables = list(layer._flatten_layers()), layer.variables
    return _remember_names(
        layer,
        [*layers, *variables],
        [each.name for each in layers],
        variables,
        lambda: _weights_of(layers, variables),
    )


def _weights_of(layers: Iterable[Any], variables: Iterable[Any]) -> dict[str, Any]:
    owners: dict[int, str] = {}
    counts: dict[str, int] = {}
    for each in layers:
        name = _own_name(each, counts)
        seeds = [generator.state for generator in each._seed_generators]
        for v in [*each._trainable_variables, *each._non_trainable_variables, *seeds]:
            owners.setdefault(id(v), f"{name}/{v.name}")
    return unique_names((owners.get(id(v), f"variable/{v.name}"), v) for v in variables)


def _own_name(layer: Any, counts: dict[str, int]) -> str:
    """A name of the user stays; one that Keras has numbered is numbered within the model."""
    kind = to_snake_case(type(layer).__name__)
    if not re.fullmatch(rf"{re.escape(kind)}(_\d+)?", layer.name):
        return str(layer.name).replace("/", ".")
    counts[kind] = counts.get(kind, -1) + 1
    return kind if counts[kind] == 0 else f"{kind}_{counts[kind]}"


def _metric_variables(model: Any) -> dict[str, Any]:
    pairs = []
    for metric in model.metrics:
        for each in getattr(metric, "metrics", None) or [metric]:
            pairs += [(f"{each.name}/{v.name}", v) for v in each.variables]
    return unique_names(pairs)


def _optimizer_variables(optimizer: Any) -> dict[str, Any]:
    inner = getattr(optimizer, "inner_optimizer", None)
    own = list(optimizer._variables)
    found = _remember_names(
        optimizer,
        [*own, *getattr(optimizer, "_trainable_variables", [])],
        [],
        own,
        lambda: _slots_of(optimizer),
    )
    if inner is None:
        return found
    more = ((f"inner/{key}", v) for key, v in _optimizer_variables(inner).items())
    return unique_names([*found.items(), *more])


def _slots_of(optimizer: Any) -> dict[str, Any]:
    references: dict[str, list[tuple[int, str]]] = {}  # by the beginning of a name
    for number, v in enumerate(getattr(optimizer, "_trainable_variables", [])):
        # A variable of TensorFlow has no path, and many have the same name.
        path = v.path if hasattr(v, "path") else v.name.replace(":", "_")
        prefix = f"{path.replace('/', '_')}_"  # the optimizer's prefix for its own variables
        references.setdefault(prefix, []).append((number, re.sub("[/:]", "_", v.name)))
    met: dict[str, int] = {}
    return unique_names((_slot_name(v.name, references, met), v) for v in optimizer._variables)


def _slot_name(
    name: str, references: Mapping[str, list[tuple[int, str]]], met: dict[str, int]
) -> str:
    # A prefix ends with an underscore, and a name has few of them.
    ends = (place + 1 for place in range(len(name) - 1, -1, -1) if name[place] == "_")
    prefix = next((name[:end] for end in ends if name[:end] in references), None)
    if prefix is None:
        return name
    count = met[name] = met.get(name, -1) + 1
    of_one_name = references[prefix]
    number, reference = of_one_name[min(count, len(of_one_name) - 1)]
    return f"{name[len(prefix) :]}/{number}/{reference}"


# -- Names, remembered: to make 800 of them takes longer than to copy the values ---------

# By object: weak references to the parts that its names depend on, their names, and its names.
_remembered: weakref.WeakKeyDictionary[Any, tuple[list[Any], list[str], list[str]]] = (
    weakref.WeakKeyDictionary()
)


def _remember_names(
    owner: Any,
    parts: Sequence[Any],
    part_names: list[str],
    variables: Sequence[Any],
    make: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """The variables by name; made again only if the parts or their names have changed."""
    references, then, names = _remembered.get(owner, ([], [""], []))
    if (
        part_names == then
        and len(references) == len(parts)
        and all(reference() is part for reference, part in zip(references, parts, strict=True))
    ):
        return dict(zip(names, variables, strict=True))
    found = make()
    _remembered.pop(owner, None)
    if len(found) == len(variables):
        # Weak references: others would keep the memory of deleted variables.
        _remembered[owner] = (list(map(weakref.ref, parts)), part_names, list(found))
    return found
