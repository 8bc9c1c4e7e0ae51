"""What the keeper of one rank does when the hub has decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast._keeper import protocol
from holdfast._keeper.writer import WriteJob, WriteOutcome

if TYPE_CHECKING:
    from holdfast._keeper.keeper import Keeper
    from holdfast._keeper.ranks.member import Member

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
            if message.wish_kind == "stop":
                self._storage.hasten()
                self.stop_reason = message.reason
            else:
                self._storage.writer.hurry()
            if self._trainer.rests:
                self._keeper.signals.expect_nudge()
        self._trainer.send(message)

    def take_order(self, order: protocol.FromHub) -> None:
        self._keeper.hangs.obey(order)

    def invalidate(self, step: int, reason: str, rank: int) -> None:
        self._storage.invalidate_from(step)
        self._trainer.send(protocol.InvalidByRank(step=step, reason=reason, rank=rank))

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

    def settle(self, attempt: int, mark: int, error: str | None, *, is_fenced: bool) -> None:
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

    def send_away(self, order: protocol.RankLeave) -> None:
        self._member.departure.release()
        self._storage.learn_durable(order.step)
        if not self._member.departure.is_trainer_gone:
            given = order.values()
            details = {name: given[name] for name in ("asked", "speaks", "said") if name in given}
            self._member.departure.order_to_leave(order.reason, order.status, **details)

    def say_bye(self, bye: protocol.RankBye) -> None:
        self._member.departure.release()
        step, reason = bye.step, bye.reason
        if bye.said:
            told = protocol.TrainerBye(step=step, reason=reason, said=bye.said, status=bye.status)
        else:
            told = protocol.TrainerBye(step=step, reason=reason)
        self._trainer.send(told)
