"""Run folders with a checkpoint of several ranks, made without any process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast._adapters.registry import adapter_of
from holdfast._state.capture import Captured, capture, capture_generators
from holdfast._store.commit.chunks import CommitThreads
from holdfast._store.commit.source import Ranges, Source
from holdfast._store.commit.write import (
    Policy,
    State,
    begin_checkpoint,
    close_checkpoint,
    write_part,
)
from holdfast._store.commit.write_queue import PublishOrder
from holdfast._store.folder.attempts import claim, note_origin, open_folder
from holdfast._store.format.image import encode_scalars, plan_image


def make_run(folder: Path, ranks: Sequence[Captured | dict[str, Any]], step: int = 8) -> Path:
    """A run that has ended, with what each rank stored: a state, or one that is captured."""
    layout, run_id = open_folder(folder)
    attempt = claim(layout, folder, lambda _: None)
    note_origin(layout, attempt, None)
    policy = Policy(layout, run_id, attempt, {}, 3, None, "0")
    kept = State(attempt, step, "made", {})
    partial = begin_checkpoint(layout, kept.folder(layout))
    files = []
    for rank, state in enumerate(ranks):
        captured = capture_of(state) if isinstance(state, dict) else state
        head = {"attempt": attempt, "world": len(ranks), "metrics": {}, "best": {}}
        scalars = encode_scalars({**head, "step": step, "tree": captured.tree})
        plan = plan_image(captured.specs, len(scalars))
        values = dict(zip((s.name for s in captured.specs), captured.values, strict=True))
        views = [memoryview(plan.header)]
        views += [adapter_of(s.kind).bytes_of(values[s.name]) for s, _ in plan.in_file_order()]
        views.append(memoryview(scalars.ljust(plan.scalars.size_bytes)))
        source = Source(views, Ranges.of(plan.extents()))
        files.append(write_part(partial, rank, source, CommitThreads(is_background=False)))
    close_checkpoint(policy, kept, partial, files, PublishOrder())
    layout.exit(attempt).write_text('{"status": 0, "how": "closed"}')
    return folder


def capture_of(state: dict[str, Any]) -> Captured:
    """A state with the generators as they are."""
    return capture(state, {"generators": capture_generators(), "position": None})
