"""One rank among several: answers the hub for its trainer, and does what the hub decides.

It reads and writes the words that are shared with the trainer, so it can answer while the trainer
is in a long call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast._environment.processes.identity import host_name
from holdfast._keeper import protocol
from holdfast._keeper.decider import SLOT_GONE
from holdfast._keeper.writer import WriteJob, WriteOutcome
from holdfast._store.commit.write_queue import Key
from holdfast._store.memory import control

if TYPE_CHECKING:
    from holdfast._keeper.keeper import Keeper
    from holdfast._keeper.ranks.member import Member

_MOMENT_SECONDS = 0.002  # until the trainer's stores are visible here: memory order is weak
_DROPPED = "a newer step is durable, or is written in its place"


class RankAgent:
    """The position of one rank, its plans, its parts of checkpoints, and the hub's decisions.

    Methods named `on_…` are what the hub calls: see `protocol.FromHub`.
    """

    def __init__(self, keeper: Keeper, hub: protocol.ToHub, member: Member) -> None:
        self._keeper = keeper
        self._hub = hub
        self._member = member
        self._storage = keeper.storage
        self._trainer = keeper.trainer
        self._attempt = keeper.policy.attempt
        self._words = words = keeper.trainer.words
        self._is_held = False  # an agreement is in progress
        self._asked = self._answered = 0  # the newest agreements that were asked, and answered
        self._decided: int | None = None  # the mark of a decision that is not carried out yet
        self._planned: int | None = None
        self._told: dict[int, int] = {}  # by attempt: the newest snapshot reported to the hub
        self._writing: set[tuple[Key, str]] = set()  # parts that are, or were, written
        self.orders: dict[Key, list[int]] = {}  # the trainer's, by boundary
        self.stop_reason: str | None = None  # of a stop that all ranks have agreed on
        if words[control.DUE] != control.NEVER:
            # A keeper before this one died during an agreement: the trainer checks in at each
            # boundary until the hub decides.
            words[control.HOLD] = words[control.PLANNED] = words[control.DUE] = 0

    def greet(self) -> None:
        """Tell the hub that this rank is here, and which snapshots it holds."""
        rank, pid = self._keeper.policy.rank, self._trainer.pid
        who = {"rank": rank, "host": host_name(), "pid": pid}
        self._hub.hello(who=who, held=self._held())

    def report(self) -> None:
        """Tell the hub which snapshots this rank holds now."""
        held = self._held()
        newest = max((mark for attempt, mark in held if attempt == self._attempt), default=-1)
        if self._planned is not None and newest >= self._planned:
            self._planned = None
        self._set_due()
        self._hub.held(held=held)

    def _held(self) -> list[Key]:
        held = self._storage.holdings.boundaries()
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
        self._hub.missed(mark=mark, why=why, at=at, is_past=is_past)

    def order(self, key: Key, reason: str, *, is_last: bool = False) -> None:
        """The trainer wants a boundary on disk; this carries out a decision to save."""
        if self._decided is not None and key[1] >= self._decided:
            self._decided = None
            self._set_due()
        self._hub.order(key=key, reason=reason, last=is_last)

    def receive(self, kind: str, /, **fields: Any) -> None:
        """Receive a message of the hub; what is for the trainer only, it gets as it is."""
        receivers = (self, self._keeper.hangs)
        if not any(protocol.receive_call(each, kind, **fields) for each in receivers):
            self._trainer.post(kind, **fields)

    # -- agreement --------------------------------------------------------------------

    def on_hold(self, round: int) -> None:
        self._asked = round
        self._is_held = True
        self._words[control.HOLD] = round
        self._words[control.DUE] = 0
        self._planned = None
        self._words[control.PLANNED] = 0
        self._keeper.timers.after(_MOMENT_SECONDS, lambda: self._answer(round))

    def _answer(self, number: int) -> None:
        """Report where the trainer is, or the first boundary that it may still reach."""
        self._answered = number
        words = self._words
        mark = int(words[control.MARK])
        held = self._storage.holdings.boundaries
        rests = self._trainer.rests and (self._attempt, mark) in held()
        stands = words[control.WAITS] == number or words[control.DONE] or rests
        self._hub.at(round=number, mark=mark if stands else mark + 1)

    def on_decide(self, round: int, mark: int, wish: dict[str, Any]) -> None:
        def decide() -> None:
            self._decided = mark
            # The hold stays: a trainer that reaches a boundary before it has the message waits.
            if self._words[control.HOLD] == round:
                self._is_held = False
            self._set_due()
            known = {"what" if name == "kind" else name: value for name, value in wish.items()}
            self._tell(protocol.DecisionForTrainer(mark=mark, round=round, **known))

        if self._answered < round == self._asked:
            # The hub decided without this rank's answer: send it first, then tell the trainer.
            self._keeper.timers.after(_MOMENT_SECONDS, decide)
        else:
            decide()

    def _tell(self, decision: protocol.DecisionForTrainer) -> None:
        if decision.what == "stop":
            self._storage.hasten()
            self.stop_reason = decision.reason
        else:
            self._storage.writer.hurry()
        if self._trainer.rests:
            self._keeper.signals.expect_nudge()
        self._trainer.tell.decide(**vars(decision))

    def on_plan(self, mark: int) -> None:
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

    def on_void(self, step: int, reason: str, rank: int) -> None:
        self._storage.invalidate_from(step)
        self._trainer.tell.void(step=step, reason=reason, rank=rank)

    # -- checkpoints ------------------------------------------------------------------

    def on_common(self, key: Key) -> None:
        """All ranks hold this boundary."""
        attempt, mark = key
        if attempt == self._attempt:
            self._words[control.COMMON] = mark + 1
            found = self._storage.holdings.at(attempt, mark)
            if found is not None:
                self._storage.holdings.drop_before(found[0].arena.generation)

    def on_write(self, key: Key, partial: str, number: int, reason: str, *, last: bool) -> None:
        attempt, mark = key
        if mark > self._told.get(attempt, -1):
            # For the keeper before this one, which died before it acknowledged the order: the
            # trainer has not handed its slots over yet. Once they are reported, the hub asks again.
            return
        if (key, partial) in self._writing:
            return  # asked once more, after a cut of the network
        found = self._storage.holdings.at(attempt, mark)
        if found is None or not found[0].pin(found[1]):
            self._hub.written(key=key, number=number, error=SLOT_GONE)
            return
        self._writing.add((key, partial))
        folder = self._keeper.policy.layout.checkpoints / partial
        job = WriteJob(*found, reason, number, partial=folder, is_last=last)
        self._storage.writer.submit(job)

    def part_written(self, outcome: WriteOutcome) -> None:
        key, number = outcome.job.key, outcome.job.order
        if outcome.file is None:
            error, dropped = outcome.error or "unknown", outcome.is_dropped
            self._hub.written(key=key, number=number, error=error, dropped=dropped)
        else:
            metrics, common = outcome.head.get("metrics", {}), outcome.head.get("common", "")
            file = {**outcome.file.to_json(), "metrics": metrics, "common": common}
            self._hub.written(key=key, number=number, file=file)

    def on_dropped(self, key: Key) -> None:
        for order in self._forget(key):
            self._trainer.tell.dropped(order=order, step=key[1] // 2, error=_DROPPED)

    def on_durable(self, key: Key) -> None:
        attempt, mark = key
        self._storage.mark_durable(attempt, mark // 2)
        if attempt != self._attempt:
            self._storage.holdings.retire_salvaged(attempt)
        for order in self._forget(key) or (None,):
            self._trainer.tell.durable(order=order, step=mark // 2, mark=mark)

    def on_failed(self, key: Key, error: str, *, fenced: bool) -> None:
        step, mark, tell = key[1] // 2, key[1], self._trainer.tell
        self._storage.mark_failed(step, is_fenced=fenced)
        answer = tell.fenced if fenced else tell.failed
        for order in self._forget(key) or (None,):
            answer(order=order, step=step, mark=mark, error=error)

    def _forget(self, key: Key) -> list[int]:
        """Returns the orders for this boundary."""
        self._writing = {each for each in self._writing if each[0] != key}
        return self.orders.pop(key, [])

    # -- the end ----------------------------------------------------------------------

    def on_leave(self, step: int | None, **order: Any) -> None:
        self._member.is_released = True
        self._storage.learn_durable(step)
        if not self._member.has_lost_trainer:
            self._trainer.order_to_leave(step=self._storage.durable_step, **order)

    def on_bye(
        self, step: int | None, reason: str | None = None, said: str = "", status: int = 0, **_: Any
    ) -> None:
        self._member.is_released = True
        requeued: dict[str, Any] = {"said": said, "status": status} if said else {}
        self._trainer.tell.bye(step=step, reason=reason, **requeued)
