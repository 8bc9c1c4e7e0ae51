"""What a keeper makes of its cloud's notices: a stop in time, a checkpoint, or a sentence."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from holdfast._notices.notice import Notice
from holdfast._notices.watch import NoticeWatch

# A notice of minutes or days: whoever left at once would be started again on this very machine,
# and leave again. What AWS and Google leave is less than this, so for them it means now.
LEAD_SECONDS = 150.0


class Hands(Protocol):
    """The keeper around it."""

    def _tell_notice(self, **told: Any) -> None: ...
    def _stop_for_notice(self, reason: str, left: float) -> None: ...


class Noticed:
    """The notices that one keeper has heard of."""

    def __init__(self, watch: NoticeWatch, hands: Hands, needed: Callable[[], float]) -> None:
        self._watch = watch
        self._hands = hands
        self._needed = needed
        self._known: set[str] = set()
        self._stopped_for: str | None = None
        watch.start()

    def look(self, now: float) -> None:
        """Act on what is new, and on what has come near."""
        for notice in self._watch.standing:
            left = _left(notice, now)
            is_near = notice.stops and left <= max(LEAD_SECONDS, self._needed())
            if notice.key not in self._known:
                self._known.add(notice.key)
                acts = "save" if not notice.stops else "stop" if is_near else "later"
                self._tell(notice.what, notice.reason, acts, left if notice.stops else None)
            if is_near and self._stopped_for is None:
                self._stopped_for = notice.key
                self._hands._stop_for_notice(notice.reason, left)
        if why := self._watch.deafness():
            self._tell("deaf", why, "none", None)

    def close(self) -> None:
        self._watch.stop()

    def _tell(self, what: str, reason: str, acts: str, seconds: float | None) -> None:
        told = {"cloud": self._watch.cloud, "what": what, "reason": reason, "acts": acts}
        at = None if seconds is None else time.time() + seconds
        self._hands._tell_notice(**told, seconds=seconds, at=at, lead=LEAD_SECONDS)


def _left(notice: Notice, now: float) -> float:
    return 0.0 if notice.ends_at is None else max(0.0, notice.ends_at - now)
