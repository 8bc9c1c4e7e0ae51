"""The rows as the page asks for them: what has changed since a revision, a bounded piece at a time.

Each change of a row gives it the next revision, and rows stand in the order of theirs. So an
answer costs as much as has changed, and not as much as there is.
"""

from __future__ import annotations

import heapq
import json
import threading
from collections import OrderedDict
from dataclasses import dataclass

from holdfast._ui.rows import Row, attention

_MOST_GONE = 5_000


@dataclass(slots=True)
class _Entry:
    revision: int
    row: Row | None  # None: it is gone
    text: str  # as JSON, made once


class RunTable:
    """Rows by key. Written by the threads that look, read by those that answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._revision = 0
        self._gone = 0
        self._forgotten = 0  # the newest revision of a removal that is no longer told

    def put(self, key: str, row: Row) -> bool:
        """Set a row; False if it says nothing new."""
        with self._lock:
            known = self._entries.get(key)
            if known is not None and known.row == row:
                return False
            self._gone -= known is not None and known.row is None
            text = json.dumps({"key": key, **row}, separators=(",", ":"))
            self._set(key, row, text)
            return True

    def remove(self, key: str) -> None:
        """Say that a run is no longer there."""
        with self._lock:
            known = self._entries.get(key)
            if known is None or known.row is None:
                return
            self._gone += 1
            self._set(key, None, json.dumps({"key": key, "gone": True}))
            if self._gone > _MOST_GONE:
                self._forget()

    def _set(self, key: str, row: Row | None, text: str) -> None:
        self._revision += 1
        self._entries[key] = _Entry(self._revision, row, text)
        self._entries.move_to_end(key)

    def _forget(self) -> None:
        oldest = next(key for key, each in self._entries.items() if each.row is None)
        self._forgotten = self._entries.pop(oldest).revision
        self._gone -= 1

    def __len__(self) -> int:
        return len(self._entries) - self._gone

    @property
    def revision(self) -> int:
        return self._revision

    def since(self, revision: int, limit: int) -> tuple[str, int, bool, bool]:
        """(a JSON list of rows, revision reached, whether there is more, whether to start anew)."""
        with self._lock:
            anew = revision > self._revision or 0 < revision < self._forgotten
            revision = 0 if anew else revision
            newer: list[_Entry] = []
            for entry in reversed(self._entries.values()):
                if entry.revision <= revision:
                    break
                newer.append(entry)
            piece = newer[::-1][:limit]
            reached = piece[-1].revision if piece else self._revision
        return f"[{','.join(each.text for each in piece)}]", reached, len(newer) > limit, anew

    def first(self, count: int) -> str:
        """The rows that matter most, as a JSON list in the order of the page."""
        with self._lock:
            entries = [each for each in self._entries.values() if each.row is not None]
        best = heapq.nsmallest(count, entries, key=lambda each: attention(each.row or {}))
        return f"[{','.join(each.text for each in best)}]"
