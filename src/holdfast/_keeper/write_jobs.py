"""What the keeper's writer is given, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast._keeper.held import HeldArena
from holdfast._keeper.keep import State
from holdfast._keeper.write_queue import Key, Urgency
from holdfast._record.manifest import DataFile
from holdfast._save.arena import SlotRecord
from holdfast._save.control import mark_of


@dataclass(frozen=True)
class Job:
    """One slot that is to become a checkpoint."""

    held: HeldArena
    record: SlotRecord
    reason: str
    order: int | None = None  # the trainer's number for it
    leave_status: int | None = None  # tell the trainer to leave when it is durable
    partial: Path | None = None  # where it is a part of a checkpoint of several ranks
    is_last: bool = False  # only the newest state counts now
    is_pinned: bool = True  # else the slot is the newest one, when its turn comes

    @property
    def key(self) -> Key:
        return self.held.arena.attempt, self.record.mark

    @property
    def urgency(self) -> Urgency:
        return Urgency.of(self.reason, is_last=self.is_last)

    @property
    def is_kept(self) -> bool:
        return self.leave_status is not None


@dataclass(frozen=True)
class Closing:
    """A checkpoint whose parts are durable: what is missing is the manifest."""

    state: State
    partial: Path
    files: list[DataFile]
    began: float
    urgency: Urgency = Urgency.ASKED
    is_kept: bool = True

    @property
    def key(self) -> Key:
        return self.state.attempt, mark_of(self.state.step, self.state.at_turn)


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    job: Job
    error: str | None
    is_fenced: bool
    seconds: float
    file: DataFile | None = None  # the part of a checkpoint
    head: dict[str, Any] = field(default_factory=dict)  # what stands beside the tensors
    is_dropped: bool = False  # a newer state is, or will be, durable in its place
