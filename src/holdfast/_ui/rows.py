"""A run as one row of the list: moments in place of ages, so that a row at rest stays the same."""

from __future__ import annotations

import time
from typing import Any

from holdfast._report.warned import warnings_of
from holdfast._status import words
from holdfast._status.gather import RunSummary
from holdfast._status.job import JobSummary

Row = dict[str, Any]

_TROUBLED = ("stuck", "died", "failed", "could not start", "unreadable")
_MOST_WARNINGS = 4
_MOST_TEXT = 400
_MOST_NAME = 80
_MOST_NUMBER = 1 << 53  # that a page can count to
_OLD_SECONDS = 3 * 86400.0


def row_of(name: str, run: RunSummary, changed_at: float, *, is_watched: bool) -> Row:
    """What the list shows of a run that could be read."""
    warnings = [_short(text) for text in warnings_of(run)]
    state = "watching" if is_watched else run.state
    ended = run.last_exit
    row: Row = {
        "name": name,
        "state": state,
        "live": run.is_live,
        "troubled": state in _TROUBLED or (run.is_live and bool(warnings)),
        "at": round(changed_at),
        "step": _whole(run.step),
        "total": _whole(run.total),
        "epoch": _whole(run.epoch),
        "epochs": _whole(run.epochs),
        "phase": run.phase and _short(run.phase, _MOST_NAME),
        "attempt": _whole(run.attempt),
        "memory_step": _whole(run.memory_step),
        "disk_step": _whole(run.disk_step),
        "disk_at": _moment(run.disk_age_seconds),
        "host": run.host and _short(run.host, _MOST_NAME),
        "ranks": len(run.ranks) or None,
        "job": _job(run.job),
        "how": None if run.is_live or ended is None else _short(ended.how.partition("\n")[0]),
        "warnings": warnings[:_MOST_WARNINGS],
    }
    return {key: value for key, value in row.items() if value not in (None, [])}


def odd_row(name: str, sentence: str) -> Row:
    """What the list shows of a folder that is not read, and why."""
    return {
        "name": name,
        "state": "unreadable",
        "live": False,
        "troubled": True,
        "at": 0,
        "warnings": [_short(sentence)],
    }


def attention(row: Row) -> tuple[int, float, str]:
    """The order of the list: what lives and what is in trouble first, then the newest."""
    rank = (0 if row["troubled"] else 1) if row["live"] else (2 if row["troubled"] else 3)
    if rank == 2 and row["at"] and time.time() - row["at"] > _OLD_SECONDS:
        rank = 3  # nobody has cared for days
    # Live ones by name: all of them have just changed, and rows must not dance.
    return rank, 0.0 if row["live"] else -row["at"], row["name"]


def _job(job: JobSummary | None) -> Row | None:
    if job is None:
        return None
    end = None if job.seconds_left is None else round(time.time() + job.seconds_left)
    return {"id": _short(job.id, _MOST_NAME), "end": end}


def _whole(value: object) -> int | None:
    # Some of it stands in the journal as it was written, which may be by anybody.
    return value if isinstance(value, int) and abs(value) < _MOST_NUMBER else None


def _moment(age_seconds: float | None) -> int | None:
    return None if age_seconds is None else round(time.time() - age_seconds)


def _short(text: str, most: int = _MOST_TEXT) -> str:
    """One line of printable characters, of a bounded length, whatever the run has written."""
    shown = words.name(text[:most])
    return shown if len(text) <= most else shown + "…"
