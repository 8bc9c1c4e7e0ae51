"""A run folder written by hand, moment by moment, in the real format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast._store.folder import series
from holdfast._store.folder.layout import RunLayout

BEGIN = 1_700_000_000.0


class Book:
    """Writes what trainer and keeper would have written; times are seconds since the beginning."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.layout = RunLayout(folder)
        for path in (self.layout.attempts, self.layout.checkpoints, self.layout.requests):
            path.mkdir(parents=True)
        self.layout.identity.write_text(json.dumps({"run_id": "ab" * 16, "created": BEGIN}))

    def note(self, at: float, event: str, **fields: Any) -> None:
        with self.layout.journal.open("a") as file:
            file.write(json.dumps({"time": BEGIN + at, "event": event, **fields}) + "\n")

    def begin(
        self, number: int, at: float, step: int = 0, origin: int | None = None, **start: Any
    ) -> None:
        """Two seconds after it took the folder it trains."""
        self.layout.attempt(number).mkdir()
        process = {"pid": 100 + number, "started": "1", "host": "n1", "boot": "b", "namespace": "x"}
        self._put(self.layout.lease(number), {"process": process, "since": BEGIN + at})
        told = None if origin is None else step
        self._put(self.layout.origin(number), {"attempt": origin, "step": told})
        source = "new" if origin is None else "disk"
        self.note(
            at + 2, "start", attempt=number, step=step, source=source, pid=100 + number, **start
        )
        self.note(at + 2, "loop", attempt=number, step=step, total=1000)

    def row(self, number: int, at: float, step: int, n: int = 1, **fields: Any) -> None:
        series.append(
            self.layout.series(number),
            {"t": BEGIN + at, "s": step, "n": n, **fields},
        )

    def rows(self, number: int, at: float, first: int, last: int, seconds: float = 1.0) -> None:
        """A step in so many seconds, with its loss."""
        for made, step in enumerate(range(first + 1, last + 1), start=1):
            loss = 100.0 - step + number / 10
            pairs = [[series.bucket_of(seconds), 1]]
            metrics = {"loss": [loss, loss, loss, 1, 0, step - 1]}
            self.row(number, at + made * seconds, step, h=pairs, m=metrics)

    def checkpoint(self, number: int, at: float, step: int) -> None:
        name = self.layout.checkpoint(step, number).name
        size = {"size_bytes": 1000, "seconds": 0.5, "name": name, "metrics": {}}
        self.note(at, "checkpoint", step=step, attempt=number, reason="cadence", **size)

    def end(self, number: int, at: float, event: str = "exit", **record: Any) -> None:
        self.note(at, event, attempt=number, **record)
        told = {**record, "time": BEGIN + at} if event == "exit" else record
        self._put(self.layout.exit(number), told)

    @staticmethod
    def _put(path: Path, record: dict[str, Any]) -> None:
        path.write_text(json.dumps(record))


def killed_and_resumed(folder: Path) -> Book:
    """100 steps in 100 s, killed; goes on from step 80 after a while, to step 200."""
    book = Book(folder)
    book.begin(1, 0)
    book.rows(1, 2, 0, 100)
    book.checkpoint(1, 82, 80)
    book.end(1, 103, "death", status=None, how="was killed by SIGKILL", step=100, durable_step=80)
    book.begin(2, 200, 80, origin=1)
    book.rows(2, 202, 80, 200)
    book.note(322, "finished", step=200, total=200, attempt=2)
    book.end(2, 323, status=0, how="closed", step=200, durable_step=200)
    return book
