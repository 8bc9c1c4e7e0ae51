"""One run, looked at again and again: only what is new in its folder is read."""

from __future__ import annotations

import os
import time
from pathlib import Path

from holdfast._report.server.find import PlainCheck
from holdfast._report.status.gather import History, RunSummary, summarize
from holdfast._store.folder.attempts import SILENT_SECONDS, is_live_here, read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.plain_file import MOST_LINES_BYTES, open_plain

_SLICE_BYTES = 4 << 20
_SETTLED_SECONDS = 2.0  # the clocks of some file systems tick that slowly


class FollowedHistory:
    """What a journal says, read on from where the last look ended, a slice at a time."""

    def __init__(self) -> None:
        self.history = History()
        self.is_behind = False  # there is more to read
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._is_in_giant = False  # a line longer than a slice, which nobody of us wrote

    def read(self, path: Path) -> History:
        """Read one slice further."""
        self.is_behind = False
        try:
            descriptor = open_plain(path, most_bytes=MOST_LINES_BYTES)
        except OSError:
            return self.history
        try:
            self._read_on(descriptor, os.fstat(descriptor))
        finally:
            os.close(descriptor)
        return self.history

    def _read_on(self, descriptor: int, found: os.stat_result) -> None:
        file = (found.st_dev, found.st_ino)
        if file != self._file or found.st_size < self._offset:
            self.history, self._file = History(), file
            self._offset, self._is_in_giant = 0, False
        if found.st_size == self._offset:
            return
        os.lseek(descriptor, self._offset, os.SEEK_SET)
        data = os.read(descriptor, _SLICE_BYTES)
        end = data.rfind(b"\n") + 1
        if not end and len(data) == _SLICE_BYTES:
            self._is_in_giant, end = True, len(data)
        elif end and self._is_in_giant:
            self._is_in_giant = False
            self.history.take_lines(data[data.find(b"\n") + 1 : end])
        elif end:
            self.history.take_lines(data[:end])
        self._offset += end
        self.is_behind = bool(end) and self._offset < found.st_size


class Follower:
    """Follows one run folder; used by one thread at a time."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder = folder
        self.changed_at = 0.0  # when something was last written, by the clock of its disk
        self.is_watched = False  # whether it lives is not known yet
        self._plain = PlainCheck(folder, root)
        self._layout = layout = RunLayout(folder)
        known = (layout.journal, layout.attempts, layout.checkpoints, layout.identity)
        self._paths = tuple(map(str, known))
        self._history = FollowedHistory()
        self._signature: tuple[int, ...] = ()
        self._attempt = 0
        self._beat: tuple[int, object] | None = None
        self._beat_at = 0.0
        self._has_beaten = False

    @property
    def is_behind(self) -> bool:
        """Whether there is more of the journal to read."""
        return self._history.is_behind

    @property
    def is_unsure(self) -> bool:
        """Whether another look tells more though nothing has changed."""
        return self.is_behind or self.is_watched

    def check(self) -> None:
        """Raise Odd if something in the folder must not be opened."""
        self._plain.check()

    def has_changed(self) -> bool:
        """Whether anything was written since the last look; some seconds later in doubt."""
        return self._sign() != self._signature or time.time() - self.changed_at < _SETTLED_SECONDS

    def look(self) -> RunSummary:
        """The run as it is now; Odd if it is not to be read, NotARun if it is gone."""
        self._plain.check()
        numbers = self._layout.attempt_numbers()
        self._attempt = numbers[-1] if numbers else 0
        # Before the rest is read: what is written meanwhile is then a change.
        self._signature = self._sign()
        self.is_watched = False
        history = self._history.read(self._layout.journal)
        return summarize(self.folder, look=self.is_live, history=history)

    def is_live(self, layout: RunLayout, attempt: int) -> bool:
        """As `attempts.is_live`, but over several looks in place of a wait in one."""
        if (known := is_live_here(layout, attempt)) is not None:
            return known
        beat, now = (attempt, read_json(layout.heartbeat(attempt)).get("beat")), time.monotonic()
        if beat != self._beat:
            self._has_beaten = self._beat is not None and self._beat[0] == attempt
            self._beat, self._beat_at = beat, now
        is_recent = now - self._beat_at < SILENT_SECONDS
        self.is_watched = is_recent and not self._has_beaten
        return is_recent and self._has_beaten

    def _sign(self) -> tuple[int, ...]:
        paths = self._paths
        if self._attempt:
            paths = (*paths, str(self._layout.attempt(self._attempt)))
        times = []
        for path in paths:
            try:
                times.append(os.lstat(path).st_mtime_ns)
            except OSError:
                times.append(-1)
        self.changed_at = max(times) / 1e9
        return tuple(times)
