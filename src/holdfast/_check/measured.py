"""What a run folder knows of the time that a save and a step take."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from holdfast._record import journal
from holdfast._record.attempts import read_json
from holdfast._record.layout import RunLayout

_RECENT = 20  # checkpoints: the state of a run may have grown since its beginning


def save_seconds(folder: Path) -> float | None:
    """The longest recent time from asking for a checkpoint until it was durable."""
    layout = RunLayout(folder)
    told = _newest(layout, "save_seconds")
    if told is not None:
        return told
    taken = [
        seconds
        for event in journal.read(layout.journal)
        if event.get("event") == "checkpoint"
        and (seconds := _number(event.get("seconds"))) is not None
    ]
    return max(taken[-_RECENT:], default=None)


def step_seconds(folder: Path) -> float | None:
    """The longest recent step: a stop waits for its end."""
    return _newest(RunLayout(folder), "step_seconds")


def _newest(layout: RunLayout, key: str) -> float | None:
    for attempt in reversed(layout.attempt_numbers()):
        value = _number(read_json(layout.heartbeat(attempt)).get(key))
        if value is not None:
            return value
    return None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and value >= 0 else None
