"""A keeper among others: how it reaches them, and its loop's own time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from holdfast._environment.processes.identity import ProcessIdentity, host_name
from holdfast._keeper.job import JobWatch
from holdfast._keeper.keeper import Keeper
from holdfast._keeper.network.ports import HubPost, MemberPost
from holdfast._keeper.postmortem import PostMortem
from holdfast._keeper.ranks.books import HubBooks
from holdfast._keeper.ranks.hub import Hub
from holdfast._keeper.ranks.member import Body, Member
from holdfast._keeper.ranks.table import UNREACHABLE_SECONDS
from holdfast._keeper.requests import Ends
from holdfast._store.commit.checkpoint import Policy
from holdfast._store.folder.attempts import read_json, write_json
from holdfast._store.folder.invalid import void_steps
from holdfast._store.folder.plain_file import read_plain

_WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class CrewConfig:
    """What a keeper must know of the others."""

    hub: list[tuple[str, int]]  # addresses; of the hub itself none
    is_one_host: bool
    launcher: dict[str, Any] | None  # the process that started the ranks
    launcher_name: str
    restarts: bool  # whether it would start them again
    unreachable_seconds: float = UNREACHABLE_SECONDS  # without a word, until a rank counts as lost


class KeeperAmongOthers(Keeper):
    """What every keeper of a crew needs to hear the hub and to be heard."""

    def __init__(
        self,
        policy: Policy,
        ends: Ends,
        numbers: frozenset[int],
        grace: float | None,
        job: JobWatch | None,
        crew: CrewConfig,
    ) -> None:
        super().__init__(policy, ends, numbers, grace, job)
        self._crew = crew
        self._rank = policy.rank
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._due_lock = threading.Lock()
        self._orders: dict[tuple[int, int], list[int]] = {}
        self._writing: set[tuple[int, int, str]] = set()  # parts that are, or were, written
        self._trainer_gone = False
        self._farewell: dict[str, Any] | None = None  # with which the trainer left
        self._is_released = False
        self._died_at: float | None = None
        self._death: PostMortem | None = None
        self._stop_reason: str | None = None  # of a stop that all ranks have agreed on
        self._gone_at = 0.0
        self._linger_until: float | None = None
        self._lost_since: float | None = time.monotonic()  # no connection to the hub, no sign of it
        self._hub_beat: object = None
        self._watch_at = 0.0
        self._hub: Hub | None = None
        self._launcher: int | None = None  # a descriptor of its process
        self._post: HubPost | MemberPost
        self._member = Member(
            policy.attempt,
            ends.control.words,
            self._to_hub,
            cast("Body", self),  # what it lacks here, the crew's keeper has
            self._who(ends.trainer_pid),
        )

    def _who(self, trainer_pid: int) -> dict[str, Any]:
        return {"rank": self._policy.rank, "host": host_name(), "pid": trainer_pid}

    def _begin(self) -> None:
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        layout, attempt = self._policy.layout, self._policy.attempt
        secret = bytes.fromhex(read_plain(layout.key).decode("ascii"))
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
                self._policy.size,
                attempt,
                self._from_hub,
                HubBooks(self._policy, self, self._job),
                unreachable_seconds=self._crew.unreachable_seconds,
            )
            void = void_steps(layout).get(attempt)
            if void is not None:  # the hub before this one knew
                self._hub.void_from(void, "", 0)
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
        known = [(host, port) for host, port in self._crew.hub]
        return list(dict.fromkeys([*fresh, *known]))

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
        if self._launcher is not None:
            self._selector.unregister(self._launcher)
            os.close(self._launcher)
            self._launcher = None
        self._linger_until = None if self._linger_until is None else 0.0
        pid = self._crew.launcher["pid"] if self._crew.launcher else 0
        self._to_hub("launcher", reason=f"{self._crew.launcher_name} (pid {pid}) is gone")

    def _to_hub(self, kind: str, **fields: Any) -> None:
        if self._rank == 0:
            self.later(0.0, lambda: self._hear_member(0, {"kind": kind, **fields}))
        elif not self._is_released:
            # Nor later: the hub may be gone, and a letter to it would make its folder anew.
            self._post.send(0, kind, **fields)

    def _from_hub(self, rank: int, kind: str, **fields: Any) -> None:
        if rank == 0:
            self.later(0.0, lambda: self._member.hear({"kind": kind, **fields}))
        else:
            self._post.send(rank, kind, **fields)

    def _hear_member(self, rank: int, message: dict[str, Any]) -> None:
        assert self._hub is not None
        if not self._hangs.hear(rank, message):
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
        if self._farewell is not None:
            self._to_hub("farewell", **self._farewell)

    def _watch_hub(self, now: float) -> None:
        """Without a connection, one whose heartbeat moves in the run folder is not gone."""
        if self._lost_since is None or now < self._watch_at:
            return
        self._watch_at = now + _WATCH_SECONDS
        beat = read_json(self._policy.layout.heartbeat(self._policy.attempt)).get("beat")
        if beat is not None and beat != self._hub_beat:
            self._hub_beat, self._lost_since = beat, now
        elif self._is_hub_gone(now):
            self._leave_without_hub()

    def _is_hub_gone(self, now: float) -> bool:
        lost = self._lost_since
        return lost is not None and now - lost > self._crew.unreachable_seconds

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
        else:
            self._watch_hub(now)
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

    def _leave_if_free(self, now: float) -> None:
        """The trainer is gone: leave when the hub has no use for this keeper any more."""
        raise NotImplementedError

    def _leave_without_hub(self) -> None:
        """Nobody is left to agree with: the trainer must not go on."""
        raise NotImplementedError
