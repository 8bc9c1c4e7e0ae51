"""The adapters of the frameworks: found by the framework that the script has imported."""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType

from holdfast._adapters import plain
from holdfast._errors import StateMismatch

# The order counts: a Keras model may be a module of its backend as well.
_FRAMEWORKS = {
    "keras": "holdfast.keras",
    "torch": "holdfast.torch",
    "tensorflow": "holdfast.tensorflow",
    "jax": "holdfast.jax",
    "numpy": "holdfast._adapters.numpy",
}

_known: tuple[int, list[ModuleType]] = (-1, [])  # by the number of modules that were loaded


def adapters() -> list[ModuleType]:
    """The adapters of the frameworks that the user's script has imported.

    An array of a framework exists only where that framework is loaded, so
    nothing is ever imported on a suspicion.
    """
    global _known
    count = len(sys.modules)
    if _known[0] != count:  # asked for every tensor, and seldom is there anything new
        found = [plain, *(adapter_of(kind) for kind in _FRAMEWORKS if _is_loaded(kind))]
        is_in_import = any(kind in sys.modules and not _is_loaded(kind) for kind in _FRAMEWORKS)
        _known = (-1 if is_in_import else len(sys.modules), found)
    return _known[1]


def _is_loaded(kind: str) -> bool:
    # One that is just being imported has no version yet, and no arrays either.
    return hasattr(sys.modules.get(kind), "__version__")


def exact_types(all_adapters: list[ModuleType]) -> dict[type, ModuleType]:
    """Classes whose objects are tensors and no more, if they are of no class derived from them."""
    return {
        kind: adapter for adapter in all_adapters for kind in getattr(adapter, "EXACT_TYPES", ())
    }


@functools.cache  # a worker asks for every batch, and an import statement takes a microsecond
def adapter_of(kind: str) -> ModuleType:
    """The adapter that stored tensors of this kind, imported if need be."""
    if kind == "bytes":
        return plain
    if kind in _FRAMEWORKS:
        return importlib.import_module(_FRAMEWORKS[kind])
    raise StateMismatch(
        f"the checkpoint holds a tensor of kind {kind!r}, which this holdfast lacks."
    )
