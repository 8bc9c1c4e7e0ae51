"""The state of the other callbacks of a fit.

Only what training has changed since the fit began is stored, not what the script has set: a
patience that the user has raised between two attempts stays raised.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from holdfast._adapters.adapter import has_state
from holdfast._errors import HoldfastError
from holdfast._text import unique_names

_NOT_KEPT = frozenset({"params", "model", "_model"})
_SKIP = object()


class Others:
    def __init__(self, callbacks: list[Any]) -> None:
        self._named = unique_names(
            (type(callback).__name__, callback)
            for callback in callbacks
            if not isinstance(callback, keras.callbacks.ProgbarLogger)  # it has no such state
        )
        self._first = {name: _noted(_plain_state(c)) for name, c in self._named.items()}

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, callback in self._named.items():
            if has_state(callback):
                found[name] = {"state": callback.state_dict()}
                continue
            now, first = _plain_state(callback), self._first[name]
            changed = {k: v for k, v in now.items() if k not in first or not _same(v, first[k])}
            found[name] = {
                "changed": changed,
                "compares": getattr(callback, "monitor_op", None) is not None,
            }
        return found

    def load(self, state: dict[str, Any]) -> None:
        for name, stored in state.items():
            callback = self._named.get(name)
            if callback is None:
                continue
            if has_state(callback):
                if "state" in stored:
                    callback.load_state_dict(stored["state"])
                continue
            if stored.get("compares") and getattr(callback, "monitor_op", 0) is None:
                # It decides once which way is better, and turns the sign of its margin then.
                callback._set_monitor_op()
            for key, item in stored.get("changed", {}).items():
                setattr(callback, key, item)


def prepare(callbacks: list[Any], *, is_resumed: bool) -> None:
    """Refuse a callback that resumes the fit too; make CSVLogger append to its file."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise HoldfastError(
                "BackupAndRestore and holdfast.keras.Callback in one fit: both would "
                "restore the model.\nTake BackupAndRestore out; holdfast keeps all that it keeps."
            )
        if is_resumed and isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True


def without_arrays(others: dict[str, Any]) -> dict[str, Any]:
    """The states after the end of a fit: without the weights that a callback has set aside."""
    light = {}
    for name, stored in others.items():
        changed = {k: v for k, v in stored.get("changed", {}).items() if not _has_arrays(v)}
        light[name] = {"changed": changed, "compares": stored.get("compares", False)}
    return light


def _plain_state(callback: Any) -> dict[str, Any]:
    found = {}
    for key, value in vars(callback).items():
        if key not in _NOT_KEPT and (plain := _plain(value)) is not _SKIP:
            found[key] = plain
    return found


def _plain(value: Any, depth: int = 0) -> Any:
    """The value, if it is made of numbers, strings and arrays alone."""
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return value
    if isinstance(value, np.ndarray):
        return _SKIP if value.dtype.hasobject else value
    if depth > 8:
        return _SKIP
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [_plain(item, depth + 1) for item in value]
        return _SKIP if any(item is _SKIP for item in items) else type(value)(items)
    if type(value) is dict:
        inner = {key: _plain(item, depth + 1) for key, item in value.items()}
        is_plain = all(isinstance(key, str | int) for key in inner)
        return inner if is_plain and not any(v is _SKIP for v in inner.values()) else _SKIP
    return _SKIP


def _noted(value: Any) -> Any:
    """A copy that `_same` can compare with later."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list | tuple):
        return type(value)(map(_noted, value))
    if isinstance(value, dict):
        return {key: _noted(item) for key, item in value.items()}
    return value


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _has_arrays(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return True
    items = value.values() if isinstance(value, dict) else value
    return isinstance(value, list | tuple | dict) and any(map(_has_arrays, items))
