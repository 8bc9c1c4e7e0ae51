"""Spot instances of AWS: the interruption, two minutes ahead, and the rebalance recommendation.

Only IMDSv2 is used: each question has a token, which is valid for six hours. The service may reject
it at any time (401), as after a hibernation.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

from holdfast._environment.cloud.metadata import Answer
from holdfast._environment.cloud.notice import Closed, NoAnswer, Notice, NoticeSource, is_word

_TOKEN_SECONDS = 21600
_NOTICE_SECONDS = 120.0
_STALE_SECONDS = 300.0  # an interruption that did not happen stays announced forever
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_STOPS = ("stop", "terminate")


class AwsSource(NoticeSource):
    cloud = "AWS"
    interval_seconds = 5.0  # as AWS recommends
    _token = ""

    def look(self) -> list[Notice]:
        action = self._ask(_ACTION)
        if action is not None and (found := self._interruption(action)):
            return found  # an interruption needs no second answer, which may be missing
        rebalance = self._ask(_REBALANCE)
        if rebalance is None:
            return []
        at = str(rebalance.tree().get("noticeTime"))[:40]
        reason = f"AWS recommends to leave {self._host} (rebalance)"
        return [Notice(f"rebalance {at}", "rebalance", reason, stops=False)]

    def _interruption(self, answer: Answer) -> list[Notice]:
        tree = answer.tree()
        action, at = tree.get("action"), tree.get("time")
        if not isinstance(at, str) or not is_word(action):
            raise answer.not_understood()
        key = f"{action} {at}"
        if action not in _STOPS:
            # Hibernation begins at once and keeps the memory, so the run need not stop.
            reason = f"AWS puts {self._host} to sleep ({action})"
            return [Notice(key, "sleep", reason, stops=False)]
        left = _seconds_until(at, answer.now())
        if left < -_STALE_SECONDS:
            return []
        ends_at = time.monotonic() + min(max(left, 0.0), _NOTICE_SECONDS)
        ends_at = self._seen.setdefault(at, ends_at)
        reason = f"the interruption of {self._host} by AWS (spot, {action})"
        return [Notice(key, "interruption", reason, stops=True, ends_at=ends_at)]

    def _ask(self, path: str) -> Answer | None:
        """The answer; None if the service has no such entry."""
        self._token = self._token or self._fetch_token()
        answer = self._metadata.ask(path, {"X-aws-ec2-metadata-token": self._token})
        if answer.status == 401:
            self._token = self._fetch_token()
            answer = self._metadata.ask(path, {"X-aws-ec2-metadata-token": self._token})
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise NoAnswer(f"status {answer.status}")
        return answer

    def _fetch_token(self) -> str:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
        answer = self._metadata.ask("/latest/api/token", lifetime, method="PUT")
        token = answer.text.strip()
        if answer.status == 403:
            raise Closed("the instance's metadata service is switched off")
        if answer.status != 200 or not token.isascii() or not token.isprintable() or not token:
            raise NoAnswer(f"no token, status {answer.status}")
        return token


def _seconds_until(text: str, now: float) -> float:
    try:
        found = datetime.fromisoformat(text)
        # AWS writes UTC, with or without the zone.
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() - now
    except (ValueError, OverflowError) as error:
        raise NoAnswer(f"not a time: {text[:40]!r}") from error
