"""Machines of Google's cloud: the preemption, and the maintenance of their host.

`preempted` is asked by a request that the service holds open until the value changes, since a
preemption leaves half a minute. `maintenance-event` is requested by its own name: Google warns only
machines that query this key.
"""

from __future__ import annotations

import time
from urllib.parse import quote

from holdfast._environment.cloud.metadata import ANSWER_SECONDS, Answer, Metadata
from holdfast._environment.cloud.notice import Closed, NoAnswer, Notice

INTERVAL_SECONDS = 1.0  # between two held questions, for a service that does not hold them
_HELD_SECONDS = 5
_PREEMPTION_SECONDS = 30.0
_MAINTENANCE_SECONDS = 60.0
_BASE = "/computeMetadata/v1/instance"
_HEADERS = {"Metadata-Flavor": "Google"}


class GcpSource:
    """What the metadata server of a machine announces."""

    cloud = "Google"
    interval_seconds = INTERVAL_SECONDS

    def __init__(self, metadata: Metadata, host: str) -> None:
        self._metadata = metadata
        self._host = host
        self._etag = ""
        self._seen: dict[str, float] = {}
        self._stood: str | None = None  # the maintenance that was announced before we came

    def look(self) -> list[Notice]:
        """All that stands announced now; waits a while for a preemption."""
        preempted = self._wait_for("/preempted")
        if preempted == "TRUE":
            # Nothing graver can come, so nothing else is asked, which might go without an answer.
            reason = f"the preemption of {self._host} by Google"
            ends_at = self._until("preempted", _PREEMPTION_SECONDS)
            return [Notice("preempted", "preemption", reason, stops=True, ends_at=ends_at)]
        maintenance = self._ask("/maintenance-event").text.strip()
        if preempted != "FALSE" or not maintenance.replace("_", "").isalpha():
            raise NoAnswer(f"not understood: {preempted[:40]!r}, {maintenance[:40]!r}")
        found = []
        if self._stood is None:
            self._stood = maintenance
        elif self._stood != maintenance:
            self._stood = ""
        if maintenance.startswith("TERMINATE"):
            found.append(self._maintenance(maintenance))
        elif maintenance != "NONE":
            reason = f"Google moves {self._host} to another machine while it runs"
            found.append(Notice(maintenance, "migration", reason, stops=False))
        else:
            self._seen.pop("maintenance", None)
        return found

    def _maintenance(self, value: str) -> Notice:
        reason = f"the maintenance of {self._host}'s hardware by Google"
        if self._stood == value:
            # It may be an hour ahead, and a run that left would be started here again, and leave
            # again. The system's own shutdown stops it when the time has come.
            reason = f"{reason} is near"
            return Notice(value, "maintenance", reason, stops=False)
        ends_at = self._until("maintenance", _MAINTENANCE_SECONDS)
        return Notice(f"{value} now", "maintenance", reason, stops=True, ends_at=ends_at)

    def _until(self, key: str, seconds: float) -> float:
        return self._seen.setdefault(key, time.monotonic() + seconds)

    def _wait_for(self, key: str) -> str:
        if not self._etag:
            answer = self._ask(key)
        else:
            held = f"?wait_for_change=true&timeout_sec={_HELD_SECONDS}&last_etag="
            seconds = _HELD_SECONDS + ANSWER_SECONDS
            answer = self._ask(f"{key}{held}{quote(self._etag, safe='')}", seconds)
        self._etag = answer.header("etag")
        return answer.text.strip()

    def _ask(self, key: str, seconds: float = ANSWER_SECONDS) -> Answer:
        answer = self._metadata.ask(f"{_BASE}{key}", _HEADERS, seconds=seconds)
        if answer.header("metadata-flavor") != "Google":
            raise NoAnswer("somebody else answers at its address")
        if answer.status == 403:
            raise Closed("the metadata server refuses")
        if answer.status != 200:
            raise NoAnswer(f"status {answer.status}")
        return answer
