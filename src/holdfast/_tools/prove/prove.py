"""The proof: twice undisturbed, then interrupted, then compared."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from pathlib import Path

from holdfast._environment import variables
from holdfast._tools.prove import causes, results
from holdfast._tools.prove.interrupted import InterruptedRun
from holdfast._tools.prove.proof import (
    DIFFERS,
    EQUAL,
    UNREPEATABLE,
    Difference,
    Proof,
    ProofRequest,
    Watcher,
    draw,
)
from holdfast._tools.prove.script_run import (
    EventListener,
    ScriptRun,
    Starter,
    UndisturbedRun,
    start_process,
)
from holdfast._tools.workplace import open_workplace

_MOST_RUNS = 3
_FIRST_HASH_SEED = 1
_STARTS_OF_A_RUN = 1000
_SPREAD = 2.0  # times the distance of two undisturbed runs is within their spread


def prove(request: ProofRequest, watcher: Watcher, start: Starter = start_process) -> Proof:
    """Interrupt the script at random, and compare it with itself undisturbed."""
    proof = Proof(request.command, request.seed, request.kills, request.signals, more=request.more)
    began = time.monotonic()
    workplace = open_workplace("holdfast-prove-", request.keep)
    with workplace as folder, contextlib.closing(EventListener()) as listener:
        proof.kept = None if request.keep is None else str(folder)
        try:
            _Prover(request, watcher, proof, folder, listener, start).prove()
        except _Untried as error:
            proof.trouble = str(error)
    proof.seconds = time.monotonic() - began
    return proof


class _Untried(Exception):
    """Why a script cannot be proved, and its last lines."""


@dataclasses.dataclass
class _Prover:
    _request: ProofRequest
    _watcher: Watcher
    _proof: Proof
    _workplace: Path
    _listener: EventListener
    _start: Starter

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + (self._request.budget_seconds or math.inf)
        # Another one for each run, as without a proof, but one that can be repeated.
        self._hash_seeds = itertools.count(_FIRST_HASH_SEED, _STARTS_OF_A_RUN)

    def prove(self) -> None:
        proof = self._proof
        if self._request.reference is not None:
            known = results.ReferenceRun(self._request.reference, self._script("reference"))
            proof.steps = known.steps
            self._interrupt(known, known, frozenset())
            return
        reference = self._run_undisturbed("reference", "undisturbed")
        again = self._run_undisturbed("again", "undisturbed, once more")
        proof.steps, proof.ranks = reference.run_steps, len(reference.histories)
        volatile: frozenset[str] = frozenset()
        for rank, history in sorted(reference.histories.items()):
            other = again.history(rank)
            volatile |= causes.volatile_items(history, other)
            finding = causes.judge_repeat(history, other)
            if finding is not None and proof.unrepeatable is None:
                if self._is_order_of_a_set(reference):
                    finding = finding.because("data-order-not-fixed")
                    self._add_note(
                        "With one PYTHONHASHSEED two undisturbed runs are equal: the order of a "
                        "set, or hash(), decides."
                    )
                proof.unrepeatable = self._difference(finding, history, rank)
        self._interrupt(reference, again, volatile)

    def _is_order_of_a_set(self, reference: UndisturbedRun) -> bool:
        """Whether the undisturbed run can be repeated with its own order of sets."""
        if self._is_late() or variables.text("PYTHONHASHSEED"):
            return False
        script = self._script("same-order", _FIRST_HASH_SEED)
        status, other = self._train(script, "undisturbed, with the same order of sets")
        return status == 0 and all(
            causes.judge_repeat(history, other.history(rank)) is None
            for rank, history in reference.histories.items()
        )

    def _script(self, name: str, hash_seed: int | None = None) -> ScriptRun:
        place = (self._workplace, self._listener, self._start)
        return ScriptRun(name, self._request, *place, hash_seed or next(self._hash_seeds))

    def _train(self, script: ScriptRun, text: str) -> tuple[int, UndisturbedRun]:
        self._watcher.stage(text, 0, self._request.kills)
        undisturbed = UndisturbedRun(script)
        status = undisturbed.run(lambda step: self._watcher.step(step, None))
        self._proof.lives += script.starts
        return status, undisturbed

    def _run_undisturbed(self, name: str, text: str) -> UndisturbedRun:
        script = self._script(name)
        status, undisturbed = self._train(script, text)
        words, log = script.last_lines(), script.file_log
        if script.linked:
            note = f"{len(script.linked)} large or linked files are shared, not copied: "
            self._add_note(note + "the script must not write to them.")
        if status != 0:
            ended = f"exit status {status}" if status > 0 else f"signal {-status}"
            why = f"The script ends with {ended}, although nothing interrupts it."
        elif outside := log.outside():
            why = f"The script saves {outside[0]} outside of its folder, where every run would "
            why += "find the files of the previous one."
            words = "Let its command say where, with {dir} in place of that folder."
        elif undisturbed.steps:
            return undisturbed
        else:
            why = "no update by torch or Keras and no boundary of a holdfast.Run was seen."
            if foreign := log.loaded - log.saved.keys():
                why = f"it loaded {min(foreign)}. "
                why += "If that is of a finished training, prove it without."
            why = f"The script ended without a training step: {why}"
        raise _Untried(f"{why}\n{words}".strip())

    def _interrupt(
        self, reference: UndisturbedRun, again: UndisturbedRun, volatile: frozenset[str]
    ) -> None:
        """Interrupt one training, and another one if it was over too soon."""
        request, proof = self._request, self._proof
        plan = list(request.plan)
        if not plan:
            plan = draw(request.seed, request.kills, request.signals, reference.moments())
        if request.only is not None:
            plan = [planned for planned in plan if planned.number == request.only]
        wanted, repeated = len(plan), 0
        counted = 0 if request.only is not None else wanted  # its number is not out of one
        for number in range(_MOST_RUNS):
            self._watcher.stage("interrupted", wanted - len(plan), counted)
            interrupted = InterruptedRun(
                self._script(f"interrupted-{number + 1}"),
                reference,
                plan,
                volatile,
                self._watcher,
                self._deadline,
                compares=proof.unrepeatable is None,
            )
            interrupted.run()
            proof.interruptions += interrupted.interruptions
            proof.lives += interrupted.script.starts
            repeated += interrupted.repeated
            if interrupted.interruptions:
                self._decide(reference, again, interrupted)
            is_over = proof.verdict in (DIFFERS, UNREPEATABLE) or self._is_late()
            if is_over or len(interrupted.plan) in (0, len(plan)):
                break
            plan = interrupted.plan
        if repeated and proof.verdict == EQUAL:
            steps = "1 step was" if repeated == 1 else f"{repeated} steps were"
            self._add_note(f"{steps} repeated: made after the last save, lost, and made again.")
        made = len(proof.interruptions)
        if made < wanted and proof.verdict != DIFFERS:
            why = "time was up" if self._is_late() else "the script ended"
            self._add_note(f"{made} of {wanted} interruptions were made: {why} before the others.")
        if not made:
            raise _Untried(
                "The time was up before the first interruption: two undisturbed runs come first."
                if self._is_late()
                else "No interruption met the script: it ended too soon."
            )

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline

    def _decide(
        self, reference: UndisturbedRun, again: UndisturbedRun, interrupted: InterruptedRun
    ) -> None:
        proof, script, finding = self._proof, interrupted.script, interrupted.finding
        at_the_end = None
        if finding is not None:
            distance = results.end_distance(reference.script, script)
            if distance is not None:
                apart = f"{distance:.2%} apart" if distance else "the same"
                at_the_end = f"the weights are {apart} in the end"
        elif proof.unrepeatable is not None:
            self._decide_by_spread(reference, again, script)
            return
        elif isinstance(reference, results.ReferenceRun):
            finding = reference.compare(script, interrupted.blamed, self._add_note)
        else:
            trio = (reference.script, again.script, script)
            asked, after = self._request.compare, interrupted.blamed
            finding = results.compare_results(trio, asked, after, self._add_note)
            finding = finding and (interrupted.suspect() or finding)
        if finding is None:
            for note in interrupted.notes():
                self._add_note(note)
            proof.verdict = EQUAL
            proof.compared = results.list_compared(reference, script)
            return
        proof.verdict = DIFFERS
        rank = interrupted.finding_rank
        difference = self._difference(finding, reference.history(rank), rank)
        proof.difference = dataclasses.replace(difference, at_the_end=at_the_end)

    def _decide_by_spread(
        self, reference: UndisturbedRun, again: UndisturbedRun, script: ScriptRun
    ) -> None:
        proof = self._proof
        proof.verdict = UNREPEATABLE
        spread = results.end_distance(reference.script, again.script)
        both = [results.end_distance(one.script, script) for one in (reference, again)]
        distances = [distance for distance in both if distance is not None]
        if spread is None or not distances:
            self._add_note("The weights of the ends could not be compared.")
            return
        nearest = min(distances)
        proof.within_spread = nearest <= _SPREAD * spread
        self._add_note(
            f"In the end two undisturbed runs are {spread:.2g} apart (relative to the norm of the "
            f"weights), the interrupted one is {nearest:.2g} from the nearer of them."
        )

    def _difference(
        self, finding: causes.Deviation, history: causes.RankHistory, rank: int
    ) -> Difference:
        why, remedy = causes.CAUSES[finding.cause]
        return Difference(
            item=history.display(finding.item),
            step=finding.step,
            after=finding.after,
            expected=_leaf_text(finding.expected),
            found=_leaf_text(finding.found),
            cause=finding.cause,
            why=why,
            remedy=remedy,
            others=tuple(history.display(item) for item in finding.others),
            rank=rank if len(history.updates) and self._proof.ranks > 1 else None,
            is_in_later_epoch=finding.is_in_later_epoch,
        )

    def _add_note(self, text: str) -> None:
        if text not in self._proof.notes:
            self._proof.notes.append(text)


def _leaf_text(leaf: causes.Leaf) -> str:
    text, number, count = leaf
    if number is None:
        return f"{text[:8]}…" if count == 0 else str(text)
    if count == 1 and len(str(text)) < 20:
        return str(text)
    return f"norm {number:.7g} ({text[:8]}…)"
