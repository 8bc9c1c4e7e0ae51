"""The adapter for Keras 3, on any backend: models, layers, optimizers, metrics, and `model.fit`.

`holdfast.keras.Callback(run)` among the callbacks of `model.fit` makes a fit that goes on where
it was stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast._adapters.shared import GENERATOR as GENERATOR
from holdfast._adapters.shared import encode_other as encode_other
from holdfast._adapters.shared import global_state as global_state
from holdfast._adapters.shared import is_array as is_array
from holdfast._adapters.shared import is_generator as is_generator
from holdfast._adapters.shared import is_global as is_global
from holdfast._adapters.shared import seed_global as seed_global
from holdfast._adapters.shared import set_global_state as set_global_state
from holdfast._errors import missing_framework

try:
    import keras
except ImportError as error:
    raise missing_framework("keras", "Keras 3") from error

from holdfast.keras import state as _state

if TYPE_CHECKING:
    from holdfast.keras.fitting import Callback as Callback

KIND = "keras"
__all__ = ["Callback"]
_SEED = "keras.seed"


def __getattr__(name: str) -> Any:
    # The way into model.fit, for scripts only: it stands on what stands on this adapter.
    if name == "Callback":
        from holdfast.keras.fitting import Callback

        return Callback
    raise AttributeError(f"module 'holdfast.keras' has no attribute {name!r}")


def is_object(value: object) -> bool:
    """Whatever has variables of Keras."""
    return isinstance(
        value, keras.Layer | keras.Optimizer | keras.Metric | keras.random.SeedGenerator
    )


def knows_better(value: object) -> bool:
    """On torch a layer has a state_dict, without what an optimizer and metrics hold."""
    return isinstance(value, keras.Layer)


object_state = _state.object_state
load_object = _state.load_object
strict_tensors = _state.strict_tensors


def generators(*, devices: bool) -> dict[str, Any]:  # noqa: ARG001  it is on none
    """The generator that random functions of Keras draw from which are given no seed."""
    generator = _state.global_generator()
    return {} if generator is None else {_SEED: generator.state.numpy()}


def restore_generators(states: Mapping[str, Any]) -> list[str]:
    if _SEED in states:
        _state.global_generator(make=True).state.assign(states[_SEED])
    return []
