"""The decider of one rank among several: how it reaches the hub, and how it ends.

It decides nothing. Requests, orders and deaths go to the hub in rank 0's keeper. What the hub
decides is done by `RankAgent`. The keeper stays until the hub releases it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import selectors
import time
from typing import TYPE_CHECKING, Any

from holdfast import _errors
from holdfast._environment.processes.identity import ProcessIdentity, host_name
from holdfast._keeper import protocol
from holdfast._keeper.memory_alarm import Alarm
from holdfast._keeper.network.endpoint import HubPost, MemberPost, PostOwner
from holdfast._keeper.ranks.agent import RankAgent
from holdfast._keeper.ranks.hub import Hub, looks_like_a_lost_peer
from holdfast._keeper.ranks.state import EndCause, HubState, KeeperServices
from holdfast._keeper.storage import HeldArena, Storage
from holdfast._keeper.trainer import PostMortem, SignalArrival
from holdfast._keeper.writer import Closing, WriteOutcome
from holdfast._store.commit.write_queue import CADENCE
from holdfast._store.folder.atomic import remove_folder
from holdfast._store.folder.attempts import read_json, write_json
from holdfast._store.folder.lineage import void_steps
from holdfast._store.folder.plain_file import read_plain
from holdfast._store.folder.requests import stop_from_file
from holdfast._store.memory import control
from holdfast._store.memory.arena import SlotRecord

if TYPE_CHECKING:
    from holdfast._keeper.keeper import Keeper

_GONE_SECONDS = 0.1  # between two checks whether the keeper may end
_LINGER_SECONDS = 60.0
_LAST_MESSAGES_SECONDS = 10.0
_ASK_AGAIN_SECONDS = 0.05
_WATCH_SECONDS = 1.0


class Member:
    """One rank's place in the agreement of all; and the end of its trainer, then of its keeper."""

    is_stopping = False  # the hub may be asked more than once, and takes the shortest time

    def __init__(self, config: protocol.RankConfig) -> None:
        self._config = config
        self.hub: Hub | None = None  # in rank 0's keeper
        self.has_lost_trainer = False  # it is dead, or has said goodbye
        self.is_released = False  # True: the hub needs this keeper no more
        self._farewell: dict[str, Any] | None = None  # with which the trainer left
        self._gone_at = 0.0
        self._has_died = False
        self._death: PostMortem | None = None
        self._told_death: PostMortem | None = None  # of a trainer that had been told to leave
        self._linger_until: float | None = None

    def attach(self, keeper: Keeper) -> None:
        """Open the way to the hub, or the hub itself."""
        self._keeper, policy = keeper, keeper.policy
        self._storage = keeper.storage
        self._trainer = keeper.trainer
        if policy.rank == 0:
            services = KeeperServices(keeper)
            state = HubState(
                policy.size,
                policy.attempt,
                lambda *to, **what: self.link.from_hub(*to, **what),
                services,
            )
            self.hub = Hub(state, self._config.unreachable_seconds)
        self.link = HubLink(keeper, self._config, self)
        self.agent = RankAgent(keeper, self.link.hub, self)
        if self.hub is not None:
            invalid_from = void_steps(policy.layout).get(policy.attempt)
            if invalid_from is not None:  # the hub before this one knew
                self.hub.commits.void_from(invalid_from, "", 0)
            self._trainer.tell.port(port=self.link.port)
            self._trainer.tell.joined()
        watch_launcher(keeper, self, self._config)
        self.agent.greet()

    def tick(self, now: float) -> float:
        self.link.tick(now)
        if self.hub is not None:
            self.hub.tick()
        if self.has_lost_trainer:
            self._leave_if_free(now)
        at_hub = math.inf if self.hub is None else self.hub.next_at()
        at_end = now + _GONE_SECONDS if self.has_lost_trainer else math.inf
        return min(self.link.post.next_at(), at_hub, at_end)

    def receive_at_hub(self, rank: int, message: dict[str, Any]) -> None:
        assert self.hub is not None
        kind = message.pop("kind")
        if not self._keeper.hangs.receive(rank, kind, **message):
            self.hub.receive(rank, kind, **message)

    def on_hub_found(self) -> None:
        """Also a hub that has taken the place of another: it must know all that is pending."""
        self._trainer.tell.joined()
        self.agent.greet()
        for key in self.agent.orders:
            self.link.hub.order(key=key, reason="asked again")
        if self._farewell is not None:
            self.link.hub.farewell(**self._farewell)

    def on_launcher_gone(self, reason: str) -> None:
        if self._linger_until is not None:
            self._linger_until = 0.0  # nothing will start the ranks again
        self.link.hub.launcher(reason=reason)

    # -- the trainer ------------------------------------------------------------

    def on_message(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "missed":
            self.agent.missed(**fields)
        elif kind == "farewell":
            self._take_farewell(**fields)
        elif hasattr(protocol.ToHub, kind):
            self.link.to_hub(kind, **fields)

    def on_arena(self) -> None:
        self.agent.report()  # the keeper before this one may have died before it wrote

    def on_snapshot(self, generation: int) -> None:  # noqa: ARG002  older ones stay until all hold it
        self.agent.report()

    def on_order(
        self, order: int, found: tuple[HeldArena, SlotRecord], reason: str, *, is_last: bool
    ) -> None:
        key = (found[0].arena.attempt, found[1].mark)
        self.agent.orders.setdefault(key, []).append(order)
        if reason != CADENCE:
            self._storage.writer.hurry()  # it comes after the part that is being written
        self.agent.report()
        self.agent.order(key, reason, is_last=is_last)

    def on_salvage(self, held: HeldArena, record: SlotRecord) -> None:
        self._storage.holdings.salvage(held)
        self.agent.report()
        self.agent.order((held.arena.attempt, record.mark), "salvaged")

    def on_invalid(self, step: int, reason: str) -> None:
        self.link.hub.void(step=step, reason=reason)

    @property
    def is_trainer_gone(self) -> bool:
        return self.has_lost_trainer or self._farewell is not None

    # -- stops and saves --------------------------------------------------------

    def on_signal(self, arrival: SignalArrival) -> None:
        limit = self._keeper.time_limit
        if limit.job is not None:
            limit.job.heard(arrival.number)
        wish = {
            "kind": "stop",
            "reason": arrival.reason,
            "status": arrival.status,
            "signal": arrival.number,
            "grace": limit.grace_of(arrival.number),
        }
        self.link.hub.wish(wish=wish, now=arrival.is_final)

    def on_request(self, kind: str, details: dict[str, Any]) -> None:
        assert self.hub is not None  # only rank 0 reads requests
        if kind == "stacks":
            self._keeper.hangs.ask_stacks(details)
            return
        now = kind == "stop" and bool(details.get("now"))
        reason = stop_from_file(details).reason if kind == "stop" else "holdfast save"
        reason = f"stop --now: {reason}" if now else reason
        wish = {"kind": kind, "reason": reason, "status": _errors.PERSON}
        self.hub.receive(0, "wish", wish=wish, now=now)

    def stop_reason(self) -> str | None:
        return self.agent.stop_reason

    def stop_status(self) -> int | None:
        stop = None if self.hub is None else self.hub.stop
        return None if stop is None else stop.status

    def on_time_short(self, reason: str, left: float) -> None:
        wish = {"kind": "stop", "reason": reason, "status": _errors.REQUEUE, "grace": left}
        self.link.hub.wish(wish=wish)

    stop_for_notice = on_time_short

    def on_time_left(self, left: float) -> None:
        pass  # the hub asks for what is left

    def on_notice(self, told: dict[str, Any]) -> None:
        self.link.hub.notice(host=host_name(), mark=self._trainer.boundary_id, told=told)

    def on_memory_alarm(self, alarm: Alarm) -> None:
        if self.has_lost_trainer:
            return
        mark, first = self._trainer.boundary_id, alarm.is_first
        self.link.hub.danger(mark=mark, first=first, host=host_name(), figures=alarm.figures())
        if first:
            # Rank 0 prints it; this one finds the cause.
            self._trainer.tell.memory(quiet=True)

    # -- hangs ------------------------------------------------------------------

    def on_hang(self, rank: int | None, *, restart: bool) -> None:
        assert self.hub is not None  # the judge is in rank 0's keeper
        if restart:
            self.hub.end_hung(rank)
        else:
            self.hub.commits.save_common("hang")

    # -- the disk, from the writer's threads ------------------------------------

    def on_written(self, outcome: WriteOutcome) -> None:
        self._keeper.timers.after(0.0, lambda: self.agent.part_written(outcome))

    def on_closed(self, closing: Closing, error: str | None, is_fenced: bool) -> None:
        """The hub's manifest is written, or not."""
        hub = self.hub
        assert hub is not None
        if error is None:
            self._storage.record_save(time.monotonic() - closing.began)
        key = closing.key
        self._keeper.timers.after(
            0.0, lambda: hub.commits.committed(key, error, is_fenced=is_fenced)
        )

    # -- what others read -------------------------------------------------------

    def row_facts(self) -> dict[str, Any]:
        if self.hub is None:
            return {}
        waits = {rank: list(each) for rank, each in self.hub.comparison.waits.items()}
        return {"mem_step": self.hub.commits.common_step, "waits": waits}

    def publish_beat(self, beat: dict[str, Any]) -> None:
        mine = {k: beat[k] for k in ("step", "memory_step", "boundary_age_seconds", "phase")}
        used = beat["memory"] or {}
        mine["memory"] = {k: used.get(k) for k in ("rss", "workers", "cgroup", "cache", "limit")}
        mine |= {k: beat[k] for k in ("paused", "pulse_age", "pace")}
        self.link.hub.beat(beat=mine)
        if self.hub is None:
            return
        entries = self.hub.state.entries.values()
        ranks = [{**entry.beat, "ended": entry.ended and entry.ended.how} for entry in entries]
        held = next((s.beat["paused"] for s in entries if s.beat.get("paused")), None)
        beat["paused"] = beat["paused"] or held
        beat["memory_step"] = self.hub.commits.common_step
        self._keeper.write_beat(
            {**beat, "ranks": ranks, "straggler": self.hub.comparison.straggler}
        )

    # -- the trainer's end ------------------------------------------------------

    def _take_farewell(
        self,
        *,
        clean: bool,
        status: int,
        reason: str,
        error: str | None = None,
        agreed: bool = False,
    ) -> None:
        self._farewell = {
            "clean": clean,
            "reason": reason,
            "status": status,
            "victim": looks_like_a_lost_peer(error or ""),
            "host": host_name(),
            "agreed": agreed,
        }
        self.link.hub.farewell(**self._farewell)

    def on_leaving(self) -> None:
        """The trainer leaves; the slots stay until the hub needs them no more."""
        if self._farewell is None:
            self._take_farewell(clean=True, reason="closed", status=0)

    def on_goodbye(self) -> None:
        self.has_lost_trainer, self._gone_at = True, time.monotonic()
        self._keeper.stop_watching_memory()
        self._keeper.end_series()
        self.on_leaving()

    def on_death(self) -> None:
        keeper = self._keeper
        # Also after a goodbye: a pidfd stays readable, and the loop would spin.
        if keeper.config.pidfd is not None:
            with contextlib.suppress(KeyError, ValueError):
                keeper.selector.unregister(keeper.config.pidfd)
        if self.has_lost_trainer:
            return
        self.has_lost_trainer, self._gone_at = True, time.monotonic()
        keeper.timers.cancel("kill")
        keeper.stop_watching_memory()
        keeper.receive_rest()  # also of one that was told to leave: it may have made an arena
        keeper.end_series()
        was_expected = self.is_released or self._trainer.leave_status is not None
        if was_expected or self._farewell is not None:
            if self._farewell is None:
                self._told_death = keeper.examine_death()
            self.on_leaving()
            return
        self._death = keeper.examine_death()
        self._report_death(self._death)

    def _report_death(self, death: PostMortem) -> None:
        if not death.ask():  # its parent has not collected the status yet
            self._keeper.timers.after(_ASK_AGAIN_SECONDS, lambda: self._report_death(death))
            return
        self._has_died = True
        self.agent.report()
        self.link.hub.died(how=death.how or "died", host=host_name(), step=self._trainer.step)
        death.write(durable=False)

    def leave_without_hub(self) -> None:
        """There is nothing left to agree with: the trainer must not go on."""
        policy = self._keeper.policy
        if self.is_trainer_gone or self._trainer.leave_status is not None:
            return
        record = read_json(policy.layout.rank(policy.attempt, 0))
        host = record.get("keeper", {}).get("host", "")
        cause = EndCause(0, "cannot be reached any more", kind="died", host=host)
        speaks = policy.rank == 1  # one rank prints it, not all
        if speaks:
            self._keeper.journal("rank-died", rank=0, how=cause.how, host=host)
        how = {"asked": False, "speaks": speaks}
        step = self._storage.durable_step
        self._trainer.order_to_leave(cause.sentence(), _errors.REQUEUE, step, **how)

    # -- the keeper's end -------------------------------------------------------

    def _leave_if_free(self, now: float) -> None:
        """The trainer is gone: end the keeper when nothing needs it any more."""
        keeper, link, hub = self._keeper, self.link, self.hub
        if not self.is_released and not link.is_hub_gone(now):
            return
        if hub is not None:
            if not hub.is_over:
                return
            # Before anything that takes time: the next attempt waits for it.
            keeper.record_death(self._death or self._told_death)
            waiting = [r for r in link.post.unacknowledged() if not hub.is_out_of_reach(r)]
            if waiting and now - self._gone_at <= _LAST_MESSAGES_SECONDS:
                return
        if self._linger_until is None:
            self._linger_until = self._begin_to_linger(now)
        # A newer attempt opens what we hold before it begins.
        is_followed = keeper.policy.layout.is_followed(keeper.policy.attempt)
        if now < self._linger_until and not is_followed:
            return
        self._storage.writer.wait_idle()  # an old checkpoint may be half removed
        common = int(self._trainer.words[control.COMMON]) - 1
        is_needed = not self.is_released or _is_memory_needed(self._storage, common)
        self._storage.release(is_needed=is_needed)
        link.close()
        keeper.finish()

    def _begin_to_linger(self, now: float) -> float:
        """Keep the slots for ranks that are started again; returns until when."""
        if (told := self._told_death) is not None:
            told.wait_for_status()
            if self._keeper.is_unexpected(told):  # something else ended it first
                self._death = told
        if self._death is not None:
            self._death.write(durable_step=self._storage.durable_step)
        comes_back = self._trainer.leave_status in _errors.RESTARTED
        if not self._config.restarts or not (self._has_died or comes_back):
            return 0.0
        self._storage.holdings.hash_newest()
        return now + _LINGER_SECONDS


class HubLink:
    """Messages to and from the hub. Rank 0's own take the same way, without the network."""

    def __init__(self, keeper: Keeper, config: protocol.RankConfig, member: Member) -> None:
        self._policy = policy = keeper.policy
        self._timers = keeper.timers
        self._config = config
        self._member = member
        self.hub: protocol.ToHub = protocol.sender(self.to_hub)
        # No connection to the hub and no sign of it since then; None while there is one.
        self._lost_since = None if policy.rank == 0 else time.monotonic()
        self._hub_beat: object = None
        self._watch_at = 0.0
        layout, attempt = policy.layout, policy.attempt
        secret = bytes.fromhex(read_plain(layout.key).decode("ascii"))
        # One for each attempt: a keeper of an older one is a stranger here.
        key = hashlib.blake2b(b"%d" % attempt, key=secret, digest_size=32).digest()
        ours = keeper.selector, key, layout.mail(attempt)
        record = {"keeper": keeper.identity, "trainer_pid": keeper.trainer.pid}
        self.post: HubPost | MemberPost
        if member.hub is not None:
            owner = PostOwner(*ours, member.receive_at_hub, member.hub.lost, member.hub.found)
            self.post = HubPost(owner, policy.size, loopback=config.is_one_host)
            self.port: int | None = self.post.port
            record["port"] = self.post.port
        else:
            self.port = None
            owner = PostOwner(*ours, self._receive, self._lose_hub, self._find_hub)
            self.post = MemberPost(owner, policy.rank, self._hub_addresses)
        with contextlib.suppress(OSError):
            layout.ranks(attempt).mkdir(exist_ok=True)
            write_json(layout.rank(attempt, policy.rank), record, durable=False)

    def to_hub(self, kind: str, /, **fields: Any) -> None:
        if self._member.hub is not None:
            message = {"kind": kind, **fields}
            self._timers.after(0.0, lambda: self._member.receive_at_hub(0, message))
        elif not self._member.is_released:
            # A letter to a hub that is gone would create its folder again.
            self.post.send(0, kind, **fields)

    def _receive(self, _: int, message: dict[str, Any]) -> None:
        self._member.agent.receive(message.pop("kind"), **message)

    def from_hub(self, rank: int, kind: str, /, **fields: Any) -> None:
        if rank == 0:
            self._timers.after(0.0, lambda: self._member.agent.receive(kind, **fields))
        else:
            self.post.send(rank, kind, **fields)

    def training_ranks(self) -> list[int]:
        hub = self._member.hub
        return [] if hub is None else hub.state.training_ranks()

    def tick(self, now: float) -> None:
        self.post.tick(now)
        if self._member.hub is None:
            self._watch_hub(now)

    def close(self) -> None:
        self.post.close()
        if self._member.hub is not None or not self._member.is_released:
            # Nothing will read it.
            remove_folder(self._policy.layout.mail(self._policy.attempt))

    # -- a member's way to the hub ----------------------------------------------

    def is_hub_gone(self, now: float) -> bool:
        lost = self._lost_since
        return lost is not None and now - lost > self._config.unreachable_seconds

    def _hub_addresses(self) -> list[tuple[str, int]]:
        """A hub that was replaced has another port, which stands in the run folder."""
        found = read_json(self._policy.layout.rank(self._policy.attempt, 0)).get("port")
        ports = [found] if isinstance(found, int) else []
        hosts = list(dict.fromkeys(host for host, _ in self._config.hub))
        fresh = [(host, port) for port in ports for host in hosts]
        known = [(host, port) for host, port in self._config.hub]
        return list(dict.fromkeys([*fresh, *known]))

    def _lose_hub(self, _: int) -> None:
        self._lost_since = time.monotonic()

    def _find_hub(self, _: int) -> None:
        self._lost_since = None
        self._member.on_hub_found()

    def _watch_hub(self, now: float) -> None:
        """Without a link, a hub whose heartbeat moves in the run folder is not gone."""
        if self._lost_since is None or now < self._watch_at:
            return
        self._watch_at = now + _WATCH_SECONDS
        beat = read_json(self._policy.layout.heartbeat(self._policy.attempt)).get("beat")
        if beat is not None and beat != self._hub_beat:
            self._hub_beat, self._lost_since = beat, now
        elif self.is_hub_gone(now):
            self._member.leave_without_hub()


def _is_memory_needed(storage: Storage, common: int) -> bool:
    """Only a state that all ranks hold is of use to the next start."""
    if not storage.has_failed() or storage.holdings.salvages:
        return storage.has_failed()
    durable = -1 if storage.durable_step is None else storage.durable_step
    return durable < common // 2 < storage.invalid_from


def watch_launcher(keeper: Keeper, member: Member, config: protocol.RankConfig) -> None:
    """Stop the run when the process that started the ranks is gone."""
    if config.launcher is None:
        return
    launcher = ProcessIdentity(**config.launcher)
    reason = f"{config.launcher_name} (pid {launcher.pid}) is gone"
    try:
        descriptor = os.pidfd_open(launcher.pid)
    except OSError:
        member.on_launcher_gone(reason)
        return
    if not launcher.is_alive():
        os.close(descriptor)
        member.on_launcher_gone(reason)
        return

    def gone() -> None:
        keeper.selector.unregister(descriptor)
        os.close(descriptor)
        member.on_launcher_gone(reason)

    keeper.selector.register(descriptor, selectors.EVENT_READ, gone)
