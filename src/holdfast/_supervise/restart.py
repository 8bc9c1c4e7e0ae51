"""Whether the command is started again, by the cause of its end."""

from __future__ import annotations

import os
from dataclasses import dataclass

from holdfast._diagnose.verdict import Restart

MOST_BY_DEFAULT = 3
_REQUEUED = 75
_LONGEST_PAUSE_SECONDS = 60.0
_LIVES_WITHOUT_PROGRESS = 3


@dataclass(frozen=True)
class End:
    """One life of the command, as far as it matters for what comes next."""

    status: int  # as subprocess has it
    kind: Restart
    was_asked: bool = False  # a signal was passed on, which was meant for all
    has_run: bool = False  # a run of holdfast was opened, in this life or before
    step: int | None = None  # how far the run got; None: it has none, or did not begin
    began_at: int | None = None  # the step that this life resumed from
    has_hung: bool = False  # and was ended for it


@dataclass(frozen=True)
class Decision:
    """What is done after an end, and why."""

    restart: bool
    why: str
    pause_seconds: float = 0.0
    is_news: bool = False  # that it is not restarted, where somebody might count on it


class Restarts:
    """Decides, and remembers what it has decided."""

    def __init__(
        self,
        most: int | None,
        *,
        in_job: bool = False,
        tasks: int = 1,
        first_pause_seconds: float = 1.0,
    ) -> None:
        self._is_chosen = most is not None
        # One rank alone cannot come back to the others.
        by_default = 0 if tasks > 1 else MOST_BY_DEFAULT
        self._most = by_default if most is None else most
        self._is_one_of_many = most is None and tasks > 1
        self._in_job = in_job
        self._first_pause_seconds = first_pause_seconds
        self._counted = 0
        self._used_once = False
        self._furthest: int | None = None
        self._idle = 0

    def after(self, end: End) -> Decision:
        """Restart or leave."""
        self._note_progress(end)
        if why := self._why_never(end):
            return Decision(False, why, is_news=end.has_hung)
        if why := self._why_no_longer(end):
            return Decision(False, why, is_news=True)
        if self._is_free(end):
            return Decision(True, "it is no fault of the command, and does not count")
        if end.kind is Restart.ONCE:
            self._used_once = True
            return Decision(True, "once, since it may have been bad luck")
        self._counted += 1
        pause = min(_LONGEST_PAUSE_SECONDS, self._first_pause_seconds * 2 ** (self._counted - 1))
        # Not all that fell at the same time shall come back at the same time.
        pause *= 0.75 + 0.5 * os.urandom(1)[0] / 255
        return Decision(True, f"restart {self._counted} of {self._most}", pause)

    def _note_progress(self, end: End) -> None:
        if not end.has_run:
            return
        reached = -1 if end.step is None else end.step
        if reached > max(self._furthest or 0, end.began_at or 0):
            self._idle = 0
        else:
            self._idle += 1
        self._furthest = max(reached, self._furthest or 0)

    def _why_never(self, end: End) -> str:
        """Empty: it is something that is restarted."""
        if end.status == 0 or end.kind is Restart.DONE:
            return "it is done"
        if end.was_asked:
            return "it was asked to end"
        if end.status == _REQUEUED and self._in_job:
            return "the scheduler brings it back"
        if self._is_one_of_many:
            return "one rank of several cannot come back alone"
        if self._most == 0:
            return "no restarts are allowed"
        if end.kind is Restart.NEVER:
            return "it would happen again"
        if not end.has_run and not self._is_chosen:
            return "no run of holdfast was opened, and it would begin from nothing"
        return ""

    def _why_no_longer(self, end: End) -> str:
        """Empty: there is nothing against it."""
        if self._idle >= _LIVES_WITHOUT_PROGRESS:
            return f"{self._idle} lives in a row have made no new step"
        if end.kind is Restart.ONCE and self._used_once:
            return "it has been restarted once for want of memory, and ran out of it again"
        is_counted = end.kind is not Restart.ONCE and not self._is_free(end)
        if is_counted and self._counted >= self._most:
            often = "once" if self._counted == 1 else f"{self._counted} times"
            return f"it has been restarted {often}"
        return ""

    def _is_free(self, end: End) -> bool:
        # Without a run nobody sees whether it ever gets any further.
        return end.kind is Restart.FREE and end.has_run
