"""What torch's own tools do to a training now: profilers, recorders, compilations.

Nothing here starts or imports any of them.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from typing import Any

import torch

_SEARCH_SECONDS = 30.0
_is_enabled = getattr(torch.autograd, "_profiler_enabled", bool)


class Profiled:
    """Observes torch from another thread; `note` records what only the training thread sees."""

    def __init__(self) -> None:
        self._is_profiling = False  # in the thread that trains
        self._profiler: weakref.ref[Any] | None = None
        self._records_memory = False
        self._next_search = 0.0
        self._counted = 0  # at the last poll
        self._compiles_before = 0  # counted before the script reset the counters

    def note(self) -> None:
        """In the thread that trains."""
        self._is_profiling = bool(_is_enabled())
        if self._is_profiling and not self._is_known() and time.monotonic() >= self._next_search:
            self._next_search = time.monotonic() + _SEARCH_SECONDS
            self._find_profiler()

    def look(self) -> tuple[list[str], int]:
        """The active tools by name, and how many graphs were compiled so far."""
        found = []
        profiler = sys.modules.get("torch.autograd.profiler")
        if self._is_profiling or getattr(profiler, "_is_profiler_enabled", False):
            found.append("torch.profiler")
            if self._records_memory:
                found.append("memory recording")
        records = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        is_recording = records is not None and torch.cuda.is_initialized() and records()
        if is_recording and "memory recording" not in found:
            found.append("memory recording")
        if torch.is_anomaly_enabled():
            found.append("anomaly detection")
        return found, self._count_compiles()

    def _is_known(self) -> bool:
        profiler = None if self._profiler is None else self._profiler()
        return profiler is not None and _is_active(profiler)

    def _find_profiler(self) -> None:
        """torch keeps no list of its profilers, so this scans all objects; a few ms, once.

        In the training thread: in another one, a tensor that is freed now would live on.
        """
        kind = torch.autograd.profiler.profile
        active = [each for each in gc.get_objects() if type(each) is kind and _is_active(each)]
        self._records_memory = any(getattr(each, "profile_memory", False) for each in active)
        self._profiler = weakref.ref(active[-1]) if active else None

    def _count_compiles(self) -> int:
        counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
        # By `get`: subscripting would insert the key.
        counted = 0 if counters is None else int(counters.get("stats", {}).get("unique_graphs", 0))
        if counted < self._counted:
            self._compiles_before += self._counted
        self._counted = counted
        return self._compiles_before + counted


def _is_active(profiler: Any) -> bool:
    has_results = getattr(profiler, "kineto_results", None) is not None
    return bool(getattr(profiler, "entered", True)) and not has_results
