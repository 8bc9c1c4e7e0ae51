"""One checkpoint from commit to retention: the same way for keeper and trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast._keeper.persist import Commit, commit_checkpoint
from holdfast._keeper.retention import remove_others
from holdfast._record import journal
from holdfast._record.attempts import read_origins
from holdfast._record.image import Extent
from holdfast._record.layout import RunLayout


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
    commit = Commit(
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
    path = policy.layout.checkpoint(state.step, state.attempt, state.at_turn)
    if path.exists():
        return 0.0
    commit_checkpoint(commit, views, extents, digests)
    seconds = time.monotonic() - began
    journal.append(
        policy.layout.journal,
        "checkpoint",
        step=state.step,
        attempt=state.attempt,
        reason=state.reason,
        size_bytes=sum(view.nbytes for view in views),
        seconds=round(seconds, 4),
        name=path.name,
        metrics=state.metrics,
    )
    return seconds


def remove_old(policy: Policy) -> None:
    """Remove the checkpoints that need not be kept any more."""
    remove_others(policy.layout, policy.line, policy.keep_last, policy.best)
