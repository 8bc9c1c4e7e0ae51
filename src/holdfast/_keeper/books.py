"""What the hub does to the run folder: begin a checkpoint, close it, note what happened."""

from __future__ import annotations

import time
from typing import Any, Protocol

from holdfast._errors import SaveFailed
from holdfast._keeper.keep import Policy, State
from holdfast._keeper.persist import begin_checkpoint, explain
from holdfast._keeper.table import Key
from holdfast._keeper.writer import Closing, Writer
from holdfast._record import journal
from holdfast._record.manifest import DataFile, Part


class _Keeper(Protocol):
    _writer: Writer

    def _write_seconds(self) -> float: ...


class HubBooks:
    """The hub's hands."""

    def __init__(self, policy: Policy, keeper: Any) -> None:
        self._policy = policy
        self._keeper = keeper
        self._began: dict[Key, float] = {}

    def begin(self, key: Key) -> str | None:
        """The folder that the ranks write into; None if the checkpoint is there already."""
        attempt, mark = key
        layout = self._policy.layout
        final = layout.checkpoint(mark // 2, attempt, bool(mark % 2))
        if final.exists():
            return None
        self._began[key] = time.monotonic()
        try:
            return begin_checkpoint(layout, final).name
        except OSError as error:
            raise SaveFailed(explain(layout, error, 0)) from error

    def commit(self, key: Key, reason: str, files: dict[int, dict[str, Any]]) -> None:
        """All parts are durable: have the manifest written."""
        attempt, mark = key
        layout = self._policy.layout
        state = State(attempt, mark // 2, reason, files[0]["metrics"], bool(mark % 2))
        final = layout.checkpoint(mark // 2, attempt, bool(mark % 2))
        parts = [
            DataFile(f["name"], f["size_bytes"], tuple(Part(**part) for part in f["parts"]))
            for _, f in sorted(files.items())
        ]
        import os

        partial = layout.partial(final, os.getpid())
        closing = Closing(state, partial, parts, self._began.pop(key, time.monotonic()))
        self._keeper._writer.submit(closing)

    def note(self, event: str, **fields: Any) -> None:
        journal.append(self._policy.layout.journal, event, **fields)

    def write_seconds(self) -> float:
        return float(self._keeper._write_seconds())
