"""The adapter for Keras 3, on any backend: models, layers, optimizers and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast._bare import GENERATOR as GENERATOR
from holdfast._bare import encode_other as encode_other
from holdfast._bare import generators as generators
from holdfast._bare import global_state as global_state
from holdfast._bare import is_array as is_array
from holdfast._bare import is_generator as is_generator
from holdfast._bare import is_global as is_global
from holdfast._bare import restore_generators as restore_generators
from holdfast._bare import seed_global as seed_global
from holdfast._bare import set_global_state as set_global_state
from holdfast._errors import missing_framework

try:
    import keras
except ImportError as error:
    raise missing_framework("keras", "Keras 3") from error

KIND = "keras"


def is_object(value: object) -> bool:
    """Whatever has variables of Keras."""
    return isinstance(value, keras.Layer | keras.Optimizer | keras.Metric)


def object_state(value: Any) -> dict[str, Any]:
    return {variable.path: variable.value for variable in value.variables}


def load_object(value: Any, state: Mapping[str, Any]) -> None:
    for variable in value.variables:
        variable.assign(state[variable.path])


def strict_tensors(value: object) -> dict[str, Any] | None:
    """The tensors that a stored state must match, name by name: those of a layer or model."""
    return object_state(value) if isinstance(value, keras.Layer) else None
