"""Which checkpoints are kept."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast._errors import CheckpointError
from holdfast._store.folder.atomic import discard_folder, remove_folder
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import is_on_line
from holdfast._store.format import manifest

MEMORY = "memory"  # the reason of a checkpoint that is made before memory runs out


@dataclass(frozen=True)
class Kept:
    """What retention knows of a committed checkpoint."""

    step: int
    attempt: int
    path: Path
    metrics: Mapping[str, float | None]
    reason: str = ""


def list_checkpoints(layout: RunLayout, known: dict[Path, Kept] | None = None) -> list[Kept]:
    """The committed checkpoints, oldest first; a damaged one has no metrics.

    `known` is a cache of manifests.
    """
    known = {} if known is None else known
    found = []
    for step, attempt, path in layout.checkpoint_folders():
        if path not in known:
            metrics: dict[str, float | None] = {}
            reason = ""
            with contextlib.suppress(OSError, CheckpointError):
                read = manifest.read(path, head=True)
                metrics, reason = read.metrics, read.reason
            known[path] = Kept(step, attempt, path, metrics, reason)
        found.append(known[path])
    return found


def choose_kept(
    checkpoints: Sequence[Kept],
    line: Mapping[int, int | None],
    keep_last: int,
    best: tuple[str, str] | None,
) -> dict[Path, str]:
    """The checkpoints to keep, each with the reason; those off the lineage are all kept."""
    kept: dict[Path, str] = {}
    own = []
    for checkpoint in checkpoints:
        if is_on_line(line, checkpoint.attempt, checkpoint.step):
            own.append(checkpoint)
        else:
            kept[checkpoint.path] = "of another line"
    for checkpoint in _without_hurried(own)[-keep_last:]:
        kept[checkpoint.path] = f"last {keep_last}"
    if best is not None:
        mode, metric = best
        sign = 1 if mode == "min" else -1
        rated = [(sign * value, c) for c in own if (value := c.metrics.get(metric)) is not None]
        if rated:
            chosen = min(rated, key=lambda pair: pair[0])[1]
            reason = f"best {mode}:{metric}"
            kept[chosen.path] = f"{kept[chosen.path]}, {reason}" if chosen.path in kept else reason
    return kept


def _without_hurried(checkpoints: Sequence[Kept]) -> list[Kept]:
    """Of consecutive checkpoints that were made while memory ran out, only the newest counts.

    They are seconds apart, and would push out older ones that are hours apart.
    """
    counted = [
        each
        for each, after in itertools.pairwise(checkpoints)
        if (each.reason, after.reason) != (MEMORY, MEMORY)
    ]
    return [*counted, *checkpoints[-1:]]


def remove_others(
    layout: RunLayout,
    line: Mapping[int, int | None],
    keep_last: int,
    best: tuple[str, str] | None,
    known: dict[Path, Kept] | None = None,
) -> list[Path]:
    """Remove the checkpoints that are not kept; returns their paths."""
    for leftover in layout.half_removed_folders():
        remove_folder(leftover)
    checkpoints = list_checkpoints(layout, known)
    kept = choose_kept(checkpoints, line, keep_last, best)
    gone = [c.path for c in checkpoints if c.path not in kept]
    for path in gone:
        with contextlib.suppress(OSError):
            discard_folder(path)
        if known is not None:
            known.pop(path, None)
    return gone
