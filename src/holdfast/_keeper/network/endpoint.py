"""What both ends of the keepers' network share: messages out and in, timers, mail.

Each message is delivered once, and in order. The sender numbers its messages for one receiver from
1 and keeps each until it is acknowledged: it is sent again on each new connection and, while there
is none, by mail. The receiver remembers the last number and drops what comes again. A keeper that
replaces another has a new life: it counts from 1 again, and gets what the former life had not
acknowledged. Callbacks run from `tick` and from the selector, never from `send`.
"""

from __future__ import annotations

import json
import math
import os
import re
import selectors
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast._keeper.network.connection import (
    MOST_BYTES,
    Complaints,
    FrameChannel,
    FrameRefused,
    say_goodbye,
)
from holdfast._keeper.network.file_mailbox import Mail

LIFE = re.compile(r"[0-9a-f]{24}")


def new_life() -> str:
    """An id for one keeper process; a later one sorts after it."""
    return f"{time.time_ns():016x}{os.urandom(4).hex()}"


class Ledger:
    """The messages between this keeper and that of one other rank."""

    def __init__(self, life: str) -> None:
        self.life = life
        self.peer_life: str | None = None
        self.first = 1  # the oldest that is not acknowledged
        self.next = 1  # the number of the next message
        self._kept: dict[int, bytes] = {}
        self._had: dict[str, int] = {}  # the last number, by life of the other
        self._replaced: set[str] = set()

    # -- sent --------------------------------------------------------------------

    def post(self, message: bytes) -> None:
        self._kept[self.next] = message
        self.next += 1

    def kept(self, number: int) -> bytes:
        return self._kept[number]

    def acknowledged(self, number: int) -> None:
        """The other end has received all up to `number`."""
        while self.first <= number and self.first < self.next:
            del self._kept[self.first]
            self.first += 1

    # -- received ----------------------------------------------------------------

    def had(self, life: str | None) -> int:
        """The last number received from this life of the other end."""
        return 0 if life is None else self._had.get(life, 0)

    def take(self, life: str, number: int) -> bool:
        """Record that `number` has arrived; False if it had already.

        A connection may skip numbers, mail must not: on each connection the sender repeats
        everything in order, from the oldest that is not acknowledged.
        """
        if number <= self.had(life):
            return False
        self._had[life] = number
        return True

    # -- replacements ------------------------------------------------------------

    def was_replaced(self, life: str) -> bool:
        return life in self._replaced

    def meet(self, life: str) -> bool:
        """A connection names the life at its other end; False if a later one has replaced it.

        Else a host that was given up and comes back would replace its successor.
        """
        if life in self._replaced:
            return False
        if self.peer_life not in (None, life):
            assert self.peer_life is not None
            self._replaced.add(self.peer_life)
        self.peer_life = life
        return True

    def meet_by_mail(self, life: str) -> None:
        """A letter names a life: it counts if it began later, by the clocks.

        It does not replace the known one for good: letters of dead keepers may remain.
        """
        if life not in self._replaced and (self.peer_life is None or life > self.peer_life):
            self.peer_life = life


Hear = Callable[[int, dict[str, Any]], None]  # (rank of the sender, message)

_MOST_MESSAGE_BYTES = MOST_BYTES - 64
_AHEAD_BYTES = 1 << 18  # signed and waiting for one connection
_SWEEP_SECONDS = 0.25
_ACKNOWLEDGE_SECONDS = 0.05
_GOODBYE_SECONDS = 0.5


@dataclass(frozen=True)
class NetworkPace:
    """How long things may take."""

    beat_seconds: float = 1.0
    silence_seconds: float = 5.0  # a cut cable is not reported
    greet_seconds: float = 5.0
    mail_after_seconds: float = 1.0
    look_seconds: float = 0.5
    look_on_seconds: float = 5.0  # after a connection was made: letters may appear late


# The beats of 512 members cost rank 0's keeper 1 % of a core (measured). Larger worlds beat half
# as often.
LARGE_WORLD = 512
SLOW_PACE = NetworkPace(beat_seconds=2.0, silence_seconds=8.0)


