"""A keeper that is one of several: what it does with its trainer, and for the hub.

It differs from a keeper that is alone in that it decides nothing: wishes, orders and deaths
go to the hub, and what the hub decides is done here. It stays until the hub lets it go.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from holdfast._keeper.books import HubBooks
from holdfast._keeper.deaths import how_it_died
from holdfast._keeper.ending import looks_like_a_lost_peer
from holdfast._keeper.hub import Hub
from holdfast._keeper.keep import Policy
from holdfast._keeper.member import Member
from holdfast._keeper.service import Ends, Keeper
from holdfast._keeper.wire import HubPost, MemberPost
from holdfast._keeper.writer import Closing, Job, Outcome
from holdfast._leave import statuses
from holdfast._record.atomic import remove_folder
from holdfast._record.attempts import read_json, write_json
from holdfast._record.identity import ProcessIdentity, host_name
from holdfast._save import control
from holdfast._stop.request import SAME_PRESS_SECONDS, stop_from_file, take_requests

_LOST_SECONDS = 90.0  # without a hub, a keeper whose trainer is gone can do nothing any more
_LINGER_SECONDS = 60.0
_LAST_WORDS_SECONDS = 10.0
_ASK_AGAIN_SECONDS = 0.05
_ASK_DEATH_SECONDS = 0.6


@dataclass(frozen=True)
class CrewConfig:
    """What a keeper must know of the others."""

    hub: list[tuple[str, int]]  # addresses; of the hub itself none
    is_one_host: bool
    launcher: dict[str, Any] | None  # the process that started the ranks
    launcher_name: str
    restarts: bool  # whether it would start them again


class CrewKeeper(Keeper):
    """The keeper of one rank."""

    def __init__(
        self,
        policy: Policy,
        ends: Ends,
        numbers: frozenset[int],
        grace: float | None,
        crew: CrewConfig,
    ) -> None:
        super().__init__(policy, ends, numbers, grace)
        self._crew = crew
        self._rank = policy.rank
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._due_lock = threading.Lock()
        self._orders: dict[tuple[int, int], list[int]] = {}
        self._trainer_gone = False
        self._farewell = False
        self._is_released = False
        self._died_at: float | None = None
        self._gone_at = 0.0
        self._linger_until: float | None = None
        self._lost_since: float | None = time.monotonic()
        self._hub: Hub | None = None
        self._post: HubPost | MemberPost
        self._member = Member(
            policy.attempt, ends.control.words, self._to_hub, self, self._who(ends.trainer_pid)
        )

    def _who(self, trainer_pid: int) -> dict[str, Any]:
        return {"rank": self._policy.rank, "host": host_name(), "pid": trainer_pid}

    # -- beginning ----------------------------------------------------------------------

    def _begin(self) -> None:
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        layout, attempt = self._policy.layout, self._policy.attempt
        secret = bytes.fromhex(layout.key.read_text(encoding="ascii"))
        # One for each attempt: a keeper of an older one is a stranger here.
        key = hashlib.blake2b(b"%d" % attempt, key=secret, digest_size=32).digest()
        mail = layout.mail(attempt)
        record = {"keeper": self._identity, "trainer_pid": self._ends.trainer_pid}
        if self._rank == 0:
            post = HubPost(
                self._selector,
                key,
                self._policy.size,
                mail,
                loopback=self._crew.is_one_host,
                hear=self._hear_member,
                lost=self._lost,
                found=self._found,
            )
            self._post = post
            self._hub = Hub(
                self._policy.size, attempt, self._from_hub, HubBooks(self._policy, self)
            )
            record["port"] = post.port
            self._tell("port", port=post.port)
            self._tell("joined")
        else:
            self._post = MemberPost(
                self._selector,
                key,
                self._rank,
                self._hub_addresses,
                mail,
                hear=lambda _, message: self._member.hear(message),
                lost=lambda _: self._lost_hub(),
                found=lambda _: self._found_hub(),
            )
        with contextlib.suppress(OSError):
            layout.ranks(attempt).mkdir(exist_ok=True)
            write_json(layout.rank(attempt, self._rank), record, durable=False)
        self._watch_launcher()
        if self._hub is not None:
            self._lost_since = None
        self._member.greet()

    def _hub_addresses(self) -> list[tuple[str, int]]:
        """Of the hub; one that was replaced has another port, which stands in the run folder."""
        found = read_json(self._policy.layout.rank(self._policy.attempt, 0)).get("port")
        ports = [found] if isinstance(found, int) else []
        hosts = list(dict.fromkeys(host for host, _ in self._crew.hub))
        fresh = [(host, port) for port in ports for host in hosts]
        return list(dict.fromkeys([*fresh, *map(tuple, self._crew.hub)]))

    def _watch_launcher(self) -> None:
        if self._crew.launcher is None:
            return
        launcher = ProcessIdentity(**self._crew.launcher)
        try:
            descriptor = os.pidfd_open(launcher.pid)
        except OSError:
            self._launcher_gone()
            return
        if not launcher.is_alive():
            os.close(descriptor)
            self._launcher_gone()
            return
        self._launcher = descriptor
        self._selector.register(descriptor, selectors.EVENT_READ, self._launcher_gone)

    def _launcher_gone(self) -> None:
        descriptor = getattr(self, "_launcher", None)
        if descriptor is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            self._launcher = None
        self._linger_until = None if self._linger_until is None else 0.0
        pid = self._crew.launcher["pid"] if self._crew.launcher else 0
        self._to_hub("launcher", reason=f"{self._crew.launcher_name} (pid {pid}) is gone")

    # -- between keepers -------------------------------------------------------------------

    def _to_hub(self, kind: str, **fields: Any) -> None:
        if self._rank == 0:
            self.later(0.0, lambda: self._hear_member(0, {"kind": kind, **fields}))
        else:
            self._post.send(0, kind, **fields)

    def _from_hub(self, rank: int, kind: str, **fields: Any) -> None:
        if rank == 0:
            self.later(0.0, lambda: self._member.hear({"kind": kind, **fields}))
        else:
            self._post.send(rank, kind, **fields)

    def _hear_member(self, rank: int, message: dict[str, Any]) -> None:
        assert self._hub is not None
        self._hub.hear(rank, message)

    def _lost(self, rank: int) -> None:
        assert self._hub is not None
        self._hub.lost(rank)

    def _found(self, rank: int) -> None:
        assert self._hub is not None
        self._hub.found(rank)

    def _lost_hub(self) -> None:
        self._lost_since = time.monotonic()

    def _found_hub(self) -> None:
        self._lost_since = None
        self._tell("joined")
        self._member.greet()
        for attempt, mark in self._orders:
            self._to_hub("order", key=[attempt, mark], reason="asked again")

    # -- time and threads --------------------------------------------------------------------

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Have the loop do something, from any thread."""
        with self._due_lock:
            self._due.append((time.monotonic() + seconds, act))
        with contextlib.suppress(OSError):
            self._wake_write.send(b"!")

    def _woken(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_read.recv(4096)

    def _tick(self, now: float) -> None:
        while True:
            with self._due_lock:
                ready = [pair for pair in self._due if pair[0] <= now]
                self._due = [pair for pair in self._due if pair[0] > now]
            if not ready:
                break
            for _, act in ready:
                act()
            now = time.monotonic()
        self._post.tick(now)
        if self._hub is not None:
            self._hub.tick()
        if self._trainer_gone:
            self._leave_if_free(now)

    def _next_tick(self) -> float | None:
        with self._due_lock:
            times = [at for at, _ in self._due]
        times.append(self._post.next_at())
        if self._hub is not None:
            times.append(self._hub.next_at())
        if self._trainer_gone:
            times.append(time.monotonic() + 0.1)
        return min(times)

    # -- from the trainer --------------------------------------------------------------------

    def _take_in(self, message: dict[str, Any], descriptors: list[int]) -> None:
        kind = message["kind"]
        if kind == "wish":
            self._to_hub("wish", wish=message["wish"])
        elif kind == "due":
            self._to_hub("due", mark=message["mark"], reason=message["reason"])
        elif kind == "missed":
            self._member.missed(message["mark"], message["why"])
        elif kind in ("waits", "print"):
            self._to_hub(kind, **{k: v for k, v in message.items() if k != "kind"})
        elif kind == "farewell":
            self._take_leave(message)
        elif kind == "goodbye":
            self._trainer_gone, self._gone_at = True, time.monotonic()
            self._trainer_leaves()
        else:
            super()._take_in(message, descriptors)

    def _snapshot_taken(self, generation: int, sequence: int) -> None:
        held = self._holdings.of(generation)
        record = None if held is None else held.find(sequence)
        if held is not None and record is not None:
            self._hasher.want(held, record)
        self._member.report()

    def _persist_ordered(self, message: dict[str, Any]) -> None:
        held = self._holdings.of(message["generation"])
        record = None if held is None else held.find(message["sequence"])
        if held is None or record is None:
            self._tell("failed", order=message["order"], error="the slot is gone")
            return
        key = (held.arena.attempt, record.mark)
        self._orders.setdefault(key, []).append(message["order"])
        self._member.report()
        self._member.order(*key, message["reason"])

    def _salvage(self, descriptor: int, message: dict[str, Any]) -> None:
        held = self._holdings.hold(descriptor, message["path"])
        record = None if held is None else held.find(message["sequence"])
        if held is not None and record is not None:
            self._holdings.salvage(held)
            self._member.report()
            self._member.order(held.arena.attempt, record.mark, "salvaged")

    def _take_leave(self, message: dict[str, Any]) -> None:
        self._farewell = True
        error = message.get("error") or ""
        self._to_hub(
            "farewell",
            clean=message["clean"],
            reason=message["reason"],
            status=message["status"],
            victim=looks_like_a_lost_peer(error),
            host=host_name(),
        )

    # -- signals and requests ------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if not self._ends.control.words[control.IN_LOOP]:
            return  # outside the loop the trainer acts at once, by itself
        if number == signal.SIGINT and self._has_nudged:
            self._has_nudged = False
            return
        again = False
        if number == signal.SIGINT:
            first, self._interrupted_at = self._interrupted_at, self._interrupted_at or now
            again = first is not None and now - first > SAME_PRESS_SECONDS
            if first is not None and not again:
                return
        name = signal.Signals(number).name
        wish = {
            "kind": "stop",
            "reason": "second Ctrl-C" if again else name,
            "status": statuses.of_signal(number),
            "signal": number,
            "grace": self._grace_of(number),
        }
        self._to_hub("wish", wish=wish, now=again)

    def _look_for_requests(self) -> None:
        if self._hub is None:
            return
        for kind, details in take_requests(self._policy.layout, self._policy.attempt):
            now = kind == "stop" and bool(details.get("now"))
            reason = stop_from_file(details).reason if kind == "stop" else "holdfast save"
            wish = {"kind": kind, "reason": f"stop --now: {reason}" if now else reason}
            wish["status"] = statuses.PERSON  # type: ignore[assignment]  # JSON takes both
            self._hub.hear(0, {"kind": "wish", "wish": wish, "now": now})

    # -- for the member ------------------------------------------------------------------------

    def tell(self, kind: str, **fields: Any) -> None:
        if kind == "decide" and self._ends.control.words[control.REST] == control.RESTS:
            self._has_nudged = True  # it will wake its main thread by a signal of its own
        self._tell(kind, **fields)

    def held(self) -> list[tuple[int, int]]:
        return self._holdings.boundaries()

    def all_hold(self, attempt: int, mark: int) -> None:
        found = self._holdings.at(attempt, mark)
        if found is not None and attempt == self._policy.attempt:
            self._holdings.drop_before(found[0].arena.generation)

    def write_part(self, attempt: int, mark: int, partial: str) -> None:
        found = self._holdings.at(attempt, mark)
        if found is None or not found[0].pin(found[1]):
            self._to_hub("written", key=[attempt, mark], error="the slot is gone")
            return
        folder = self._policy.layout.checkpoints / partial
        self._writer.submit(Job(*found, "part", partial=folder))

    def _outcome(self, outcome: Outcome) -> None:
        self.later(0.0, lambda: self._part_written(outcome))

    def _part_written(self, outcome: Outcome) -> None:
        key = [outcome.job.held.arena.attempt, outcome.job.record.mark]
        if outcome.file is None:
            self._to_hub("written", key=key, error=outcome.error or "unknown")
            return
        file = {**asdict(outcome.file), "metrics": outcome.metrics}
        self._to_hub("written", key=key, file=file)

    def _closed(self, closing: Closing, error: str | None, is_fenced: bool) -> None:
        """The hub's manifest is written, or not; called by the writing thread."""
        key = (closing.state.attempt, control.mark_of(closing.state.step, closing.state.at_turn))
        hub = self._hub
        assert hub is not None
        self.later(0.0, lambda: hub.committed(key, error, is_fenced=is_fenced))

    def settle(self, attempt: int, mark: int, error: str | None, *, is_fenced: bool) -> None:
        orders = self._orders.pop((attempt, mark), [])
        if error is None:
            self._failed = False
            if attempt == self._policy.attempt:
                self._durable_step = mark // 2
            else:
                self._holdings.retire_salvaged(attempt)
        else:
            self._failed = not is_fenced
        kind = "durable" if error is None else "fenced" if is_fenced else "failed"
        fields = {} if error is None else {"error": error}
        for order in orders or [None]:
            self._tell(kind, order=order, step=mark // 2, mark=mark, **fields)

    def send_away(self, message: dict[str, Any]) -> None:
        self._is_released = True
        if message["step"] is not None:
            self._durable_step = message["step"]
        if not self._trainer_gone:
            details = {"asked": message["asked"], "speaks": message["speaks"]}
            self._send_away(message["reason"], message["status"], **details)

    def say_bye(self, message: dict[str, Any]) -> None:
        self._is_released = True
        self._tell("bye", step=message["step"], reason=message.get("reason"))

    # -- the end -------------------------------------------------------------------------------

    def _let_go_when_idle(self) -> None:
        """The trainer leaves; the slots stay until the hub needs them no more."""
        self._trainer_leaves()

    def _trainer_leaves(self) -> None:
        if not self._farewell:
            self._take_leave({"clean": True, "reason": "closed", "status": 0})

    def _bury(self) -> None:
        if self._trainer_gone:
            return
        if self._ends.pidfd is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._ends.pidfd)
        self._trainer_gone, self._gone_at = True, time.monotonic()
        self._kill_at = None
        if self._is_released or self._farewell or self._leave_status is not None:
            self._trainer_leaves()
            return
        self._hear_the_rest()
        self._tell_of_death()

    def _tell_of_death(self) -> None:
        how = how_it_died(self._ends.pidfd, self._ends.trainer_pid)
        if how is None and time.monotonic() - self._gone_at < _ASK_DEATH_SECONDS:
            self.later(_ASK_AGAIN_SECONDS, self._tell_of_death)  # its parent has not heard yet
            return
        step = int(self._ends.control.words[control.STEP])
        self._died_at = time.monotonic()
        self._member.report()
        self._to_hub("died", how=how or "died", host=host_name(), step=step)

    def _leave_if_free(self, now: float) -> None:
        lost = self._lost_since is not None and now - self._lost_since > _LOST_SECONDS
        if not self._is_released and not lost:
            return
        if self._hub is not None:
            if not self._hub.is_over:
                return
            self._record_death()  # before anything that takes time: the next life waits for it
            if not self._may_hub_go(now):
                return
        if self._linger_until is None:
            lingers = self._died_at is not None or self._leave_status == statuses.REQUEUE
            self._linger_until = now + _LINGER_SECONDS if lingers and self._crew.restarts else 0.0
            if self._linger_until:
                self._hash_newest()
        if now < self._linger_until and not self._is_followed():
            return
        self._failed = self._failed or not self._is_released
        self._let_go()
        self._post.close()
        if self._hub is not None:
            remove_folder(self._policy.layout.mail(self._policy.attempt))
        self._done = True

    def _is_followed(self) -> bool:
        """Whether a newer attempt has begun: it has opened what we hold before it did."""
        with contextlib.suppress(OSError):
            return self._policy.layout.attempt_numbers()[-1] > self._policy.attempt
        return False

    def _may_hub_go(self, now: float) -> bool:
        """Who hosts a service leaves last, but not never."""
        return not self._post.unacknowledged() or now - self._gone_at > _LAST_WORDS_SECONDS

    def _record_death(self) -> None:
        if self._rank == 0:
            super()._record_death()

    def _publish_beat(self, beat: dict[str, Any]) -> None:
        mine = {k: beat[k] for k in ("step", "memory_step", "boundary_age_seconds", "phase")}
        self._to_hub("beat", beat=mine)
        if self._hub is None:
            return
        seats = self._hub.seats.values()
        ranks = [{**seat.beat, "ended": seat.ended and seat.ended.how} for seat in seats]
        common = self._hub.common
        beat["memory_step"] = None if common is None else common[1] // 2
        super()._publish_beat({**beat, "ranks": ranks, "straggler": self._hub.straggler})

