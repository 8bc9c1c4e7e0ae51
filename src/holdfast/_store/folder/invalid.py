"""Void states: from some step of an attempt on, a rule has called everything bad.

The record is in the attempt's folder, one for each rank that found it, and is durable before any
process is notified. It covers the whole lineage: an attempt that evaluates the state it has resumed
and finds it bad voids what an earlier attempt has saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast._store.folder.atomic import move_aside
from holdfast._store.folder.attempts import read_json, write_json
from holdfast._store.folder.layout import RunLayout

VOID = "void-"  # prefix of a void checkpoint that was set aside


def note_void(layout: RunLayout, attempt: int, step: int, reason: str, rank: int = 0) -> None:
    """Record durably that everything from `step` on is void."""
    path = layout.void(attempt, rank)
    before = _step_in(read_json(path))
    if before is None or step < before:
        write_json(path, {"step": step, "reason": reason})


def void_steps(layout: RunLayout) -> dict[int, int]:
    """The first void step of each attempt that has one."""
    found: dict[int, int] = {}
    for attempt in layout.attempt_numbers():
        for path in layout.voids(attempt):
            step = _step_in(read_json(path))
            if step is not None:
                found[attempt] = min(step, found.get(attempt, step))
    return found


def is_void(voids: Mapping[int, int], attempt: int, step: int) -> bool:
    """Whether the state that `attempt` saved at `step` is void, by it or a later attempt.

    >>> is_void({2: 50}, 1, 50), is_void({2: 50}, 2, 49), is_void({2: 50}, 3, 60)
    (True, False, False)
    """
    return any(attempt <= by and step >= first for by, first in voids.items())


def without_void(line: Mapping[int, int | None], voids: Mapping[int, int]) -> dict[int, int | None]:
    """The lineage up to the first void state.

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
