"""Which states of a run count: those of its lineage that no rule has called bad.

The lineage is the (attempt, step) states that lead to the newest attempt. An attempt starts from a
state of an earlier one. What the earlier one saved beyond that state (a late writer, a checkpoint
that came back) belongs to another history, and must not be resumed.

A state is void if a rule has called a step bad: everything from that step on. The record is in the
attempt's folder, one for each rank that found it, and is durable before any process is notified.
It covers the whole lineage: an attempt that evaluates the state it has resumed and finds it bad
voids what an earlier attempt has saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast._store.folder.atomic import move_aside
from holdfast._store.folder.attempts import read_json, write_json
from holdfast._store.folder.layout import RunLayout

Origin = tuple[int, int] | None


def trace_line(origins: Mapping[int, Origin], newest: int) -> dict[int, int | None]:
    """For each attempt on the lineage of `newest`, the last step that counts (None: all).

    `origins` has the attempts that began to train, each with the (attempt, step)
    it came from, or None for one that began from scratch.

    >>> trace_line({1: None, 2: (1, 50), 3: (1, 40)}, newest=3)
    {3: None, 1: 40}
    """
    begun = [number for number in origins if number <= newest]
    if not begun:
        return {}
    attempt = max(begun)
    line: dict[int, int | None] = {attempt: None}
    origin = origins[attempt]
    while origin is not None and origin[0] < attempt:
        attempt, step = origin
        line[attempt] = step
        origin = origins.get(attempt)
    return line


def is_on_line(line: Mapping[int, int | None], attempt: int, step: int) -> bool:
    """Whether the state that `attempt` saved at `step` is on the lineage."""
    if attempt not in line:
        return False
    last = line[attempt]
    return last is None or step <= last


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
