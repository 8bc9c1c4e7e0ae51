"""The samples of the last minutes: all of the newest, and of the older ones the highest."""

from __future__ import annotations

from typing import Any

_KEPT_SECONDS = 300.0
_WHOLE_SECONDS = 10.0
_MOST_WHOLE = 100
_OLDER = 48  # together with these and what lies on the edges: 150
_SPAN_SECONDS = (_KEPT_SECONDS - _WHOLE_SECONDS) / _OLDER


class History:
    """Of one process."""

    def __init__(self) -> None:
        self._new: list[dict[str, Any]] = []
        self._old: list[dict[str, Any]] = []

    def add(self, sample: dict[str, Any]) -> None:
        """The samples come in the order of their times."""
        self._new.append(sample)
        oldest = sample["t"] - _WHOLE_SECONDS
        while self._new[0]["t"] < oldest or len(self._new) > _MOST_WHOLE:
            self._keep(self._new.pop(0))
        while self._old and self._old[0]["t"] < sample["t"] - _KEPT_SECONDS:
            self._old.pop(0)

    def recent(self) -> list[dict[str, Any]]:
        """Of the last five minutes, the oldest first; all of them only of the last ten seconds."""
        return self._old + self._new

    def _keep(self, sample: dict[str, Any]) -> None:
        before = self._old[-1] if self._old else None
        if before is not None and _span(before) == _span(sample):
            # The highest says more than any other: it is what nearly went wrong.
            if _height(sample) >= _height(before):
                self._old[-1] = sample
            return
        self._old.append(sample)


def _span(sample: dict[str, Any]) -> int:
    return int(sample["t"] // _SPAN_SECONDS)


def _height(sample: dict[str, Any]) -> int:
    return int(sample.get("cgroup") or 0) or int(sample.get("rss") or 0)
