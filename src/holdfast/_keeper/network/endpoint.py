"""The keepers' network: rank 0's keeper listens, and those of all other ranks connect to it.

Each message is delivered once, and in order. The sender numbers its messages for one receiver from
1 and keeps each until it is acknowledged: it is sent again on each new connection and, while there
is none, by mail. The receiver remembers the last number and drops what comes again. A keeper that
replaces another has a new life: it counts from 1 again, and gets what the former life had not
acknowledged. Callbacks run from `tick` and from the selector, never from `send`.

Only numeric addresses are used: resolving a name can take longer than a keeper may wait.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import random
import re
import selectors
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class PostOwner:
    """What a post gets from its keeper, and what it calls there."""

    selector: selectors.BaseSelector
    key: bytes
    mail: Path
    hear: Callable[[int, dict[str, Any]], None]  # (rank of the sender, message)
    lost: Callable[[int], None]
    found: Callable[[int], None]


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
        self, owner: PostOwner, rank: int, peers: Iterable[int], pace: NetworkPace
    ) -> None:
        assert owner.key, "without a key any process could sign"
        self._owner = owner
        self._selector = owner.selector
        self._life = new_life()
        self._peers = {peer: Peer(peer, self._life) for peer in peers}
        self._complaints = Complaints()
        self._mail = Mail(owner.mail, owner.key, rank, self._life, self._complaints)
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
            self._pump(peer)  # if this empties the queue, no event asks for more

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
        self._owner.found(peer.rank)
        self._pump(peer)

    def _part(self, peer: Peer) -> None:
        """A connection has ended; what was on it is sent again on the next."""
        if peer.channel is not None:
            # A silent connection was useless since the last frame.
            silent = time.monotonic() - peer.channel.heard_at > self._pace.silence_seconds
            peer.since = peer.channel.heard_at if silent else time.monotonic()
            peer.channel = None
            self._owing.discard(peer)
            self._owner.lost(peer.rank)

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

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        try:
            self._owner.hear(rank, message)
        except (AttributeError, LookupError, TypeError, ValueError):
            # It has wrong fields. It would be sent again to the next keeper, and end that one too.
            traceback.print_exc()

    def _acknowledged(self, peer: Peer, number: int) -> None:
        if number >= peer.ledger.first:
            peer.ledger.acknowledged(number)
            self._mail.clear(peer.rank, peer.ledger)

    # -- the channels ------------------------------------------------------------

    def _channel(self, link: socket.socket, *, is_hub: bool) -> FrameChannel:
        return FrameChannel(self._selector, link, self._owner.key, self, is_hub=is_hub)

    def channel_opened(self, channel: FrameChannel) -> None:
        """The member sends the first frame."""

    def channel_ended(self, channel: FrameChannel, reason: str | None) -> None:
        raise NotImplementedError

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


# -- The two ends: one listens, the others connect -------------------------------------------------

_STRANGERS = 64  # beyond one connection for each rank
_MOST_AT_ONCE = 256
_ACCEPT_AGAIN_SECONDS = 0.5
_CONNECT_SECONDS = 2.0
_FIRST_DELAY_SECONDS = 0.1
_LONGEST_DELAY_SECONDS = 2.0


class HubPost(Post):
    """Rank 0's end: listens for the keeper of every other rank."""

    def __init__(
        self, owner: PostOwner, size: int, *, loopback: bool, pace: NetworkPace | None = None
    ) -> None:
        pace = pace or (NetworkPace() if size <= LARGE_WORLD else SLOW_PACE)
        super().__init__(owner, 0, range(1, size), pace)
        self._most_strangers = size + _STRANGERS
        self._strangers: dict[FrameChannel, None] = {}  # oldest first
        _allow_files(2 * size + _STRANGERS)
        self._listener = _listen(loopback)
        self.port: int = self._listener.getsockname()[1]
        self._accept_at = math.inf  # when to listen again, after there were too many files
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def tick(self, now: float) -> None:
        if now >= self._accept_at and not self._is_closed:
            self._accept_at = math.inf
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        super().tick(now)

    def next_at(self) -> float:
        return min(super().next_at(), self._accept_at)

    def close(self) -> None:
        if self._is_closed:
            return
        super().close()
        for channel in self._strangers:
            channel.close()
        if self._accept_at == math.inf:
            self._selector.unregister(self._listener)
        self._accept_at = math.inf
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                link, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # it has closed the connection again
            except OSError as error:
                # Too many open files: the selector would report it over and over.
                self._complaints.say(f"No connection can be accepted: {error}.")
                self._selector.unregister(self._listener)
                self._accept_at = time.monotonic() + _ACCEPT_AGAIN_SECONDS
                return
            if len(self._strangers) >= self._most_strangers:
                # Drop the oldest: a keeper identifies itself within a moment.
                next(iter(self._strangers)).end("too many others have not identified themselves")
            self._strangers[self._channel(link, is_hub=True)] = None

    def _sweep(self, now: float) -> None:
        super()._sweep(now)
        for channel in list(self._strangers):
            if now - channel.since < self._pace.greet_seconds:
                break
            channel.end("it has not identified itself")

    def _greeted(self, channel: FrameChannel, said: dict[str, Any]) -> None:
        rank, life = said.get("rank"), life_of(said)
        if type(rank) is not int or rank not in self._peers:
            raise FrameRefused("it has no rank of this job")
        peer = self._peers[rank]
        if not peer.ledger.meet(life):
            raise FrameRefused(
                f"another keeper has taken the place of this one of rank {peer.rank}"
            )
        del self._strangers[channel]
        channel.trust(peer.rank, life)
        if peer.channel is not None:
            peer.channel.close()  # its host may be gone without closing it
            self._part(peer)
        if self._is_closed:
            return
        pace = {"beat": self._pace.beat_seconds, "silence": self._pace.silence_seconds}
        channel.put(json.dumps({**peer.status(), **pace}).encode())
        channel.flush()
        self._join(peer, channel, said)

    def channel_ended(self, channel: FrameChannel, reason: str | None) -> None:
        if reason is not None:
            self._complaints.say(reason)
        self._strangers.pop(channel, None)
        if channel.rank is not None:
            self._part(self._peers[channel.rank])


