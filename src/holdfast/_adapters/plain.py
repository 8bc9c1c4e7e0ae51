"""The adapter for Python's own bytes and generators, which need no framework."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from typing import Any

from holdfast._adapters.adapter import Adapter, Places
from holdfast._store.format.image import TensorSpec

_INLINE_BYTES = 1024


class PlainAdapter(Adapter):
    kind = "bytes"

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

    def borrow(self, spec: TensorSpec, data: memoryview) -> bytes:  # noqa: ARG002
        return bytes(data)

    def own(self, spec: TensorSpec, data: memoryview) -> bytes | bytearray:
        return bytes(data) if spec.dtype == "bytes" else bytearray(data)

    def load_in_place(self, live: object, spec: TensorSpec, data: memoryview) -> bool:
        if not isinstance(live, bytearray) or spec.dtype != "bytearray":
            return False
        live[:] = data
        return True

    def is_generator(self, value: object) -> bool:
        random = sys.modules.get("random")  # not loaded: there is no generator of its kind
        if random is None:
            return False
        return isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)

    def generator_state(self, value: Any) -> Any:
        return value.getstate()

    def restore_generator(self, value: Any, state: Any) -> None:
        version, words, gauss = state
        value.setstate((version, tuple(words), gauss))

    def reseed(self, value: Any, seed: int) -> None:
        value.seed(seed)

    def is_global(self, value: object) -> bool:
        return value is getattr(sys.modules.get("random"), "_inst", None)

    def global_state(self) -> Any:
        import random

        return random.getstate()

    def set_global_state(self, state: Any) -> None:
        import random

        random.setstate(state)

    def seed_global(self, seed: int) -> None:
        import random

        random.seed(seed)


ADAPTER = PlainAdapter()
