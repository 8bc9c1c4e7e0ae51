"""After an end: the verdict, in a few lines, and how far the run got.

Imported only when the command has failed: all that judging takes would make every start slow.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast._diagnose.verdict import Cause, Restart, Sure, Verdict, restart_after
from holdfast._store.folder.attempts import read_json, read_origins
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.plain_file import read_plain
from holdfast._store.folder.supervised import led_output
from holdfast._supervise.record import Book
from holdfast._supervise.restart import Decision, End


def find_verdict(book: Book) -> Verdict | None:
    """Why it ended; None if that cannot be told, which must not keep anybody from a restart."""
    # Records are written by processes that are about to die, and judging them is no reason to.
    with contextlib.suppress(Exception):
        from holdfast._diagnose.deaths.judge import judge
        from holdfast._diagnose.evidence.gather import gather_led, gather_run

        if book.hang is not None:
            return _of_hang(book.hang)
        for run in book.runs():
            return judge(gather_run(Path(run["folder"]), run.get("attempt")))
        if book.folder is not None:
            return judge(gather_led(book.folder))
    return None


def _of_hang(hang: dict[str, Any]) -> Verdict:
    """What the leader has ended it for."""
    cause = Cause(hang["cause"])
    restart = restart_after(cause)
    return Verdict(
        *(cause, hang["sentence"], Sure.LIKELY),
        evidence=tuple(hang["evidence"]),
        advice=tuple(hang["advice"]),
        # It has been ended, whatever it looked like.
        restart=Restart.BACKOFF if restart is Restart.DONE else restart,
    )


def find_end(book: Book, status: int, verdict: Verdict | None, **known: bool) -> End:
    """The end as a decision about a restart needs it."""
    kind = Restart.BACKOFF if verdict is None else verdict.restart
    step = began_at = None
    for run in book.runs():
        with contextlib.suppress(OSError, ValueError, TypeError):
            step, began_at = _reached(RunLayout(Path(run["folder"])), int(run["attempt"]))
        break
    return End(status, kind, step=step, began_at=began_at, **known)


def tell(
    say: Callable[[str], None], book: Book, verdict: Verdict | None, decision: Decision, pid: int
) -> None:
    """What happened and what follows, for whoever looks at the screen."""
    if verdict is not None and verdict.restart is not Restart.DONE:
        subject = str(pid)
        for run in book.runs()[:1]:
            subject = f"{shlex.quote(run['folder'])} --attempt {run.get('attempt')}"
        said = (verdict.sentence, *book.said)
        advice = [each for each in verdict.advice[:1] if not any(each in line for line in said)]
        lines = [*advice, f"more: holdfast why {subject}"]
        if not _has_said(book, verdict.sentence):
            lines.insert(0, verdict.sentence)
        say("\n  ".join(lines))
    if decision.restart:
        after = f" in {decision.pause_seconds:.0f} s" if decision.pause_seconds >= 1 else ""
        say(f"starting it again{after} ({decision.why}).")
    elif decision.is_news:
        say(f"not starting it again: {decision.why}.")


def _has_said(book: Book, sentence: str) -> bool:
    """Whether the run itself has, before its traceback, or the leader while it lived."""
    if sentence in book.said:
        return True
    with contextlib.suppress(OSError):
        return book.folder is not None and sentence.encode() in read_plain(led_output(book.folder))
    return False


def as_record(decision: Decision) -> dict[str, Any]:
    """As led.json has it."""
    return {
        "restart": decision.restart,
        "why": decision.why,
        "pause": round(decision.pause_seconds, 3),
    }


def _reached(layout: RunLayout, attempt: int) -> tuple[int | None, int | None]:
    """The last step that was done in an attempt, and the one it began at."""
    steps: list[int] = []
    for path in (layout.exit(attempt), layout.death(attempt), layout.heartbeat(attempt)):
        found = read_json(path).get("step")
        if isinstance(found, int):
            steps.append(found)
    steps += [step for step, of, _ in layout.checkpoint_folders() if of == attempt]
    origin = read_origins(layout, [attempt]).get(attempt)
    return max(steps, default=None), None if origin is None else origin[1]
