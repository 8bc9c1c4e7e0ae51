"""How the keeper of a rank and the hub, which is in rank 0's keeper, reach each other."""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import time
from typing import TYPE_CHECKING

from holdfast._environment.processes.identity import ProcessIdentity
from holdfast._keeper.network.ports import HubPost, MemberPost
from holdfast._keeper.protocol import FromHub, RankConfig, ToHub
from holdfast._store.folder.atomic import remove_folder
from holdfast._store.folder.attempts import read_json, write_json
from holdfast._store.folder.plain_file import read_plain

if TYPE_CHECKING:
    from holdfast._keeper.keeper import Keeper
    from holdfast._keeper.ranks.member import Member

_WATCH_SECONDS = 1.0


class HubLink:
    """Messages to and from the hub. Rank 0's own take the same way, without the network."""

    def __init__(self, keeper: Keeper, config: RankConfig, member: Member) -> None:
        self._policy = policy = keeper.policy
        self._timers = keeper.timers
        self._config = config
        self._member = member
        # No connection to the hub and no sign of it since then; None while there is one.
        self._lost_since = None if policy.rank == 0 else time.monotonic()
        self._hub_beat: object = None
        self._watch_at = 0.0
        layout, attempt = policy.layout, policy.attempt
        secret = bytes.fromhex(read_plain(layout.key).decode("ascii"))
        # One for each attempt: a keeper of an older one is a stranger here.
        key = hashlib.blake2b(b"%d" % attempt, key=secret, digest_size=32).digest()
        mail = layout.mail(attempt)
        record = {"keeper": keeper.identity, "trainer_pid": keeper.trainer.pid}
        self.post: HubPost | MemberPost
        if member.hub is not None:
            self.post = HubPost(
                keeper.selector,
                key,
                policy.size,
                mail,
                loopback=config.is_one_host,
                hear=lambda rank, data: member.receive_at_hub(rank, ToHub.from_json(data)),
                lost=member.hub.lost,
                found=member.hub.found,
            )
            self.port: int | None = self.post.port
            record["port"] = self.post.port
        else:
            self.port = None
            self.post = MemberPost(
                keeper.selector,
                key,
                policy.rank,
                self._hub_addresses,
                mail,
                hear=lambda _, data: member.agent.receive(FromHub.from_json(data)),
                lost=self._lose_hub,
                found=self._find_hub,
            )
        with contextlib.suppress(OSError):
            layout.ranks(attempt).mkdir(exist_ok=True)
            write_json(layout.rank(attempt, policy.rank), record, durable=False)

    def to_hub(self, message: ToHub) -> None:
        if self._member.hub is not None:
            self._timers.after(0.0, lambda: self._member.receive_at_hub(0, message))
        elif not self._member.departure.is_released:
            # A letter to a hub that is gone would create its folder again.
            self.post.send(0, message.kind, **message.values())

    def from_hub(self, rank: int, message: FromHub) -> None:
        if rank == 0:
            self._timers.after(0.0, lambda: self._member.agent.receive(message))
        else:
            self.post.send(rank, message.kind, **message.values())

    def training_ranks(self) -> list[int]:
        hub = self._member.hub
        return [] if hub is None else hub.state.training_ranks()

    def tick(self, now: float) -> None:
        self.post.tick(now)
        if self._member.hub is None:
            self._watch_hub(now)

    def close(self) -> None:
        self.post.close()
        if self._member.hub is not None or not self._member.departure.is_released:
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
        """Without a connection, a hub whose heartbeat moves in the run folder is not gone."""
        if self._lost_since is None or now < self._watch_at:
            return
        self._watch_at = now + _WATCH_SECONDS
        beat = read_json(self._policy.layout.heartbeat(self._policy.attempt)).get("beat")
        if beat is not None and beat != self._hub_beat:
            self._hub_beat, self._lost_since = beat, now
        elif self.is_hub_gone(now):
            self._member.departure.leave_without_hub()


def watch_launcher(keeper: Keeper, member: Member, config: RankConfig) -> None:
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
