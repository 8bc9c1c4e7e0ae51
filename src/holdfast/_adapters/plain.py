"""The adapter for Python's own bytes and generators: what needs no framework."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from typing import Any

from holdfast._store.format.image import TensorSpec

KIND = "bytes"
GENERATOR = "python"  # the name of its global generator
_INLINE_BYTES = 1024


def is_array(value: object) -> bool:
    return isinstance(value, bytes | bytearray) and len(value) > _INLINE_BYTES


def alias_key(value: bytes | bytearray) -> Hashable | None:
    return ("bytes", id(value), type(value), len(value))


def spec(name: str, value: bytes | bytearray) -> TensorSpec:
    dtype = "bytes" if isinstance(value, bytes) else "bytearray"
    return TensorSpec(name, KIND, dtype, "U8", (len(value),), None, 1, len(value))


def item_bytes(dtype: str) -> int:
    """The size of one item; ValueError if there is no such type here."""
    if dtype not in ("bytes", "bytearray"):
        raise ValueError(f"there are no bytes of type {dtype!r}")
    return 1


def encode_other(_: object) -> None:
    return None


def destinations(
    buffer: Any, places: Sequence[tuple[TensorSpec, int]], start: int
) -> list[memoryview]:
    """Where each tensor goes: views of the mapping, made once and used for every snapshot."""
    whole = memoryview(buffer)
    return [whole[start + at : start + at + s.size_bytes] for s, at in places]


def copy_all(targets: Sequence[memoryview], values: Sequence[bytes]) -> None:
    for target, value in zip(targets, values, strict=True):
        target[:] = value


def bytes_of(value: bytes | bytearray) -> memoryview:
    return memoryview(value)


def borrow(_: TensorSpec, data: memoryview) -> bytes:
    return bytes(data)


def own(spec: TensorSpec, data: memoryview) -> bytes | bytearray:
    return bytes(data) if spec.dtype == "bytes" else bytearray(data)


def load_in_place(live: object, spec: TensorSpec, data: memoryview) -> bool:
    if not isinstance(live, bytearray) or spec.dtype != "bytearray":
        return False
    live[:] = data
    return True


def is_generator(value: object) -> bool:
    random = sys.modules.get("random")  # without it there are no generators of its kind
    if random is None:
        return False
    return isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)


def generator_state(value: Any) -> Any:
    return value.getstate()


def restore_generator(value: Any, state: Any) -> None:
    version, words, gauss = state
    value.setstate((version, tuple(words), gauss))


def is_global(value: object) -> bool:
    """Whether a generator is the one behind the module's own functions."""
    return value is getattr(sys.modules.get("random"), "_inst", None)


def generators(*, devices: bool) -> dict[str, Any]:  # noqa: ARG001  there are none
    return {}


def global_state() -> Any:
    import random

    return random.getstate()


def set_global_state(state: Any) -> None:
    import random

    random.setstate(state)


def seed_global(seed: int) -> None:
    """Seed Python's own generator."""
    import random

    random.seed(seed)


def reseed(value: Any, seed: int) -> None:
    """Seed a generator that somebody holds."""
    value.seed(seed)
