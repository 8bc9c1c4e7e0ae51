"""Hang detection in one keeper: the watch over its trainer, and the judge of all ranks.

The keeper of rank 0, or of a single process, has both. The other ranks have only the watch and send
its reports to the judge.
"""

from __future__ import annotations

import queue
import time
import traceback
from typing import TYPE_CHECKING, Any

from holdfast._environment import variables
from holdfast._keeper import protocol
from holdfast._keeper.hangs.judge import HangJudge
from holdfast._keeper.hangs.record import file_hang, file_look, say_in_place_of, told_of
from holdfast._keeper.hangs.watch import HangWatch
from holdfast._keeper.storage import Storage
from holdfast._keeper.trainer import Ends, Trainer
from holdfast._store.commit.write import Policy
from holdfast._store.folder import journal
from holdfast._store.folder.opened import tell_leader_of_hang

if TYPE_CHECKING:
    from holdfast._environment.processes.inspect import Looker
    from holdfast._keeper.decider import Decider

_MOST_SAID = 4000
_BLIND_SECONDS = 60.0  # after an unexpected error


class HangMonitor:
    """The watch and the judge of one keeper. An error here never ends the keeper."""

    def __init__(
        self, policy: Policy, ends: Ends, trainer: Trainer, storage: Storage, decider: Decider
    ) -> None:
        self._policy = policy
        self._ends = ends
        self._trainer = trainer
        self._storage = storage
        self._decider = decider
        self._watch = HangWatch(
            trainer.words,
            trainer.pid,
            policy.rank,
            policy.hang_seconds,
            self._post,
            self._make_looker,
            policy.size,
        )
        self._judge = HangJudge(self) if policy.rank == 0 else None
        self._blind_until = 0.0
        self._explained: queue.SimpleQueue[tuple[dict[str, Any], int | None]] = queue.SimpleQueue()

    # -- in the keeper's loop ------------------------------------------------------------

    def poll(self, now: float) -> None:
        """Read the trainer's progress; if all is well, only a few shared words."""
        if now < self._blind_until:
            return
        try:
            self._poll(now)
        except Exception:  # noqa: BLE001  the keeper must go on
            traceback.print_exc()
            self._blind_until = now + _BLIND_SECONDS

    def _poll(self, now: float) -> None:
        trainer = self._trainer
        is_leaving = trainer.is_leaving or trainer.leave_status is not None
        is_over = is_leaving or self._decider.is_trainer_gone
        self._watch.observe(now, trainer.phase, is_over=is_over)
        if self._judge is not None:
            while not self._explained.empty():
                self._judge.explained(*self._explained.get_nowait())
            self._judge.tick()

    def receive(self, rank: int, message: protocol.ToHub) -> bool:
        """At the hub: a report of a rank's watch; False if it was for the hub itself."""
        assert self._judge is not None
        try:
            if isinstance(message, protocol.RankHello | protocol.RankDied | protocol.RankFarewell):
                self._judge.on_going(rank, moved=False)  # what its former keeper had reported
            return self._judge.receive(rank, message)
        except Exception:  # noqa: BLE001  as above
            traceback.print_exc()
            return False  # the hub ignores what it does not know

    def obey(self, order: protocol.FromHub) -> None:
        """Do what the judge orders for this rank."""
        match order:
            case protocol.LookOrder():
                self._watch.inspections.ask(order.round)
            case protocol.RestartClock():
                self._watch.restart_clock()
            case protocol.GuardOrder():
                self._watch.hold(order.by, is_seen=order.is_seen)

    def ask_stacks(self, details: dict[str, Any]) -> None:
        """`holdfast stacks` asks what all ranks do now."""
        assert self._judge is not None
        layout, attempt, token = self._policy.layout, self._policy.attempt, details.get("token")
        self._judge.ask(lambda looks, missing: file_look(layout, attempt, token, looks, missing))

    @property
    def is_paused(self) -> bool:
        """True if a debugger holds this trainer."""
        return self._watch.is_paused

    @property
    def is_hung(self) -> bool:
        """True while a hang is found and not over."""
        return self._judge is not None and self._judge.beat()["hang"] is not None

    def beat(self) -> dict[str, Any]:
        found = self._watch.beat()
        if self._judge is None:
            return {**found, "hang": None}
        judged = self._judge.beat()
        return {**found, "hang": judged["hang"], "paused": judged["held"] or found["paused"]}

    def _post(self, message: protocol.ToHub) -> None:
        link = self._decider.judge_link()
        if link is None:
            self.receive(0, message)
        else:
            link.to_hub(message)

    def _make_looker(self) -> Looker:
        from holdfast._environment.processes.inspect import Looker  # only in trouble

        return Looker(self._ends.trainer_pid, fault_file=self._ends.stacks)

    # -- what the judge has done --------------------------------------------------------------

    def ranks(self) -> list[int]:
        link = self._decider.judge_link()
        return [0] if link is None else link.training_ranks()

    def order(self, rank: int, order: protocol.FromHub) -> None:
        link = self._decider.judge_link()
        if link is None:
            self.obey(order)
        else:
            link.from_hub(rank, order)

    def say(self, kind: str, **fields: Any) -> None:
        if "sentence" in fields:
            fields["sentence"] = fields["sentence"][:_MOST_SAID]  # a message has its bounds
        fields["folder"] = str(self._policy.layout.folder)
        if kind == "hang" and self._watch.is_deaf and variables.led_folder() is None:
            # The trainer could print it only when the hang is over. A leader prints it by itself.
            say_in_place_of(self._trainer.pid, told_of(fields))
            return
        message = protocol.ToTrainer.from_json({"kind": kind, **fields})
        assert message is not None
        self._trainer.send(message)
        # A stopped trainer cannot print it before that is over.
        if fields.get("is_deaf") and (place := variables.led_folder()) is not None:
            tell_leader_of_hang(place, {"held": {**fields, "since": time.time()}})

    def note(self, event: str, **fields: Any) -> None:
        step = self._trainer.step
        fields = {"step": step, "attempt": self._policy.attempt, **fields}
        journal.append(self._policy.layout.journal, event, **fields)

    def report_survivor(self, pid: int, state: str) -> None:
        """The trainer has survived SIGKILL: it waits for a disk in the kernel."""
        self.note("survives-kill", pid=pid, state=state)
        found = {} if self._judge is None else self._judge.record or {}
        if (place := variables.led_folder()) is not None:
            tell_leader_of_hang(place, {**found, "unkillable": [pid]})

    def facts(self) -> dict[str, Any]:
        """Further fields of the record of a hang."""
        restarts = self._policy.hang_restarts and not self._trainer.stays
        return {
            "attempt": self._policy.attempt,
            "policy": "restart" if restarts else "report",
            "durable_step": self._storage.durable_step,
        }

    def file(self, record: dict[str, Any]) -> None:
        file_hang(self._policy.layout, record, lambda rank: self._explained.put((record, rank)))

    def file_again(self, record: dict[str, Any]) -> None:
        file_hang(self._policy.layout, record, None)

    def save(self) -> None:
        """Make the newest snapshot durable: the next step may never come."""
        self._decider.on_hang(None, restart=False)

    def restart(self, rank: int | None) -> None:
        """Save what is in memory and make the trainer leave; its supervisor starts it again."""
        self._decider.on_hang(rank, restart=True)
