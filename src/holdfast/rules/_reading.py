"""Reading a logged value without waiting for a device.

What is in the memory of this machine is read at once, so that a rule holds at the very step. From
a device a copy is begun when the value is logged, in the order of the device's own work, and is
read when it has arrived: a rule may hold a few steps later then, and nothing is snapshotted
meanwhile that was not read.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Protocol

from holdfast._adapters.metrics import is_on_host


class Reading(Protocol):
    """A number that is there, or on its way."""

    def is_ready(self) -> bool: ...
    def value(self) -> float:
        """Waits if it must."""
        ...


class Known:
    """A number that is there."""

    __slots__ = ("_value",)

    def __init__(self, value: float) -> None:
        self._value = value

    def is_ready(self) -> bool:
        return True

    def value(self) -> float:
        return self._value


class _OfJax:
    """An array of JAX on a device: it can be asked whether it is there."""

    def __init__(self, array: Any) -> None:
        self._array = array
        array.copy_to_host_async()

    def is_ready(self) -> bool:
        return bool(self._array.is_ready())

    def value(self) -> float:
        return float(self._array)


class _ByThread:
    """Something of a framework that cannot be asked: a thread waits for it.

    While it waits for a device it does not hold the interpreter.
    """

    def __init__(self, held: Any) -> None:
        self._found = float("nan")
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._read, args=(held,), name="holdfast-metric", daemon=True
        )
        self._thread.start()

    def _read(self, held: Any) -> None:
        try:
            self._found = float(held)
        except Exception as error:  # noqa: BLE001  raised where the value is wanted
            self._error = error

    def is_ready(self) -> bool:
        return not self._thread.is_alive()

    def value(self) -> float:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found


def begin_reading(held: Any) -> Reading:
    """Begin to read a value as `Metrics` holds it."""
    if type(held) is float:  # at each step: no more than that
        return Known(held)
    if isinstance(held, int | float) or is_on_host(held):
        return Known(float(held))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(held, torch.Tensor) and held.is_cuda:
        from holdfast.torch.readings import OnItsWay

        return OnItsWay(held)
    if hasattr(held, "copy_to_host_async") and hasattr(held, "is_ready"):
        return _OfJax(held)
    return _ByThread(held)
