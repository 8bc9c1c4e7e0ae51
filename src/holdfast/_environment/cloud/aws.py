"""Spot instances of AWS: the interruption, two minutes before, and the recommendation to leave.

Asked by IMDSv2 only: each question carries a token, which is good for six hours and may be
called stale at any time (401), as after a hibernation.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime

from holdfast._environment.cloud.metadata import Answer, Metadata
from holdfast._environment.cloud.notice import Closed, NoAnswer, Notice, is_word

INTERVAL_SECONDS = 5.0  # as the documents recommend, for both questions
_TOKEN_SECONDS = 21600
_NOTICE_SECONDS = 120.0
_STALE_SECONDS = 300.0  # an interruption that did not happen stays announced, for ever
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_STOPS = ("stop", "terminate")


class AwsSource:
    """What the metadata service of an instance announces."""

    cloud = "AWS"
    interval_seconds = INTERVAL_SECONDS

    def __init__(self, metadata: Metadata, host: str) -> None:
        self._metadata = metadata
        self._host = host
        self._token = ""
        self._seen: dict[str, float] = {}  # until when, as it was told at the first look

    def look(self) -> list[Notice]:
        """All that stands announced now."""
        found = []
        action = self._ask(_ACTION)
        if action is not None:
            found += self._interruption(action)
        if found:
            return found  # what is graver needs no second answer, which may be missing
        rebalance = self._ask(_REBALANCE)
        if rebalance is not None:
            told = str(_tree(rebalance).get("noticeTime"))[:40]
            reason = f"AWS recommends to leave {self._host} (rebalance)"
            found.append(Notice(f"rebalance {told}", "rebalance", reason, stops=False))
        return found

    def _interruption(self, answer: Answer) -> list[Notice]:
        tree = _tree(answer)
        action, told = tree.get("action"), tree.get("time")
        if not isinstance(told, str) or not is_word(action):
            raise NoAnswer(f"not understood: {answer.text[:80]!r}")
        if action not in _STOPS:
            # Hibernation begins at once and keeps the memory: there is nothing to leave for.
            reason = f"AWS puts {self._host} to sleep ({action})"
            return [Notice(f"{action} {told}", "sleep", reason, stops=False)]
        left = _seconds_until(told, answer.now())
        if left < -_STALE_SECONDS:
            return []
        ends_at = time.monotonic() + min(max(left, 0.0), _NOTICE_SECONDS)
        ends_at = self._seen.setdefault(told, ends_at)
        reason = f"the interruption of {self._host} by AWS (spot, {action})"
        return [Notice(f"{action} {told}", "interruption", reason, stops=True, ends_at=ends_at)]

    def _ask(self, path: str) -> Answer | None:
        """The answer, or None if there is nothing of this name."""
        if not self._token:
            self._token = self._fetch_token()
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


def _tree(answer: Answer) -> dict[str, object]:
    try:
        tree = json.loads(answer.text)
    except (ValueError, RecursionError) as error:
        raise NoAnswer(f"not understood: {answer.text[:80]!r}") from error
    if not isinstance(tree, dict):
        raise NoAnswer(f"not understood: {answer.text[:80]!r}")
    return tree


def _seconds_until(told: str, now: float) -> float:
    try:
        found = datetime.fromisoformat(told)
        # Its times are of UTC, whether they say so or not, and not of this machine's clock.
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() - now
    except (ValueError, OverflowError) as error:
        raise NoAnswer(f"not a time: {told[:40]!r}") from error
