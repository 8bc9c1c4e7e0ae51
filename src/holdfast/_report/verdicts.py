"""Post-mortems: the verdict of `holdfast why` on each attempt that ended badly, judged once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
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
    """What was found is kept until the records of its attempt change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._layout = RunLayout(folder.absolute())
        self._verdicts: dict[int, Verdict] = {}  # by attempt
        self._kept: dict[tuple[str, int], tuple[object, Any]] = {}  # with stamps of its files

    def known(self, attempt: int) -> Verdict | None:
        return self._verdicts.get(attempt)

    def judge(self, history: AttemptHistory, *, is_newest: bool) -> Verdict:
        def find() -> Verdict:
            # Only for an attempt that ended badly: slow to import.
            from holdfast._diagnose.deaths.judge import judge
            from holdfast._diagnose.evidence.gather import gather_run

            return judge(gather_run(self._folder, history.number, list(history.events)))

        found: Verdict = self._once("verdict", history.number, is_newest, find)
        self._verdicts[history.number] = found
        return found

    def death(self, history: AttemptHistory, verdict: Verdict, *, is_newest: bool) -> Death:
        number = history.number
        return Death(
            t=verdict.time or history.died_at or history.ended or history.last_seen or 0.0,
            attempt=number,
            rank=verdict.rank,
            cause=verdict.cause.value,
            sentence=verdict.sentence,
            evidence=[*verdict.evidence, *verdict.others][:_MOST_LINES],
            advice=list(verdict.advice)[:_MOST_LINES],
            stacks=self._once("stacks", number, is_newest, lambda: self._read_stacks(number)),
        )

    def hang(self, attempt: int) -> Hang | None:
        """What was found when it hung, if it did."""
        path = self._layout.hang(attempt)
        known, stamp = self._kept.get(("hang", attempt)), _stamp(path)
        if known is None or known[0] != stamp:
            found = None if stamp is None else self._explain(attempt, read_json(path))
            known = self._kept["hang", attempt] = (stamp, found)
        hang: Hang | None = known[1]
        return hang

    def _once(self, what: str, attempt: int, is_newest: bool, find: Callable[[], Any]) -> Any:
        """Only the files of the newest attempt may still change."""
        known = self._kept.get((what, attempt))
        if known is None or is_newest:
            files = (self._layout.exit, self._layout.death, self._layout.led)
            stamps = [_stamp(path(attempt)) for path in files]
            if known is None or known[0] != stamps:
                known = self._kept[what, attempt] = (stamps, find())
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

    def _read_stacks(self, attempt: int) -> str:
        """The traceback that it left, and the output of faulthandler."""
        found: list[str] = []
        for pattern, read in (("error*.json", _traceback), ("stacks*.txt", _end_of)):
            with contextlib.suppress(OSError):
                found += map(read, sorted(self._layout.attempt(attempt).glob(pattern))[:8])
        joined = "\n\n".join(each.strip("\n") for each in found if each.strip())
        return joined[:_MOST_CHARACTERS]


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
