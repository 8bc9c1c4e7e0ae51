"""What a trainer asks of all ranks, and what they have decided.

The keepers agree. The trainer reads one word at each boundary, and waits only while an agreement is
under way. Every wait has a bound.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from holdfast._environment.processes.proc import FairDeadline
from holdfast._errors import RanksError
from holdfast._keeper.protocol import DecisionForTrainer as Decision
from holdfast._keeper.protocol import RankConfig
from holdfast._run.ranks.meeting import RankGroup, make_key
from holdfast._run.ranks.world import addresses
from holdfast._run.saving.keeper_client import KeeperClient
from holdfast._run.witness.observer import batch_print
from holdfast._store.commit.write import Policy
from holdfast._store.memory.control import AGREES, DUE, HOLD, MARK, PLANNED, WAITS, WORK, at_work
from holdfast._text import say

_DECISION_SECONDS = 15.0
_FAREWELL_SECONDS = 90.0
_JOIN_SECONDS = 60.0
_LOOK_SECONDS = 0.05
_HOLD_SECONDS = 0.001  # for the rank that asked, until it sees the hold
_DUE_SECONDS = 0.25  # between two proposals for the same snapshot


class RankAgreement:
    """The decisions of all ranks, as one trainer receives them."""

    def __init__(self, rank: int, size: int, keeper: KeeperClient) -> None:
        self.rank = rank
        self.size = size
        self._keeper = keeper
        self._words = keeper.words
        self._changed = threading.Condition()
        self._decided: list[Decision] = []
        self._round = 0  # the newest that was decided, or given up
        self._heard: set[int] = set()  # the rounds whose decision has come
        self._requested: dict[str, dict[str, Any]] = {}  # by kind
        self._next_due = 0.0
        self._stops = False  # this rank has reached the boundary of a decided stop
        self._bye: dict[str, Any] | None = None
        self.port: int | None = None
        self.has_joined = False
        self._meter: Any = None
        self._batches_to_show = 0

    # -- in the thread that receives --------------------------------------------------

    def hear(self, message: dict[str, Any]) -> Decision | bool:
        """Returns a decision, True for another message to all ranks, False for any other."""
        kind = message["kind"]
        decision: Decision | bool = True
        with self._changed:
            if kind == "decide":
                decision = Decision(**{k: v for k, v in message.items() if k != "kind"})
                if decision.round in self._heard:
                    return True  # sent again, by a new keeper
                self._heard.add(decision.round)
                self._decided.append(decision)
                if decision.mark < self._words[DUE]:
                    self._words[DUE] = decision.mark  # as the keeper does, unless it died
                self._round = max(self._round, decision.round)
            elif kind == "bye":
                self._bye = message
            elif kind == "port":
                self.port = message["port"]
            elif kind == "joined":
                self.has_joined = True
            else:
                return False
            self._changed.notify_all()
        return decision

    # -- at boundaries ------------------------------------------------------------------

    def request(self, kind: str, reason: str, **details: Any) -> None:
        """Ask that all ranks stop, or save, at one boundary."""
        with self._changed:
            is_decided = any(each.what in (kind, "stop") for each in self._decided)
        if kind not in self._requested and not is_decided:
            self._stops = False  # an earlier stop came with the last step of a loop
            self._requested[kind] = {"kind": kind, "reason": reason, **details}
            self._send_request(kind)

    def _send_request(self, kind: str) -> None:
        self._keeper.send("wish", wish=self._requested[kind], mark=int(self._words[MARK]))

    def at_boundary(self, mark: int) -> Decision | None:
        """What all ranks do at this boundary, if anything; waits while that is being decided."""
        if self._words[HOLD] > self._round or self._requested:
            with at_work(self._words, AGREES):
                self._wait_for_decision()
        with self._changed:
            ripe = [each for each in self._decided if mark >= each.mark]
            self._decided = [each for each in self._decided if mark < each.mark]
        self._stops = self._stops or any(each.what == "stop" for each in ripe)
        # A stop saves too.
        return max(ripe, key=lambda each: each.what == "stop", default=None)

    def _wait_for_decision(self) -> None:
        deadline = FairDeadline(_DECISION_SECONDS, self._keeper.keeper_pids)
        keeper = self._keeper.keeper_pid
        while True:
            self._words[WAITS] = number = int(self._words[HOLD])
            with self._changed:
                kinds = {each.what for each in self._decided}
                is_granted = "stop" in kinds or set(self._requested) <= kinds
                if is_granted and self._round >= self._words[HOLD]:
                    break
                if deadline.is_over():
                    self._round = max(self._round, number)  # no answer comes any more
                    break
                self._changed.wait(_LOOK_SECONDS if number > self._round else _HOLD_SECONDS)
            self._keeper.check_keeper()
            if keeper != self._keeper.keeper_pid:
                keeper = self._keeper.keeper_pid  # the keeper that died may not have passed it on
                for kind in self._requested:
                    self._send_request(kind)
        self._words[WAITS] = 0
        self._requested.clear()

    def is_planned(self, mark: int) -> bool:
        """True if all ranks take a snapshot at this boundary."""
        planned = int(self._words[PLANNED])
        if planned and mark > planned:
            self.missed(planned, "it was past that step", is_past=True)
        return planned == mark and planned > 0

    def propose(self, mark: int, reason: str | None) -> None:
        """Rank 0 proposes a snapshot, or a checkpoint if there is a reason."""
        now = time.monotonic()
        if self.rank == 0 and (now >= self._next_due or reason is not None):
            self._next_due = now + _DUE_SECONDS
            self._keeper.send("due", mark=mark, reason=reason)

    def taken(self) -> None:
        self._next_due = 0.0

    def missed(self, mark: int, why: str, *, is_past: bool = False) -> None:
        self._keeper.send("missed", mark=mark, why=why, is_past=is_past)

    # -- figures that the keepers compare ----------------------------------------------

    def watch(self, meter: Any) -> None:
        """Send how long this rank waits for the others, and its first batches."""
        self._meter = meter
        self._batches_to_show = 2

    def show_waits(self) -> None:
        if self._meter is not None and (found := self._meter.read()) is not None:
            self._keeper.send("waits", waited=found[1], step_seconds=found[2])

    def show_batch(self, batch: Any) -> None:
        """Send the first batches for comparison: the script may lack a DistributedSampler."""
        if self._batches_to_show:
            self._batches_to_show -= 1
            if (found := batch_print(batch)) is not None:
                self._keeper.send("print", print=found)

    def show_lap(self, epoch: int, number: int, batches: int) -> None:
        """Send the number of batches of a pass for comparison."""
        self._keeper.send("lap", epoch=epoch, number=number, batches=batches)

    # -- beginning and end -----------------------------------------------------------------

    def wait_to_join(self, is_there: Callable[[], bool], look: Callable[[], None]) -> bool:
        """True if that is there in time; `look` raises if other ranks fail."""
        deadline = time.monotonic() + _JOIN_SECONDS
        while not is_there() and time.monotonic() < deadline and self._keeper.has_keeper:
            with self._changed:
                if not is_there():
                    self._changed.wait(_LOOK_SECONDS)
            look()
        return is_there()

    @property
    def is_requeued(self) -> bool:
        """True once the keeper of rank 0 has requeued the job."""
        return self._bye is not None and bool(self._bye.get("said"))

    def say_farewell(
        self, *, clean: bool, status: int, reason: str, error: str | None
    ) -> dict[str, Any] | None:
        """Leave; returns what is durable now, or None without an answer.

        If another rank is the cause, the answer is to leave at once, and this does not return.
        """
        if self._meter is not None:
            self._meter.close()
        with self._changed:
            # A stop may be decided for a boundary that is passed: asked from within a phase.
            mark, stops = self._words[MARK], [each for each in self._decided if each.what == "stop"]
            agreed = self._stops or any(each.mark <= mark for each in stops)
        told: dict[str, Any] = {"status": status, "reason": reason, "error": error}
        self._words[WORK] = AGREES

        def send_farewell() -> None:
            self._keeper.send("farewell", agreed=agreed, clean=clean, **told)

        send_farewell()
        self._keeper.wait_for_answer(
            self._changed, lambda: self._bye is not None, _FAREWELL_SECONDS, send_farewell
        )
        return self._bye


# -- Starting the keepers of all ranks -------------------------------------------------------------


def join_ranks(
    group: RankGroup,
    policy: Policy,
    grace_seconds: float | None,
    numbers: tuple[int, ...],
    hear: Callable[[dict[str, Any]], None],
) -> tuple[KeeperClient, RankAgreement]:
    """Start the keepers: that of rank 0 first, since the others connect to it."""
    if sys.platform != "linux":
        raise RanksError(
            "a run of several ranks needs keepers, and those need Linux.\n"
            "Train with one process here, or on Linux."
        )
    heard: list[dict[str, Any]] = []  # until `joined` has the object below

    def listen(message: dict[str, Any]) -> None:
        if not joined:
            heard.append(message)
        elif message["kind"] in ("port", "joined"):
            joined[0].hear(message)
        else:
            hear(message)

    joined: list[RankAgreement] = []
    told: list[Any] = []
    if group.rank == 0:
        make_key(policy.layout)
    else:
        told = group.exchange("hub", None)
    launcher = group.launcher
    config = RankConfig(
        hub=[] if group.rank == 0 else [(a, told[0]["port"]) for a in told[0]["addresses"]],
        is_one_host=group.is_one_host,
        launcher=None if launcher is None else launcher.process,
        launcher_name="" if launcher is None else launcher.name,
        restarts=launcher is not None and launcher.restarts,
    )
    keeper = KeeperClient(policy, grace_seconds, numbers, listen, vars(config))
    ranks = RankAgreement(group.rank, group.size, keeper)
    joined.append(ranks)
    for message in heard:
        ranks.hear(message)
    if group.rank == 0:
        if not ranks.wait_to_join(lambda: ranks.port is not None, lambda: None):
            raise RanksError(
                "the keeper of rank 0 did not start.\n"
                f"See {policy.layout.keeper_log(policy.attempt)}"
            )
        where = ["127.0.0.1"] if group.is_one_host else addresses()
        group.exchange("hub", {"port": ranks.port, "addresses": where})
    if not ranks.wait_to_join(lambda: ranks.has_joined, group.look):
        raise RanksError(
            f"the keeper of rank {group.rank} cannot reach that of rank 0 at "
            f"{', '.join(f'{host} port {port}' for host, port in config.hub) or 'any address'}.\n"
            "Open the way between the hosts for any port, or name an address of rank 0's host "
            "that the others reach in HOLDFAST_ADDRESS there."
        )
    return keeper, ranks


def prepare_ranks(state: Mapping[str, Any], ranks: RankAgreement) -> None:
    """Make torch's DDP begin alike in every attempt, and measure its waits."""
    if "torch.nn.parallel.distributed" not in sys.modules:
        return
    from holdfast.torch import ddp

    modules = ddp.find_ddp(state)
    for sentence in ddp.settle_buckets(modules):
        say(sentence)
    if modules:
        ranks.watch(ddp.WaitMeter(modules))
