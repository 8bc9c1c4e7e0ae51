"""The adapters of the frameworks that the script has imported.

An array of a framework exists only where that framework is loaded, so no framework is imported just
to check.
"""

from __future__ import annotations

import functools
import importlib
import random
import sys
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from holdfast._adapters.adapter import Adapter, Generators, Places
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
    if _known[0] != count:  # called for every tensor, and the list rarely changes
        found = [PLAIN, *(adapter_of(kind) for kind in _FRAMEWORKS if _is_loaded(kind))]
        is_in_import = any(kind in sys.modules and not _is_loaded(kind) for kind in _FRAMEWORKS)
        _known = (-1 if is_in_import else len(sys.modules), found)
    return _known[1]


def _is_loaded(kind: str) -> bool:
    # A framework that is just being imported has no version yet, and no arrays either.
    return hasattr(sys.modules.get(kind), "__version__")


def array_adapter(value: object) -> Adapter | None:
    return next((each for each in adapters() if each.is_array(value)), None)


def generators_of(value: object) -> Generators | None:
    """The generators of the framework that this random generator is of; None for other values."""
    found = (each.generators for each in adapters())
    return next((each for each in found if each.is_generator(value)), None)


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
    device: str,
    specs: Sequence[TensorSpec],
    views: Sequence[memoryview],
    *,
    hashed: bool,
    slot: memoryview | None = None,
) -> DeviceBatch | None:
    """Send stored tensors to the device that they were on; None if that is not possible."""
    if {spec.kind for spec in specs} != {"torch"}:
        return None
    found: DeviceBatch | None = (
        adapter_of("torch").receiving().send(device, specs, views, hashed=hashed, slot=slot)
    )
    return found


# -- The adapter for Python's own bytes and generators, which need no framework --------------------


_INLINE_BYTES = 1024


class PlainGenerators(Generators):
    def is_generator(self, value: object) -> bool:
        return isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)

    def generator_state(self, value: Any) -> Any:
        return value.getstate()

    def restore_generator(self, value: Any, state: Any) -> None:
        version, words, gauss = state
        value.setstate((version, tuple(words), gauss))

    def reseed(self, value: Any, seed: int) -> None:
        value.seed(seed)

    def is_global(self, value: object) -> bool:
        return value is random._inst  # behind the functions of the module

    def global_state(self) -> Any:
        return random.getstate()

    def set_global_state(self, state: Any) -> None:
        random.setstate(state)

    def seed_global(self, seed: int) -> None:
        random.seed(seed)


class PlainAdapter(Adapter):
    kind = "bytes"
    generators = PlainGenerators()

    def is_array(self, value: object) -> bool:
        return isinstance(value, bytes | bytearray) and len(value) > _INLINE_BYTES

    def alias_key(self, value: bytes | bytearray) -> Hashable | None:
        return ("bytes", id(value), type(value), len(value))

    def spec(self, name: str, value: bytes | bytearray) -> TensorSpec:
        dtype = "bytes" if isinstance(value, bytes) else "bytearray"
        return TensorSpec(name, self.kind, dtype, "U8", (len(value),), None, 1, len(value))

    def item_bytes(self, dtype: str) -> int:
        if dtype not in ("bytes", "bytearray"):
            raise ValueError(f"there are no bytes of type {dtype!r}")
        return 1

    def destinations(self, buffer: Any, places: Places, start: int) -> list[memoryview]:
        whole = memoryview(buffer)
        return [whole[start + at : start + at + s.size_bytes] for s, at in places]

    def copy_all(self, targets: Sequence[memoryview], values: Sequence[bytes]) -> None:
        for target, value in zip(targets, values, strict=True):
            target[:] = value

    def bytes_of(self, value: bytes | bytearray) -> memoryview:
        return memoryview(value)

    def read_array(self, spec: TensorSpec, data: memoryview) -> bytes:  # noqa: ARG002  of any kind
        return bytes(data)

    def new_array(self, spec: TensorSpec, data: memoryview) -> bytes | bytearray:
        return bytes(data) if spec.dtype == "bytes" else bytearray(data)

    def load_in_place(self, live: object, spec: TensorSpec, data: memoryview) -> bool:
        if not isinstance(live, bytearray) or spec.dtype != "bytearray":
            return False
        live[:] = data
        return True


PLAIN = PlainAdapter()
