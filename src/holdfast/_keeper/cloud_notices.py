"""Notices of the cloud, and what follows: a stop in time, a checkpoint, or a sentence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast._environment.cloud.notice import (
    CLOUDS,
    Closed,
    NoAnswer,
    Notice,
    NoticeSource,
    find_cloud,
)

if TYPE_CHECKING:
    from holdfast._keeper.decider import Decider

_AGAIN_SECONDS = 60.0  # the longest interval between two questions without an answer
_DEAF_SECONDS = 150.0  # without a single answer, until the user is told


class NoticeWatch:
    """Asks the cloud in a thread; `standing` is what its newest answer announces."""

    def __init__(self, source: NoticeSource) -> None:
        self.cloud = source.cloud
        self.standing: tuple[Notice, ...] = ()  # replaced as a whole, so read without a lock
        self.has_answered = False
        self.trouble = ""  # why there was no answer
        self.is_closed = False  # no answer will come any more
        self._source = source
        self._began = time.monotonic()
        self._is_over = threading.Event()
        self._has_told = False

    def start(self) -> None:
        """Begin to ask, without waiting for the first answer."""
        threading.Thread(target=self._go_on, name="notices", daemon=True).start()

    def stop(self) -> None:
        self._is_over.set()

    def deafness(self) -> str:
        """Why no notice can be received, once; empty while there are answers."""
        is_deaf = not self.has_answered and time.monotonic() - self._began > _DEAF_SECONDS
        if self._has_told or not (self.is_closed or is_deaf):
            return ""
        self._has_told = True
        return self.trouble or "no answer in time"

    def look(self) -> None:
        try:
            self.standing = tuple(self._source.look())
        except NoAnswer as error:
            # What was announced stays announced: silence does not revoke it.
            self.trouble = str(error)
            self.is_closed = isinstance(error, Closed)
        except Exception as error:  # noqa: BLE001  the thread must go on
            self.trouble = str(error) or type(error).__name__
        else:
            self.has_answered, self.trouble = True, ""

    def _go_on(self) -> None:
        wait = self._source.interval_seconds
        while not self.is_closed:
            self.look()
            wait = min(2 * wait, _AGAIN_SECONDS) if self.trouble else self._source.interval_seconds
            if self.has_answered:  # a short fault must not cost half of the notice period
                wait = min(wait, 2 * self._source.interval_seconds)
            if self._is_over.wait(wait):
                return


def open_watch(wish: str, host: str, address: str = "") -> NoticeWatch | None:
    """The watch for this machine, not started yet; None where there is no cloud."""
    cloud = find_cloud() if wish == "auto" else wish
    if cloud not in CLOUDS:
        return None
    # Only here: the HTTP modules are large, and not needed outside a cloud.
    from holdfast._environment.cloud import aws, azure, gcp
    from holdfast._environment.cloud.metadata import ADDRESS, Metadata

    sources: dict[str, Callable[[Metadata, str], NoticeSource]] = {
        "aws": aws.AwsSource,
        "azure": azure.AzureSource,
        "gcp": gcp.GcpSource,
    }
    return NoticeWatch(sources[cloud](Metadata(address or ADDRESS), host))


# A run that left hours before the end would be started again on the same machine, and leave again.
# AWS and Google give a shorter notice than this, so there the run stops immediately.
LEAD_SECONDS = 150.0


class NoticeReactions:
    """The notices that one keeper knows."""

    def __init__(self, watch: NoticeWatch, decider: Decider, needed: Callable[[], float]) -> None:
        self._watch = watch
        self._decider = decider
        self._needed = needed
        self._known: set[str] = set()
        self._stopped_for: str | None = None
        watch.start()

    def poll(self, now: float) -> None:
        """Act on new notices, and on those whose end has come near."""
        for notice in self._watch.standing:
            left = 0.0 if notice.ends_at is None else max(0.0, notice.ends_at - now)
            is_near = notice.stops and left <= max(LEAD_SECONDS, self._needed())
            if notice.key not in self._known:
                self._known.add(notice.key)
                acts = "save" if not notice.stops else "stop" if is_near else "later"
                self._tell(notice.what, notice.reason, acts, left if notice.stops else None)
            if is_near and self._stopped_for is None:
                self._stopped_for = notice.key
                self._decider.stop_for_notice(notice.reason, left)
        if why := self._watch.deafness():
            self._tell("deaf", why, "none", None)

    def _tell(self, what: str, reason: str, acts: str, seconds: float | None) -> None:
        self._decider.on_notice(
            {
                "cloud": self._watch.cloud,
                "what": what,
                "reason": reason,
                "acts": acts,
                "seconds": seconds,
                "at": None if seconds is None else time.time() + seconds,
                "lead": LEAD_SECONDS,
            }
        )
