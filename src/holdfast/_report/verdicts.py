"""Post-mortems: the verdict of `holdfast why` on each attempt that ended badly, judged once."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast._diagnose.texts.log_file import read_tail
from holdfast._report.attempts import AttemptHistory
from holdfast._report.view import Death, Hang
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._text import real, text, whole

if TYPE_CHECKING:
    from holdfast._diagnose.verdict import Verdict

MOST = 100  # the newest
_MOST_CHARACTERS = 30_000
_MOST_LINES = 40
_STACKS_BYTES = 1 << 16


class Verdicts:
    """A verdict is kept until the records of its attempt change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._layout = RunLayout(folder.absolute())
        self._known: dict[int, tuple[object, Verdict]] = {}  # by attempt, with stamps of its files
        self._hangs: dict[int, tuple[object, Hang | None]] = {}
        self._texts: dict[int, tuple[object, str]] = {}

    def known(self, attempt: int) -> Verdict | None:
        found = self._known.get(attempt)
        return None if found is None else found[1]

    def judge(self, history: AttemptHistory, *, is_newest: bool) -> Verdict:
        known = self._known.get(history.number)
        if known is not None and not is_newest:
            return known[1]
        stamps = self._stamps(history.number)
        if known is None or known[0] != stamps:
            # Only for an attempt that ended badly: slow to import.
            from holdfast._diagnose.deaths.judge import judge
            from holdfast._diagnose.evidence.gather import gather_run

            found = judge(gather_run(self._folder, history.number, list(history.events)))
            known = self._known[history.number] = (stamps, found)
        return known[1]

    def death(self, history: AttemptHistory, verdict: Verdict, *, is_newest: bool) -> Death:
        return Death(
            t=verdict.time or history.died_at or history.ended or history.last_seen or 0.0,
            attempt=history.number,
            rank=verdict.rank,
            cause=verdict.cause.value,
            sentence=verdict.sentence,
            evidence=[*verdict.evidence, *verdict.others][:_MOST_LINES],
            advice=list(verdict.advice)[:_MOST_LINES],
            stacks=self._stacks(history.number, is_newest),
        )

    def hang(self, attempt: int) -> Hang | None:
        """What was found when it hung, if it did."""
        path = self._layout.hang(attempt)
        stamp = _stamp(path)
        if stamp is None:
            return None
        known = self._hangs.get(attempt)
        if known is None or known[0] != stamp:
            known = self._hangs[attempt] = (stamp, self._explain(attempt, read_json(path)))
        return known[1]

    def _explain(self, attempt: int, record: dict[str, Any]) -> Hang | None:
        from holdfast._diagnose.hangs.explain import explain

        if not record:
            return None
        found = explain(record)
        began, ended = real(record.get("began")), real(record.get("ended"))
        until = ended if ended is not None else real(record.get("found"))
        return Hang(
            t=began or real(record.get("found")) or 0.0,
            attempt=attempt,
            rank=found.rank,
            cause=text(record.get("cause"), 60) or found.cause.value,
            sentence=text(record.get("sentence"), 2000) or found.sentence,
            evidence=[*found.evidence, *found.others][:_MOST_LINES],
            advice=list(found.advice)[:_MOST_LINES],
            stacks=_end_of(self._layout.hang_text(attempt)),
            seconds=None if began is None or until is None else until - began,
        )

    def _stacks(self, attempt: int, is_newest: bool) -> str:
        """The traceback that it left, and the output of faulthandler."""
        known = self._texts.get(attempt)
        if known is not None and not is_newest:
            return known[1]
        stamps = self._stamps(attempt)
        if known is None or known[0] != stamps:
            folder = self._layout.attempt(attempt)
            found = [_traceback(path) for path in _sorted(folder, "error*.json")]
            found += [_end_of(path) for path in _sorted(folder, "stacks*.txt")]
            joined = "\n\n".join(each.strip("\n") for each in found if each.strip())
            known = self._texts[attempt] = (stamps, joined[:_MOST_CHARACTERS])
        return known[1]

    def _stamps(self, attempt: int) -> object:
        paths = (self._layout.exit(attempt), self._layout.death(attempt), self._layout.led(attempt))
        return tuple(map(_stamp, paths))


def _sorted(folder: Path, pattern: str) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(folder.glob(pattern))[:8]
    return []


def _traceback(path: Path) -> str:
    record = read_json(path)
    found = record.get("traceback")
    if isinstance(found, list):
        found = "".join(map(str, found))
    rank = whole(record.get("rank"))
    head = f"rank {rank}:\n" if rank else ""
    return head + text(found, _MOST_CHARACTERS) if isinstance(found, str) else ""


def _end_of(path: Path) -> str:
    found = read_tail(path, _STACKS_BYTES)
    return found if len(found) <= _MOST_CHARACTERS else "…\n" + found[-_MOST_CHARACTERS:]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
