"""What a run was started with, by the record of its newest attempt."""

from __future__ import annotations

import json
from typing import Any

from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._text import cut, name, record

Scalar = str | int | float | bool | None
Config = dict[str, Scalar]

_MOST_KEYS = 200
_MOST_DEPTH = 4
_MOST_TEXT = 200


def read_config(layout: RunLayout, attempt: int | None) -> Config:
    """The hyperparameters of an attempt, flat; empty if none were recorded.

    >>> flatten({"lr": 0.1, "model": {"width": 64, "layers": [1, 2]}})
    {'lr': 0.1, 'model.width': 64, 'model.layers': '[1, 2]'}
    """
    if not attempt:
        return {}
    return flatten(record(read_json(layout.start(attempt)).get("config")))


def flatten(config: dict[str, Any], before: str = "", depth: int = _MOST_DEPTH) -> Config:
    """One level: `model.width` for a key in a key. A list is one value, as text."""
    found: Config = {}
    for key, value in config.items():
        path = cut(name(f"{before}{key}"), _MOST_TEXT)
        if isinstance(value, dict) and value and depth > 1:
            found |= flatten(value, f"{path}.", depth - 1)
        else:
            found[path] = _scalar(value)
        if len(found) >= _MOST_KEYS:
            break
    return dict(list(found.items())[:_MOST_KEYS])


def _scalar(value: Any) -> Scalar:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return cut(name(text), _MOST_TEXT)
