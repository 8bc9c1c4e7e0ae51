"""After an end of the command: the verdict in a few lines, and whether it is started again.

Imported only when the command has failed: the imports for judging would make every start slow.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast._diagnose.verdict import Cause, Restart, Sure, Verdict, restart_after
from holdfast._errors import REQUEUE
from holdfast._store.folder.attempts import read_json, read_origins
from holdfast._store.folder.layout import RunLayout
from holdfast._supervise.record import SupervisionRecord

MOST_BY_DEFAULT = 3
_LONGEST_PAUSE_SECONDS = 60.0
_ATTEMPTS_WITHOUT_PROGRESS = 3
_REFUSED = re.compile(
    r"\bRunIsLive: .* trains here, pid (?P<pid>\d{1,9}) on (?P<host>\S+?)\.(?:\s|$)"
)


@dataclass(frozen=True)
class CommandEnd:
    """The end of one attempt, as far as it matters for a restart."""

    status: int  # as subprocess has it
    kind: Restart
    was_asked: bool = False  # a signal was passed on, which was meant for all
    has_run: bool = False  # a run of holdfast was opened, in this attempt or before
    step: int | None = None  # how far the run got; None: it has none, or did not begin
    began_at: int | None = None  # the step that this attempt resumed from
    has_hung: bool = False  # and was ended for it


@dataclass(frozen=True)
class RestartDecision:
    restart: bool
    why: str
    pause_seconds: float = 0.0
    is_news: bool = False  # say that it is not restarted, where a restart might be expected


class Restarts:
    """Decides by the cause of an end, and counts what it has decided."""

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

    def after(self, end: CommandEnd) -> RestartDecision:
        self._count_progress(end)
        if why := self._why_never(end):
            return RestartDecision(False, why, is_news=end.has_hung)
        if why := self._why_no_longer(end):
            return RestartDecision(False, why, is_news=True)
        if self._is_free(end):
            return RestartDecision(True, "the command is not at fault, and this does not count")
        if end.kind is Restart.ONCE:
            self._used_once = True
            return RestartDecision(True, "once, since it may have been bad luck")
        self._counted += 1
        pause = min(_LONGEST_PAUSE_SECONDS, self._first_pause_seconds * 2 ** (self._counted - 1))
        # Commands that died at the same time must not restart at the same time.
        pause *= 0.75 + 0.5 * os.urandom(1)[0] / 255
        return RestartDecision(True, f"restart {self._counted} of {self._most}", pause)

    def _count_progress(self, end: CommandEnd) -> None:
        if not end.has_run:
            return
        reached = -1 if end.step is None else end.step
        if reached > max(self._furthest or 0, end.began_at or 0):
            self._idle = 0
        else:
            self._idle += 1
        self._furthest = max(reached, self._furthest or 0)

    def _why_never(self, end: CommandEnd) -> str:
        """Empty: this kind of end is restarted."""
        if end.status == 0 or end.kind is Restart.DONE:
            return "it is done"
        if end.was_asked:
            return "it was asked to end"
        if end.status == REQUEUE and self._in_job:
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

    def _why_no_longer(self, end: CommandEnd) -> str:
        """Empty: no limit is reached."""
        if self._idle >= _ATTEMPTS_WITHOUT_PROGRESS:
            return f"{self._idle} attempts in a row have made no new step"
        if end.kind is Restart.ONCE and self._used_once:
            return "it has been restarted once for want of memory, and ran out of it again"
        is_counted = end.kind is not Restart.ONCE and not self._is_free(end)
        if is_counted and self._counted >= self._most:
            often = "once" if self._counted == 1 else f"{self._counted} times"
            return f"it has been restarted {often}"
        return ""

    @staticmethod
    def _is_free(end: CommandEnd) -> bool:
        # Without a run it is unknown whether it makes any progress.
        return end.kind is Restart.FREE and end.has_run


def find_verdict(record: SupervisionRecord) -> Verdict | None:
    """Why it ended; None if that is unknown, which does not prevent a restart."""
    # The records come from processes that were about to die: they may hold anything.
    with contextlib.suppress(Exception):
        from holdfast._diagnose.deaths.judge import judge
        from holdfast._diagnose.evidence.gather import gather_led, gather_run

        if record.hang is not None:
            return _hang_verdict(record.hang)
        for run in record.runs():
            # Its keeper has recorded the death, or has ended.
            return judge(gather_run(Path(run["folder"]), run.get("attempt"), waits=False))
        if record.folder is not None:
            return judge(gather_led(record.folder))
    return None


def _hang_verdict(hang: dict[str, Any]) -> Verdict:
    cause = Cause(hang["cause"])
    restart = restart_after(cause)
    return Verdict(
        *(cause, hang["sentence"], Sure.LIKELY),
        evidence=tuple(hang["evidence"]),
        advice=tuple(hang["advice"]),
        # It has been ended, so it is not done.
        restart=Restart.BACKOFF if restart is Restart.DONE else restart,
    )


def find_end(
    record: SupervisionRecord, status: int, verdict: Verdict | None, **known: bool
) -> CommandEnd:
    kind = Restart.BACKOFF if verdict is None else verdict.restart
    if verdict is not None and may_become_free(verdict, has_run=known.get("has_run", False)):
        kind = Restart.BACKOFF
    step = began_at = None
    for run in record.runs()[:1]:
        with contextlib.suppress(OSError, ValueError, TypeError):
            step, began_at = _reached(RunLayout(Path(run["folder"])), int(run["attempt"]))
    return CommandEnd(status, kind, step=step, began_at=began_at, **known)


def may_become_free(verdict: Verdict, *, has_run: bool) -> bool:
    """Whether it was refused because of another trainer, which is leaving or has left.

    A process of an earlier attempt may still be leaving. Any other trainer goes on.
    """
    told = _REFUSED.search(verdict.sentence)
    if told is None:
        return False
    is_gone = told["host"] == os.uname().nodename and not Path("/proc", told["pid"]).exists()
    return has_run or is_gone


def explain(
    say: Callable[[str], None],
    record: SupervisionRecord,
    verdict: Verdict | None,
    decision: RestartDecision,
    pid: int,
) -> None:
    is_told = verdict is None or verdict.cause in (Cause.FINISHED, Cause.ASKED) or record.runs()
    if verdict is not None and (verdict.restart is not Restart.DONE or not is_told):
        subject = str(pid)
        for run in record.runs()[:1]:
            subject = f"{shlex.quote(run['folder'])} --attempt {run.get('attempt')}"
        said = (verdict.sentence, *record.said)
        advice = [each for each in verdict.advice[:1] if not any(each in line for line in said)]
        if decision.restart:
            from holdfast._diagnose.advice import START_AGAIN  # slow to import

            advice = [each for each in advice if not each.startswith(START_AGAIN)]
        lines = [*advice, f"More: holdfast why {subject}"]
        if verdict.sentence not in record.said and not record.has_printed(verdict.sentence):
            lines.insert(0, verdict.sentence)
        say("\n  ".join(lines))
    if decision.restart:
        after = f" in {decision.pause_seconds:.0f} s" if decision.pause_seconds >= 1 else ""
        say(f"starting it again{after} ({decision.why}).")
    elif decision.is_news:
        say(f"not starting it again: {decision.why}.")


def _reached(layout: RunLayout, attempt: int) -> tuple[int | None, int | None]:
    """The last step that an attempt made, and the one it began at."""
    steps: list[int] = []
    for path in (layout.exit(attempt), layout.death(attempt), layout.heartbeat(attempt)):
        found = read_json(path).get("step")
        if isinstance(found, int):
            steps.append(found)
    steps += [step for step, of, _ in layout.checkpoint_folders() if of == attempt]
    origin = read_origins(layout, [attempt]).get(attempt)
    return max(steps, default=None), None if origin is None else origin[1]
