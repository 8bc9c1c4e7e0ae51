"""One checkpoint from commit to retention: the same way for keeper and trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast._errors import SaveFailed
from holdfast._keeper.persist import Commit, close_checkpoint, commit_checkpoint, explain
from holdfast._keeper.retention import remove_others
from holdfast._record import journal
from holdfast._record.atomic import remove_folder
from holdfast._record.attempts import read_origins
from holdfast._record.image import Extent
from holdfast._record.layout import RunLayout
from holdfast._record.manifest import DataFile


@dataclass(frozen=True)
class Policy:
    """What stays the same for all checkpoints of an attempt."""

    layout: RunLayout
    run_id: str
    attempt: int
    line: dict[int, int | None]
    keep_last: int
    best: tuple[str, str] | None
    version: str
    rank: int = 0
    size: int = 1  # of the world
    requeue_limit: int = 3  # of a job, while no life makes a step
    hang_seconds: float | None = None  # without a step; None: learned from the run
    hang_restarts: bool = False  # whether whoever leads it wants it to leave then


@dataclass(frozen=True)
class State:
    """What is to be kept: a state of some attempt, and why."""

    attempt: int
    step: int
    reason: str
    metrics: dict[str, float | None]
    at_turn: bool = False


def keep_checkpoint(
    policy: Policy,
    state: State,
    views: Sequence[memoryview],
    extents: Sequence[Extent],
    digests: Callable[[], Sequence[bytes]],
) -> float:
    """Commit an image and note it in the journal; returns the seconds."""
    began = time.monotonic()
    commit = commit_of(policy, state)
    if commit.final.exists():
        return 0.0
    commit_checkpoint(commit, views, extents, digests)
    seconds = time.monotonic() - began
    note_checkpoint(policy, state, commit, sum(view.nbytes for view in views), seconds)
    return seconds


def keep_parts(
    policy: Policy, state: State, partial: Path, files: Sequence[DataFile], began: float
) -> None:
    """Commit a checkpoint whose parts the ranks have written."""
    commit = commit_of(policy, state)
    size_bytes = sum(file.size_bytes for file in files)
    try:
        close_checkpoint(commit, partial, files)
    except OSError as error:
        raise SaveFailed(explain(policy.layout, error, size_bytes)) from error
    finally:
        remove_folder(partial)
    note_checkpoint(policy, state, commit, size_bytes, time.monotonic() - began)


def commit_of(policy: Policy, state: State) -> Commit:
    """What is to be committed when this state is kept."""
    return Commit(
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
    )


def note_checkpoint(
    policy: Policy, state: State, commit: Commit, size_bytes: int, seconds: float
) -> None:
    """Tell the journal of a checkpoint that is durable."""
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
        **ranks,
    )


def remove_old(policy: Policy) -> None:
    """Remove the checkpoints that need not be kept any more."""
    remove_others(policy.layout, policy.line, policy.keep_last, policy.best)
