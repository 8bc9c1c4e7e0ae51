"""The adapter for Keras 3, on any backend; arrays are those of the backend's adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from holdfast._adapters.adapter import Adapter, Generators, Objects
from holdfast.keras import state

_SEED = "keras.seed"


class KerasObjects(Objects):
    def overrides_state_dict(self, value: object) -> bool:
        # On torch a layer has a state_dict(), but without its optimizer and metrics.
        return isinstance(value, keras.Layer)

    def is_object(self, value: object) -> bool:
        return isinstance(
            value, keras.Layer | keras.Optimizer | keras.Metric | keras.random.SeedGenerator
        )

    def object_state(self, value: Any) -> dict[str, Any]:
        return state.object_state(value)

    def load_object(self, value: Any, stored: Mapping[str, Any]) -> None:
        state.load_object(value, stored)

    def strict_tensors(self, value: object) -> dict[str, Any] | None:
        return state.strict_tensors(value)


class KerasGenerators(Generators):
    def states(self, *, devices: bool) -> dict[str, Any]:  # noqa: ARG002
        # Random functions of Keras that are given no seed draw from this one.
        generator = state.global_generator()
        return {} if generator is None else {_SEED: generator.state.numpy()}

    def restore_states(self, states: Mapping[str, Any]) -> list[str]:
        if _SEED in states:
            state.global_generator(make=True).state.assign(states[_SEED])
        return []


class KerasAdapter(Adapter):
    kind = "keras"
    objects = KerasObjects()
    generators = KerasGenerators()


ADAPTER = KerasAdapter()
