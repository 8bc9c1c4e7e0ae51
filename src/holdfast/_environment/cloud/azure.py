"""Machines of Azure: scheduled events, from an eviction in half a minute to a repair next week.

All machines of an availability set receive each other's events, so the names are compared. No event
is approved: it would begin earlier, for all machines that it names.
"""

from __future__ import annotations

import calendar
import email.utils
import time
from typing import Any

from holdfast._environment.cloud.metadata import ANSWER_SECONDS, Answer
from holdfast._environment.cloud.notice import Notice, NoticeSource, is_word

_FIRST_SECONDS = 130.0  # the first question starts the service, which takes up to two minutes
_HEADERS = {"Metadata": "true"}
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_WORDS = {
    "Preempt": "the eviction of {host} by Azure (spot)",
    "Reboot": "the reboot of {host} by Azure",
    "Redeploy": "the move of {host} to another node by Azure",
    "Terminate": "the deletion of {host} by Azure",
}
# An eviction is real even if its time cannot be read. Another event without a time would stop
# every run that is started here, as long as it is listed.
_LEAST_SECONDS = {"Preempt": 30.0}


class AzureSource(NoticeSource):
    cloud = "Azure"
    interval_seconds = 1.0  # as Azure recommends: an eviction leaves 30 s
    _name: str | None = None
    _is_first = True
    _over: frozenset[str] = frozenset()  # began before the machine was last started

    def look(self) -> list[Notice]:
        answer = self._ask(_EVENTS, _FIRST_SECONDS if self._is_first else ANSWER_SECONDS)
        events = answer.tree().get("Events")
        if not isinstance(events, list):
            raise answer.not_understood()
        found, strange = [], None
        for event in events:
            try:
                found += self._notices(event, answer.now()) if self._is_ours(event) else []
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                strange = error  # an event that is not understood must not hide the others
        if strange is not None and not found:
            raise answer.not_understood() from strange
        self._is_first = False
        return found

    def _notices(self, event: dict[str, Any], now: float) -> list[Notice]:
        key, kind = str(event["EventId"]), event["EventType"]
        if not is_word(kind):
            raise ValueError("a type that is no word")
        has_begun = event.get("EventStatus") == "Started"
        if has_begun and self._is_first:
            self._over |= {key}  # it stays listed for minutes after the machine has restarted
        if key in self._over:
            return []
        if kind not in _WORDS:
            reason = f"Azure holds {self._host} for some seconds ({kind})"
            return [Notice(key, kind.lower(), reason, stops=False)]
        at = str(event.get("NotBefore") or "")
        left = 0.0 if has_begun else _seconds_until(at, now, unknown=_LEAST_SECONDS.get(kind))
        ends_at = time.monotonic() + max(left, 0.0)
        # The first end stays, unless the event comes earlier.
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
        return self._metadata.ask(path, _HEADERS, seconds=seconds).checked()


def _seconds_until(text: str, now: float, unknown: float | None) -> float:
    """The time until then; `unknown` if the text is no time and there is such a value."""
    try:
        found = email.utils.parsedate(text)
        if found is None:
            raise ValueError(f"not a time: {text[:40]!r}")
        return calendar.timegm(found) - now
    except ValueError:
        if unknown is None:
            raise
        return unknown
