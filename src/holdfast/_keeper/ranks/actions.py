"""What the keeper of one rank does when the hub has decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast._keeper.writer import Job, Outcome
from holdfast._store.memory import control

if TYPE_CHECKING:
    from holdfast._keeper.keeper import Keeper
    from holdfast._keeper.ranks.member import Member

_TOLD_AT_THE_END = ("asked", "speaks", "said")
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

    def tell(self, kind: str, **fields: Any) -> None:
        if kind == "decide":
            if fields.get("wish_kind") == "stop":
                self._storage.hasten()
                self.stop_reason = fields["reason"]
            else:
                self._storage.writer.hurry()
            if self._trainer.rests:
                self._keeper.signals.expect_nudge()
        self._trainer.send(kind, **fields)

    def take_order(self, message: dict[str, Any]) -> None:
        self._keeper.hangs.obey(message)

    def void(self, step: int, reason: str, rank: int) -> None:
        self._storage.invalidate_from(step)
        self._trainer.send("void", step=step, reason=reason, rank=rank)

    # -- checkpoints ------------------------------------------------------------

    def held(self) -> list[tuple[int, int]]:
        return self._storage.holdings.boundaries()

    def all_hold(self, attempt: int, mark: int) -> None:
        found = self._storage.holdings.at(attempt, mark)
        if found is not None and attempt == self._attempt:
            self._storage.holdings.drop_before(found[0].arena.generation)

    def write_part(
        self, attempt: int, mark: int, partial: str, number: int, reason: str, last: bool
    ) -> None:
        if (attempt, mark, partial) in self._writing:
            return  # asked once more, after a cut of the network
        found = self._storage.holdings.at(attempt, mark)
        if found is None or not found[0].pin(found[1]):
            told = {"key": [attempt, mark], "number": number, "error": "the slot is gone"}
            self._member.link.to_hub("written", **told)
            return
        self._writing.add((attempt, mark, partial))
        folder = self._keeper.policy.layout.checkpoints / partial
        job = Job(*found, reason, number, partial=folder, is_last=last)
        self._storage.writer.submit(job)

    def part_written(self, outcome: Outcome) -> None:
        key = [outcome.job.held.arena.attempt, outcome.job.record.mark]
        told: dict[str, Any] = {"key": key, "number": outcome.job.order}
        if outcome.file is None:
            told |= {"error": outcome.error or "unknown", "dropped": outcome.is_dropped}
        else:
            metrics, common = outcome.head.get("metrics", {}), outcome.head.get("common", "")
            told["file"] = {**outcome.file.to_json(), "metrics": metrics, "common": common}
        self._member.link.to_hub("written", **told)

    def drop(self, attempt: int, mark: int) -> None:
        for order in self._forget(attempt, mark):
            self._trainer.send("dropped", order=order, step=mark // 2, error=_DROPPED)

    def settle(self, attempt: int, mark: int, error: str | None, *, is_fenced: bool) -> None:
        """A checkpoint of all ranks is durable, or has failed."""
        if error is None:
            self._storage.mark_durable(attempt, mark // 2)
            if attempt != self._attempt:
                self._storage.holdings.retire_salvaged(attempt)
        else:
            self._storage.mark_failed(mark // 2, is_fenced=is_fenced)
        kind = "durable" if error is None else "fenced" if is_fenced else "failed"
        fields = {} if error is None else {"error": error}
        for order in self._forget(attempt, mark) or (None,):
            self._trainer.send(kind, order=order, step=mark // 2, mark=mark, **fields)

    def _forget(self, attempt: int, mark: int) -> list[int]:
        """Returns the orders for this boundary."""
        self._writing = {each for each in self._writing if each[:2] != (attempt, mark)}
        return self.orders.pop((attempt, mark), [])

    # -- the end ----------------------------------------------------------------

    def send_away(self, message: dict[str, Any]) -> None:
        self._member.departure.release()
        self._storage.learn_durable(message["step"])
        if not self._member.departure.is_trainer_gone:
            details = {name: message[name] for name in _TOLD_AT_THE_END if name in message}
            reason, status = message["reason"], message["status"]
            self._member.departure.order_to_leave(reason, status, **details)

    def say_bye(self, message: dict[str, Any]) -> None:
        self._member.departure.release()
        details = {name: message[name] for name in ("said", "status") if "said" in message}
        step, reason = message["step"], message.get("reason")
        self._trainer.send("bye", step=step, reason=reason, **details)


def boundary_id(words: Any) -> int:
    return int(words[control.MARK])
