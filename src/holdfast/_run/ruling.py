"""A run as far as rules stop it: what was logged, what was called bad, and when it is over.

Bad: the record that everything from that step on is void is durable first, then the slots in memory
go, then all ranks leave. No snapshot is taken of a boundary whose values were not judged, so a kill
at any instant finds no bad state that anybody would resume.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast import _errors
from holdfast._adapters.metrics import Metrics, without_devices
from holdfast._errors import Stopped
from holdfast._keeper.metric_batches import Logged
from holdfast._run.exit.followers import Follower
from holdfast._run.ranks.party import Party
from holdfast._run.resume.start import Resumed
from holdfast._run.saving.invalid_states import first_tainted
from holdfast._run.saving.keeper_client import Custody, Handle
from holdfast._run.saving.rank_orders import Crew, Decision
from holdfast._run.saving.saver import Saver
from holdfast._state.finite import nan_at_start, not_finite, trained
from holdfast._store.folder.invalid import note_void, set_aside_void
from holdfast._store.folder.layout import RunLayout
from holdfast._store.memory.control import mark_of
from holdfast._text import say
from holdfast.rules import Rule
from holdfast.rules._base import FAILURE
from holdfast.rules._judge import Judge, Verdict

_MOST_NAMES = 8
BY_SCRIPT = "run.finish()"  # why a run is over that no rule has ended


class Ruled:
    """The part of an open run that knows its rules."""

    step: int
    attempt: int
    resumed_from: int | None
    _rule: Rule | None
    _judge: Judge
    _bad: Verdict | None = None  # what was called bad, here or by another rank
    _over: str | None = None  # why the training is complete, if a rule has said so
    _is_voided = False
    _meant: list[str] | None = None  # arrays that held a NaN at the start, if that is known
    _finished_at = -1  # the step that is durable as the last one
    _folder: Path
    _layout: RunLayout
    _state: dict[str, Any]
    _metrics: Metrics
    _saver: Saver
    _custody: Custody
    _crew: Crew | None
    _stopped: Stopped | None
    _next_look: float
    _at_turn: bool
    _logged: Logged | None = None  # while somebody sends it on
    _listeners: list[Callable[[int, dict[str, Any]], None]]  # to what is logged: append and return
    _followers: tuple[Follower, ...] = ()  # loggers, each with a process of its own

    def __init_subclass__(cls) -> None:
        """Name the methods as a user calls them: Python's own errors say Run.log, and no base."""
        super().__init_subclass__()
        for name, method in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("_") or name == "__init__":
                method.__qualname__ = f"Run.{name}"

    @property
    def over(self) -> str | None:
        """Why the training is complete, if a rule or run.finish() in a loop has ended it.

        A loop of your own asks this.
        """
        return self._over

    def log(self, **metrics: Any) -> None:
        """Note metrics of this step: for rules, `keep_best`, the journal and `holdfast status`.

        >>> run.log(loss=loss, val_loss=0.3)  # doctest: +SKIP
        """
        self._require_opened()
        is_best = self._metrics.note(metrics)
        if self._logged is not None:
            numbers = metrics if self._metrics.are_numbers else without_devices(metrics)
            self._logged.append((self.step, numbers))
        for listen in self._listeners:
            listen(self.step, metrics)
        if self._judge.is_there:
            for name in metrics:
                self._judge.note(name, self._metrics.held(name))
        if is_best and (self._crew is None or self._crew.rank == 0):
            self.save(reason="best")

    def save(self, *, reason: str = "asked") -> Handle:
        """Ask for a checkpoint at the next boundary; the handle's `wait()` waits for it."""
        self._require_open()
        self._next_look = 0.0
        return self._saver.want(Handle(reason))

    # -- opening ----------------------------------------------------------------------

    def _begin_rules(self, found: Resumed, party: Party | None) -> None:
        """A life begins: the rules know what they knew, and may have ended the run already."""
        self._judge = Judge(self._rule, 1 if party is None else party.size)
        self._judge.load(found.rules)
        self._bad, self._is_voided, self._over, self._finished_at = None, False, None, -1
        ended = (found.rules or {}).get("over")
        # By rules that were changed since, it may have to go on.
        holds = ended == BY_SCRIPT or (ended is not None and self._judge.holds(self.step))
        if party is not None and found.resumed_from is not None:
            told = party.exchange("over", [ended, holds])
            holds = any(each[1] for each in told)
            ended = next((each[0] for each in told if each[0] is not None), None)
        if holds:
            self._over = str(ended)
        self._meant = (found.rules or {}).get("nan")
        if found.resumed_from is None and self._judge.names_tensors:
            self._meant = nan_at_start(self._state)

    def _rules_state(self) -> dict[str, Any]:
        """For the next life."""
        known = {"over": self._over, "nan": self._meant}
        return {**self._judge.state(), **{k: v for k, v in known.items() if v is not None}}

    def _is_ended_before(self) -> bool:
        """Whether the training had ended before, by a rule or by run.finish(); says so."""
        if self._over is None:
            return False
        how = f"ended at step {self.step} by a rule"
        if self._over == BY_SCRIPT:
            how = f"finished at step {self.step}"
        say(f"{self._folder}: {how} ({self._over}); nothing left to train.")
        return True

    # -- at boundaries ----------------------------------------------------------------

    def _is_bad(self) -> bool:
        """Before anything is saved: whether this state was called bad. Waits for its values."""
        for follower in self._followers:
            follower.hand_over()  # the life that resumes from here does not log it again
        if self._bad is None and self._judge.is_there and self._judge.settle():
            self._take_verdict()
        return self._bad is not None

    def _look_at_rules(self) -> None:
        """Judge what was logged up to this boundary, as far as it has arrived."""
        if self._bad is None and self._over is None and self._judge.look(self.step):
            self._take_verdict()
        if self._judge.is_there and self._judge.lacks_samples():
            say(
                "Budget(samples=…) counts what run.log(samples=…) is given, and nothing was given "
                "so far."
            )

    def _take_verdict(self) -> None:
        verdict = self._judge.verdict
        if verdict is not None and verdict.is_bad and self._bad is None:
            self._bad = verdict
            self._void(verdict)

    def _hear_void(self, message: dict[str, Any]) -> None:
        """Another rank has called it bad; from the link's thread."""
        if self._bad is None:
            reason = message["reason"] or "a rule has called it bad"
            self._bad = Verdict(FAILURE, reason, message["step"], rank=message["rank"])
        self._next_look = 0.0

    def _void(self, verdict: Verdict) -> None:
        """Make everything from the bad step on void: on disk, in memory, for all ranks."""
        rank = 0 if self._crew is None else self._crew.rank
        step, layout = verdict.step, self._layout
        self._record_void(step, verdict.reason, rank)
        names: list[str] = []
        if verdict.names_tensors:
            names = self._tensors_not_finite()
            of = (self._custody.policy, self._saver)
            earlier = first_tainted(*of, names, trained(self._state, self._meant), step)
            if earlier < step:
                step = earlier
                self._record_void(step, verdict.reason, rank)
        self._saver.void_from(step)
        for before, _ in set_aside_void(layout) if rank == 0 else ():
            self._note("set-aside", name=before.name, why="called bad")
        self._custody.void_from(step, verdict.reason)
        self._is_voided = True
        known = {"rules": list(verdict.rules), "outcome": verdict.outcome}
        self._note(
            "rule",
            step=self.step,
            bad_step=verdict.step,
            void_from=step,
            reason=verdict.reason,
            tensors=names[:_MOST_NAMES],
            **known,
        )
        say(f"{verdict.reason}: everything from step {step} on is void.")
        if names:
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            say(f"not finite: {', '.join(names[:_MOST_NAMES])}{more}.")

    def _record_void(self, step: int, reason: str, rank: int) -> None:
        try:
            note_void(self._layout, self.attempt, step, reason, rank)
        except OSError as error:  # what is in memory goes all the same, and nothing is saved
            say(
                f"{self._folder}: it could not be noted that step {step} is bad "
                f"({error.strerror or error}).\n"
                f"Remove the checkpoints from step {step} on before the next start."
            )

    def _tensors_not_finite(self) -> list[str]:
        with contextlib.suppress(Exception):  # what a state says on its way out may be anything
            return not_finite(self._state)
        return []

    def _leave_bad(self) -> bool:
        """Leave without saving this step, with all ranks if there are several; False: not yet."""
        assert self._bad is not None
        verdict, crew = self._bad, self._crew
        if crew is not None:
            crew.wish("stop", verdict.reason, status=_errors.BAD)
            decision = crew.at_boundary(mark_of(self.step, self._at_turn))
            if decision is None or decision.kind != "stop":
                self._next_look = 0.0
                return False  # all leave at a boundary that is ahead: nothing is saved until then
        self._stop_bad()
        return True

    def _is_stopped_as_bad(self, decision: Decision) -> bool:
        """All ranks leave here, and one of them has called it bad: nothing is saved."""
        if decision.kind != "stop" or (self._bad is None and decision.status != _errors.BAD):
            return False
        if self._bad is None:
            self._bad = Verdict(FAILURE, decision.reason, self.step, rank=decision.rank)
        self._stop_bad()
        return True

    def _stop_bad(self) -> Stopped:
        assert self._bad is not None
        verdict = self._bad
        if self._crew is None:
            self._saver.keep_last("last good")  # what is held from before the bad step
        whose = ""
        if verdict.rank is not None and not self._is_voided:
            whose = f" (rank {verdict.rank})"
            told = {"bad_step": verdict.step, "outcome": verdict.outcome, "rank": verdict.rank}
            self._note("rule", step=self.step, reason=verdict.reason, **told)
        self._stopped = stopped = Stopped(_errors.BAD, f"{verdict.reason}{whose}", self.step)
        self._note("stop", step=self.step, reason=stopped.reason, status=stopped.status)
        kept = self._custody.durable_step
        if kept is None and (self.resumed_from or verdict.step) < verdict.step:
            kept = self.resumed_from
        good = "nothing before it was saved" if kept is None else f"step {kept} is durable"
        if self._crew is None:
            say(f"leaving with status {stopped.status} ({stopped.reason}); {good}.")
        return stopped

    def _ends(self) -> bool:
        """A boundary says to leave: True if a rule has ended the training well."""
        if self._stopped is not None:
            raise self._stopped
        return True

    def _judge_the_end(self) -> None:
        """Before the last state is saved: it may be bad, or a rule may have ended it here too."""
        if self._is_bad():
            raise self._stop_bad()
        verdict = self._judge.verdict
        if verdict is not None and self._over is None:
            self._end_well(verdict.reason)

    def _end_well(self, reason: str) -> None:
        """A rule ends the training: the loops end, as if they had come to their end."""
        self._over = reason
        verdict = self._judge.verdict
        rules = [] if verdict is None else list(verdict.rules)
        self._note("rule", step=self.step, reason=reason, rules=rules, outcome="success")
        say(f"{reason}: the training is complete at step {self.step}.")

    def _require_opened(self) -> None:
        """Refuse a run that was never opened: what it is given would be lost without a word."""
        if not self.attempt:
            self._require_open()

    def _require_open(self) -> None:
        raise NotImplementedError

    def _note(self, event: str, **fields: Any) -> None:
        raise NotImplementedError
