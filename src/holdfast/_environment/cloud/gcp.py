"""Machines of Google's cloud: the preemption, and the maintenance of their host.

A preemption leaves half a minute, so the service holds the question for `preempted` open until the
value changes. `maintenance-event` is requested by name: Google warns only machines that query it.
"""

from __future__ import annotations

import time
from urllib.parse import quote

from holdfast._environment.cloud.metadata import ANSWER_SECONDS, Answer
from holdfast._environment.cloud.notice import NoAnswer, Notice, NoticeSource

_HELD_SECONDS = 5
_PREEMPTION_SECONDS = 30.0
_MAINTENANCE_SECONDS = 60.0
_BASE = "/computeMetadata/v1/instance"
_HEADERS = {"Metadata-Flavor": "Google"}


class GcpSource(NoticeSource):
    cloud = "Google"
    interval_seconds = 1.0  # for a service that does not hold questions open
    _etag = ""
    _first: str | None = None  # the maintenance that was announced before the start

    def look(self) -> list[Notice]:
        """Waits some seconds for a preemption."""
        preempted = self._wait_for_preemption()
        if preempted == "TRUE":
            # Nothing worse can come, and the second question may have no answer.
            reason = f"the preemption of {self._host} by Google"
            ends_at = self._until("preempted", _PREEMPTION_SECONDS)
            return [Notice("preempted", "preemption", reason, stops=True, ends_at=ends_at)]
        maintenance = self._ask("/maintenance-event").text.strip()
        if preempted != "FALSE" or not maintenance.replace("_", "").isalpha():
            raise NoAnswer(f"not understood: {preempted[:40]!r}, {maintenance[:40]!r}")
        if self._first is None:
            self._first = maintenance
        elif self._first != maintenance:
            self._first = ""
        if maintenance.startswith("TERMINATE"):
            return [self._maintenance(maintenance)]
        if maintenance != "NONE":
            reason = f"Google moves {self._host} to another machine while it runs"
            return [Notice(maintenance, "migration", reason, stops=False)]
        self._seen.pop("maintenance", None)
        return []

    def _maintenance(self, value: str) -> Notice:
        reason = f"the maintenance of {self._host}'s hardware by Google"
        if self._first == value:
            # It may be an hour ahead. A run that stopped would be started here again, and stop
            # again. The shutdown of the system stops it in time.
            return Notice(value, "maintenance", f"{reason} is near", stops=False)
        ends_at = self._until("maintenance", _MAINTENANCE_SECONDS)
        return Notice(f"{value} now", "maintenance", reason, stops=True, ends_at=ends_at)

    def _until(self, key: str, seconds: float) -> float:
        return self._seen.setdefault(key, time.monotonic() + seconds)

    def _wait_for_preemption(self) -> str:
        path, seconds = "/preempted", ANSWER_SECONDS
        if self._etag:
            path += f"?wait_for_change=true&timeout_sec={_HELD_SECONDS}&last_etag="
            path, seconds = path + quote(self._etag, safe=""), _HELD_SECONDS + ANSWER_SECONDS
        answer = self._ask(path, seconds)
        self._etag = answer.header("etag")
        return answer.text.strip()

    def _ask(self, key: str, seconds: float = ANSWER_SECONDS) -> Answer:
        answer = self._metadata.ask(f"{_BASE}{key}", _HEADERS, seconds=seconds)
        if answer.header("metadata-flavor") != "Google":
            raise NoAnswer("another service answers at its address")
        return answer.checked()
