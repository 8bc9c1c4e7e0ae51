"""What torch's own tools do to a training now: profilers, recorders, compilations.

Nothing here starts or imports any of them.
"""

from __future__ import annotations

import sys

import torch

_is_enabled = getattr(torch.autograd, "_profiler_enabled", bool)


class Profiled:
    """Observes torch from another thread; `note` records what only the training thread sees."""

    def __init__(self) -> None:
        self._is_profiling = False  # in the thread that trains
        self._counted = 0  # at the last poll
        self._compiles_before = 0  # counted before the script reset the counters

    def note(self) -> None:
        """In the thread that trains."""
        self._is_profiling = bool(_is_enabled())

    def look(self) -> tuple[list[str], int]:
        """The active tools by name, and how many graphs were compiled so far."""
        found = []
        profiler = sys.modules.get("torch.autograd.profiler")
        if self._is_profiling or getattr(profiler, "_is_profiler_enabled", False):
            found.append("torch.profiler")
        records = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        if records is not None and torch.cuda.is_initialized() and records():
            found.append("memory recording")
        if torch.is_anomaly_enabled():
            found.append("anomaly detection")
        return found, self._count_compiles()

    def _count_compiles(self) -> int:
        counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
        # By `get`: subscripting would insert the key.
        counted = 0 if counters is None else int(counters.get("stats", {}).get("unique_graphs", 0))
        if counted < self._counted:
            self._compiles_before += self._counted
        self._counted = counted
        return self._compiles_before + counted
