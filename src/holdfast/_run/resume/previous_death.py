"""What the life before died of, in one line of the next start.

Nobody waits for it: what judges a death takes a while to import, and the training has better to
do. A thread finds the words while the state is restored.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from holdfast import _errors
from holdfast._environment import variables
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._text import say

# With these a run leaves that has finished, or that somebody has asked to.
_WANTED = (_errors.FINISHED, *_errors.ASKED)
_PATIENCE_SECONDS = 0.02  # so that it mostly stands beside the line that it belongs to


class LifeBefore:
    """Why the attempt before was lost or failed; nothing if its end was wanted."""

    def __init__(self, layout: RunLayout, folder: Path, attempt: int) -> None:
        self._layout = layout
        self._folder = folder
        self._may_speak = threading.Event()
        self._thread: threading.Thread | None = None
        with contextlib.suppress(OSError, RuntimeError):  # no start fails for an old death
            self._number = max((n for n in layout.attempt_numbers() if n < attempt), default=0)
            # `holdfast run` has said it already, a line above.
            if self._number and not self._was_wanted() and not variables.is_started_again():
                thread = threading.Thread(target=self._tell, name="holdfast-before", daemon=True)
                thread.start()
                self._thread = thread

    def tell(self) -> None:
        """Say it, now or as soon as it is known."""
        self._may_speak.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_SECONDS)

    def _was_wanted(self) -> bool:
        return read_json(self._layout.exit(self._number)).get("status") in _WANTED

    def _tell(self) -> None:
        with contextlib.suppress(Exception):  # no start fails for an old death
            line = self._find_line()
            if line and self._may_speak.wait(60):
                say(line)

    def _find_line(self) -> str:
        # Slow to import, and needed only where something has gone wrong.
        from holdfast._diagnose.deaths.judge import judge
        from holdfast._diagnose.evidence.gather import gather_run
        from holdfast._diagnose.verdict import Cause

        verdict = judge(gather_run(self._layout.folder, self._number))
        if verdict.cause in (
            *(Cause.RUNNING, Cause.FINISHED, Cause.ASKED, Cause.PREEMPTED, Cause.TIME_LIMIT),
            Cause.UNKNOWN,
        ):
            return ""
        at = "" if verdict.step is None else f" at step {verdict.step}"
        more = f"holdfast why {self._folder} --attempt {self._number}"
        return f"the attempt before ended{at}. {verdict.sentence} More: {more}"
