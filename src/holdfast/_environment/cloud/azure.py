"""Machines of Azure: scheduled events, from an eviction in half a minute to a repair next week.

All machines of an availability set are told of each other's events, so the names matter. Nothing
is approved: that would let the event begin earlier, for all the machines that it names.
"""

from __future__ import annotations

import calendar
import email.utils
import json
import time
from typing import Any

from holdfast._environment.cloud.metadata import ANSWER_SECONDS, Answer, Metadata
from holdfast._environment.cloud.notice import Closed, NoAnswer, Notice, is_word

INTERVAL_SECONDS = 1.0  # as the documents recommend: an eviction leaves 30 s
_FIRST_SECONDS = 130.0  # the service is switched on by the first question, in up to two minutes
_HEADERS = {"Metadata": "true"}
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_WORDS = {
    "Preempt": "the eviction of {host} by Azure (spot)",
    "Reboot": "the reboot of {host} by Azure",
    "Redeploy": "the move of {host} to another node by Azure",
    "Terminate": "the deletion of {host} by Azure",
}
# An eviction is real whatever its time looks like. Of the others one without a time would stop
# every run that is started here, for as long as it is listed.
_LEAST_SECONDS = {"Preempt": 30.0}


class AzureSource:
    """What the scheduled events of a machine announce."""

    cloud = "Azure"
    interval_seconds = INTERVAL_SECONDS

    def __init__(self, metadata: Metadata, host: str) -> None:
        self._metadata = metadata
        self._host = host
        self._name: str | None = None
        self._is_first = True
        self._over: set[str] = set()  # had begun before we came: of the machine's last life
        self._seen: dict[str, float] = {}

    def look(self) -> list[Notice]:
        """All that stands announced now for this very machine."""
        seconds = _FIRST_SECONDS if self._is_first else ANSWER_SECONDS
        answer = self._ask(_EVENTS, seconds)
        try:
            tree = json.loads(answer.text)
            events = tree["Events"]
            if not isinstance(events, list):
                raise ValueError("Events is no list")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise NoAnswer(f"not understood: {answer.text[:80]!r}") from error
        found, strange = [], None
        for event in events:
            try:
                found += self._notices(event, answer.now()) if self._is_ours(event) else []
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                strange = error  # one that is not understood must not hide the others
        if strange is not None and not found:
            raise NoAnswer(f"not understood: {answer.text[:80]!r}") from strange
        self._is_first = False
        return found

    def _notices(self, event: dict[str, Any], now: float) -> list[Notice]:
        """What an event is for this machine: one notice, or none."""
        key, kind = str(event["EventId"]), event["EventType"]
        if not is_word(kind):
            raise ValueError("a type that is no word")
        has_begun = event.get("EventStatus") == "Started"
        if has_begun and self._is_first:
            self._over.add(key)  # stays listed for minutes after the machine is back
        if key in self._over:
            return []
        if kind not in _WORDS:
            reason = f"Azure holds {self._host} for some seconds ({kind})"
            return [Notice(key, kind.lower(), reason, stops=False)]
        told = str(event.get("NotBefore") or "")
        left = 0.0 if has_begun else _seconds_until(told, now, unknown=_LEAST_SECONDS.get(kind))
        ends_at = time.monotonic() + max(left, 0.0)
        # The first time told stands, unless the event comes sooner.
        self._seen[key] = ends_at = min(ends_at, self._seen.get(key, ends_at))
        reason = _WORDS[kind].format(host=self._host)
        return [Notice(key, kind.lower(), reason, stops=True, ends_at=ends_at)]

    def _is_ours(self, event: dict[str, Any]) -> bool:
        names = event.get("Resources")
        if not isinstance(names, list) or not names:
            return True
        if self._name is None:
            self._name = self._ask(_NAME).text.strip().lower()
        return not self._name or self._name in (str(name).lower() for name in names)

    def _ask(self, path: str, seconds: float = ANSWER_SECONDS) -> Answer:
        answer = self._metadata.ask(path, _HEADERS, seconds=seconds)
        if answer.status == 403:
            raise Closed("the metadata service refuses")
        if answer.status != 200:
            raise NoAnswer(f"status {answer.status}")
        return answer


def _seconds_until(told: str, now: float, unknown: float | None) -> float:
    """How long it is until a time; `unknown`, if there is such a value, where it is no time."""
    try:
        found = email.utils.parsedate(told)
        if found is None:
            raise ValueError(f"not a time: {told[:40]!r}")
        return calendar.timegm(found) - now
    except ValueError:
        if unknown is None:
            raise
        return unknown
