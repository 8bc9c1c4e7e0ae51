"""One run, observed again and again: only what is new in its folder is read."""

from __future__ import annotations

import os
import time
from pathlib import Path

from holdfast._report.json_lines import Lines
from holdfast._report.server.find import PlainCheck
from holdfast._report.status.gather import JournalHistory, RunSummary, summarize
from holdfast._store.folder.attempts import SILENT_SECONDS, is_live_here, read_json
from holdfast._store.folder.layout import RunLayout

_SETTLED_SECONDS = 2.0  # the clocks of some file systems tick that slowly


class FollowedHistory:
    """The history in a journal, read on one piece at a time."""

    def __init__(self, journal: Path) -> None:
        self.history = JournalHistory()
        self.is_behind = False  # there is more to read
        self._lines = Lines(journal)

    def read(self) -> JournalHistory:
        piece = next(self._lines.read(), None)
        if self._lines.has_started_over:
            self.history = JournalHistory()
        if piece is not None:
            self.history.take_lines(piece)
        self.is_behind = piece is not None and self._lines.share < 1
        return self.history


class RunFollower:
    """Follows one run folder; used by one thread at a time."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder = folder
        self.changed_at = 0.0  # of its files, by the clock of the disk
        self.is_watched = False  # more heartbeats are needed to see whether it lives
        self._plain = PlainCheck(folder, root)
        self.layout = layout = RunLayout(folder)
        known = (layout.journal, layout.attempts, layout.checkpoints, layout.identity)
        self._paths = tuple(map(str, known))
        self._labels = str(layout.labels)
        self._history = FollowedHistory(layout.journal)
        self._signature: tuple[int, ...] = ()
        self._attempt = 0
        self._beat: tuple[int, object] | None = None
        self._beat_at = 0.0
        self._has_beaten = False

    @property
    def is_behind(self) -> bool:
        return self._history.is_behind

    def check(self) -> None:
        self._plain.check()

    def has_changed(self) -> bool:
        """Whether anything was written since the last look; in doubt, True for some seconds."""
        return self._sign() != self._signature or time.time() - self.changed_at < _SETTLED_SECONDS

    def look(self) -> RunSummary:
        """The run as it is now; Odd if it cannot be read, NotARun if it is gone."""
        self._plain.check()
        numbers = self.layout.attempt_numbers()
        self._attempt = numbers[-1] if numbers else 0
        # Before the rest is read, so that a write meanwhile counts as a change.
        self._signature = self._sign()
        self.is_watched = False
        return summarize(self.folder, look=self.is_live, history=self._history.read())

    def is_live(self, layout: RunLayout, attempt: int) -> bool:
        """As `attempts.is_live`, but over several looks instead of one that waits."""
        if (known := is_live_here(layout, attempt)) is not None:
            return known
        beat, now = (attempt, read_json(layout.heartbeat(attempt)).get("beat")), time.monotonic()
        if beat != self._beat:
            self._has_beaten = self._beat is not None and self._beat[0] == attempt
            self._beat, self._beat_at = beat, now
        is_recent = now - self._beat_at < SILENT_SECONDS
        self.is_watched = is_recent and not self._has_beaten
        return is_recent and self._has_beaten

    def signature(self) -> tuple[int, ...]:
        """Changes with its files; any thread may ask."""
        paths = self._paths
        if self._attempt:
            paths = (*paths, str(self.layout.attempt(self._attempt)))
        return (*map(_changed_ns, paths), _changed_ns(self._labels))

    def _sign(self) -> tuple[int, ...]:
        found = self.signature()
        # The last one is of the labels: a new tag is no sign of life.
        self.changed_at = max(found[:-1]) / 1e9
        return found


def _changed_ns(path: str) -> int:
    try:
        return os.lstat(path).st_mtime_ns
    except OSError:
        return -1
