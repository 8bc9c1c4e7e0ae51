"""Where a run stands at one moment, as the progress line needs to know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Standing:
    """What there is to show; None is what nobody knows."""

    step: int
    steps: int | None = None
    epoch: int | None = None  # counted from 0; people see it counted from 1
    epochs: int | None = None
    batch: int | None = None
    batches: int | None = None
    phase: str | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # None: no finite number
    memory_step: int | None = None  # the newest step that is safe in memory
    disk_step: int | None = None  # the newest durable step
