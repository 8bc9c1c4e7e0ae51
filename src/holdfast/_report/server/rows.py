"""A run as one row of the list. It has moments instead of ages, so an idle row stays the same."""

from __future__ import annotations

import heapq
import json
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from holdfast import _text
from holdfast._report.assemble import warnings_of
from holdfast._report.attempts import Config
from holdfast._report.labels import Labels
from holdfast._report.status.gather import RunSummary
from holdfast._report.status.parts import main_metric

Row = dict[str, Any]

_NO_LABELS = Labels()

_TROUBLED = ("stuck", "died", "failed", "could not start", "unreadable")
_MOST_WARNINGS = 4
_MOST_TEXT = 400
_MOST_NAME = 80
_OLD_SECONDS = 3 * 86400.0


def row_of(
    name: str,
    run: RunSummary,
    changed_at: float,
    *,
    is_watched: bool,
    labels: Labels = _NO_LABELS,
    config: Config | None = None,
) -> Row:
    warnings = [_short(text) for text in warnings_of(run)]
    state = "watching" if is_watched else run.state
    ended, job, metric = run.last_exit, run.job, main_metric(run.outlook.metrics)
    row: Row = {
        "name": name,
        "state": state,
        "live": run.is_live,
        "troubled": state in _TROUBLED or (run.is_live and bool(warnings)),
        "at": round(changed_at),
        "step": run.step,
        "total": run.total,
        "epoch": run.outlook.epoch,
        "epochs": run.outlook.epochs,
        "phase": run.outlook.phase and _short(run.outlook.phase, _MOST_NAME),
        "attempt": run.attempt,
        "memory_step": run.safe.memory_step,
        "disk_step": run.safe.disk_step,
        "disk_at": _moment(run.safe.disk_age_seconds, -1),
        "host": run.process.host and _short(run.process.host, _MOST_NAME),
        "ranks": len(run.ranks) or None,
        "job": job and {"id": _short(job.id, _MOST_NAME), "end": _moment(job.seconds_left, 1)},
        "how": None if run.is_live or ended is None else _short(ended.how.partition("\n")[0]),
        "warnings": warnings[:_MOST_WARNINGS],
        "left": None if run.outlook.eta_seconds is None else round(run.outlook.eta_seconds),
        "metric": metric and [_short(metric, _MOST_NAME), run.outlook.metrics[metric]],
        "tags": list(labels.tags),
        "note": labels.note and _short(labels.note),
        "archived": labels.is_archived or None,
        # In one line, to be searched: `lr=0.1 seed=7`.
        "config": " ".join(f"{key}={value}" for key, value in (config or {}).items())[:_MOST_TEXT],
    }
    return {key: value for key, value in row.items() if value not in (None, [], "")}


def odd_row(name: str, sentence: str) -> Row:
    return {
        "name": name,
        "state": "unreadable",
        "live": False,
        "troubled": True,
        "at": 0,
        "warnings": [_short(sentence)],
    }


def attention(row: Row) -> tuple[int, float, str]:
    """The order of the list: live and troubled runs first, then the newest."""
    rank = (0 if row["troubled"] else 1) if row["live"] else (2 if row["troubled"] else 3)
    if rank == 2 and row["at"] and time.time() - row["at"] > _OLD_SECONDS:
        rank = 3  # old trouble
    # Live ones by name: all of them have just changed, and rows must not move around.
    return rank, 0.0 if row["live"] else -row["at"], row["name"]


def _moment(seconds: float | None, sign: int) -> int | None:
    return None if seconds is None else round(time.time() + sign * seconds)


def _short(text: str, most: int = _MOST_TEXT) -> str:
    """One short line of printable characters."""
    shown = _text.name(text[:most])
    return shown if len(text) <= most else shown + "…"


# Each change of a row gives it the next revision, and the table is in the order of revisions. So an
# answer costs as much as has changed since the revision that a page has.


@dataclass(slots=True)
class _TableEntry:
    revision: int
    row: Row | None  # None: it is gone
    text: str  # as JSON, made once


class RunTable:
    """Rows by key. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _TableEntry] = OrderedDict()
        self._revision = 0
        self._gone = 0

    def put(self, key: str, row: Row) -> bool:
        """Set a row; False if it is not new."""
        with self._lock:
            known = self._entries.get(key)
            if known is not None and known.row == row:
                return False
            self._gone -= known is not None and known.row is None
            text = json.dumps({"key": key, **row}, separators=(",", ":"))
            self._set(key, row, text)
            return True

    def remove(self, key: str) -> None:
        with self._lock:
            known = self._entries.get(key)
            if known is None or known.row is None:
                return
            self._gone += 1
            self._set(key, None, json.dumps({"key": key, "gone": True}))

    def _set(self, key: str, row: Row | None, text: str) -> None:
        self._revision += 1
        self._entries[key] = _TableEntry(self._revision, row, text)
        self._entries.move_to_end(key)

    def __len__(self) -> int:
        return len(self._entries) - self._gone

    @property
    def revision(self) -> int:
        return self._revision

    def since(self, revision: int, limit: int) -> tuple[str, int, bool, bool]:
        """(a JSON list of rows, revision reached, whether there is more, whether to start over)."""
        with self._lock:
            starts_over = revision > self._revision
            revision = 0 if starts_over else revision
            newer: list[_TableEntry] = []
            for entry in reversed(self._entries.values()):
                if entry.revision <= revision:
                    break
                newer.append(entry)
            piece = newer[::-1][:limit]
            reached = piece[-1].revision if piece else self._revision
        return (
            f"[{','.join(each.text for each in piece)}]",
            reached,
            len(newer) > limit,
            starts_over,
        )

    def first(self, count: int) -> str:
        with self._lock:
            entries = [each for each in self._entries.values() if each.row is not None]
        best = heapq.nsmallest(count, entries, key=lambda each: attention(each.row or {}))
        return f"[{','.join(each.text for each in best)}]"
