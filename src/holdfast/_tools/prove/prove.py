"""The proof: twice undisturbed, then interrupted, then compared."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from holdfast._environment import variables
from holdfast._tools.prove.against import KnownRun, compare_results, end_distance, say_apart, tally
from holdfast._tools.prove.attempt import Listener, Starter, start_process
from holdfast._tools.prove.copying import open_workplace
from holdfast._tools.prove.course import Course, Undisturbed
from holdfast._tools.prove.history import History, Leaf
from holdfast._tools.prove.interrupted import Interrupted
from holdfast._tools.prove.plan import Planned, draw
from holdfast._tools.prove.proof import (
    DIFFERS,
    EQUAL,
    UNREPEATABLE,
    UNTRIED,
    Difference,
    Proof,
    Watcher,
    Wishes,
)
from holdfast._tools.prove.repeat import judge_repeat, volatile_items
from holdfast._tools.prove.trail import Finding
from holdfast._tools.prove.verdicts import words_for

_MOST_COURSES = 3
_ORDER_OF_A_SET = "data-order-not-fixed"
_FIRST_HASH_SEED = 1
_LIVES_OF_A_COURSE = 1000
_SPREAD = 2.0  # so many times the distance of two undisturbed runs is still their spread


def prove(wishes: Wishes, watcher: Watcher, start: Starter = start_process) -> Proof:
    """Interrupt the script at random, and compare it with itself undisturbed."""
    proof = Proof(wishes.command, wishes.seed, wishes.kills, wishes.signals, more=wishes.more)
    began = time.monotonic()
    with open_workplace(wishes.keep) as (workplace, kept):
        proof.kept = None if kept is None else str(kept)
        listener = Listener(workplace / "socket")
        try:
            _Prover(wishes, watcher, proof, workplace, listener, start, began).prove()
        finally:
            listener.close()
    proof.seconds = time.monotonic() - began
    return proof


class _Prover:
    def __init__(
        self,
        wishes: Wishes,
        watcher: Watcher,
        proof: Proof,
        workplace: Path,
        listener: Listener,
        start: Starter,
        began: float,
    ) -> None:
        self._wishes = wishes
        self._watcher = watcher
        self._proof = proof
        self._workplace = workplace
        self._listener = listener
        self._start = start
        self._began = began
        self._courses = 0

    def prove(self) -> None:
        proof = self._proof
        if self._wishes.reference is not None:
            known = KnownRun(self._wishes.reference, self._course("reference"))
            proof.steps = known.steps
            self._interrupt(known, known, frozenset())
            return
        reference = self._run_undisturbed("reference", "undisturbed")
        if reference is None:
            return
        again = self._run_undisturbed("again", "undisturbed, once more")
        if again is None:
            return
        proof.steps, proof.ranks = reference.steps, len(reference.histories)
        volatile: frozenset[str] = frozenset()
        for rank, history in sorted(reference.histories.items()):
            other = again.histories.get(rank, History())
            judged = judge_repeat(history, other)
            if judged is not None and proof.unrepeatable is None:
                found = judged.item
                step = None if found.place is None else found.place + 1
                finding = Finding(found.item, step, None, found.expected, found.found, judged.cause)
                proof.unrepeatable = self._difference(finding, history, rank)
            volatile |= volatile_items(history, other)
        if proof.unrepeatable is not None and self._is_order_of_a_set(reference):
            why, remedy = words_for(_ORDER_OF_A_SET)
            proof.unrepeatable = dataclasses.replace(
                proof.unrepeatable, cause=_ORDER_OF_A_SET, why=why, remedy=remedy
            )
            self._note(
                "With one PYTHONHASHSEED two undisturbed runs are equal: the order of a set, or "
                "hash(), decides."
            )
        self._interrupt(reference, again, volatile)

    def _is_order_of_a_set(self, reference: Undisturbed) -> bool:
        """Whether the undisturbed run can be repeated with its own order of sets."""
        if self._is_late() or variables.has_hash_seed():
            return False
        self._watcher.stage("undisturbed, with the same order of sets", 0, self._wishes.kills)
        course = self._course("same-order", _FIRST_HASH_SEED)
        other = Undisturbed(course)
        status = other.run(lambda step: self._watcher.step(step, None))
        self._proof.lives += course.lives
        return status == 0 and all(
            judge_repeat(history, other.histories.get(rank, History())) is None
            for rank, history in reference.histories.items()
        )

    def _course(self, name: str, hash_seed: int | None = None) -> Course:
        if hash_seed is None:
            hash_seed = _FIRST_HASH_SEED + _LIVES_OF_A_COURSE * self._courses
            self._courses += 1
        place = (self._workplace, self._listener, self._start)
        return Course(name, self._wishes, *place, hash_seed)

    def _run_undisturbed(self, name: str, text: str) -> Undisturbed | None:
        self._watcher.stage(text, 0, self._wishes.kills)
        course = self._course(name)
        undisturbed = Undisturbed(course)
        try:
            status = undisturbed.run(lambda step: self._watcher.step(step, None))
        finally:
            self._proof.lives += course.lives
        if course.linked:
            note = f"{len(course.linked)} large or linked files are shared, not copied: "
            self._note(note + "the script must not write to them.")
        if status != 0:
            ended = f"exit status {status}" if status > 0 else f"signal {-status}"
            self._cannot(f"The script, undisturbed, ends with {ended}.", course)
            return None
        outside = course.filing.outside()
        if outside:
            self._cannot(
                f"The script saves {outside[0]}, outside of its folder, where every run would meet "
                "those before it.\nLet its command say where, with {dir} in place of that folder.",
                None,
            )
            return None
        if not undisturbed.steps:
            why = "no update by torch or Keras and no boundary of a holdfast.Run was seen."
            foreign = course.filing.loaded - course.filing.saved.keys()
            if foreign:
                name = min(foreign)
                why = f"it loaded {name}. If that is of a finished training, prove it without."
            self._cannot(f"The script ended without a training step: {why}", course)
            return None
        return undisturbed

    def _interrupt(
        self, reference: Undisturbed, again: Undisturbed, volatile: frozenset[str]
    ) -> None:
        """Interrupt a training from beginning to end, and another one if it was over too soon."""
        wishes, proof = self._wishes, self._proof
        plan = list(wishes.plan)
        if not plan:
            plan = draw(wishes.seed, wishes.kills, wishes.signals, reference.moments())
        if wishes.only is not None:
            plan = [planned for planned in plan if planned.number == wishes.only]
        wanted, left, repeated = len(plan), plan, 0
        for turn in range(_MOST_COURSES):
            self._watcher.stage("interrupted", wanted - len(left), wanted)
            course = self._course(f"interrupted-{turn + 1}")
            interrupted = self._run_interrupted(course, reference, left, volatile)
            repeated += interrupted.repeated
            if interrupted.interruptions:
                self._decide(reference, again, course, interrupted)
            is_over = proof.verdict in (DIFFERS, UNREPEATABLE) or self._is_late()
            if is_over or len(interrupted.leftover) in (0, len(left)):
                break
            left = interrupted.leftover
        if repeated and proof.verdict == EQUAL:
            self._note(f"{repeated} steps were made again: those since what was saved last.")
        made = len(proof.interruptions)
        if made < wanted and proof.verdict != DIFFERS:
            why = "time was up" if self._is_late() else "the script ended"
            self._note(f"{made} of {wanted} interruptions were made: {why} before the others.")
        if not made:
            proof.verdict = UNTRIED
            proof.trouble = (
                "The time was up before the first interruption: two undisturbed runs come first."
                if self._is_late()
                else "No interruption met the script: it ended too soon."
            )

    def _is_late(self) -> bool:
        budget = self._wishes.budget_seconds
        return budget is not None and time.monotonic() > self._began + budget

    def _run_interrupted(
        self, course: Course, reference: Undisturbed, plan: list[Planned], volatile: frozenset[str]
    ) -> Interrupted:
        proof, budget = self._proof, self._wishes.budget_seconds
        interrupted = Interrupted(
            course,
            reference,
            plan,
            volatile,
            self._watcher,
            deadline=None if budget is None else self._began + budget,
            compares=proof.unrepeatable is None,
        )
        try:
            interrupted.run()
        finally:
            proof.interruptions += interrupted.interruptions
            proof.lives += course.lives
        return interrupted

    def _decide(
        self,
        reference: Undisturbed,
        again: Undisturbed,
        course: Course,
        interrupted: Interrupted,
    ) -> None:
        proof, finding = self._proof, interrupted.finding
        if finding is None and proof.unrepeatable is not None:
            self._decide_by_spread(reference, again, course)
            return
        rank, distance = interrupted.finding_rank or 0, None
        if finding is None and isinstance(reference, KnownRun):
            finding = reference.compare(course, interrupted.blamed)
            proof.notes += reference.notes
        elif finding is None:
            trio = (reference.course, again.course, course)
            finding = compare_results(trio, self._wishes.compare, interrupted.blamed, self._note)
            finding = finding and (interrupted.suspect() or finding)
        else:
            finding = self._ask_again(finding, reference)
            distance = end_distance(reference.course, course)
        if finding is None:
            for note in interrupted.notes():
                self._note(note)
            proof.verdict = EQUAL
            proof.compared = tally(reference, course)
            return
        proof.verdict = DIFFERS
        at_the_end = None if distance is None else say_apart(distance)
        proof.difference = self._difference(
            finding, reference.histories.get(rank, History()), rank, at_the_end
        )

    def _ask_again(self, finding: Finding, reference: Undisturbed) -> Finding:
        """One batch into a pass, one step too early and the pass's beginning are the same."""
        if not finding.is_ambiguous:
            return finding
        for number, share in enumerate((0.35, 0.55, 0.75, 0.9)):
            self._watcher.stage("interrupted once more, to tell the cause", 0, 1)
            plan = [Planned(1, "KILL", "gradient", share, 0.0)]
            course = self._course(f"opinion-{number}")
            quiet = Interrupted(
                course, reference, plan, frozenset(), Watcher(), deadline=None, compares=True
            )
            quiet.run()
            self._proof.lives += course.lives
            other = quiet.finding
            if other is not None and not other.is_ambiguous:
                return dataclasses.replace(finding, cause=other.cause, is_ambiguous=False)
        return finding

    def _decide_by_spread(self, reference: Undisturbed, again: Undisturbed, course: Course) -> None:
        proof = self._proof
        proof.verdict = UNREPEATABLE
        spread = end_distance(reference.course, again.course)
        both = [end_distance(one.course, course) for one in (reference, again)]
        distances = [distance for distance in both if distance is not None]
        if spread is None or not distances:
            self._note("The weights of the ends could not be compared.")
            return
        nearest = min(distances)
        proof.within_spread = nearest <= _SPREAD * spread
        self._note(
            f"In the end two undisturbed runs are {spread:.2g} apart (relative to the norm of the "
            f"weights), the interrupted one is {nearest:.2g} from the nearer of them."
        )

    def _difference(
        self, finding: Finding, history: History, rank: int, at_the_end: str | None = None
    ) -> Difference:
        why, remedy = words_for(finding.cause)
        return Difference(
            item=history.display(finding.item),
            step=finding.step,
            after=finding.after,
            expected=_in_words(finding.expected),
            found=_in_words(finding.found),
            cause=finding.cause,
            why=why,
            remedy=remedy,
            others=tuple(history.display(item) for item in finding.others),
            rank=rank if len(history.sights) and self._proof.ranks > 1 else None,
            at_the_end=at_the_end,
        )

    def _cannot(self, why: str, course: Course | None) -> None:
        words = course.last_words() if course is not None else ""
        self._proof.verdict = UNTRIED
        self._proof.trouble = f"{why}\n{words}" if words else why

    def _note(self, text: str) -> None:
        if text not in self._proof.notes:
            self._proof.notes.append(text)


def _in_words(leaf: Leaf | None) -> str:
    if leaf is None:
        return "missing"
    text, number, count = leaf
    if number is None:
        return f"{text[:8]}…" if count == 0 else str(text)
    if count == 1 and len(str(text)) < 20:
        return str(text)
    return f"norm {number:.7g} ({text[:8]}…)"
