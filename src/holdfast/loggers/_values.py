"""Values on their way to a logger: nothing here waits for a device.

A number in this machine's memory is read when it is logged: a tensor may be changed in place
before anybody looks again. Of a GPU's a copy is begun then, in the order of its own work. Arrays
of JAX and tensors of TensorFlow never change, so they can be read whenever they are there.
"""

from __future__ import annotations

import sys
from typing import Any

from holdfast._adapters.metrics import is_on_host


class Later:
    """A value that can only be had by waiting for it: whoever has the time does."""

    __slots__ = ("_held",)

    def __init__(self, held: Any) -> None:
        self._held = held

    def is_ready(self) -> bool:
        ask = getattr(self._held, "is_ready", None)  # of JAX
        return False if ask is None else bool(ask())

    def value(self) -> float:
        return float(self._held)


def begin_reading(held: Any) -> Any:
    """A number, or something with `is_ready` and `value`."""
    if isinstance(held, int | float):  # of NumPy too
        return float(held)
    if hasattr(held, "is_ready"):  # JAX works on its own on a CPU too
        if not is_on_host(held):
            held.copy_to_host_async()
        return Later(held)
    if is_on_host(held):
        return float(held)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(held, torch.Tensor) and held.is_cuda:
        from holdfast.torch.readings import OnItsWay

        return OnItsWay(held)
    return Later(held)
