"""The interrupted course: strike, restart, and follow the training along the undisturbed one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from holdfast._tools.prove.attempt import Client, Event
from holdfast._tools.prove.course import Course, Hung, Undisturbed
from holdfast._tools.prove.files import Saved
from holdfast._tools.prove.history import Sight
from holdfast._tools.prove.plan import Planned
from holdfast._tools.prove.proof import Interruption, Watcher
from holdfast._tools.prove.trail import Finding, Trail

_VAGUE = ("generator-not-restored", "unknown")
_COMMIT_SECONDS = 0.05
_AT_THE_BEGINNING = ("start", "load")
_NEAR = 0.25  # of the training: a save that comes so soon is waited for
_LEAST_SIGHTS_BETWEEN = 4  # of a life that lives on after an interruption
_MOST_LIVES_WITHOUT_PROGRESS = 3


class Interrupted:
    """All lives of one interrupted training."""

    def __init__(
        self,
        course: Course,
        reference: Undisturbed,
        plan: list[Planned],
        volatile: frozenset[str],
        watcher: Watcher,
        deadline: float | None,
        compares: bool,
    ) -> None:
        self._course = course
        self._reference = reference
        self._plan = list(plan)
        self._watcher = watcher
        self._deadline = deadline
        self._compares = compares
        self._newest_at_start: Saved | None = None
        self._trails = {
            rank: Trail(history, volatile) for rank, history in reference.histories.items()
        }
        self._passed: set[str] = set()  # boundaries of runs, in all lives
        self._here = 0  # boundaries of the undisturbed run that are behind this life
        history = reference.histories.get(0)
        keys = [] if history is None else list(history.boundaries)
        self._boundary_places = {key: place for place, key in enumerate(keys, start=1)}
        self._made = 0  # steps of the first rank in all lives
        self._end_seen = False
        self._left_unfinished: list[int] = []  # interruptions after which it ended with status 0
        self._due: float | None = None  # when the signal of the present interruption goes out
        self._present: Planned | None = None
        self._struck: Interruption | None = None  # the last one, in this life
        self._sights_since = 0
        self.interruptions: list[Interruption] = []
        self.blamed: int | None = None  # the last interruption of a life that has trained
        self.finding: Finding | None = None
        self.finding_rank: int | None = None
        self.status: int | None = None

    def notes(self) -> list[str]:
        """What is worth a word though it is no difference."""
        found = [note for trail in self._trails.values() for note in trail.notes]
        filing = self._course.filing
        goes_on = any(each.resumed_at for each in self.interruptions)
        if filing.saved and not filing.loaded and self.repeated and not goes_on:
            found.append("The script saves but loads nothing: it begins anew each time.")
        if self._left_unfinished:
            numbers = ", ".join(map(str, self._left_unfinished))
            found.append(
                f"After interruption {numbers} the script ended with status 0 though it was not "
                "complete: whatever starts it takes it for finished."
            )
        return found

    @property
    def repeated(self) -> int:
        """Steps that were made more than once, since what was saved lay before them."""
        return max(0, self._made - self._reference.steps)

    @property
    def leftover(self) -> list[Planned]:
        """The interruptions whose moment did not come before the script was complete."""
        return list(self._plan)

    # -- lives ------------------------------------------------------------------------

    def run(self) -> None:
        """Live until the script is complete, or something is wrong."""
        barren = 0
        while True:
            reached = self._reached()
            self._begin_life()
            try:
                reference = self._reference.course
                status = self._course.live(
                    self._hear, self._tick, reference.longest_silence, reference.filing
                )
            except Hung:
                self._fail("hangs", "further steps, or its end", "neither", "the script")
                return
            self.status = status
            self._end_life(status)
            if self.finding is not None:
                return
            if status == 0 and (self._struck is None or self._is_complete()):
                self._finish()
                return
            if self._struck is None:
                self._fail_to_resume(status)
                return
            if status == 0:
                self._left_unfinished.append(self._struck.number)
            barren = barren + 1 if self._reached() <= reached and not self._plan else 0
            if barren > _MOST_LIVES_WITHOUT_PROGRESS:
                self._fail("resume-fails", "the script goes on", "it ends again and again")
                return

    def _begin_life(self) -> None:
        self._newest_at_start = self._course.filing.newest
        for trail in self._trails.values():
            self._begin_anew(trail)
        self._struck, self._end_seen, self._sights_since = None, False, 0
        self._has_trained, self._saves_here, self._here = False, 0, 0
        self._ends: dict[int, Mapping[str, Any]] = {}
        self._take_next()
        if self._present is not None and self._present.moment == "start":
            self._due = time.monotonic() + self._present.delay * self._reference.start_seconds

    def _begin_anew(self, trail: Trail) -> None:
        newest = self._course.filing.newest
        is_in_handler = newest is not None and newest.in_handler
        trail.begin_life(self.blamed, newest.place if newest else 0, is_in_handler)

    def _take_next(self, *, in_this_life: bool = False) -> None:
        """The next interruption; in a life that goes on, none that is for a beginning."""
        self._due = self._present = None
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._plan.clear()
        found = self._candidates(in_this_life)
        if found:
            self._plan.remove(found[0])
            self._present = found[0]

    def _candidates(self, in_this_life: bool) -> list[Planned]:
        if in_this_life:
            return [each for each in self._plan if each.moment not in _AT_THE_BEGINNING]
        # Those for a beginning were passed over while the life before went on: now they are due.
        behind = self._reached() / max(1, self._reference.steps)
        first = self._plan[:1]
        due = [p for p in self._plan if p.moment in _AT_THE_BEGINNING and p.share <= behind]
        return first if first and first[0].moment in _AT_THE_BEGINNING else [*due, *first]

    def _end_life(self, status: int) -> None:
        if self._struck is not None:
            self._struck.status = status
            if self._has_trained or self.blamed is None:
                self.blamed = self._struck.number
        if self._present is not None:
            self._plan.insert(0, self._present)
            self._present = None
        if self._compares and self.finding is None:
            self._choose_rank()
        self._look_for_lost_progress()

    def _choose_rank(self) -> None:
        """Of the ranks that differ the first; where gradients are shared, the one that says why."""
        found = [
            (trail.finding.step or 0, trail.finding.cause in _VAGUE, rank)
            for rank, trail in self._trails.items()
            if trail.finding is not None
        ]
        if found:
            self.finding_rank = min(found)[-1]
            self.finding = self._trails[self.finding_rank].finding

    def _look_for_lost_progress(self) -> None:
        """A checkpoint that could not be read, and a training that silently begins anew."""
        failed, newest = self._course.filing.failed, self._newest_at_start
        trail = self._trails.get(0)
        if self.finding is not None or not failed or newest is None or not newest.place:
            return
        if trail is not None and trail.started_at == 0:
            name, error = next(iter(failed.items()))
            cause = (
                "torn-checkpoint" if name in self._course.filing.torn_failed else "progress-lost"
            )
            expected, found = f"goes on from step {newest.place}", f"begins anew: {error}"
            self._fail(cause, expected, found, f"checkpoint {name}")

    def _is_complete(self) -> bool:
        if not self._has_sights():
            return self._end_seen or len(self._passed) >= self._reference.steps
        return self._reached() >= len(self._reference.histories[0].sights)

    def _finish(self) -> None:
        if not self._compares:
            return
        for rank, trail in self._trails.items():
            trail.finish(self._ends.get(rank))
        self._choose_rank()

    def suspect(self) -> Finding | None:
        """What may be behind a result that differs: something that was seen to begin anew."""
        return next(filter(None, (trail.suspect() for trail in self._trails.values())), None)

    def _fail_to_resume(self, status: int) -> None:
        failed = self._course.filing.failed
        words = self._course.last_words().splitlines()[-1:] or ["nothing"]
        if failed:
            name, error = next(iter(failed.items()))
            cause = "torn-checkpoint" if name in self._course.filing.torn_failed else "resume-fails"
            self._fail(cause, "it can be loaded", f"cannot be: {error}", f"checkpoint {name}")
        else:
            ended = f"exit status {status}" if status >= 0 else f"signal {-status}"
            self._fail("resume-fails", "the script goes on", f"{ended}: {words[0][:160]}")

    def _fail(self, cause: str, expected: str, found: str, item: str = "the restart") -> None:
        step, after = self._reached() or None, self.blamed
        leaves = ([expected, None, 1], [found, None, 1])
        self.finding = Finding(item, step, after, *leaves, cause)

    # -- what the processes tell -----------------------------------------------------

    def _hear(self, client: Client, event: Event) -> Mapping[str, Any] | None:
        kind = event["event"]
        trail = self._trails.get(client.rank)
        if client.rank == 0:
            self._course.filing.note(event, self._place())
        if kind == "end" and client.trains:
            self._end_seen = True
            self._ends[client.rank] = event["items"]
        elif kind == "sight" and trail is not None:
            self._has_trained = True
            if event["number"] == 0 and trail.started_at is not None:
                self._begin_anew(trail)  # a launcher has started it again, as torchrun does
            trail.see(Sight.from_event(event))
            self._note_start(client, trail)
        elif kind == "run" and not self._has_sights() and self.interruptions:
            last = self.interruptions[-1]
            last.resumed_at = event["step"] if last.resumed_at is None else last.resumed_at
        elif kind == "boundary":
            if trail is not None:
                trail.see_boundary(event["key"], event["step"], event["items"])
            self._has_trained = True
            if client.rank == 0:
                self._passed.add(event["key"])
                self._here = self._boundary_places.get(event["key"], self._here + 1)
                if not self._has_sights():
                    self._note_progress(self._here)
        if client.rank == 0:
            return self._strike_if_due(client, event)
        return None

    def _note_start(self, client: Client, trail: Trail) -> None:
        if client.rank == 0:
            self._note_progress(trail.place)
            if self.interruptions and self.interruptions[-1].resumed_at is None:
                self.interruptions[-1].resumed_at = (
                    trail.started_at if self._struck is None else trail.place
                )

    def _note_progress(self, place: int) -> None:
        self._sights_since += 1
        self._made += 1
        self._saves_here = 0
        self._watcher.step(place, self._reference.steps)

    def _strike_if_due(self, client: Client, event: Event) -> Mapping[str, Any] | None:
        planned, kind = self._present, event["event"]
        if planned is None or "ask" not in event:
            return None
        if self._due is not None and planned.moment not in _AT_THE_BEGINNING:
            return None
        if self._compares and any(trail.finding for trail in self._trails.values()):
            return None  # it goes on to its end, so that it can be said how far apart that is
        if self._struck is not None and self._sights_since < _LEAST_SIGHTS_BETWEEN:
            return None
        if kind == "here":
            self._strike(client)
            return None
        if planned.moment == "load" and kind == "load":
            self._strike(client)
            return None
        if planned.moment in _AT_THE_BEGINNING:
            if kind in ("sight", "boundary"):
                self._due = None
                self._strike(client)  # it did not come in time: this is the end of the start
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
        """A moment that is rare, such as a save, does not keep the others waiting."""
        if planned.moment not in ("save", "phase") or kind not in ("sight", "boundary"):
            return planned
        steps, place = self._reference.steps, self._place()
        coming = (at for at in self._reference.course.filing.save_places if at >= place)
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
        """Of several files that are saved together, any may be the one that is met."""
        together = self._reference.course.filing.save_places.count(self._place())
        self._saves_here += 1
        if self._saves_here <= min(round(planned.delay * together), together - 1):
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
        return [] if self._course.life is None else self._course.life.listener.clients

    def _strike(self, client: Client | None) -> None:
        planned, life = self._present, self._course.life
        assert planned is not None
        assert life is not None
        self._struck = self._note(planned)
        self._sights_since = self._saves_here = 0
        several = len(self._trails) > 1 or len({c.rank for c in self._clients() if c.trains}) > 1
        self._struck.target = life.strike(planned, client, has_ranks=several)
        self._watcher.interruption(self._struck)
        self._take_next(in_this_life=True)

    def _note(self, planned: Planned) -> Interruption:
        interruption = Interruption(
            number=planned.number,
            signal=planned.signal,
            moment=planned.moment,
            step=self._place(),
            struck=True,
        )
        self.interruptions.append(interruption)
        return interruption

    def _has_sights(self) -> bool:
        """Whether updates of torch are what is counted; else it is boundaries of runs."""
        history = self._reference.histories.get(0)
        return history is not None and bool(history.sights)

    def _place(self) -> int:
        """How much of the undisturbed run this life has come to."""
        if not self._has_sights():
            return self._here
        trail = self._trails[0]
        return trail.place if trail.started_at is not None else 0

    def _reached(self) -> int:
        if not self._has_sights():
            return len(self._passed)
        trail = self._trails[0]
        return max(trail.reached, trail.place)
