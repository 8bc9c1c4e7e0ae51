"""A run that is followed: reads what is new in its folder, and assembles the view.

Nothing in the folder is changed. A model belongs to one thread at a time. It reads everything
once, so an update of a run with a long history costs only what is new.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast._report import events
from holdfast._report.assemble import Records, assemble, to_be_judged
from holdfast._report.attempts import AttemptHistory
from holdfast._report.json_lines import Lines, Record, parse
from holdfast._report.labels import read_labels
from holdfast._report.series import Rows
from holdfast._report.status.gather import JournalHistory, RunSummary, aged, summarize
from holdfast._report.verdicts import Verdicts
from holdfast._report.view import ProofRecord, View
from holdfast._store.folder import attempts
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import trace_line
from holdfast._text import real, text, whole

_OLD_SECONDS = 600.0  # of a heartbeat
_WATCH_SECONDS = 5.0  # beats come every other second
_UNSETTLED = 2  # the newest attempts, whose files may still change


class RunModel:
    def __init__(
        self,
        folder: Path,
        *,
        look: Callable[[RunLayout, int], bool] | None = None,
        proofs: Sequence[ProofRecord] = (),
    ) -> None:
        """NotARun if there is none. `look` says whether an attempt lives, and may take long."""
        self._folder = folder
        self._layout, _ = attempts.find_run(folder)
        self._look = look_once if look is None else look
        self._proofs = list(proofs)
        self._begin()

    def _begin(self) -> None:
        self._journal = Lines(self._layout.journal)
        self._history = JournalHistory()
        marks = events.EventMarks()
        rows = Rows(self._layout, marks.add)
        self._known = Records(self._layout, rows, Verdicts(self._folder), marks)
        self._settled: set[int] = set()
        self._attempts_share = 1.0
        self._summary: RunSummary | None = None
        self._lineage_of: object = None

    @property
    def histories(self) -> dict[int, AttemptHistory]:
        """The attempts by number, as of the last update; not to be changed."""
        return self._known.histories

    @property
    def reading(self) -> float:
        """The share of the files that has been read."""
        return min(self._journal.share, self._attempts_share)

    def update(self, seconds: float | None = None) -> bool:
        """Read what is new; whether there was anything.

        With `seconds`, reading a long history stops when they are over: `reading` is then below
        1, the view shows what is known by then, and the next update goes on.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        is_new = self._read_journal(deadline)
        is_new = self._read_attempts(deadline) or is_new
        before = self._summary
        self._summary = summarize(self._folder, look=self._look, history=self._history)
        is_new = self._judge(self._summary, deadline) or is_new
        labels = read_labels(self._layout)
        is_new, self._known.labels = is_new or labels != self._known.labels, labels
        return is_new or before is None or aged(before, None) != aged(self._summary, None)

    def summary(self) -> RunSummary:
        """What `holdfast status` shows, as of the last update."""
        if self._summary is None:
            self.update()
        assert self._summary is not None
        return self._summary

    def view(self) -> View:
        summary, known = self.summary(), self._known
        newest = max(known.histories, default=0)
        stamp = None
        with contextlib.suppress(OSError):
            stamp = self._layout.checkpoints.stat().st_mtime_ns
        state = (newest, summary.is_live, stamp, tuple(known.histories))
        if state != self._lineage_of:
            found = attempts.known_origins(self._layout, {newest} if summary.is_live else ())
            # A first attempt that has saved nothing yet is all there is.
            known.origins = found or attempts.read_origins(self._layout)
            known.lineage = trace_line(known.origins, newest)
            self._lineage_of = state
        return assemble(known, summary, time.time(), self._proofs, self.reading)

    def _read_journal(self, deadline: float | None) -> bool:
        is_new = False
        for piece in self._journal.read():
            if self._journal.has_started_over and not is_new:
                journal = self._journal
                self._begin()
                self._journal = journal
            is_new = True
            for event in parse(piece):
                self._take(event)
            if deadline is not None and time.monotonic() > deadline:
                break
        return is_new

    def _take(self, event: Record) -> None:
        kind, t = text(event.get("event"), 60), real(event.get("time"))
        if not kind or t is None:
            return
        known = self._known
        number = whole(event.get("attempt"))
        if kind == "start":
            known.current = number
        number = known.current if number is None else number
        if kind == "checkpoint":
            event["attempt"] = number
            known.checkpoints.add(event)
            return
        self._history.take(event)
        # There may be very many requests to save; a verdict needs the other last events.
        is_save = kind == "request" and event.get("kind") == "save"
        if number is not None and number > 0 and not is_save:
            self._history_of(number).take(kind, t, event)
        if kind == "straggler":
            key = number, whole(event.get("rank"))
            known.stragglers[key] = events.fill(events.STRAGGLER, event)
        if (mark := events.describe(event, t, number)) is not None:
            known.marks.add(mark)

    def _history_of(self, number: int) -> AttemptHistory:
        found = self._known.histories.get(number)
        if found is None:
            found = self._known.histories[number] = AttemptHistory(number)
        return found

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
            found = self._read_attempt(number)
            if found is None:  # a series was replaced: another run was copied here
                self._begin()
                self._read_journal(None)
                for each in self._layout.attempt_numbers():
                    self._read_attempt(each)
                return True
            is_new = found or is_new
            if number not in numbers[-_UNSETTLED:]:
                self._settled.add(number)
        return is_new

    def _read_attempt(self, number: int) -> bool | None:
        """Whether there was something new; None if its series was replaced."""
        history = self._history_of(number)
        is_known = history.began is not None
        if not is_known:
            history.take_lease(attempts.read_json(self._layout.lease(number)))
        has_rows = self._known.rows.read(history)
        if has_rows is None:
            return None
        return self._read_end(history) or has_rows or not is_known

    def _read_end(self, history: AttemptHistory) -> bool:
        """How it ended, where the journal does not say; and until when it lived."""
        if history.died_at is None and history.exit.status is None:
            history.died_at = real(
                attempts.read_json(self._layout.death(history.number)).get("time")
            )
        if history.exit.is_recorded and history.ended is not None:
            return False
        path = self._layout.exit(history.number)
        record = attempts.read_json(path)
        if not record:
            beat = attempts.read_json(self._layout.heartbeat(history.number))
            if (moment := real(beat.get("time"))) is not None:
                # The first beats come before the trainer has sent where it begins.
                history.see(moment, whole(beat.get("step")) or None)
            return False
        moment = real(record.get("time"))
        if moment is None:
            with contextlib.suppress(OSError):
                moment = path.stat().st_mtime
        history.end(record, moment)
        return True

    def _judge(self, summary: RunSummary, deadline: float | None) -> bool:
        """Find out why attempts ended; each takes some milliseconds, once."""
        is_new = False
        verdicts = self._known.verdicts
        for history in to_be_judged(self._known.in_order(), summary):
            if is_new and deadline is not None and time.monotonic() > deadline:
                break  # the next update goes on
            before = verdicts.known(history.number)
            is_newest = history.number == summary.attempt
            is_new = verdicts.judge(history, is_newest=is_newest) is not before or is_new
        return is_new


def look_once(layout: RunLayout, attempt: int) -> bool:
    """Whether an attempt lives.

    One of another machine is watched for a few seconds, unless its last heartbeat is older than
    two clocks can differ: a copied folder is answered at once.
    """
    holder = attempts.lease_holder(layout, attempt)
    if holder is None or layout.exit(attempt).exists() or holder.is_here():
        return attempts.is_live(layout, attempt)
    moment = real(attempts.read_json(layout.heartbeat(attempt)).get("time"))
    if moment is None or abs(time.time() - moment) > _OLD_SECONDS:
        return False
    return attempts.is_live(layout, attempt, _WATCH_SECONDS)
