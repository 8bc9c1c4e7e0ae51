"""Run folders without a training, as far as the list of runs reads them."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from holdfast._environment.processes.identity import ProcessIdentity
from holdfast._store.folder import journal
from holdfast._store.folder.attempts import open_folder, write_json
from holdfast._store.folder.layout import RunLayout

ELSEWHERE = ProcessIdentity(4711, "1", "gpu-07", "another boot", "another namespace")


def make_run(folder: Path, step: int = 90, total: int = 100) -> RunLayout:
    """A run that was stopped on another machine."""
    layout, _ = open_folder(folder)
    layout.attempt(1).mkdir()
    write_json(layout.lease(1), {"process": asdict(ELSEWHERE), "since": time.time()})
    beat(layout, step)
    journal.append(layout.journal, "start", attempt=1, step=0)
    journal.append(layout.journal, "loop", total=total)
    journal.append(layout.journal, "stop", attempt=1)
    leave(layout, step)
    return layout


def make_live(folder: Path, step: int = 10) -> RunLayout:
    """One on another machine that lives as long as somebody calls `beat`."""
    layout = make_run(folder, step)
    layout.exit(1).unlink()
    layout.journal.write_text(json.dumps({"event": "start", "attempt": 1, "step": 0}) + "\n")
    return layout


def beat(layout: RunLayout, step: int) -> None:
    record = {"beat": time.time_ns(), "time": time.time(), "step": step, "slots": 3}
    write_json(layout.heartbeat(1), record, durable=False)


def leave(layout: RunLayout, step: int) -> None:
    record = {"status": 130, "how": "asked", "step": step, "time": time.time()}
    write_json(layout.exit(1), record, durable=False)
