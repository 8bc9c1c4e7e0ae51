"""One checkpoint from commit to retention, by the keeper or the trainer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from holdfast._errors import SaveFailed
from holdfast._store.commit.chunks import Labour
from holdfast._store.commit.dedup import Former
from holdfast._store.commit.retention import Kept, remove_others
from holdfast._store.commit.source import Source
from holdfast._store.commit.write import (
    CheckpointCommit,
    close_checkpoint,
    commit_checkpoint,
    explain,
    refuse_if_replaced,
)
from holdfast._store.commit.write_queue import Turns
from holdfast._store.folder import journal
from holdfast._store.folder.atomic import remove_folder
from holdfast._store.folder.attempts import read_origins
from holdfast._store.folder.layout import RunLayout
from holdfast._store.format.manifest import DataFile


@dataclass(frozen=True)
class Policy:
    """What the trainer tells the keeper once, at its start: most settings are here."""

    layout: RunLayout
    run_id: str
    attempt: int
    line: dict[int, int | None]
    keep_last: int
    best: tuple[str, str] | None
    version: str
    rank: int = 0
    size: int = 1  # of the world
    requeue_limit: int = 3  # of a job, while no attempt makes a step
    hang_seconds: float | None = None  # without a step; None: learned from the run
    hang_restarts: bool = False  # True if `--hang-timeout` asked for a restart
    mirror: str | None = None  # the address of the mirror
    mirror_keep_last: int = 3
    notices: str = "off"  # of which cloud; "auto" to find out
    keep_memory_seconds: float = 0.0  # for the next attempt, after a death


class Durable(NamedTuple):
    """A committed checkpoint: what the next one may share, and how long it took."""

    former: Former
    seconds: float


@dataclass(frozen=True)
class State:
    """A state of some attempt that is to be kept, and why."""

    attempt: int
    step: int
    reason: str
    metrics: dict[str, float | None]
    at_turn: bool = False


def keep_checkpoint(
    policy: Policy,
    state: State,
    source: Source,
    labour: Labour,
    former: Former | None = None,
    turns: Turns | None = None,
) -> Durable | None:
    """Commit an image and record it in the journal; None if it is committed already."""
    began = time.monotonic()
    commit = commit_of(policy, state, turns)
    refuse_if_replaced(commit.layout, commit.run_id)
    if commit.final.exists():
        return None
    written = commit_checkpoint(commit, source, labour, former)
    seconds = time.monotonic() - began
    with commit.turns.take_note(commit.key):
        note_checkpoint(policy, state, commit, source.size_bytes, written.own_bytes, seconds)
    return Durable(written, seconds)


def keep_parts(
    policy: Policy,
    state: State,
    partial: Path,
    files: Sequence[DataFile],
    began: float,
    turns: Turns,
) -> None:
    """Commit a checkpoint whose parts the ranks have written."""
    commit = commit_of(policy, state, turns)
    size_bytes = sum(file.image_bytes for file in files)
    own_bytes = sum(file.size_bytes for file in files)
    try:
        close_checkpoint(commit, partial, files)
    except OSError as error:
        raise SaveFailed(explain(policy.layout, error, size_bytes)) from error
    finally:
        remove_folder(partial)
    seconds = time.monotonic() - began
    with commit.turns.take_note(commit.key):
        note_checkpoint(policy, state, commit, size_bytes, own_bytes, seconds)


def commit_of(policy: Policy, state: State, turns: Turns | None = None) -> CheckpointCommit:
    """The commit of this state."""
    return CheckpointCommit(
        layout=policy.layout,
        run_id=policy.run_id,
        attempt=state.attempt,
        writer_attempt=policy.attempt,
        step=state.step,
        at_turn=state.at_turn,
        reason=state.reason,
        metrics=state.metrics,
        origin=read_origins(policy.layout, [state.attempt]).get(state.attempt),
        version=policy.version,
        turns=turns or Turns(),
    )


def note_checkpoint(
    policy: Policy,
    state: State,
    commit: CheckpointCommit,
    size_bytes: int,
    own_bytes: int,
    seconds: float,
) -> None:
    """Record a durable checkpoint in the journal."""
    written = {"written_bytes": own_bytes} if own_bytes < size_bytes else {}
    ranks = {"ranks": policy.size} if policy.size > 1 else {}
    journal.append(
        policy.layout.journal,
        "checkpoint",
        step=state.step,
        attempt=state.attempt,
        reason=state.reason,
        size_bytes=size_bytes,
        seconds=round(seconds, 4),
        name=commit.final.name,
        metrics=state.metrics,
        **written,
        **ranks,
    )


def remove_old(policy: Policy, known: dict[Path, Kept] | None = None) -> None:
    """Remove the checkpoints that are not kept; `known` caches what was read of them."""
    remove_others(policy.layout, policy.line, policy.keep_last, policy.best, known)