class Peer:
    """The keeper of one other rank."""

    def __init__(self, rank: int, life: str) -> None:
        self.rank = rank
        self.ledger = Ledger(life)
        self.channel: FrameChannel | None = None
        self.since = time.monotonic()  # connected or not, since when
        self.sent = 0  # the last number that was put on this connection

    def status(self) -> dict[str, Any]:
        """The first frame of a connection: our life, and what we have received of the other's."""
        life = self.ledger.peer_life
        return {"life": self.ledger.life, "of": life, "had": self.ledger.had(life)}


class Post:
    """One end: queues, sends and receives messages."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        key: bytes,
        rank: int,
        peers: Iterable[int],
        mail: Path,
        hear: Hear,
        lost: Callable[[int], None],
        found: Callable[[int], None],
        pace: NetworkPace,
    ) -> None:
        assert key, "without a key any process could sign"
        self._selector = selector
        self._key = key
        self._life = new_life()
        self._peers = {peer: Peer(peer, self._life) for peer in peers}
        self._complaints = Complaints()
        self._mail = Mail(mail, key, rank, self._life, self._complaints)
        self._hear = hear
        self._lost = lost
        self._found = found
        self._pace = pace
        self._sweep_at = 0.0
        self._look_at = 0.0
        self._acknowledge_at = math.inf
        self._owing: set[Peer] = set()  # peers that wait for an acknowledgement
        self._is_closed = False

    # -- for the keeper ----------------------------------------------------------

    def send(self, rank: int, kind: str, /, **fields: Any) -> None:
        """Queue a message for the keeper of `rank`; it arrives once, in order."""
        message = json.dumps({**fields, "kind": kind}, separators=(",", ":")).encode()
        if len(message) > _MOST_MESSAGE_BYTES:
            raise ValueError(
                f"A message {kind!r} of {len(message)} bytes; {_MOST_MESSAGE_BYTES} are the most."
            )
        peer = self._peers[rank]
        peer.ledger.post(message)
        self._pump(peer)

    def connected(self) -> set[int]:
        return {peer.rank for peer in self._peers.values() if peer.channel is not None}

    def unacknowledged(self) -> set[int]:
        """The ranks whose keeper may not have received everything."""
        peers = self._peers.values()
        return {peer.rank for peer in peers if peer.ledger.first < peer.ledger.next}

    def tick(self, now: float) -> None:
        if now >= self._acknowledge_at:
            self._acknowledge_at = math.inf
            for peer in list(self._owing):
                self._beat(peer)
            self._owing.clear()
        if now >= self._sweep_at and not self._is_closed:
            self._sweep_at = now + min(_SWEEP_SECONDS, self._pace.beat_seconds / 4)
            self._sweep(now)
        if now >= self._look_at and not self._is_closed:
            self._look(now)

    def next_at(self) -> float:
        if self._is_closed:
            return math.inf
        return min(self._sweep_at, self._look_at, self._acknowledge_at)

    def close(self) -> None:
        """Send what is queued on connections, and close them after half a second at most."""
        self._is_closed = True
        channels = []
        for peer in list(self._owing):
            self._beat(peer)  # else the other end waits for the acknowledgement
        for peer in self._peers.values():
            self._pump(peer, math.inf)
            if peer.channel is not None:
                channels.append(peer.channel)
                peer.channel = None
        say_goodbye(channels, _GOODBYE_SECONDS)
        self._mail.close()

    # -- timers ------------------------------------------------------------------

    def _sweep(self, now: float) -> None:
        pace = self._pace
        for peer in self._peers.values():
            channel = peer.channel
            if self._is_closed:
                return
            if channel is None:
                if now - peer.since > pace.mail_after_seconds:
                    self._mail.post(peer.rank, peer.ledger)
            elif now - channel.heard_at > pace.silence_seconds:
                channel.read()  # perhaps this process did not read in time
                if time.monotonic() - channel.heard_at > pace.silence_seconds:
                    channel.end()
            elif now - channel.sent_at >= pace.beat_seconds and not channel.waiting_bytes:
                self._beat(peer)

    def _beat(self, peer: Peer) -> None:
        if peer.channel is not None:
            peer.channel.put(b'{"a":%d}' % peer.ledger.had(peer.channel.life))
            peer.channel.flush()

    def _look(self, now: float) -> None:
        """Read the mail of peers that are not connected, or only since a moment."""
        self._look_at = now + self._pace.look_seconds
        ledgers, connected = {}, set()
        for peer in self._peers.values():
            if peer.channel is None or now - peer.since < self._pace.look_on_seconds:
                ledgers[peer.rank] = peer.ledger
                if peer.channel is not None:
                    connected.add(peer.rank)
            else:
                self._mail.withdraw_note(peer.rank)
        if ledgers:
            for rank, message in self._mail.look(ledgers, connected):
                self._hear(rank, message)
                if self._is_closed:
                    return
            if self._mail.is_behind:
                self._look_at = now

    # -- connections -------------------------------------------------------------

    def _join(self, peer: Peer, channel: FrameChannel, said: dict[str, Any]) -> None:
        """Use a connection whose other end has identified itself in `said`."""
        if said.get("of") == self._life and type(said.get("had")) is int:
            self._acknowledged(peer, said["had"])
        peer.channel = channel
        peer.since = time.monotonic()
        peer.sent = peer.ledger.first - 1
        self._found(peer.rank)
        self._pump(peer)

    def _part(self, peer: Peer) -> None:
        """A connection has ended; what was on it is sent again on the next."""
        if peer.channel is not None:
            # A silent connection was useless since the last frame.
            silent = time.monotonic() - peer.channel.heard_at > self._pace.silence_seconds
            peer.since = peer.channel.heard_at if silent else time.monotonic()
            peer.channel = None
            self._owing.discard(peer)
            self._lost(peer.rank)

    def _pump(self, peer: Peer, ahead_bytes: float = _AHEAD_BYTES) -> None:
        """Put queued messages on the connection, a bounded amount ahead."""
        channel, ledger = peer.channel, peer.ledger
        if channel is None:
            return
        while not channel.is_broken:
            number = max(peer.sent + 1, ledger.first)
            if number >= ledger.next:
                break
            frame = (ledger.had(channel.life), number, ledger.kept(number))
            channel.put(b'{"a":%d,"n":%d,"m":%b}' % frame)
            peer.sent = number
            self._owing.discard(peer)
            if channel.waiting_bytes > ahead_bytes:
                channel.flush()
                if channel.waiting_bytes > ahead_bytes:
                    return
        channel.flush()

    def _take(self, peer: Peer, channel: FrameChannel, said: dict[str, Any]) -> None:
        """One frame of a peer: an acknowledgement, and perhaps a message."""
        acknowledged, number, message = said.get("a"), said.get("n"), said.get("m")
        if type(acknowledged) is not int:
            raise FrameRefused("it does not say what it has received")
        self._acknowledged(peer, acknowledged)
        if number is None:
            return
        if type(number) is not int or not isinstance(message, dict):
            raise FrameRefused("its frame is not a message")
        self._owing.add(peer)
        self._acknowledge_at = min(self._acknowledge_at, time.monotonic() + _ACKNOWLEDGE_SECONDS)
        if peer.ledger.take(channel.life, number):
            self._hear(peer.rank, message)

    def _acknowledged(self, peer: Peer, number: int) -> None:
        if number >= peer.ledger.first:
            peer.ledger.acknowledged(number)
            self._mail.clear(peer.rank, peer.ledger)

    # -- from the channels -------------------------------------------------------

    def channel_drained(self, channel: FrameChannel) -> None:
        peer = None if channel.rank is None else self._peers[channel.rank]
        if peer is not None and peer.channel is channel:
            self._pump(peer)

    def channel_heard(self, channel: FrameChannel, said: dict[str, Any]) -> None:
        if channel.rank is None:
            self._greeted(channel, said)
        else:
            self._take(self._peers[channel.rank], channel, said)

    def _greeted(self, channel: FrameChannel, said: dict[str, Any]) -> None:
        raise NotImplementedError


def life_of(said: dict[str, Any]) -> str:
    """The life that the first frame of a connection names."""
    life = said.get("life")
    if not isinstance(life, str) or not LIFE.fullmatch(life):
        raise FrameRefused("it does not name its life")
    return life
