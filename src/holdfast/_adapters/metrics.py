"""The metrics of the last step; values on a device are read only when they are needed."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from holdfast._errors import HoldfastError

_LARGEST = sys.float_info.max


class Metrics:
    """What `run.log` was given; a tensor on a device is waited for only when it is read."""

    def __init__(self, best: tuple[str, str] | None) -> None:
        self._latest: dict[str, Any] = {}
        self._mode, self._watched = best or ("", "")
        self._best: float | None = None
        self.are_numbers = True  # True if the last values were plain numbers, no tensors
        self._read: dict[str, float | None] = {}  # as last read
        self._late: dict[str, float] = {}  # read from a device since `take_late`

    def note(self, metrics: dict[str, Any]) -> bool:
        """Keep the values; True if the watched metric is better than ever before.

        The values in `metrics` afterwards may be kept: they have no graph and do not change.
        """
        self.are_numbers = True
        for name, value in metrics.items():
            if type(value) is not float and not _is_number(value):
                metrics[name] = held = _held(name, value)
                self.are_numbers = self.are_numbers and isinstance(held, int | float)
        self._latest.update(metrics)
        if self._watched not in metrics:
            return False
        value = float(self._latest[self._watched])
        if not math.isfinite(value):
            return False
        sign = 1 if self._mode == "min" else -1
        if self._best is not None and sign * value >= sign * self._best:
            return False
        self._best = value
        return True

    def held(self, name: str) -> Any:
        """The latest value of a metric, without its graph."""
        return self._latest[name]

    @property
    def best(self) -> dict[str, float]:
        """The best value so far, by the watched metric: another attempt may watch another one."""
        return {} if self._best is None else {f"{self._mode}:{self._watched}": self._best}

    def glance(self) -> dict[str, float | None]:
        """The latest values that are available without waiting for a device."""
        found = dict(self._read)
        for name, value in list(self._latest.items()):
            number = ready(value)
            if number is not None:
                found[name] = _finite(number)
        return found

    def values(self) -> dict[str, float | None]:
        """The latest value of each metric; None if it is not finite."""
        for name, value in list(self._latest.items()):
            if not isinstance(value, int | float):
                self._latest[name] = number = float(value)
                if not is_on_host(value):
                    self._late[name] = number
        self._read = {name: _finite(float(value)) for name, value in self._latest.items()}
        return dict(self._read)

    def take_late(self) -> dict[str, float]:
        """The values that were read from a device since the last call."""
        late, self._late = self._late, {}
        return late

    def restore(
        self, metrics: Mapping[str, float | None], best: Mapping[str, float] | None = None
    ) -> None:
        self._latest = {name: math.nan if v is None else v for name, v in metrics.items()}
        self._best = (best or {}).get(f"{self._mode}:{self._watched}")


def is_on_host(value: Any) -> bool:
    """Whether a number is in the memory of the host, so that reading it waits for no device."""
    device = getattr(value, "device", "cpu")  # torch: an object; TensorFlow: a path; JAX: both
    named = getattr(device, "type", None) or getattr(device, "platform", None) or device
    if not isinstance(named, str):  # an array of JAX on several devices
        devices = getattr(value, "devices", None)
        found = devices() if callable(devices) else ()
        named = next((str(each.platform) for each in found), "")
    return "cpu" in named.lower()


def without_devices(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What may be kept for long: a number on a device may keep a whole tensor alive."""
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) or is_on_host(value)
    }


def ready(value: Any) -> float | None:
    """The number, if it is available without waiting for a device."""
    if isinstance(value, int | float):
        return float(value)
    is_ready = getattr(value, "is_ready", None)  # JAX computes asynchronously on the CPU too
    return float(value) if is_on_host(value) and (is_ready is None or is_ready()) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= _LARGEST)


def _plain(value: Any) -> Any:
    """The number of torch or NumPy that is in the memory of the host; else None."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return float(value) if value.dtype.kind in "biuf" else None
    if numpy is not None and isinstance(value, numpy.ndarray):
        return value.item() if value.size == 1 and value.dtype.kind in "biuf" else None
    # Not of subclasses: reading a shard needs all ranks.
    if type(value).__name__ == "Tensor" and getattr(value, "is_cpu", False):
        return value.item() if value.numel() == 1 else None
    return None


def _held(name: str, value: Any) -> Any:
    if isinstance(value, int):  # too large for a float
        return math.inf if value > 0 else -math.inf
    number = _plain(value)  # now: a sum in place would differ later
    if isinstance(number, int | float):
        return number
    size = getattr(value, "numel", None)
    count = size() if callable(size) else getattr(value, "size", None)
    if count is None and hasattr(value, "shape"):
        count = math.prod(value.shape)
    if count != 1 or not hasattr(value, "__float__"):
        raise HoldfastError(
            f"run.log({name}=…): a {type(value).__name__} is not one number.\n"
            "Log numbers, or tensors and arrays of one element."
        )
    value = value.detach() if hasattr(value, "detach") else value
    if getattr(value, "is_fully_addressable", True) is False:
        value = value.addressable_data(0)  # JAX on several processes: each has the number
    # NumPy converts no array with dimensions to a number, not even one of one element.
    has_dimensions = hasattr(value, "reshape") and len(value.shape) > 0
    return value.reshape(()) if has_dimensions else value
