"""Which of Lightning's two packages this is about: the same code, under two names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def find_package() -> str | None:
    """The package that the script has imported, or else one that is installed; None if neither."""
    for name in _NAMES:
        if sys.modules.get(name) is not None:
            return name
    for name in _NAMES:
        whole = name.partition(".")[0]
        # sys.modules has None for a package whose import is forbidden.
        if sys.modules.get(whole, ...) is not None and importlib.util.find_spec(whole) is not None:
            return name
    return None


def callback_class() -> Any:
    """What a callback is derived from. Either package takes those of the other."""
    name = find_package()
    assert name is not None  # holdfast.lightning is not imported otherwise
    return importlib.import_module(f"{name}.callbacks").Callback


def package_of(trainer: Any) -> str:
    """The package of a trainer, also of a class derived from Lightning's."""
    for kind in type(trainer).__mro__:
        for name in _NAMES:
            if kind.__module__.startswith(f"{name}."):
                return name
    return _NAMES[0]


def part_of(trainer: Any, name: str) -> ModuleType:
    """A module of the trainer's own package: a class of the other is another class."""
    return importlib.import_module(f"{package_of(trainer)}.{name}")
