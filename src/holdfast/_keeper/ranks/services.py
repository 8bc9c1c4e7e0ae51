"""What the hub does outside of itself: in the run folder, and with the scheduler."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holdfast._errors import SaveFailed
from holdfast._keeper.ranks.state import RankRequest
from holdfast._keeper.time_limit import in_background
from holdfast._keeper.writer import Closing
from holdfast._store.commit.write import State, begin_checkpoint, explain, refuse_if_replaced
from holdfast._store.commit.write_queue import Key
from holdfast._store.folder import journal
from holdfast._store.folder.invalid import set_aside_void
from holdfast._store.format.manifest import DataFile

if TYPE_CHECKING:
    from holdfast._keeper.keeper import Keeper


class KeeperServices:
    """The hub's access to run folder, writer and scheduler."""

    def __init__(self, keeper: Keeper) -> None:
        self._policy = keeper.policy
        self._storage = keeper.storage
        self._limit = keeper.time_limit
        self._job = keeper.time_limit.job
        self._timers = keeper.timers
        self._began: dict[Key, float] = {}

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
            return begin_checkpoint(layout, final).name
        except OSError as error:
            raise SaveFailed(explain(layout, error, 0)) from error

    def commit(self, key: Key, reason: str, files: dict[int, dict[str, Any]]) -> None:
        """All parts are durable: queue the manifest for writing."""
        attempt, mark = key
        layout = self._policy.layout
        state = State(attempt, mark // 2, reason, files[0]["metrics"], bool(mark % 2))
        final = layout.checkpoint(mark // 2, attempt, bool(mark % 2))
        parts = [DataFile.from_json(file) for _, file in sorted(files.items())]
        partial = layout.partial(final, os.getpid())
        closing = Closing(state, partial, parts, self._began.pop(key, time.monotonic()))
        self._storage.writer.submit(closing)

    def note(self, event: str, **fields: Any) -> None:
        fields.setdefault("attempt", self._policy.attempt)
        journal.append(self._policy.layout.journal, event, **fields)

    def set_aside_void(self) -> None:
        """Set invalid checkpoints aside before a rank leaves because of them."""
        for before, _ in set_aside_void(self._policy.layout):
            self.note("set-aside", name=before.name, why="called bad")

    def write_seconds(self) -> float:
        return self._storage.write_seconds()

    def grace_of(self, number: int) -> float | None:
        """The seconds that a signal leaves."""
        return self._limit.grace_of(number)

    def preemption_seconds(self) -> float | None:
        """What is left of the grace of a preemption, if it is one."""
        return None if self._job is None else self._job.preemption_seconds()

    @property
    def has_job(self) -> bool:
        """True if a scheduler can be asked why the run ends, and for a requeue."""
        return self._job is not None

    def settle(self, wish: RankRequest, then: Callable[[RankRequest], None]) -> None:
        """Ask the scheduler why a stop is asked for, then continue with the answer."""
        job = self._job
        assert job is not None

        def ask() -> None:
            found = job.settle(wish.reason, wish.status, wish.signal)
            settled = replace(wish, reason=found.reason, status=found.status)
            self._timers.after(0.0, lambda: then(settled))

        in_background(ask)

    def requeue(self, step: int | None, then: Callable[[str, int], None]) -> None:
        """Requeue the job, then continue with the result."""
        job = self._job
        assert job is not None

        def ask() -> None:
            found = job.requeue(step)
            self._timers.after(0.0, lambda: then(found.said, found.status))

        in_background(ask)
