"""The keepers' network: rank 0's keeper listens, and those of all other ranks connect to it.

Only numeric addresses are used: resolving a name can take longer than a keeper may wait.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import random
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast._keeper.network.connection import FrameChannel, FrameRefused
from holdfast._keeper.network.endpoint import (
    LARGE_WORLD,
    SLOW_PACE,
    Hear,
    NetworkPace,
    Peer,
    Post,
    life_of,
)

__all__ = ["Hear", "HubPost", "MemberPost", "NetworkPace"]

_STRANGERS = 64  # beyond one connection for each rank
_MOST_AT_ONCE = 256
_ACCEPT_AGAIN_SECONDS = 0.5
_CONNECT_SECONDS = 2.0
_FIRST_DELAY_SECONDS = 0.1
_LONGEST_DELAY_SECONDS = 2.0


class HubPost(Post):
    """Rank 0's end: listens for the keeper of every other rank."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        key: bytes,
        size: int,
        mail: Path,
        *,
        loopback: bool,
        hear: Hear,
        lost: Callable[[int], None],
        found: Callable[[int], None],
        pace: NetworkPace | None = None,
    ) -> None:
        pace = pace or (NetworkPace() if size <= LARGE_WORLD else SLOW_PACE)
        super().__init__(selector, key, 0, range(1, size), mail, hear, lost, found, pace)
        self._most_strangers = size + _STRANGERS
        self._strangers: dict[FrameChannel, None] = {}  # oldest first
        _allow_files(2 * size + _STRANGERS)
        self._listener = _listen(loopback)
        self.port: int = self._listener.getsockname()[1]
        self._accept_at = math.inf  # when to listen again, after there were too many files
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

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
            self._strangers[FrameChannel(self._selector, link, self._key, self, is_hub=True)] = None

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

    def channel_opened(self, channel: FrameChannel) -> None:
        """The member sends the first frame."""

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
        selector: selectors.BaseSelector,
        key: bytes,
        rank: int,
        addresses: Callable[[], list[tuple[str, int]]],
        mail: Path,
        *,
        hear: Hear,
        lost: Callable[[int], None],
        found: Callable[[int], None],
        pace: NetworkPace | None = None,
    ) -> None:
        super().__init__(selector, key, rank, (0,), mail, hear, lost, found, pace or NetworkPace())
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
        self._greeting = FrameChannel(self._selector, link, self._key, self, is_hub=False)

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
    if loopback:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    else:
        listener = _listen_everywhere()
    listener.setblocking(False)
    return listener


def _listen_everywhere() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # compiled in, but switched off
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=1024)


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
