"""A run that is followed: what is new in its folder is read, and the view is put together.

Nothing in the folder is changed. A model belongs to one thread at a time; what it reads, it reads
once, so that a look at a run with a long history costs what has happened since.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from holdfast._report import events
from holdfast._report.assemble import Known, assemble, to_be_judged
from holdfast._report.attempts import Life
from holdfast._report.checkpoints import Frequent
from holdfast._report.json_lines import Lines, Record, parse, real, text, whole
from holdfast._report.series import Rows
from holdfast._report.status.gather import History, RunSummary, summarize
from holdfast._report.verdicts import Verdicts
from holdfast._report.view import Proof, View
from holdfast._store.folder.attempts import (
    find_run,
    is_live,
    known_origins,
    lease_holder,
    read_json,
    read_origins,
)
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import Origin, trace_line

_OLD_SECONDS = 600.0  # of a heartbeat
_WATCH_SECONDS = 5.0  # beats come every other second
_UNSETTLED = 2  # the newest attempts, of which files may still change


class RunModel:
    """Everything that a page shows of one run."""

    def __init__(
        self,
        folder: Path,
        *,
        look: Callable[[RunLayout, int], bool] | None = None,
        proofs: Sequence[Proof] = (),
    ) -> None:
        """NotARun if there is none. `look` says whether an attempt lives, and may take its time."""
        self._folder = folder
        self._layout, self._id = find_run(folder)
        self._look = look_once if look is None else look
        self._proofs = list(proofs)
        self._begin()

    def _begin(self) -> None:
        self._journal = Lines(self._layout.journal)
        self._history = History()
        self._lives: dict[int, Life] = {}
        self._settled: set[int] = set()
        self._rows = Rows(self._layout)
        self._marks = events.Marks()
        self._frequent = Frequent()
        self._stragglers: dict[tuple[int | None, int | None], str] = {}
        self._verdicts = Verdicts(self._folder)
        self._attempts_share = self._judged_share = 1.0
        self._current: int | None = None  # the attempt whose events come just now
        self._summary: RunSummary | None = None
        self._line: dict[int, int | None] = {}
        self._line_of: object = None
        self._origins: dict[int, Origin] = {}

    @property
    def reading(self) -> float:
        """The share of what is there that has been read and understood."""
        return min(self._journal.share, self._attempts_share, self._judged_share)

    def update(self, seconds: float | None = None) -> bool:
        """Read what has come since; whether anything has.

        With `seconds` a long history is left in the middle when they are over: `reading` is then
        below 1, the view shows what is known by then, and the next update goes on.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        is_new = self._read_journal(deadline)
        is_new = self._read_attempts(deadline) or is_new
        before = self._summary
        self._summary = summarize(self._folder, look=self._look, history=self._history)
        is_new = self._judge(self._summary, deadline) or is_new
        return is_new or before is None or _ageless(before) != _ageless(self._summary)

    def summary(self) -> RunSummary:
        """What `holdfast status` tells of it, as of the last update."""
        if self._summary is None:
            self.update()
        assert self._summary is not None
        return self._summary

    def view(self) -> View:
        """What the page shows, as of the last update."""
        summary = self.summary()
        return assemble(
            Known(
                layout=self._layout,
                summary=summary,
                now=time.time(),
                lives=self._in_order(),
                line=self._find_line(summary),
                origins=self._origins,
                rows=self._rows,
                marks=self._marks,
                frequent=self._frequent,
                current=self._current,
                stragglers=list(dict.fromkeys(self._stragglers.values())),
                late_ranks={rank for _, rank in self._stragglers},
                verdicts=self._verdicts,
                proofs=self._proofs,
                reading=self.reading,
            )
        )

    # -- the journal ---------------------------------------------------------------------

    def _read_journal(self, deadline: float | None) -> bool:
        is_new = False
        for piece in self._journal.read():
            if self._journal.has_started_over and not is_new:
                journal = self._journal
                self._begin()
                self._journal = journal
            is_new = True
            for event in parse(self._frequent.sort_out(piece)):
                self._take(event)
            if deadline is not None and time.monotonic() > deadline:
                break
        return is_new

    def _take(self, event: Record) -> None:
        kind, t = text(event.get("event"), 60), real(event.get("time"))
        if not kind or t is None:
            return
        if kind == "start":
            self._current = whole(event.get("attempt"))
        number = whole(event.get("attempt"))
        number = self._current if number is None else number
        self._history.take(event)
        if number is not None and number > 0:
            self._life(number).take(kind, t, event)
        if kind == "straggler":
            self._stragglers[number, whole(event.get("rank"))] = events.straggler(event)
        mark = events.describe(event, t, number)
        if mark is not None:
            self._marks.add(mark)

    def _life(self, number: int) -> Life:
        found = self._lives.get(number)
        if found is None:
            found = self._lives[number] = Life(number)
        return found

    # -- the attempts ----------------------------------------------------------------------

    def _read_attempts(self, deadline: float | None) -> bool:
        numbers: list[int] = []
        with contextlib.suppress(OSError):
            numbers = self._layout.attempt_numbers()
        is_new = False
        self._attempts_share = 1.0
        for at, number in enumerate(numbers):
            if number in self._settled:
                continue
            # One that has something new is read in any case, or there would be no end.
            if is_new and deadline is not None and time.monotonic() > deadline:
                # Not the next one before this one: curves are kept in the order of time.
                self._attempts_share = at / len(numbers)
                break
            is_known = number in self._lives and self._lives[number].began is not None
            life = self._life(number)
            if not is_known:
                life.take_lease(read_json(self._layout.lease(number)))
                is_new = True
            found = self._rows.read(life)
            if found is None:
                return self._start_over()
            is_new = self._read_end(life) or is_new or found
            if number not in numbers[-_UNSETTLED:]:
                self._settled.add(number)
        return is_new

    def _start_over(self) -> bool:
        """A series has been replaced: somebody has copied another run here."""
        self._begin()
        self._read_journal(None)
        for number in self._layout.attempt_numbers():
            life = self._life(number)
            life.take_lease(read_json(self._layout.lease(number)))
            self._rows.read(life)
            self._read_end(life)
        return True

    def _read_end(self, life: Life) -> bool:
        """How it ended, where the journal does not say; and until when it lived."""
        if life.died_at is None and life.status is None:
            life.died_at = real(read_json(self._layout.death(life.number)).get("time"))
        if life.has_exit and life.ended is not None:
            return False
        path = self._layout.exit(life.number)
        record = read_json(path)
        if not record:
            beat = read_json(self._layout.heartbeat(life.number))
            if (moment := real(beat.get("time"))) is not None:
                # The first beats come before the trainer has told where it begins.
                life.see(moment, whole(beat.get("step")) or None)
            return False
        moment = real(record.get("time"))
        if moment is None:
            with contextlib.suppress(OSError):
                moment = path.stat().st_mtime
        life.end(record, moment)
        return True

    def _judge(self, summary: RunSummary, deadline: float | None) -> bool:
        """Find out why attempts ended; each takes some milliseconds, once."""
        is_new, self._judged_share = False, 1.0
        lives = to_be_judged(self._in_order(), summary)
        for at, life in enumerate(lives):
            if is_new and deadline is not None and time.monotonic() > deadline:
                self._judged_share = (1 + at) / (1 + len(lives))
                break
            before = self._verdicts.known(life.number)
            is_newest = life.number == summary.attempt
            is_new = self._verdicts.judge(life, is_newest=is_newest) is not before or is_new
        return is_new

    def _in_order(self) -> list[Life]:
        return [self._lives[number] for number in sorted(self._lives)]

    def _find_line(self, summary: RunSummary) -> dict[int, int | None]:
        """The attempts that lead to today, each with the last step that counts."""
        newest = max(self._lives, default=0)
        stamp = _stamp(self._layout.checkpoints)
        state = (newest, summary.is_live, stamp, tuple(self._lives))
        if state != self._line_of:
            found = known_origins(self._layout, {newest} if summary.is_live else ())
            # A first attempt that has saved nothing yet is all there is.
            self._origins = found or read_origins(self._layout)
            self._line = trace_line(self._origins, newest)
            self._line_of = state
        return self._line


def look_once(layout: RunLayout, attempt: int) -> bool:
    """Whether an attempt lives. One of another machine is watched for a few seconds, unless its
    last heartbeat is so old that no two clocks are as far apart: a copied folder is looked at at
    once.
    """
    holder = lease_holder(layout, attempt)
    if holder is None or layout.exit(attempt).exists() or holder.is_here():
        return is_live(layout, attempt)
    moment = real(read_json(layout.heartbeat(attempt)).get("time"))
    if moment is None or abs(time.time() - moment) > _OLD_SECONDS:
        return False
    return is_live(layout, attempt, _WATCH_SECONDS)


def _stamp(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _ageless(run: RunSummary) -> RunSummary:
    """The same without what changes by the mere passing of time."""
    return replace(
        run,
        memory_age_seconds=None,
        disk_age_seconds=None,
        boundary_age_seconds=None,
        last_exit=None,
        job=None,
        ranks=[],
    )
