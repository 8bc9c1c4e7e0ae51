"""Asking a run to stop or to save, and waiting until it has."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast._record import journal
from holdfast._record.attempts import find_run, is_live, lease_holder, read_json
from holdfast._record.layout import RunLayout
from holdfast._status.gather import RunSummary, summarize
from holdfast._status.ranks import keepers_of
from holdfast._stop.request import ask

_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was left for a run."""

    layout: RunLayout
    attempt: int
    pid: int
    host: str
    events: int  # how long the journal was before
    beat: dict[str, Any]  # the last of its keeper


def ask_run(folder: Path, kind: str, **details: object) -> Asked:
    """Leave a request; FolderError if no process trains there now."""
    layout, _ = find_run(folder)
    events = sum(1 for _ in journal.read(layout.journal))
    attempt = ask(folder, kind, **details)
    holder = lease_holder(layout, attempt)
    assert holder is not None  # else it would not have counted as live
    beat = read_json(layout.heartbeat(attempt))
    return Asked(layout, attempt, holder.pid, holder.host, events, beat)


def wait_until_gone(folder: Path, asked: Asked) -> RunSummary:
    """Wait, for as long as it takes, until that attempt has ended and all is on disk."""
    while is_live(asked.layout, asked.attempt):
        time.sleep(_LOOK_SECONDS)
    # It has said goodbye; now it leaves the interpreter, and after it the keepers of all ranks.
    holder = lease_holder(asked.layout, asked.attempt)
    for process in filter(None, [holder, *keepers_of(asked.layout, asked.attempt)]):
        while process.is_here() and process.is_alive():
            time.sleep(_LOOK_SECONDS)
    return summarize(folder)


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """What became of a checkpoint that was asked for."""

    step: int | None = None
    error: str | None = None


def wait_until_saved(asked: Asked) -> SaveOutcome:
    """Wait until the checkpoint is durable, has failed, or the run has ended."""
    live = True
    while True:
        outcome = _look(asked)
        if outcome is not None:
            return outcome
        if not live:
            return SaveOutcome(error="the run ended before its next boundary")
        live = is_live(asked.layout, asked.attempt)  # and look once more after its end
        time.sleep(_LOOK_SECONDS)


def _look(asked: Asked) -> SaveOutcome | None:
    for index, event in enumerate(journal.read(asked.layout.journal)):
        if index < asked.events:
            continue
        if event.get("event") == "save-failed":
            return SaveOutcome(error=str(event.get("error")))
        if event.get("event") == "checkpoint" and "holdfast save" in str(event.get("reason")):
            return SaveOutcome(step=event.get("step"))
    return None
