"""The interrupted training: interrupt it, restart it, and compare it with the undisturbed one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast._errors import HoldfastError
from holdfast._report.status.gather import summarize
from holdfast._tools.prove.causes import (
    MISSING,
    Deviation,
    DeviationCase,
    Items,
    RankAttempt,
    RankHistory,
    UpdateRecord,
    completes_step,
    renumber,
)
from holdfast._tools.prove.proof import Interruption, Planned, Watcher
from holdfast._tools.prove.script_run import Client, Event, Hung, Saved, ScriptRun, UndisturbedRun

_VAGUE = ("generator-not-restored", "unknown")
_COMMIT_SECONDS = 0.05
_AT_THE_BEGINNING = ("start", "load")
_NEAR = 0.25  # of the training: wait for a save that comes so soon
_LEAST_UPDATES_BETWEEN = 4  # in a process that survives an interruption
_MOST_STARTS_WITHOUT_PROGRESS = 3
_DECIDES = ("weight", "setting", "gradient")
_MOST_NOTES = 3


class RankComparison:
    """Compares one rank of an interrupted training with the undisturbed one, update by update.

    Some values decide an update and must be equal at once: weights, rates, batches, gradients.
    Others may differ without consequence, for a while or for good. They are remembered as
    deviations, and count when a deciding value differs later, or when they differ at the end.
    """

    def __init__(self, reference: RankHistory, volatile: frozenset[str] = frozenset()) -> None:
        self._reference = reference
        self._volatile = volatile
        self._deviations: dict[str, Deviation] = {}
        self._passed: set[str] = set()  # boundaries, in all attempts
        self.attempt = RankAttempt()
        self.notes: list[str] = []
        self.finding: Deviation | None = None
        self.place = 0  # updates of the undisturbed run that this attempt has made
        self.reached = 0  # the furthest place of all attempts

    def compare_update(self, update: UpdateRecord) -> None:
        known, attempt = self._reference.updates, self.attempt
        if attempt.started_at is None:
            attempt.started_at = self.place = self._align(update)
        place, self.place = self.place, self.place + 1
        self.reached = max(self.reached, place)
        if self.finding is None and place < len(known):
            number = attempt.numbers.setdefault(update.optimizer, known[place].optimizer)
            if number != update.optimizer:
                update = replace(update, items=renumber(update.items, attempt.numbers))
            self._compare(update, known[place], place)
        attempt.since_start += 1

    def compare_boundary(self, key: str, step: int, items: Items) -> None:
        self._passed.add(key)
        expected = self._reference.boundaries.get(key, {})
        if self.finding is not None:
            return
        differing = [item for item in expected if items.get(item, MISSING)[0] != expected[item][0]]
        # An input only hints at the cause.
        held = [item for item in differing if item.startswith("input/") and item in items]
        differing = [item for item in differing if item not in self._volatile]
        deciding = [item for item in differing if not item.startswith("input/")]
        if not deciding:
            return
        case = self._case(None, max(0, self.place - 1), deciding[:1])
        self.finding = None if case is None else case.judge()
        if self.finding is None or self.finding.cause == "unknown":
            # The run restores its state, so the cause is a value that was not given to it.
            is_metric = deciding[0].startswith("metric/")
            item = (held or deciding)[0]
            self.finding = Deviation(
                *(item, step - 1, self.attempt.after, expected[item], items.get(item, MISSING)),
                cause="metric-differs" if is_metric else "state-not-named",
                others=tuple(sorted(other for other in differing if other != item)),
            )

    def finish(self, end: Items) -> None:
        """The script is over: it must have made all steps, and its end be the same."""
        if self.finding is not None:
            return
        total = len(self._reference.updates)
        boundaries = self._reference.boundaries.keys()
        if boundaries - self._passed:
            counts = len(boundaries), len(self._passed)
            self._find_count("boundaries", counts, "other-number-of-steps")
            return
        if self.attempt.started_at is not None and self.place != total:
            is_one_off = abs(self.place - total) == 1
            cause = "off-by-one-step" if is_one_off else "other-number-of-steps"
            self._find_count("steps", (total, self.place), cause)
            return
        end = renumber(end, self.attempt.numbers)
        for item, leaf in self._reference.end.items():
            found = end.get(item, leaf)
            if item in self._volatile or found[0] == leaf[0]:
                continue
            new = Deviation(item, total, self.attempt.after, leaf, found)
            deviation = self._deviations.get(item, new)
            self._find_if_it_counts(deviation)
            if self.finding is not None:
                return
            if item in self._deviations and leaf[2] > 1 and len(self.notes) < _MOST_NOTES:
                name = self._reference.display(item)
                self.notes.append(
                    f"{name} is not as undisturbed in the end, since interruption "
                    f"{deviation.after}; nothing else is, so it may be for display only."
                )

    def suspect(self) -> Deviation | None:
        """A deviation of some attempt that was not seen to end."""
        for deviation in self._deviations.values():
            if self.finding is None:
                self._find_if_it_counts(deviation)
        return self.finding

    def _find_if_it_counts(self, deviation: Deviation) -> None:
        case = self._case(None, len(self._reference.updates), [])
        if case is not None and case.counts_in_the_end(deviation):
            self.finding = deviation.because(case.cause_of(deviation))

    def _align(self, update: UpdateRecord) -> int:
        """Where in the undisturbed run this attempt begins."""
        known, expected_start = self._reference.updates, self.attempt.expected_start
        places = [place for place, each in enumerate(known) if each.weights == update.weights]
        if update.boundary_id is not None:
            marked = [p for p, each in enumerate(known) if each.boundary_id == update.boundary_id]
            if marked:
                return next((place for place in marked if place in places), marked[0])
        if not places:
            return min(expected_start, max(0, len(known) - 1))

        def likeness(place: int) -> tuple[int, int]:
            items = known[place].items
            equal = sum(items.get(k, MISSING)[0] == v[0] for k, v in update.items.items())
            return equal, -abs(place - expected_start)

        return max(places, key=likeness)

    def _compare(self, update: UpdateRecord, expected: UpdateRecord, place: int) -> None:
        differing = []
        is_first = self.attempt.since_start == 0
        pairs = [(expected.items, update.items)]
        if is_first:  # of the script's numbers, those that an attempt begins with
            pairs.append((expected.numbers, update.numbers))
        for known, items in pairs:
            for item, leaf in known.items():
                kind, found = item.partition("/")[0], items.get(item, MISSING)
                is_unseen = found is MISSING and (kind != "moment" or update.unbuilt)
                if kind == "number":
                    self._deviations.pop(item, None)
                if item in self._volatile or is_unseen:
                    continue
                if found[0] == leaf[0]:
                    self._deviations.pop(item, None)
                elif kind in _DECIDES:
                    differing.append(item)
                elif item not in self._deviations:
                    new = Deviation(item, place, self.attempt.after, leaf, found)
                    self._deviations[item] = new
        if not same_batches(update, expected, is_first=is_first):
            differing.append("batch")
        case = self._case(update, place, differing)
        if differing and case is not None:
            finding = case.judge()
            is_later = self._has_begun_an_epoch(finding.place)
            self.finding = replace(finding, is_in_later_epoch=is_later)

    def _has_begun_an_epoch(self, place: int | None) -> bool:
        """Whether a pass over the data begins after the attempt did, up to an update."""
        since = range((self.attempt.started_at or 0) + 1, 0 if place is None else place + 1)
        batches = (batch for at in since for batch in self._reference.updates[at].batches)
        return any(batch["at"] == 0 for batch in batches)

    def _case(
        self, update: UpdateRecord | None, place: int, differing: list[str]
    ) -> DeviationCase | None:
        reference = self._reference
        if not reference.updates:
            return None
        place = min(place, len(reference.updates) - 1)
        known = reference, self.attempt, self._deviations
        return DeviationCase(*known, update, place, differing)

    def _find_count(self, unit: str, counts: tuple[int, int], cause: str) -> None:
        expected, found = (f"{count} {unit}" for count in counts)
        self.finding = Deviation.of_texts(
            cause, "number of steps", (expected, found), self.attempt.after, min(counts)
        )


def same_batches(update: UpdateRecord, expected: UpdateRecord, *, is_first: bool) -> bool:
    """Whether the batches for an update are the same, not counting those skipped before it.

    In the first update of an attempt, batches may be missing that were for no update.
    """
    count = len(expected.batches)
    if is_first and update.batches:
        count = min(count, len(update.batches))
    return not count or update.batch_hashes[-count:] == expected.batch_hashes[-count:]


@dataclass
class _Attempt:
    newest_at_start: Saved  # the newest checkpoint when it began
    struck: Interruption | None = None  # the last one
    updates_since: int = 0  # that interruption
    here: int = 0  # boundaries of the undisturbed run that it has passed
    step: int = 0  # of the run, at the last of them
    saves_here: int = 0  # since the last step
    has_trained: bool = False
    ends: dict[int, Items] = field(default_factory=dict)  # the last state, by rank


class InterruptedRun:
    def __init__(
        self,
        script: ScriptRun,
        reference: UndisturbedRun,
        plan: list[Planned],
        volatile: frozenset[str],
        watcher: Watcher,
        deadline: float,
        compares: bool,
    ) -> None:
        self.script = script
        self.plan = list(plan)  # those whose moment did not come yet
        self._reference = reference
        self._watcher = watcher
        self._deadline = deadline
        self._compares = compares
        self._comparisons = {
            rank: RankComparison(history, volatile) for rank, history in reference.histories.items()
        }
        # Steps are updates of an optimizer, or else boundaries of runs.
        self._has_updates = bool(reference.history().updates)
        keys = reference.history().boundaries
        self._boundary_places = {key: place for place, key in enumerate(keys, start=1)}
        self._passed: set[str] = set()  # boundaries of runs, in all attempts
        self._made = 0  # steps of the first rank in all attempts
        self._left_unfinished: list[int] = []  # interruptions after which it ended with status 0
        self._due: float | None = None  # when the signal of the present interruption goes out
        self._present: Planned | None = None
        self._attempt = _Attempt(script.file_log.newest)
        self.interruptions: list[Interruption] = []
        self.blamed: int | None = None  # the last interruption of an attempt that has trained
        self.finding: Deviation | None = None
        self.finding_rank = 0

    def notes(self) -> Iterator[str]:
        for comparison in self._comparisons.values():
            yield from comparison.notes
        file_log = self.script.file_log
        goes_on = any(each.resumed_at for each in self.interruptions)
        if file_log.saved and not file_log.loaded and self.repeated and not goes_on:
            yield "The script saves but loads nothing: it starts over each time."
        if self._left_unfinished:
            numbers = ", ".join(map(str, self._left_unfinished))
            yield (
                f"After interruption {numbers} the script ended with status 0 though it was not "
                "complete: a launcher would not start it again."
            )
        for name, folder in self.script.runs.items():
            with contextlib.suppress(HoldfastError, OSError):  # the script may have removed it
                known = summarize(Path(folder))
                if known.state == "closed" and known.step:
                    yield (
                        f"{name} is left at step {known.step} and is not finished: another start "
                        "trains on from there. If training is complete, write run.finish() before "
                        "the loop is left, or give the loop steps=N."
                    )

    @property
    def repeated(self) -> int:
        """Steps that were made more than once: those after the last save."""
        steps = self._reference.steps if self._has_updates else self._reference.run_steps
        return max(0, self._made - steps)

    def run(self) -> None:
        """Start the script again and again, until it is complete or a difference is found."""
        barren = 0
        undisturbed = self._reference.script
        while True:
            reached = self._reached()
            self._attempt = _Attempt(self.script.file_log.newest)
            for comparison in self._comparisons.values():
                self._begin_comparison(comparison)
            self._take_next(self._next_planned())
            if self._present is not None and self._present.moment == "start":
                self._due = time.monotonic() + self._present.delay * self._reference.start_seconds
            try:
                status = self.script.run_once(self._receive, self._tick, undisturbed)
            except Hung:
                self._fail("hangs", "further steps, or its end", "neither", "the script")
                return
            self._end_attempt(status)
            if self.finding is not None:
                return
            struck = self._attempt.struck
            if status == 0 and (struck is None or self._is_complete()):
                if self._compares:
                    for rank, comparison in self._comparisons.items():
                        comparison.finish(self._attempt.ends.get(rank, {}))
                    self._choose_rank()
                return
            if struck is None:
                self._fail_to_resume(status)
                return
            if status == 0:
                self._left_unfinished.append(struck.number)
            barren = barren + 1 if self._reached() <= reached and not self.plan else 0
            if barren > _MOST_STARTS_WITHOUT_PROGRESS:
                self._fail("resume-fails", "the script goes on", "it ends again and again")
                return

    def _begin_comparison(self, comparison: RankComparison) -> None:
        newest = self.script.file_log.newest
        comparison.attempt = RankAttempt(self.blamed, newest.place, newest.in_handler)

    def _take_next(self, planned: Planned | None) -> None:
        self._due = self._present = None
        if time.monotonic() > self._deadline:
            self.plan.clear()
        elif planned is not None:
            self.plan.remove(planned)
            self._present = planned

    def _next_planned(self) -> Planned | None:
        """The next interruption for a new process."""
        # Those for a beginning were skipped while the previous process ran: now they are due.
        behind = self._reached() / max(1, self._reference.steps)
        due = [p for p in self.plan if p.moment in _AT_THE_BEGINNING and p.share <= behind]
        first = next(iter(self.plan), None)
        return first if first is None or first.moment in _AT_THE_BEGINNING else [*due, first][0]

    def _end_attempt(self, status: int) -> None:
        struck = self._attempt.struck
        if struck is not None:
            struck.status = status
            if self._attempt.has_trained or self.blamed is None:
                self.blamed = struck.number
        if self._present is not None:
            self.plan.insert(0, self._present)
            self._present = None
        if self._compares and self.finding is None:
            self._choose_rank()
        # A checkpoint that could not be read, and a training that silently starts over.
        place, first = self._attempt.newest_at_start.place, self._comparisons.get(0)
        is_lost = place and first is not None and first.attempt.started_at == 0
        if self.finding is None and self.script.file_log.failed and is_lost:
            self._fail_to_load("progress-lost", f"goes on from step {place}", "starts over")

    def _choose_rank(self) -> None:
        """The rank that differs first; where gradients are shared, one with a clear cause."""
        found = [
            (comparison.finding.step or 0, comparison.finding.cause in _VAGUE, rank)
            for rank, comparison in self._comparisons.items()
            if comparison.finding is not None
        ]
        if found:
            self.finding_rank = min(found)[-1]
            self.finding = self._comparisons[self.finding_rank].finding

    def _is_complete(self) -> bool:
        if not self._has_updates:
            return bool(self._attempt.ends) or len(self._passed) >= self._reference.steps
        return self._reached() >= len(self._reference.history().updates)

    def suspect(self) -> Deviation | None:
        """What may be behind a result that differs: a value that was seen to start over."""
        found = (comparison.suspect() for comparison in self._comparisons.values())
        return next(filter(None, found), None)

    def _fail_to_resume(self, status: int) -> None:
        if self.script.file_log.failed:
            self._fail_to_load("resume-fails", "it can be loaded", "cannot be")
            return
        words = self.script.last_lines().splitlines()[-1:] or ["nothing"]
        ended = f"exit status {status}" if status >= 0 else f"signal {-status}"
        self._fail("resume-fails", "the script goes on", f"{ended}: {words[0][:160]}")

    def _fail_to_load(self, cause: str, expected: str, found: str) -> None:
        file_log = self.script.file_log
        name, error = next(iter(file_log.failed.items()))
        cause = "torn-checkpoint" if name in file_log.torn_failed else cause
        self._fail(cause, expected, f"{found}: {error}", f"checkpoint {name}")

    def _fail(self, cause: str, expected: str, found: str, item: str = "the restart") -> None:
        place = self._reached() - 1
        self.finding = Deviation.of_texts(
            cause, item, (expected, found), self.blamed, place if place >= 0 else None
        )

    def _receive(self, client: Client, event: Event) -> Mapping[str, Any] | None:
        kind, attempt = event["event"], self._attempt
        comparison = self._comparisons.get(client.rank)
        last = self.interruptions[-1] if self.interruptions else None
        if client.rank == 0:
            self.script.file_log.record(event, self._place())
        if kind == "end" and client.trains:
            attempt.ends[client.rank] = event["items"]
        elif kind == "sight" and comparison is not None:
            attempt.has_trained = True
            if event["number"] == 0 and comparison.attempt.started_at is not None:
                self._begin_comparison(comparison)  # restarted by its launcher, as torchrun does
            comparison.compare_update(UpdateRecord.from_event(event))
            if client.rank == 0:
                self._record_progress(comparison.place)
                if last is not None and last.resumed_at is None:
                    is_new = attempt.struck is None
                    last.resumed_at = comparison.attempt.started_at if is_new else comparison.place
        elif kind == "run" and not self._has_updates and last is not None:
            last.resumed_at = event["step"] if last.resumed_at is None else last.resumed_at
        elif kind == "boundary":
            if comparison is not None:
                comparison.compare_boundary(event["key"], event["step"], event["items"])
            attempt.has_trained = True
            if client.rank == 0:
                self._passed.add(event["key"])
                attempt.here = self._boundary_places.get(event["key"], attempt.here + 1)
                attempt.step = event["step"]
                if not self._has_updates:
                    self._record_progress(attempt.here)
                    self._made -= not completes_step(event["key"])
        return self._strike_if_due(client, event) if client.rank == 0 else None

    def _record_progress(self, place: int) -> None:
        self._attempt.updates_since += 1
        self._made += 1
        self._attempt.saves_here = 0
        self._watcher.step(place, self._reference.steps)

    def _strike_if_due(self, client: Client, event: Event) -> Mapping[str, Any] | None:
        planned, kind, attempt = self._present, event["event"], self._attempt
        if planned is None or "ask" not in event:
            return None
        is_at_beginning = planned.moment in _AT_THE_BEGINNING
        if self._due is not None and not is_at_beginning:
            return None
        if self._compares and any(comparison.finding for comparison in self._comparisons.values()):
            return None  # it runs to its end, to measure how far apart the ends are
        if attempt.struck is not None and attempt.updates_since < _LEAST_UPDATES_BETWEEN:
            return None
        if is_at_beginning and kind in ("sight", "boundary"):
            self._due = None  # the start ends here
            self._strike(client)
        elif kind == "here" or kind == planned.moment == "load":
            self._strike(client)
        elif not is_at_beginning and self._place() >= planned.share * self._reference.steps:
            return self._strike_at(self._let_others_pass(planned, kind), client, kind)
        return None

    def _strike_at(self, planned: Planned, client: Client, kind: str) -> Mapping[str, Any] | None:
        """Strike now, have the process wait at a moment between two events, or set a time."""
        if kind == planned.moment == "save":
            # Of several files that are saved together, any may be the one that is interrupted.
            together = self._reference.script.file_log.save_places.count(self._place())
            self._attempt.saves_here += 1
            if self._attempt.saves_here <= min(round(planned.delay * together), together - 1):
                return None
            if planned.signal == "KILL":
                return {"arm": "tear"}  # in the middle of the file
        if kind == "boundary" and planned.moment == "commit":
            self._due = time.monotonic() + planned.delay * _COMMIT_SECONDS
            return {"save": True}
        if kind == planned.moment:  # save, boundary, phase
            self._strike(client)
        elif kind == "sight" and planned.moment in ("update", "gradient"):
            return {"arm": planned.moment}
        elif kind in ("sight", "boundary") and planned.moment == "step":
            self._due = time.monotonic() + planned.delay * self._reference.step_seconds
        return None

    def _let_others_pass(self, planned: Planned, kind: str) -> Planned:
        """A rare moment, such as a save, does not delay the other interruptions."""
        if planned.moment not in ("save", "phase") or kind not in ("sight", "boundary"):
            return planned
        steps, place = self._reference.steps, self._place()
        coming = (at for at in self._reference.script.file_log.save_places if at >= place)
        if planned.moment == "save" and next(coming, steps) - place <= _NEAR * steps:
            return planned
        for index, other in enumerate(self.plan):
            is_due = place >= other.share * steps
            if is_due and other.moment not in (planned.moment, *_AT_THE_BEGINNING):
                self.plan[index] = planned
                self._present = other
                return other
        return planned

    def _tick(self, now: float) -> None:
        if self._due is not None and now >= self._due:
            self._due = None
            self._strike(next((c for c in self._clients() if c.trains and c.rank == 0), None))

    def _clients(self) -> list[Client]:
        return [] if self.script.process is None else self.script.process.listener.clients

    def _strike(self, client: Client | None) -> None:
        planned, process, attempt = self._present, self.script.process, self._attempt
        assert planned is not None
        assert process is not None
        step = self._place() if self._has_updates else attempt.step
        struck = attempt.struck = Interruption(planned.number, planned.signal, planned.moment, step)
        self.interruptions.append(struck)
        attempt.updates_since = attempt.saves_here = 0
        ranks = {client.rank for client in self._clients() if client.trains}
        has_ranks = len(self._comparisons) > 1 or len(ranks) > 1
        struck.target = process.strike(planned, client, has_ranks=has_ranks)
        self._watcher.interruption(struck)
        # In a process that survives, none that is for a start.
        others = (each for each in self.plan if each.moment not in _AT_THE_BEGINNING)
        self._take_next(next(others, None))

    def _place(self) -> int:
        """How many steps of the undisturbed run this attempt has behind it."""
        if not self._has_updates:
            return self._attempt.here
        comparison = self._comparisons[0]
        return comparison.place if comparison.attempt.started_at is not None else 0

    def _reached(self) -> int:
        if not self._has_updates:
            return len(self._passed)
        comparison = self._comparisons[0]
        return max(comparison.reached, comparison.place)
