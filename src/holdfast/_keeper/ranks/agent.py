"""One rank among several: answers the hub for its trainer, and does what the hub decides.

It reads and writes the words that are shared with the trainer, so it can answer while the trainer
is in a long call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast._keeper import protocol
from holdfast._keeper.writer import WriteJob, WriteOutcome
from holdfast._store.memory import control

if TYPE_CHECKING:
    from holdfast._keeper.keeper import Keeper
    from holdfast._keeper.ranks.member import Member

_MOMENT_SECONDS = 0.002  # until the trainer's stores are visible here: memory order is weak


@dataclass(eq=False)
class RankAgent:
    """The position of one rank, its plans and the decisions that are not carried out yet."""

    _attempt: int
    _words: Any
    _send: Callable[[protocol.ToHub], None]
    _actions: RankActions
    _who: dict[str, Any]

    def __post_init__(self) -> None:
        words = self._words
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

    def receive(self, message: protocol.FromHub | None) -> None:
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
                actions.finish_commit(attempt, mark, None, is_fenced=False)
            case protocol.CommitFailed(key=[attempt, mark]):
                actions.finish_commit(attempt, mark, message.error, is_fenced=message.fenced)
            case protocol.InvalidByRank():
                actions.invalidate(message)
            case protocol.LeaveOrder():
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
            # The hub decided without this rank's answer: send it first, then tell the trainer.
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
            protocol.DecisionForTrainer(mark=decision.mark, round=decision.round, what=kind, **wish)
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


_DROPPED = "a newer step is durable, or is written in its place"


class RankActions:
    """Writes this rank's parts, and passes the hub's decisions on to its trainer."""

    def __init__(self, keeper: Keeper, member: Member) -> None:
        self._keeper = keeper
        self._member = member
        self._storage = keeper.storage
        self._trainer = keeper.trainer
        self._attempt = keeper.policy.attempt
        self._writing: set[tuple[int, int, str]] = set()  # parts that are, or were, written
        self.orders: dict[tuple[int, int], list[int]] = {}  # the trainer's, by boundary
        self.stop_reason: str | None = None  # of a stop that all ranks have agreed on

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        self._keeper.timers.after(seconds, act)

    def tell(self, message: protocol.ToTrainer) -> None:
        if isinstance(message, protocol.DecisionForTrainer):
            if message.what == "stop":
                self._storage.hasten()
                self.stop_reason = message.reason
            else:
                self._storage.writer.hurry()
            if self._trainer.rests:
                self._keeper.signals.expect_nudge()
        self._trainer.send(message)

    def take_order(self, order: protocol.FromHub) -> None:
        self._keeper.hangs.obey(order)

    def invalidate(self, message: protocol.InvalidByRank) -> None:
        self._storage.invalidate_from(message.step)
        self._trainer.send(message)

    # -- checkpoints ------------------------------------------------------------

    def held(self) -> list[tuple[int, int]]:
        return self._storage.holdings.boundaries()

    def all_hold(self, attempt: int, mark: int) -> None:
        found = self._storage.holdings.at(attempt, mark)
        if found is not None and attempt == self._attempt:
            self._storage.holdings.drop_before(found[0].arena.generation)

    def write_part(self, order: protocol.WritePart) -> None:
        attempt, mark = order.key
        if (attempt, mark, order.partial) in self._writing:
            return  # asked once more, after a cut of the network
        found = self._storage.holdings.at(attempt, mark)
        if found is None or not found[0].pin(found[1]):
            gone = "the slot is gone"
            told = protocol.PartWritten(key=[attempt, mark], number=order.number, error=gone)
            self._member.link.to_hub(told)
            return
        self._writing.add((attempt, mark, order.partial))
        folder = self._keeper.policy.layout.checkpoints / order.partial
        job = WriteJob(*found, order.reason, order.number, partial=folder, is_last=order.last)
        self._storage.writer.submit(job)

    def part_written(self, outcome: WriteOutcome) -> None:
        key, number = list(outcome.job.key), outcome.job.order
        if outcome.file is None:
            error, dropped = outcome.error or "unknown", outcome.is_dropped
            told = protocol.PartWritten(key=key, number=number, error=error, dropped=dropped)
        else:
            metrics, common = outcome.head.get("metrics", {}), outcome.head.get("common", "")
            file = {**outcome.file.to_json(), "metrics": metrics, "common": common}
            told = protocol.PartWritten(key=key, number=number, file=file)
        self._member.link.to_hub(told)

    def drop(self, attempt: int, mark: int) -> None:
        for order in self._forget(attempt, mark):
            self._trainer.send(protocol.WriteDropped(order=order, step=mark // 2, error=_DROPPED))

    def finish_commit(self, attempt: int, mark: int, error: str | None, *, is_fenced: bool) -> None:
        """A checkpoint of all ranks is durable, or has failed."""
        if error is None:
            self._storage.mark_durable(attempt, mark // 2)
            if attempt != self._attempt:
                self._storage.holdings.retire_salvaged(attempt)
        else:
            self._storage.mark_failed(mark // 2, is_fenced=is_fenced)
        step, failed = mark // 2, protocol.WriteFenced if is_fenced else protocol.WriteFailed
        for order in self._forget(attempt, mark) or (None,):
            if error is None:
                self._trainer.send(protocol.WriteDurable(order=order, step=step, mark=mark))
            else:
                self._trainer.send(failed(order=order, step=step, mark=mark, error=error))

    def _forget(self, attempt: int, mark: int) -> list[int]:
        """Returns the orders for this boundary."""
        self._writing = {each for each in self._writing if each[:2] != (attempt, mark)}
        return self.orders.pop((attempt, mark), [])

    # -- the end ----------------------------------------------------------------

    def send_away(self, order: protocol.LeaveOrder) -> None:
        self._member.departure.is_released = True
        self._storage.learn_durable(order.step)
        if not self._member.departure.is_trainer_gone:
            told = {**order.values(), "step": self._storage.durable_step}
            self._trainer.order_to_leave(**told)

    def say_bye(self, bye: protocol.RankBye) -> None:
        self._member.departure.is_released = True
        requeued: dict[str, Any] = {"said": bye.said, "status": bye.status} if bye.said else {}
        self._trainer.send(protocol.TrainerBye(step=bye.step, reason=bye.reason, **requeued))
