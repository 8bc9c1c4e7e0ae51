"""Tensors that were on a device, sent there before any object gets them.

They are then what objects copy from and are compared with, without a way back through the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast._adapters.registry import adapter_of
from holdfast._store.format.image import TensorSpec


class SentAhead:
    """The tensors of a state that are on their devices already, by their numbers."""

    def __init__(self) -> None:
        self.tensors: dict[int, Any] = {}
        self._batches: list[Any] = []

    def send(
        self, specs: Sequence[TensorSpec], views: Sequence[memoryview], *, hashed: bool
    ) -> dict[int, bytes]:
        """Send what was on a device that is there; with `hashed`, the digests of what was sent."""
        digests: dict[int, bytes] = {}
        devices = sorted({spec.device for spec in specs if spec.device})
        for device in devices:
            kinds = {spec.kind for spec in specs if spec.device == device}
            if kinds != {"torch"}:
                continue
            numbers = [n for n, spec in enumerate(specs) if spec.device == device]
            batch = (
                adapter_of("torch")
                .receiving()
                .send(
                    device, [specs[n] for n in numbers], [views[n] for n in numbers], hashed=hashed
                )
            )
            if batch is None:
                continue
            self._batches.append(batch)
            self.tensors.update(zip(numbers, batch.tensors, strict=True))
            if hashed:
                digests.update(zip(numbers, batch.digests, strict=True))
        return digests

    def renumber(self, numbers: Sequence[int]) -> None:
        """They were sent in another order than that of their specs."""
        self.tensors = {numbers[number]: tensor for number, tensor in self.tensors.items()}

    @property
    def is_untouched(self) -> bool:
        return all(batch.is_untouched for batch in self._batches)

    @property
    def memory(self) -> list[tuple[int, int]]:
        """Where they begin and end, in addresses of their devices."""
        return [batch.memory for batch in self._batches]

    def clear(self) -> None:
        """Give their memory back."""
        self.tensors.clear()
        self._batches.clear()