class MemberPost(Post):
    """Another rank's end: connects to the hub, and again when the connection is lost."""

    def __init__(
        self,
        owner: PostOwner,
        rank: int,
        addresses: Callable[[], list[tuple[str, int]]],
        pace: NetworkPace | None = None,
    ) -> None:
        super().__init__(owner, rank, (0,), pace or NetworkPace())
        self._rank = rank
        self._hub: Peer = self._peers[0]
        self._addresses = addresses
        self._tried: set[tuple[str, int]] = set()
        self._connecting: socket.socket | None = None
        self._greeting: FrameChannel | None = None  # connected, but not known to be the hub
        self._try_at = 0.0  # the next try, or the timeout of this one
        self._delay = _FIRST_DELAY_SECONDS

    def tick(self, now: float) -> None:
        super().tick(now)
        if now >= self._try_at and not self._is_closed:
            self._give_up()
            self._try_next(now)

    def next_at(self) -> float:
        return min(super().next_at(), self._try_at)

    def close(self) -> None:
        if not self._is_closed:
            super().close()
            self._give_up()
            self._try_at = math.inf

    # -- making a connection -----------------------------------------------------

    def _give_up(self) -> None:
        if self._connecting is not None:
            self._selector.unregister(self._connecting)
            self._connecting.close()
            self._connecting = None
        if self._greeting is not None:
            self._greeting.close()
            self._greeting = None

    def _try_next(self, now: float) -> None:
        """Try an address that was not tried in this round; after all of them, pause."""
        address = next((a for a in self._ask() if a not in self._tried), None)
        if address is None:
            self._tried.clear()
            # Not all members at the same moment.
            self._try_at = now + self._delay * random.uniform(0.75, 1.0)
            self._delay = self._longer_delay()
            return
        self._tried.add(address)
        self._try_at = now  # the next address, unless this one connects
        try:
            self._connecting = _begin_connect(*address)
        except (socket.gaierror, UnicodeError):
            self._complaints.say(f"{address[0]!r} is not a numeric address: not tried.")
        except OSError:
            return
        else:
            self._selector.register(self._connecting, selectors.EVENT_WRITE, self._connect_ended)
            self._try_at = now + _CONNECT_SECONDS

    def _ask(self) -> list[tuple[str, int]]:
        # Each time: the hub may have been replaced.
        try:
            return [(host, port) for host, port in self._addresses()]
        except OSError:
            return []

    def _connect_ended(self) -> None:
        link, self._connecting = self._connecting, None
        if link is None:
            return
        self._selector.unregister(link)
        if link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            link.close()
            self._try_at = 0.0
            return
        self._try_at = time.monotonic() + self._pace.greet_seconds
        self._greeting = self._channel(link, is_hub=False)

    def channel_opened(self, channel: FrameChannel) -> None:
        channel.put(json.dumps({"rank": self._rank, **self._hub.status()}).encode())
        channel.flush()

    def _greeted(self, channel: FrameChannel, said: dict[str, Any]) -> None:
        life, beat, silence = life_of(said), said.get("beat"), said.get("silence")
        if not isinstance(beat, int | float) or not isinstance(silence, int | float):
            raise FrameRefused("it does not name its intervals")
        if not self._hub.ledger.meet(life):
            raise FrameRefused("another hub has taken its place")
        self._pace = replace(self._pace, beat_seconds=beat, silence_seconds=silence)
        self._greeting = None
        self._tried.clear()
        self._try_at = math.inf
        channel.trust(0, life)
        self._join(self._hub, channel, said)

    def channel_heard(self, channel: FrameChannel, said: dict[str, Any]) -> None:
        super().channel_heard(channel, said)
        # Answer the hub's beats at once: all answers then arrive together and wake it up once.
        if channel.is_open and channel.heard_at - channel.sent_at > self._pace.beat_seconds / 2:
            self._beat(self._hub)

    def channel_ended(self, channel: FrameChannel, reason: str | None) -> None:
        if reason is not None:
            self._complaints.say(reason)
        now = time.monotonic()
        if channel is self._greeting:
            self._greeting = None
            self._try_at = now
        elif channel is self._hub.channel:
            lasted = now - self._hub.since > _LONGEST_DELAY_SECONDS
            # A connection that never lasts is retried more and more slowly.
            self._delay = _FIRST_DELAY_SECONDS if lasted else self._longer_delay()
            self._try_at = now + self._delay
            self._part(self._hub)

    def _longer_delay(self) -> float:
        return min(2 * self._delay, _LONGEST_DELAY_SECONDS)


def _listen(loopback: bool) -> socket.socket:
    """A socket that listens on a free port."""
    listener, place = None, ("127.0.0.1" if loopback else "", 0)
    if not loopback and socket.has_dualstack_ipv6():
        both = socket.AF_INET6
        with contextlib.suppress(OSError):  # compiled in, but switched off
            listener = socket.create_server(place, family=both, backlog=1024, dualstack_ipv6=True)
    listener = listener or socket.create_server(place, backlog=1024)
    listener.setblocking(False)
    return listener


def _begin_connect(host: str, port: int) -> socket.socket:
    """A socket that connects to `host`; OSError if it fails at once."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    link = socket.socket(family, kind, protocol)
    link.setblocking(False)
    result = link.connect_ex(address)
    if result not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
        link.close()
        raise OSError(result, "it cannot be reached")
    return link


def _allow_files(count: int) -> None:
    """Raise the limit of open files to the number of connections; it is usually 1024."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = count + 256
        if soft != resource.RLIM_INFINITY and soft < wanted:
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
