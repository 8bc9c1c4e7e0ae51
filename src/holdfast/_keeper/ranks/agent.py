"""Answers the hub for one rank, and dispatches what the hub decides.

It reads and writes the words that are shared with the trainer, so it can answer while the trainer
is in a long call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast._keeper import protocol
from holdfast._store.memory import control

if TYPE_CHECKING:
    from holdfast._keeper.ranks.actions import RankActions

_MOMENT_SECONDS = 0.002  # until the trainer's stores are visible here: memory order is weak


class RankAgent:
    """The position of one rank, its plans and the decisions that are not carried out yet."""

    def __init__(
        self,
        attempt: int,
        words: Any,
        send: Callable[[protocol.ToHub], None],
        actions: RankActions,
        who: dict[str, Any],
    ) -> None:
        self._attempt = attempt
        self._words = words
        self._send = send
        self._actions = actions
        self._who = who
        self._is_held = False  # an agreement is in progress
        self._asked = self._answered = 0  # the newest agreements that were asked, and answered
        self._decided: int | None = None  # the mark of a decision that is not carried out yet
        self._planned: int | None = None
        self._told: dict[int, int] = {}  # by attempt: the newest snapshot reported to the hub
        if words[control.DUE] != control.NEVER:
            # A keeper before this one died during an agreement: the trainer checks in at each
            # boundary until the hub decides.
            words[control.HOLD] = words[control.PLANNED] = words[control.DUE] = 0

    def greet(self) -> None:
        """Tell the hub that this rank is here, and which snapshots it holds."""
        self._send(protocol.RankHello(who=self._who, held=self._held()))

    def report(self) -> None:
        """Tell the hub which snapshots this rank holds now."""
        held = self._held()
        newest = max((mark for attempt, mark in held if attempt == self._attempt), default=-1)
        if self._planned is not None and newest >= self._planned:
            self._planned = None
        self._set_due()
        self._send(protocol.RankHolds(held=held))

    def _held(self) -> list[tuple[int, int]]:
        held = self._actions.held()
        for attempt, mark in held:
            self._told[attempt] = max(mark, self._told.get(attempt, -1))
        return held

    def missed(self, mark: int, why: str, *, is_past: bool = False) -> None:
        """There is no snapshot of a boundary at which one was to be taken.

        `is_past`: the plan came too late. A trainer that stands at that very boundary, as after
        its last step, may still save it.
        """
        if self._planned == mark:
            self._planned = None
            self._set_due()
        at = int(self._words[control.MARK])
        self._send(protocol.SnapshotMissed(mark=mark, why=why, at=at, is_past=is_past))

    def order(self, attempt: int, mark: int, reason: str, *, is_last: bool = False) -> None:
        """The trainer wants a boundary on disk; this carries out a decision to save."""
        if self._decided is not None and mark >= self._decided:
            self._decided = None
            self._set_due()
        self._send(protocol.CommitOrder(key=[attempt, mark], reason=reason, last=is_last))

    # -- from the hub -----------------------------------------------------------------

    def hear(self, message: protocol.FromHub | None) -> None:
        actions = self._actions
        match message:
            case protocol.HoldOrder():
                self._on_hold(message.round)
            case protocol.DecisionForRank():
                self._on_decide(message)
            case protocol.SnapshotPlan():
                self._on_plan(message.mark)
            case protocol.CommonSnapshot(key=[attempt, mark]):
                if attempt == self._attempt:
                    self._words[control.COMMON] = mark + 1
                actions.all_hold(attempt, mark)
            case protocol.WritePart(key=[attempt, mark]):
                # Else it is for the keeper before this one, which died before it acknowledged the
                # order: the trainer has not handed its slots over yet. Once they are reported, the
                # hub asks again.
                if mark <= self._told.get(attempt, -1):
                    actions.write_part(message)
            case protocol.CommitDropped(key=[attempt, mark]):
                actions.drop(attempt, mark)
            case protocol.CommitDurable(key=[attempt, mark]):
                actions.settle(attempt, mark, None, is_fenced=False)
            case protocol.CommitFailed(key=[attempt, mark]):
                actions.settle(attempt, mark, message.error, is_fenced=message.fenced)
            case protocol.InvalidForAll():
                actions.invalidate(message.step, message.reason, message.by)
            case protocol.RankLeave():
                actions.send_away(message)
            case protocol.RankBye():
                actions.say_bye(message)
            case protocol.LookOrder() | protocol.RestartClock() | protocol.GuardOrder():
                actions.take_order(message)
            case protocol.ToTrainer():  # such as a notice, which it only passes on
                actions.tell(message)

    def _on_hold(self, number: int) -> None:
        self._asked = number
        self._is_held = True
        self._words[control.HOLD] = number
        self._words[control.DUE] = 0
        self._planned = None
        self._words[control.PLANNED] = 0
        self._actions.later(_MOMENT_SECONDS, lambda: self._answer(number))

    def _answer(self, number: int) -> None:
        """Report where the trainer is, or the first boundary that it may still reach."""
        self._answered = number
        words = self._words
        mark = int(words[control.MARK])
        rests = (
            words[control.REST] == control.RESTS and (self._attempt, mark) in self._actions.held()
        )
        stands = words[control.WAITS] == number or words[control.DONE] or rests
        self._send(protocol.RankAt(round=number, mark=mark if stands else mark + 1))

    def _on_decide(self, decision: protocol.DecisionForRank) -> None:
        if self._answered < decision.round == self._asked:
            # Without this rank: the hub must know where its trainer was before that is told.
            self._actions.later(_MOMENT_SECONDS, lambda: self._decide(decision))
        else:
            self._decide(decision)

    def _decide(self, decision: protocol.DecisionForRank) -> None:
        self._decided = decision.mark
        # The hold stays: a trainer that reaches a boundary before it has the message waits.
        if self._words[control.HOLD] == decision.round:
            self._is_held = False
        self._set_due()
        wish = dict(decision.wish)
        kind = wish.pop("kind")
        self._actions.tell(
            protocol.DecisionForTrainer(
                mark=decision.mark, round=decision.round, wish_kind=kind, **wish
            )
        )

    def _on_plan(self, mark: int) -> None:
        if self._words[control.MARK] >= mark or self._is_held:
            self.missed(mark, "it was past that step", is_past=True)
            return
        self._planned = mark
        self._set_due()

    def _set_due(self) -> None:
        """Set the mark from which on the trainer must check in at a boundary."""
        words = self._words
        words[control.PLANNED] = self._planned or 0
        if self._is_held:
            return
        ahead = [mark for mark in (self._decided, self._planned) if mark is not None]
        words[control.DUE] = min(ahead, default=control.NEVER)
