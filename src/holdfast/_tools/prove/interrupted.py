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
    Deviation,
    DeviationCase,
    Items,
    RankHistory,
    UpdateRecord,
    cause_of,
    completes_step,
    counts_in_the_end,
    judge,
    renumber,
    weights_key,
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
        self._after: int | None = None
        self._expected_start = 0
        self._saved_in_handler = False
        self._since_start = 0
        self._numbers: dict[int, int] = {}  # of optimizers: in this attempt, and undisturbed
        self._passed: set[str] = set()  # boundaries, in all attempts
        self.notes: list[str] = []
        self.finding: Deviation | None = None
        self.started_at: int | None = None  # of this attempt
        self.place = 0  # updates of the undisturbed run that this attempt has made
        self.reached = 0  # the furthest place of all attempts

    def begin_attempt(self, after: int | None, expected_start: int, saved_in_handler: bool) -> None:
        self._after = after
        self._expected_start = expected_start
        self._saved_in_handler = saved_in_handler
        self._since_start = 0
        self._numbers.clear()
        self.started_at = None

    def compare_update(self, update: UpdateRecord) -> None:
        known = self._reference.updates
        if self.started_at is None:
            self.started_at = self.place = self._align(update)
        place, self.place = self.place, self.place + 1
        self.reached = max(self.reached, place)
        if self.finding is None and place < len(known):
            self._numbers.setdefault(update.optimizer, known[place].optimizer)
            self._compare(update.renumbered(self._numbers), known[place], place)
        self._since_start += 1

    def compare_boundary(self, key: str, step: int, items: Items) -> None:
        self._passed.add(key)
        expected = self._reference.boundaries.get(key)
        if expected is None or self.finding is not None:
            return
        for item, leaf in expected.items():
            found = items.get(item)
            if item in self._volatile or item.startswith("input/"):
                continue  # an input only hints at the cause
            if found is None or found[0] != leaf[0]:
                cause = "metric-differs" if item.startswith("metric/") else "state-not-named"
                case = self._case(None, max(0, self.place - 1), [item])
                finding = judge(case) if case is not None else None
                if finding is None or finding.cause == "unknown":
                    finding = self._boundary_finding(item, step, expected, items, cause)
                self.finding = finding
                return

    def _boundary_finding(
        self, item: str, step: int, expected: Items, items: Items, cause: str
    ) -> Deviation:
        """The run restores its state, so the cause is a value that was not given to it."""
        others = [i for i, leaf in expected.items() if items.get(i, [None])[0] != leaf[0]]
        held = [i for i in others if i.startswith("input/") and i in items]
        item = (held or [item])[0]
        others = sorted(i for i in others if i != item and i not in self._volatile)
        leaves = expected[item], items.get(item)
        return Deviation(item, step - 1, self._after, *leaves, cause=cause, others=tuple(others))

    def finish(self, end: Items | None) -> None:
        """The script is over: it must have made all steps, and its end be the same."""
        if self.finding is not None:
            return
        total = len(self._reference.updates)
        missing = self._reference.boundaries.keys() - self._passed
        if missing:
            counts = len(self._reference.boundaries), len(self._passed)
            self._find_count("boundaries", counts, len(self._passed), "other-number-of-steps")
            return
        if self.started_at is not None and self.place != total:
            is_one_off = abs(self.place - total) == 1
            cause = "off-by-one-step" if is_one_off else "other-number-of-steps"
            self._find_count("steps", (total, self.place), min(self.place, total), cause)
            return
        renumbered = renumber(end or {}, self._numbers)
        for item, leaf in (self._reference.end or {}).items():
            other = renumbered.get(item)
            if other is None or item in self._volatile or other[0] == leaf[0]:
                continue
            deviation = self._deviations.get(item) or Deviation(
                item, total, self._after, leaf, other
            )
            case = self._case(None, total - 1, [])
            if case is not None and counts_in_the_end(case, deviation):
                self.finding = deviation.because(cause_of(case, deviation))
                return
            if item in self._deviations and leaf[2] > 1 and len(self.notes) < _MOST_NOTES:
                name = self._reference.display(item)
                self.notes.append(
                    f"{name} is not as undisturbed in the end, since interruption "
                    f"{deviation.after}; nothing else is, so it may be for display only."
                )

    def suspect(self) -> Deviation | None:
        """A deviation of some attempt that was not seen to end."""
        case = self._case(None, len(self._reference.updates) - 1, [])
        for deviation in self._deviations.values():
            if case is not None and counts_in_the_end(case, deviation):
                self.finding = deviation.because(cause_of(case, deviation))
                return self.finding
        return None

    def _align(self, update: UpdateRecord) -> int:
        """Where in the undisturbed run this attempt begins."""
        reference = self._reference
        places = reference.by_weights.get(weights_key(update), [])
        if update.boundary_id is not None and update.boundary_id in reference.by_boundary_id:
            marked = reference.by_boundary_id[update.boundary_id]
            return next((place for place in marked if place in places), marked[0])
        if not places:
            return min(self._expected_start, max(0, len(reference.updates) - 1))

        def likeness(place: int) -> tuple[int, int]:
            items = reference.updates[place].items
            equal = sum(items.get(k, [None])[0] == v[0] for k, v in update.items.items())
            return equal, -abs(place - self._expected_start)

        return max(places, key=likeness)

    def _compare(self, update: UpdateRecord, expected: UpdateRecord, place: int) -> None:
        differing = []
        for item, leaf in expected.items.items():
            kind, found = item.partition("/")[0], update.items.get(item)
            is_unseen = found is None and (kind != "moment" or update.is_unbuilt)
            if item in self._volatile or is_unseen:
                continue
            if found is not None and found[0] == leaf[0]:
                self._deviations.pop(item, None)
            elif kind in _DECIDES:
                differing.append(item)
            elif item not in self._deviations:
                self._deviations[item] = Deviation(item, place, self._after, leaf, found)
        if self._since_start == 0:
            self._record_numbers(update, expected, place)
        if not same_batches(update, expected, is_first=self._since_start == 0):
            differing.append("batch")
        if differing:
            case = self._case(update, place, differing)
            if case is not None:
                finding = judge(case)
                is_later = self._has_begun_an_epoch(finding.place)
                self.finding = replace(finding, is_in_later_epoch=is_later)

    def _has_begun_an_epoch(self, place: int | None) -> bool:
        """Whether a pass over the data begins after the attempt did, up to an update."""
        since = range((self.started_at or 0) + 1, 0 if place is None else place + 1)
        batches = (batch for at in since for batch in self._reference.updates[at].batches)
        return any(batch["at"] == 0 for batch in batches)

    def _record_numbers(self, update: UpdateRecord, expected: UpdateRecord, place: int) -> None:
        """The script's numbers that differ at the first update of an attempt."""
        numbers = update.numbers
        for item, leaf in expected.numbers.items():
            found = numbers.get(item)
            self._deviations.pop(item, None)
            if found is not None and found[0] != leaf[0] and item not in self._volatile:
                self._deviations[item] = Deviation(item, place, self._after, leaf, found)

    def _case(
        self, update: UpdateRecord | None, place: int, differing: list[str]
    ) -> DeviationCase | None:
        known = self._reference.updates
        if not known:
            return None
        return DeviationCase(
            reference=self._reference,
            update=update,
            place=min(place, len(known) - 1),
            differing=differing,
            deviations=self._deviations,
            after=self._after,
            since_start=self._since_start,
            saved_in_handler=self._saved_in_handler,
        )

    def _find_count(self, unit: str, counts: tuple[int, int], place: int, cause: str) -> None:
        leaves = ([f"{count} {unit}", None, 1] for count in counts)
        deviation = Deviation("number of steps", place, self._after, *leaves)
        self.finding = deviation.because(cause)


