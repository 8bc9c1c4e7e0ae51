"""The adapters of the frameworks that the script has imported.

An array of a framework exists only where that framework is loaded, so nothing is imported on a
suspicion.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast._adapters.adapter import Adapter
from holdfast._adapters.plain import ADAPTER as PLAIN
from holdfast._errors import StateMismatch
from holdfast._store.format.image import TensorSpec

if TYPE_CHECKING:
    from holdfast._store.read.verify import DeviceBatch

# Modules with an object named ADAPTER. The order counts: a Keras model may be a module of its
# backend as well.
_FRAMEWORKS = {
    "keras": "holdfast.keras.adapter",
    "torch": "holdfast.torch.adapter",
    "tensorflow": "holdfast.tensorflow.adapter",
    "jax": "holdfast.jax.adapter",
    "numpy": "holdfast._adapters.numpy",
}

_known: tuple[int, list[Adapter]] = (-1, [])  # by the number of modules that were loaded


def adapters() -> list[Adapter]:
    """The adapters of all frameworks that are loaded, and of Python itself."""
    global _known
    count = len(sys.modules)
    if _known[0] != count:  # called for every tensor, and seldom is there anything new
        found = [PLAIN, *(adapter_of(kind) for kind in _FRAMEWORKS if _is_loaded(kind))]
        is_in_import = any(kind in sys.modules and not _is_loaded(kind) for kind in _FRAMEWORKS)
        _known = (-1 if is_in_import else len(sys.modules), found)
    return _known[1]


def _is_loaded(kind: str) -> bool:
    # A framework that is just being imported has no version yet, and no arrays either.
    return hasattr(sys.modules.get(kind), "__version__")


def exact_types(all_adapters: list[Adapter]) -> dict[type, Adapter]:
    """Classes whose direct instances are plain tensors."""
    return {kind: adapter for adapter in all_adapters for kind in adapter.exact_types}


@functools.cache  # a worker asks for every batch, and an import statement takes a microsecond
def adapter_of(kind: str) -> Adapter:
    """The adapter that stored tensors of this kind, imported if it is not loaded yet."""
    if kind == "bytes":
        return PLAIN
    if kind in _FRAMEWORKS:
        found: Adapter = importlib.import_module(_FRAMEWORKS[kind]).ADAPTER
        return found
    raise StateMismatch(
        f"the checkpoint holds a tensor of kind {kind!r}, which this holdfast lacks."
    )


def send_to_device(
    device: str, specs: Sequence[TensorSpec], views: Sequence[memoryview], *, hashed: bool
) -> DeviceBatch | None:
    """Send stored tensors to the device that they were on; None if that is not possible."""
    if {spec.kind for spec in specs} != {"torch"}:
        return None
    return adapter_of("torch").receiving().send(device, specs, views, hashed=hashed)
