"""`holdfast ls` and `holdfast verify`: what the checkpoints of a run are, and if they are whole."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from holdfast import _text
from holdfast._errors import CheckpointError
from holdfast._report.status.gather import only_run, read_history
from holdfast._store.commit.retention import choose_kept, list_checkpoints
from holdfast._store.folder.attempts import find_run, known_origins
from holdfast._store.folder.layout import is_epoch_end
from holdfast._store.folder.lineage import trace_line
from holdfast._store.read.verify import find_damage, read_manifest
from holdfast._tools.cli.group import AS_JSON, RUN, print_json
from holdfast._tools.cli.show import Screen, some

NOT_KEPT = "goes with the next one"


@click.command()
@RUN
@AS_JSON
def ls(run: Path, as_json: bool) -> None:
    """List the checkpoints of a run, and why each is kept.

    \b
    Example:
      holdfast ls runs/a
    """
    run = only_run(run)
    found = list_with_reasons(run)
    if as_json:
        print_json(asdict(found))
        return
    _show_checkpoints(Screen(), run, found)


@click.command()
@RUN
@AS_JSON
def verify(run: Path, as_json: bool) -> int:
    """Check every byte of every checkpoint of a run.

    Reads only: nothing is moved or changed. The exit status is 1 if a checkpoint is damaged. A run
    never loads a damaged checkpoint: it resumes from the previous one.

    \b
    Example:
      holdfast verify runs/a
    """
    run = only_run(run)
    screen = Screen()
    verdicts = []
    for verdict in verify_all(run):
        verdicts.append(verdict)
        if not as_json:
            _show_verdict(screen, verdict)
    if as_json:
        print_json([asdict(verdict) for verdict in verdicts])
    elif not verdicts:
        screen.write(f"{_text.name(run)}: no checkpoints yet.")
    return int(any(verdict.damage for verdict in verdicts))


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    folder: str
    step: int
    at_turn: bool  # of an epoch
    attempt: int
    age_seconds: float | None = None
    size_bytes: int | None = None
    reason: str | None = None  # why it was made
    kept_because: str | None = None  # None: the run did not say how many it keeps
    metrics: dict[str, float | None] = field(default_factory=dict)
    is_damaged: bool = False  # the manifest cannot be read; `verify` reads the rest
    ranks: int | None = None  # that made it


@dataclass(frozen=True, slots=True)
class CheckpointList:
    """All checkpoints of a run, oldest first."""

    checkpoints: list[CheckpointSummary]
    watched: str | None  # the metric of keep_best
    set_aside: list[str]  # damaged or unfinished ones, which are never loaded


@dataclass(frozen=True, slots=True)
class Verified:
    folder: str
    step: int
    attempt: int
    size_bytes: int | None
    damage: list[str]
    is_gone: bool  # removed by the run meanwhile


def list_with_reasons(folder: Path) -> CheckpointList:
    layout, _ = find_run(folder)
    history = read_history(layout)
    mode, _, metric = (history.keep_best or "").partition(":")
    kept = None
    if history.keep_last is not None:
        line = trace_line(known_origins(layout), max(layout.attempt_numbers(), default=0))
        best = (mode, metric) if metric else None
        kept = choose_kept(list_checkpoints(layout), line, history.keep_last, best)
    found = [
        _summary(path, step, attempt, None if kept is None else kept.get(path, NOT_KEPT))
        for step, attempt, path in layout.checkpoint_folders()
    ]
    aside = layout.set_aside
    set_aside = sorted(entry.name for entry in aside.iterdir()) if aside.is_dir() else []
    return CheckpointList(found, metric if history.keep_best else None, set_aside)


def _summary(path: Path, step: int, attempt: int, because: str | None) -> CheckpointSummary:
    about: dict[str, Any] = {"is_damaged": True}
    with contextlib.suppress(CheckpointError):
        found = read_manifest(path)
        about = {
            "age_seconds": max(0.0, time.time() - found.saved_at),
            "size_bytes": found.size_bytes,
            "reason": found.reason,
            "metrics": found.metrics,
            "ranks": len(found.files),
        }
    is_end = is_epoch_end(path)
    return CheckpointSummary(str(path), step, is_end, attempt, kept_because=because, **about)


def verify_all(folder: Path) -> Iterator[Verified]:
    """Read every byte of every checkpoint, oldest first, and change nothing."""
    layout, _ = find_run(folder)
    for step, attempt, path in layout.checkpoint_folders():
        size_bytes = _summary(path, step, attempt, None).size_bytes
        damage = find_damage(path)
        gone = bool(damage) and not path.exists()
        yield Verified(str(path), step, attempt, size_bytes, [] if gone else damage, gone)


def _show_checkpoints(screen: Screen, folder: Path, found: CheckpointList) -> None:
    if not found.checkpoints:
        screen.write(f"{_text.name(folder)}: no checkpoints yet.")
    else:
        titles = [">=step", ">=age", ">=size", "metrics", "kept because", ">attempt"]
        if any((each.ranks or 1) > 1 for each in found.checkpoints):
            titles.append(">ranks")
        rows = [_row(each, found.watched)[: len(titles)] for each in found.checkpoints]
        screen.table(titles, rows)
        total = sum(each.size_bytes or 0 for each in found.checkpoints)
        count = _text.count(len(found.checkpoints), "checkpoint")
        screen.write(f"{count}, {_text.size(total)}", style="dim")
    if found.set_aside:
        screen.write(
            f"{len(found.set_aside)} damaged or unfinished, never loaded: "
            f"{_text.name(folder)}/set-aside",
            style="yellow",
        )


def _row(each: CheckpointSummary, watched: str | None) -> list[str | Text]:
    # The metric of keep_best comes first.
    names = sorted(each.metrics, key=lambda name: (name != watched, name))
    metrics = ", ".join(f"{name} {_text.number(each.metrics[name])}" for name in names)
    return [
        f"{each.step} (end of epoch)" if each.at_turn else str(each.step),
        "" if each.age_seconds is None else _text.duration(each.age_seconds),
        "" if each.size_bytes is None else _text.size(each.size_bytes),
        Text("damaged manifest", style="bold red") if each.is_damaged else metrics,
        each.kept_because or "unknown",
        str(each.attempt),
        "" if each.ranks is None else str(each.ranks),
    ]


def _show_verdict(screen: Screen, verdict: Verified) -> None:
    label = f"step {verdict.step} (attempt {verdict.attempt}): "
    if verdict.is_gone:
        screen.write(f"{label}removed by the run meanwhile", style="dim")
    elif verdict.damage:
        shown = some(list(map(_text.name, verdict.damage)), between="; ")
        screen.write(Text.assemble(label, ("DAMAGED", "bold red"), f": {shown}"))
    else:
        size = "" if verdict.size_bytes is None else f", {_text.size(verdict.size_bytes)}"
        screen.write(Text.assemble(label, ("whole", "green"), size))
