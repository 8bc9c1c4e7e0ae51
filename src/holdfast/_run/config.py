"""The hyperparameters that `Run(config=…)` was given, as JSON values of a bounded size.

Secrets are still in them: they are left out when the record is written, see `start_record.py`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from collections.abc import Mapping, Sequence, Set
from typing import Any

from holdfast._errors import SettingsError

_MOST_ITEMS = 2000  # of all levels together
_MOST_DEPTH = 8
_MOST_TEXT = 2000
_MOST_REPR = 200
_STATEFUL = ("state_dict", "load_state_dict", "get_state", "set_state", "parameters")


def checked_config(config: object) -> dict[str, Any]:
    """The values by name; SettingsError if it is state, or nothing that has names.

    Values of other types than numbers, texts, booleans, lists and dicts are recorded by their repr.
    """
    if config is None:
        return {}
    values = _by_name(config)
    if not isinstance(values, Mapping):
        raise SettingsError(
            f"config is a {type(config).__name__}: config has the hyperparameters of the run, "
            "and is never restored.\nGive a dict, a dataclass or an argparse namespace. State has "
            "any other name: holdfast.Run(folder, model=model)"
        )
    for name, value in values.items():
        if _is_stateful(value):
            raise SettingsError(
                f"config[{name!r}] is a {type(value).__name__}: config has the hyperparameters, "
                "and is never restored.\nGive state by its own name: "
                f"holdfast.Run(folder, {name}=…)"
            )
    found = _Recorder().value(values, 0)
    assert isinstance(found, dict)
    return found


def _is_stateful(value: object) -> bool:
    if isinstance(value, type):
        return False
    has_state = any(callable(getattr(value, name, None)) for name in _STATEFUL)
    return has_state or (hasattr(value, "dtype") and getattr(value, "shape", ()) != ())


def _by_name(value: object) -> object:
    """A namespace or a dataclass as a dict, without copies of its values; all else as it is."""
    argparse = sys.modules.get("argparse")  # a namespace of it exists only where it is imported
    if isinstance(value, types.SimpleNamespace) or (
        argparse is not None and isinstance(value, argparse.Namespace)
    ):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
    return value


class _Recorder:
    """Counts what it has recorded: a config may hold a whole data set."""

    def __init__(self) -> None:
        self._left = _MOST_ITEMS

    def value(self, value: object, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int) and type(value) is int:
            return value if abs(value) < 1 << 53 else str(value)[:_MOST_REPR]
        if isinstance(value, float) and type(value) is float:
            return value if math.isfinite(value) else repr(value)
        if isinstance(value, str) and type(value) is str:
            return _shorten(value, _MOST_TEXT)
        if depth < _MOST_DEPTH:
            value = _by_name(value)
            if isinstance(value, Mapping):
                return self._mapping(value, depth)
            if isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray | str):
                return self._items(value, depth)
        return _describe(value)

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, each in value.items():
            name = _shorten(str(key), _MOST_REPR)
            if self._left <= 0:
                found["…"] = f"{len(value) - len(found)} more"
                break
            self._left -= 1
            found[name] = self.value(each, depth + 1)
        return found

    def _items(self, value: Any, depth: int) -> list[Any]:
        found: list[Any] = []
        for each in value:
            if self._left <= 0:
                found.append(f"… {len(value) - len(found)} more")
                break
            self._left -= 1
            found.append(self.value(each, depth + 1))
        return found


def _describe(value: object) -> Any:
    """A scalar of NumPy or of a framework as its number, anything else by its repr."""
    try:
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            number = value.item()
            if isinstance(number, bool) or (isinstance(number, int | float) and number == number):
                return number
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}"
        return _shorten(repr(value), _MOST_REPR)
    except Exception:  # noqa: BLE001  a repr of the user must not fail the run
        return f"<{type(value).__name__}>"


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
