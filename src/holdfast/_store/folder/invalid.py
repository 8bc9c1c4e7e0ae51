"""What a rule has called bad: from a step of an attempt on, nothing counts any more.

The record stands in the attempt's folder, one for each rank that found it, and is durable before
anybody is told. It covers the whole line that led there: an attempt that evaluates the very state
it has resumed, and finds it bad, speaks of what an earlier attempt has saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast._store.folder.atomic import move_aside
from holdfast._store.folder.attempts import read_json, write_json
from holdfast._store.folder.layout import RunLayout

VOID = "void-"  # before the name of a checkpoint that was set aside for it


def note_void(layout: RunLayout, attempt: int, step: int, reason: str, rank: int = 0) -> None:
    """Note durably that everything from `step` on is void."""
    path = layout.void(attempt, rank)
    before = _step_in(read_json(path))
    if before is None or step < before:
        write_json(path, {"step": step, "reason": reason})


def void_steps(layout: RunLayout) -> dict[int, int]:
    """For each attempt in which something was called bad, the first step that is void."""
    found: dict[int, int] = {}
    for attempt in layout.attempt_numbers():
        for path in layout.voids(attempt):
            step = _step_in(read_json(path))
            if step is not None:
                found[attempt] = min(step, found.get(attempt, step))
    return found


def is_void(voids: Mapping[int, int], attempt: int, step: int) -> bool:
    """Whether the state that `attempt` saved at `step` was called bad, by it or by a later one.

    >>> is_void({2: 50}, 1, 50), is_void({2: 50}, 2, 49), is_void({2: 50}, 3, 60)
    (True, False, False)
    """
    return any(attempt <= by and step >= first for by, first in voids.items())


def without_void(line: Mapping[int, int | None], voids: Mapping[int, int]) -> dict[int, int | None]:
    """The line as far as nothing on it was called bad.

    >>> without_void({3: None, 1: 40}, {3: 30})
    {3: 29, 1: 29}
    """
    left = dict(line)
    for attempt, last in line.items():
        bounds = [first - 1 for by, first in voids.items() if attempt <= by]
        if bounds:
            left[attempt] = min(bounds if last is None else [*bounds, last])
    return left


def set_aside_void(layout: RunLayout) -> list[tuple[Path, Path]]:
    """Move void checkpoints out of the way; returns from where to where."""
    voids = void_steps(layout)
    moved = []
    for step, attempt, folder in layout.checkpoint_folders() if voids else ():
        if is_void(voids, attempt, step):
            with contextlib.suppress(OSError):
                moved.append((folder, move_aside(folder, layout.set_aside, VOID)))
    return moved


def _step_in(record: dict[str, Any]) -> int | None:
    step = record.get("step")
    return step if isinstance(step, int) else None
