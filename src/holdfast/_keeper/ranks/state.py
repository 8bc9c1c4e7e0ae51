"""What the parts of the hub share: the ranks, the run folder, the writer and the scheduler."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdfast._errors import SaveFailed
from holdfast._keeper import protocol
from holdfast._keeper.timers import in_background
from holdfast._keeper.writer import Closing
from holdfast._store.commit.write import State, begin_checkpoint, explain, refuse_if_replaced
from holdfast._store.commit.write_queue import Key
from holdfast._store.folder.atomic import remove_folder
from holdfast._store.folder.layout import writer_of
from holdfast._store.folder.lineage import set_aside_void
from holdfast._store.format.manifest import DataFile

if TYPE_CHECKING:
    from holdfast._keeper.keeper import Keeper

_PACE_SECONDS = 0.02  # between two observations that give a rank's speed


@dataclass
class EndCause:
    """How one rank ended, or why all do."""

    rank: int
    how: str
    kind: str
    host: str = ""
    status: int = 0

    def sentence(self) -> str:
        """For the last line of the other ranks."""
        if self.kind in ("asked", "hung"):
            return self.how
        where = f" on {self.host}" if self.host else ""
        return f"rank {self.rank}{where} {self.how}"


@dataclass
class RankEntry:
    """What is known of one rank."""

    rank: int
    is_here: bool = False
    held: set[Key] = field(default_factory=set)
    ended: EndCause | None = None  # its trainer is dead or has left
    released: bool = False  # its keeper may go
    lost_at: float | None = None
    past: int = -1  # up to this mark it cannot save any more what it has not saved
    beat: dict[str, Any] = field(default_factory=dict)

    pace: tuple[float, int, float] = (0.0, 0, 0.0)  # time, mark, and marks a second

    @property
    def trains(self) -> bool:
        return self.is_here and self.ended is None

    def observe(self, now: float, mark: int) -> None:
        """Record how far it has come."""
        when, seen, rate = self.pace
        if mark >= seen:  # also if it stands still: it may have been fast before
            if seen and now - when >= _PACE_SECONDS:
                rate = (mark - seen) / (now - when)
            self.pace = (now, mark, rate)

    def expected_at(self, when: float) -> float:
        """The mark that it will have reached."""
        then, mark, rate = self.pace
        return mark + rate * (when - then)


@dataclass
class RankRequest:
    """A request that all ranks do something at one boundary."""

    kind: str  # "stop" or "save"
    reason: str
    status: int = 0
    signal: int = 0
    grace: float | None = None
    rank: int = 0


@dataclass(eq=False)
class HubState:
    """The ranks, and what the parts of the hub reach the outside with."""

    size: int
    attempt: int
    send: Callable[..., None]  # (rank, kind, **fields)
    services: KeeperServices
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.entries = {rank: RankEntry(rank) for rank in range(self.size)}
        self.all_keepers: protocol.FromHub = protocol.sender(self._send_all)
        self.all_trainers: protocol.ToTrainer = protocol.sender(self._send_all)

    def keeper(self, rank: int) -> protocol.FromHub:
        found: protocol.FromHub = protocol.sender(functools.partial(self.send, rank))
        return found

    def trainer(self, rank: int) -> protocol.ToTrainer:
        """Its keeper passes these on."""
        found: protocol.ToTrainer = protocol.sender(functools.partial(self.send, rank))
        return found

    def _send_all(self, kind: str, /, **fields: Any) -> None:
        for rank in self.entries:
            self.send(rank, kind, **fields)

    def training_ranks(self) -> list[int]:
        return [rank for rank, entry in self.entries.items() if entry.trains]

    def remaining_ranks(self) -> list[int]:
        """Also those that are not here yet: a hub that was replaced must wait for them."""
        return [rank for rank, entry in self.entries.items() if entry.ended is None]


class KeeperServices:
    """The hub's access to run folder, writer and scheduler."""

    def __init__(self, keeper: Keeper) -> None:
        self._job = job = keeper.time_limit.job
        self._policy = keeper.policy
        self._storage = keeper.storage
        self._timers = keeper.timers
        self.note = keeper.journal
        self.write_seconds = keeper.storage.write_seconds
        self.grace_of = keeper.time_limit.grace_of
        # True if a scheduler can be asked why the run ends, and for a requeue.
        self.has_job = job is not None
        self._began: dict[Key, float] = {}
        self._closing: set[str] = set()  # folders that get their manifest

    def begin(self, key: Key) -> str | None:
        """The folder that the ranks write into; None if the checkpoint is there already."""
        attempt, mark = key
        layout = self._policy.layout
        final = layout.checkpoint(mark // 2, attempt, bool(mark % 2))
        refuse_if_replaced(layout, self._policy.run_id)
        if final.exists():
            return None
        self._began[key] = time.monotonic()
        try:
            name = begin_checkpoint(layout, final).name
        except OSError as error:
            raise SaveFailed(explain(layout, error, 0)) from error
        self._closing.discard(name)
        return name

    def remove_given_up(self, wanted: Collection[str]) -> None:
        """Remove what the ranks have written of checkpoints that will not be complete."""
        for folder in self._policy.layout.partial_folders():
            is_needed = folder.name in wanted or folder.name in self._closing
            if writer_of(folder) == os.getpid() and not is_needed:
                remove_folder(folder)

    def commit(self, key: Key, reason: str, files: dict[int, dict[str, Any]]) -> None:
        """All parts are durable: queue the manifest for writing."""
        attempt, mark = key
        layout = self._policy.layout
        state = State(attempt, mark // 2, reason, files[0]["metrics"], bool(mark % 2))
        final = layout.checkpoint(mark // 2, attempt, bool(mark % 2))
        parts = [DataFile.from_json(file) for _, file in sorted(files.items())]
        partial = layout.partial(final, os.getpid())
        self._closing.add(partial.name)
        closing = Closing(state, partial, parts, self._began.pop(key, time.monotonic()))
        self._storage.writer.submit(closing)

    def set_aside_void(self) -> None:
        """Set invalid checkpoints aside before a rank leaves because of them."""
        for before, _ in set_aside_void(self._policy.layout):
            self.note("set-aside", name=before.name, why="called bad")

    def preemption_seconds(self) -> float | None:
        """What is left of the grace of a preemption, if it is one."""
        return None if self._job is None else self._job.preemption_seconds()

    def resolve_stop(self, wish: RankRequest, then: Callable[[RankRequest], None]) -> None:
        """Ask the scheduler why a stop is asked for, then continue with the answer."""
        job = self._job
        assert job is not None

        def ask() -> Callable[[], None]:
            reason, status = job.resolve_stop(wish.reason, wish.status, wish.signal)
            return lambda: then(replace(wish, reason=reason, status=status))

        self._in_background(ask)

    def requeue(self, step: int | None, then: Callable[[str, int], None]) -> None:
        """Requeue the job, then continue with the result."""
        job = self._job
        assert job is not None

        def ask() -> Callable[[], None]:
            found = job.requeue(step)
            return lambda: then(found.said, found.status)

        self._in_background(ask)

    def _in_background(self, ask: Callable[[], Callable[[], None]]) -> None:
        """Ask in a thread; what follows is done in the keeper's loop."""
        in_background(lambda: self._timers.after(0.0, ask()))
