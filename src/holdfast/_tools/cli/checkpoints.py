"""The checkpoints of a run: what they are, why they are kept, whether they are whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast._errors import CheckpointError
from holdfast._report.status.gather import JournalHistory, read_history
from holdfast._store.commit.retention import choose_kept, list_checkpoints
from holdfast._store.folder.attempts import find_run, known_origins
from holdfast._store.folder.layout import RunLayout, is_turn
from holdfast._store.folder.lineage import trace_line
from holdfast._store.read.damage import find_damage
from holdfast._store.read.verify import read_manifest

NOT_KEPT = "goes with the next one"


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """One checkpoint of a run."""

    folder: str
    step: int
    at_turn: bool  # of an epoch
    attempt: int
    age_seconds: float | None
    size_bytes: int | None
    reason: str | None  # why it was made
    kept_because: str | None  # None: the run did not say how many it keeps
    metrics: dict[str, float | None]
    is_damaged: bool  # the manifest cannot be read; `verify` reads the rest
    ranks: int | None  # that made it


@dataclass(frozen=True, slots=True)
class CheckpointList:
    """All checkpoints of a run, oldest first."""

    checkpoints: list[CheckpointSummary]
    watched: str | None  # the metric of keep_best
    set_aside: list[str]  # damaged or unfinished ones, which are never loaded


@dataclass(frozen=True, slots=True)
class Verified:
    """One checkpoint after `verify`."""

    folder: str
    step: int
    attempt: int
    size_bytes: int | None
    damage: list[str]
    is_gone: bool  # removed by the run meanwhile


def list_with_reasons(folder: Path) -> CheckpointList:
    """The answer of `holdfast ls`."""
    layout, _ = find_run(folder)
    history = read_history(layout)
    kept = _reasons(layout, history)
    found = []
    for step, attempt, path in layout.checkpoint_folders():
        because = kept.get(path, NOT_KEPT) if kept is not None else None
        found.append(_summary(path, step, attempt, because))
    best = history.keep_best
    aside = layout.set_aside
    return CheckpointList(
        checkpoints=found,
        watched=best.partition(":")[2] if best else None,
        set_aside=sorted(entry.name for entry in aside.iterdir()) if aside.is_dir() else [],
    )


def _reasons(layout: RunLayout, history: JournalHistory) -> dict[Path, str] | None:
    if history.keep_last is None:
        return None
    newest = max(layout.attempt_numbers(), default=0)
    line = trace_line(known_origins(layout), newest)
    mode, _, metric = (history.keep_best or "").partition(":")
    best = (mode, metric) if metric else None
    return choose_kept(list_checkpoints(layout), line, history.keep_last, best)


def _summary(path: Path, step: int, attempt: int, because: str | None) -> CheckpointSummary:
    try:
        found = read_manifest(path)
    except CheckpointError:
        return CheckpointSummary(
            str(path), step, is_turn(path), attempt, None, None, None, because, {}, True, None
        )
    return CheckpointSummary(
        folder=str(path),
        step=step,
        at_turn=is_turn(path),
        attempt=attempt,
        age_seconds=max(0.0, time.time() - found.saved_at),
        size_bytes=found.size_bytes,
        reason=found.reason,
        kept_because=because,
        metrics=found.metrics,
        is_damaged=False,
        ranks=len(found.files),
    )


def verify_all(folder: Path) -> Iterator[Verified]:
    """Read every byte of every checkpoint, oldest first, and change nothing."""
    layout, _ = find_run(folder)
    for step, attempt, path in layout.checkpoint_folders():
        size_bytes = _summary(path, step, attempt, None).size_bytes
        damage = find_damage(path)
        gone = bool(damage) and not path.exists()
        yield Verified(str(path), step, attempt, size_bytes, [] if gone else damage, gone)
