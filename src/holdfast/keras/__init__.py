"""Keras 3, on any backend.

`holdfast.keras.Callback(run)` among the callbacks of `model.fit` makes a fit that goes on where
it was stopped. `adapter.py` is what a run uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast._errors import missing_framework

try:
    import keras as keras
except ImportError as error:
    raise missing_framework("keras", "Keras 3") from error

if TYPE_CHECKING:
    from holdfast.keras.fitting import Callback as Callback

__all__ = ["Callback"]


def __getattr__(name: str) -> Any:
    # Lazily: it is built on _run, and _run is built on the adapter.
    if name == "Callback":
        from holdfast.keras.fitting import Callback

        return Callback
    raise AttributeError(f"module 'holdfast.keras' has no attribute {name!r}")
