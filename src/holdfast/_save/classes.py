"""The classes of optimizers and schedulers: a stored state fits no other, even of the same form."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def class_names(state: dict[str, Any]) -> dict[str, str]:
    """The class of each optimizer and scheduler of torch in a state, by where it is."""
    if not hasattr(sys.modules.get("torch"), "__version__"):
        return {}
    return dict(_named(state.items(), ""))


def _named(entries: Iterable[tuple[Any, Any]], path: str) -> Iterable[tuple[str, str]]:
    from holdfast.torch.stepping import class_name

    for key, value in entries:
        name = class_name(value)
        if name is not None:
            yield f"{path}{key}", name
        elif isinstance(value, dict):
            yield from _named(value.items(), f"{path}{key}.")
        elif isinstance(value, list | tuple):
            yield from _named(enumerate(value), f"{path}{key}.")