def same_batches(update: UpdateRecord, expected: UpdateRecord, *, is_first: bool) -> bool:
    """Whether the batches for an update are the same, not counting those skipped before it.

    In the first update of an attempt, batches may be missing that were for no update.
    """
    count = len(expected.batches)
    if is_first and update.batches:
        count = min(count, len(update.batches))
    if not count:
        return True
    wanted = expected.batches[-count:]
    return [b["bytes"] for b in update.batches[-count:]] == [b["bytes"] for b in wanted]


@dataclass
class _Attempt:
    newest_at_start: Saved | None  # the newest checkpoint when it began
    struck: Interruption | None = None  # the last one
    updates_since: int = 0  # that interruption
    here: int = 0  # boundaries of the undisturbed run that it has passed
    step: int = 0  # of the run, at the last of them
    saves_here: int = 0  # since the last step
    has_trained: bool = False
    has_ended: bool = False
    ends: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # the last state, by rank


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
        self._reference = reference
        self._plan = list(plan)
        self._watcher = watcher
        self._deadline = deadline
        self._compares = compares
        self._comparisons = {
            rank: RankComparison(history, volatile) for rank, history in reference.histories.items()
        }
        self._passed: set[str] = set()  # boundaries of runs, in all attempts
        history = reference.histories.get(0)
        keys = [] if history is None else list(history.boundaries)
        self._boundary_places = {key: place for place, key in enumerate(keys, start=1)}
        self._made = 0  # steps of the first rank in all attempts
        self._left_unfinished: list[int] = []  # interruptions after which it ended with status 0
        self._due: float | None = None  # when the signal of the present interruption goes out
        self._present: Planned | None = None
        self._attempt = _Attempt(None)
        self.interruptions: list[Interruption] = []
        self.blamed: int | None = None  # the last interruption of an attempt that has trained
        self.finding: Deviation | None = None
        self.finding_rank: int | None = None

    def notes(self) -> list[str]:
        found = [note for comparison in self._comparisons.values() for note in comparison.notes]
        file_log = self.script.file_log
        goes_on = any(each.resumed_at for each in self.interruptions)
        if file_log.saved and not file_log.loaded and self.repeated and not goes_on:
            found.append("The script saves but loads nothing: it starts over each time.")
        if self._left_unfinished:
            numbers = ", ".join(map(str, self._left_unfinished))
            found.append(
                f"After interruption {numbers} the script ended with status 0 though it was not "
                "complete: a launcher would not start it again."
            )
        return [*found, *self._unfinished_runs()]

    def _unfinished_runs(self) -> Iterator[str]:
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
        steps = self._reference.steps if self._has_updates() else self._reference.run_steps
        return max(0, self._made - steps)

    @property
    def leftover(self) -> list[Planned]:
        """The interruptions whose moment did not come before the script was complete."""
        return list(self._plan)

    def run(self) -> None:
        """Start the script again and again, until it is complete or a difference is found."""
        barren = 0
        while True:
            reached = self._reached()
            self._attempt = _Attempt(self.script.file_log.newest)
            for comparison in self._comparisons.values():
                self._begin_comparison(comparison)
            self._take_next()
            if self._present is not None and self._present.moment == "start":
                self._due = time.monotonic() + self._present.delay * self._reference.start_seconds
            try:
                reference = self._reference.script
                status = self.script.run_once(
                    self._receive, self._tick, reference.longest_silence, reference.file_log
                )
            except Hung:
                self._fail("hangs", "further steps, or its end", "neither", "the script")
                return
            self._end_attempt(status)
            if self.finding is not None:
                return
            if status == 0 and (self._attempt.struck is None or self._is_complete()):
                if self._compares:
                    for rank, comparison in self._comparisons.items():
                        comparison.finish(self._attempt.ends.get(rank))
                    self._choose_rank()
                return
            if self._attempt.struck is None:
                self._fail_to_resume(status)
                return
            if status == 0:
                self._left_unfinished.append(self._attempt.struck.number)
            barren = barren + 1 if self._reached() <= reached and not self._plan else 0
            if barren > _MOST_STARTS_WITHOUT_PROGRESS:
                self._fail("resume-fails", "the script goes on", "it ends again and again")
                return

    def _begin_comparison(self, comparison: RankComparison) -> None:
        newest = self.script.file_log.newest
        is_in_handler = newest is not None and newest.in_handler
        comparison.begin_attempt(self.blamed, newest.place if newest else 0, is_in_handler)

    def _take_next(self, *, in_this_attempt: bool = False) -> None:
        """The next interruption; in a process that survives, none that is for a start."""
        self._due = self._present = None
        if time.monotonic() > self._deadline:
            self._plan.clear()
        found = self._candidates(in_this_attempt)
        if found:
            self._plan.remove(found[0])
            self._present = found[0]

    def _candidates(self, in_this_attempt: bool) -> list[Planned]:
        if in_this_attempt:
            return [each for each in self._plan if each.moment not in _AT_THE_BEGINNING]
        # Those for a beginning were skipped while the previous process ran: now they are due.
        behind = self._reached() / max(1, self._reference.steps)
        first = self._plan[:1]
        due = [p for p in self._plan if p.moment in _AT_THE_BEGINNING and p.share <= behind]
        return first if first and first[0].moment in _AT_THE_BEGINNING else [*due, *first]

    def _end_attempt(self, status: int) -> None:
        if self._attempt.struck is not None:
            self._attempt.struck.status = status
            if self._attempt.has_trained or self.blamed is None:
                self.blamed = self._attempt.struck.number
        if self._present is not None:
            self._plan.insert(0, self._present)
            self._present = None
        if self._compares and self.finding is None:
            self._choose_rank()
        self._find_lost_progress()

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

    def _find_lost_progress(self) -> None:
        """A checkpoint that could not be read, and a training that silently starts over."""
        failed, newest = self.script.file_log.failed, self._attempt.newest_at_start
        comparison = self._comparisons.get(0)
        if self.finding is not None or not failed or newest is None or not newest.place:
            return
        if comparison is not None and comparison.started_at == 0:
            expected = f"goes on from step {newest.place}"
            self._fail_to_load("progress-lost", expected, "starts over")

    def _is_complete(self) -> bool:
        if not self._has_updates():
            return self._attempt.has_ended or len(self._passed) >= self._reference.steps
        return self._reached() >= len(self._reference.histories[0].updates)

    def suspect(self) -> Deviation | None:
        """What may be behind a result that differs: a value that was seen to start over."""
        return next(
            filter(None, (comparison.suspect() for comparison in self._comparisons.values())), None
        )

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
        finding = Deviation.of_texts(item, expected, found, self.blamed).because(cause)
        reached = self._reached()
        self.finding = replace(finding, place=reached - 1 if reached else None)

    def _receive(self, client: Client, event: Event) -> Mapping[str, Any] | None:
        kind = event["event"]
        comparison = self._comparisons.get(client.rank)
        if client.rank == 0:
            self.script.file_log.record(event, self._place())
        if kind == "end" and client.trains:
            self._attempt.has_ended = True
            self._attempt.ends[client.rank] = event["items"]
        elif kind == "sight" and comparison is not None:
            self._attempt.has_trained = True
            if event["number"] == 0 and comparison.started_at is not None:
                self._begin_comparison(comparison)  # restarted by its launcher, as torchrun does
            comparison.compare_update(UpdateRecord.from_event(event))
            if client.rank == 0:
                self._record_progress(comparison.place)
                if self.interruptions and self.interruptions[-1].resumed_at is None:
                    began = (
                        comparison.started_at if self._attempt.struck is None else comparison.place
                    )
                    self.interruptions[-1].resumed_at = began
        elif kind == "run" and not self._has_updates() and self.interruptions:
            last = self.interruptions[-1]
            last.resumed_at = event["step"] if last.resumed_at is None else last.resumed_at
        elif kind == "boundary":
            if comparison is not None:
                comparison.compare_boundary(event["key"], event["step"], event["items"])
            self._attempt.has_trained = True
            if client.rank == 0:
                self._passed.add(event["key"])
                self._attempt.here = self._boundary_places.get(event["key"], self._attempt.here + 1)
                self._attempt.step = event["step"]
                if not self._has_updates():
                    self._record_progress(self._attempt.here)
                    self._made -= not completes_step(event["key"])
        if client.rank == 0:
            return self._strike_if_due(client, event)
        return None

    def _record_progress(self, place: int) -> None:
        self._attempt.updates_since += 1
        self._made += 1
        self._attempt.saves_here = 0
        self._watcher.step(place, self._reference.steps)

    def _strike_if_due(self, client: Client, event: Event) -> Mapping[str, Any] | None:
        planned, kind = self._present, event["event"]
        if planned is None or "ask" not in event:
            return None
        if self._due is not None and planned.moment not in _AT_THE_BEGINNING:
            return None
        if self._compares and any(comparison.finding for comparison in self._comparisons.values()):
            return None  # it runs to its end, to measure how far apart the ends are
        if (
            self._attempt.struck is not None
            and self._attempt.updates_since < _LEAST_UPDATES_BETWEEN
        ):
            return None
        if kind == "here" or kind == planned.moment == "load":
            self._strike(client)
            return None
        if planned.moment in _AT_THE_BEGINNING:
            if kind in ("sight", "boundary"):
                self._due = None
                self._strike(client)  # the start ends here
            return None
        if self._place() < planned.share * self._reference.steps:
            return None
        planned = self._let_others_pass(planned, kind)
        if kind == planned.moment == "save":
            return self._strike_save(client, planned)
        if kind == "boundary" and planned.moment == "commit":
            self._due = time.monotonic() + planned.delay * _COMMIT_SECONDS
            return {"save": True}
        if kind == planned.moment:  # boundary, phase
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
        for index, other in enumerate(self._plan):
            is_due = place >= other.share * steps
            if is_due and other.moment not in (planned.moment, *_AT_THE_BEGINNING):
                self._plan[index] = planned
                self._present = other
                return other
        return planned

    def _strike_save(self, client: Client, planned: Planned) -> Mapping[str, Any] | None:
        """Of several files that are saved together, any may be the one that is interrupted."""
        together = self._reference.script.file_log.save_places.count(self._place())
        self._attempt.saves_here += 1
        if self._attempt.saves_here <= min(round(planned.delay * together), together - 1):
            return None
        if planned.signal == "KILL":
            return {"arm": "tear"}  # in the middle of the file
        self._strike(client)
        return None

    def _tick(self, now: float) -> None:
        if self._due is not None and now >= self._due:
            self._due = None
            client = next((c for c in self._clients() if c.trains and c.rank == 0), None)
            self._strike(client)

    def _clients(self) -> list[Client]:
        return [] if self.script.process is None else self.script.process.listener.clients

    def _strike(self, client: Client | None) -> None:
        planned, process = self._present, self.script.process
        assert planned is not None
        assert process is not None
        step = self._place() if self._has_updates() else self._attempt.step
        self._attempt.struck = Interruption(planned.number, planned.signal, planned.moment, step)
        self.interruptions.append(self._attempt.struck)
        self._attempt.updates_since = self._attempt.saves_here = 0
        several = (
            len(self._comparisons) > 1 or len({c.rank for c in self._clients() if c.trains}) > 1
        )
        self._attempt.struck.target = process.strike(planned, client, has_ranks=several)
        self._watcher.interruption(self._attempt.struck)
        self._take_next(in_this_attempt=True)

    def _has_updates(self) -> bool:
        """Whether steps are updates of an optimizer; else they are boundaries of runs."""
        history = self._reference.histories.get(0)
        return history is not None and bool(history.updates)

    def _place(self) -> int:
        """How many steps of the undisturbed run this attempt has behind it."""
        if not self._has_updates():
            return self._attempt.here
        comparison = self._comparisons[0]
        return comparison.place if comparison.started_at is not None else 0

    def _reached(self) -> int:
        if not self._has_updates():
            return len(self._passed)
        comparison = self._comparisons[0]
        return max(comparison.reached, comparison.place)
