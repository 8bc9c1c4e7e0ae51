"""Reading a logged value without waiting for a device.

A value in the memory of this machine is read at once: a tensor may change in place later. From a
GPU a copy begins when the value is logged, in the order of the device's own work, and is read when
it has arrived. Arrays of JAX and tensors of TensorFlow never change.

A rule then holds a few steps later. No snapshot is taken of a step whose values were not read.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Protocol

from holdfast._adapters.metrics import is_on_host


class Reading(Protocol):
    """A number that is being read."""

    def is_ready(self) -> bool: ...
    def value(self) -> float:
        """Waits for it."""
        ...


class _Later:
    """A value that is read when it is needed; only arrays of JAX report that they are ready."""

    __slots__ = ("_held",)

    def __init__(self, held: Any) -> None:
        self._held = held

    def is_ready(self) -> bool:
        ask = getattr(self._held, "is_ready", None)
        return ask is not None and bool(ask())

    def value(self) -> float:
        return float(self._held)


class _ByThread:
    """A value that does not report that it is ready: a thread waits for it.

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
        except Exception as error:  # noqa: BLE001  raised where the value is used
            self._error = error

    def is_ready(self) -> bool:
        return not self._thread.is_alive()

    def value(self) -> float:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found


def begin_reading(held: Any, *, for_rule: bool) -> float | Reading:
    """Begin to read a value as `Metrics` holds it.

    A rule must hold at the step itself where that is possible. So it waits for what JAX computes on
    the CPU, and a thread waits for a value that does not report that it is ready.
    """
    if isinstance(held, int | float):  # also of NumPy
        return float(held)
    reports, is_here = hasattr(held, "is_ready"), is_on_host(held)
    if is_here and (for_rule or not reports):
        return float(held)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(held, torch.Tensor) and held.is_cuda:
        from holdfast.torch.readings import OnItsWay

        return OnItsWay(held)
    if reports and not is_here:
        held.copy_to_host_async()
    return _Later(held) if reports or not for_rule else _ByThread(held)
