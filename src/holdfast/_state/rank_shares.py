"""Tensors that are the same on all ranks are stored once: each rank stores a share of them.

The parameters of a data-parallel model and the optimizer's moments for them are equal on every rank
at every boundary. They are divided by size, so that memory holds them once and all ranks write at
the same time. The division follows from names and sizes alone, without communication.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from holdfast._adapters.registry import adapter_of
from holdfast._state.capture import Captured, capture
from holdfast._state.capture_cache import CaptureCache
from holdfast._store.format.image import TensorSpec


class Shares:
    """Captures the share of one rank."""

    def __init__(self, rank: int, size: int, state: Mapping[str, Any]) -> None:
        self._rank = rank
        self._size = size
        self._state = state
        self._elsewhere = _Living({}, None)  # what other ranks store, by alias key
        self._cache = CaptureCache()
        self._count = -1  # of tensors, when the shares were last computed
        self._replicated: Any = None  # what is the same on all ranks
        self.print = ""  # of their names and sizes: must be equal on all ranks

    def capture(self, state: Mapping[str, Any], extra: Mapping[str, Any]) -> Captured:
        """This rank's own state and its share of the common one."""
        if self._replicated is None or self._replicated.is_current():
            captured = self._cache.capture(state, extra, self._elsewhere)
            count = len(captured.specs) + captured.left_out
            if count == self._count and captured.left_out == len(self._elsewhere):
                return captured
        self._share_out(capture(state, extra))
        captured = self._cache.capture(state, extra, self._elsewhere)
        self._count = len(captured.specs) + captured.left_out
        return captured

    def _share_out(self, captured: Captured) -> None:
        common = self._common_tensors(captured)
        owners = share_out([spec for spec, _ in common], self._size)
        text = json.dumps(sorted((spec.name, spec.size_bytes) for spec, _ in common))
        self.print = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        names = {key: spec.name for spec, key in common if owners[spec.name] != self._rank}
        self._elsewhere = _Living(names, self._replicated)

    def _common_tensors(self, captured: Captured) -> list[tuple[TensorSpec, Hashable]]:
        if "torch.nn.parallel.distributed" not in sys.modules:
            return []
        from holdfast.torch import ddp

        self._replicated = keys = ddp.replicated_keys(self._state, ddp.find_ddp(self._state))
        found = []
        for spec, value in zip(captured.specs, captured.values, strict=True):
            if spec.kind == "torch":
                key = adapter_of("torch").alias_key(value)
                if key in keys:
                    found.append((spec, key))
        return found


class _Living(dict[Hashable, str]):
    """Names by alias key, valid as long as the tensors with these keys live."""

    def __init__(self, names: dict[Hashable, str], replicated: Any) -> None:
        super().__init__(names)
        self._replicated = replicated

    def get(self, key: Hashable, default: Any = None) -> Any:
        if self._replicated is None or key not in self._replicated:
            return default
        return super().get(key, default)


def share_out(specs: Sequence[TensorSpec], size: int) -> dict[str, int]:
    """The rank that stores each tensor: the largest first, to the rank that has least."""
    loads = [0] * size
    owners = {}
    for spec in sorted(specs, key=lambda spec: (-spec.size_bytes, spec.name)):
        rank = min(range(size), key=lambda each: (loads[each], each))
        owners[spec.name] = rank
        loads[rank] += spec.size_bytes
    return owners
