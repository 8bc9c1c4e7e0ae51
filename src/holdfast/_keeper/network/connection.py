"""One TCP connection between two keepers: whole frames, each of them signed.

    hub:    magic, nonce                frame, frame, …
    member: magic, nonce    frame, frame, …
    frame:  length (4 bytes), MAC (16), JSON

The MAC covers both nonces, the direction, the frame's number on this connection and the JSON: a
recorded frame cannot be replayed, reflected, dropped or reordered. Any process may connect to the
port, so an unauthenticated peer gets little memory, and its bytes are never parsed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import selectors
import socket
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast._keeper.network.endpoint import Post

MOST_BYTES = 8 << 20
_STRANGERS_BYTES = 4096  # enough for the first frame of a peer
_CHUNK_BYTES = 1 << 16
_NONCE_BYTES = 16
_MAC_BYTES = 16
_HEAD_BYTES = 4 + _MAC_BYTES
# Two words: TCP allows a connection to itself, which must not be taken for a hub.
_MAGIC = {True: b"hf1 hub\n", False: b"hf1 mem\n"}
_LINE_SECONDS = 1.0
_LAST_SECONDS = 0.002  # between two looks whether the other end has closed


def keyed(key: bytes, purpose: bytes, data: bytes = b"") -> hashlib.blake2b:
    """A MAC under the run's key, different for each purpose."""
    return hashlib.blake2b(
        data, digest_size=_MAC_BYTES, key=hashlib.blake2b(key).digest(), person=purpose
    )


class Complaints:
    """Lines for the log, at most one a second: strangers could cause any number."""

    def __init__(self) -> None:
        self._next_at = 0.0
        self._left_out = 0

    def say(self, line: str) -> None:
        now = time.monotonic()
        if now < self._next_at:
            self._left_out += 1
            return
        self._next_at = now + _LINE_SECONDS
        more = f" ({self._left_out} more such lines left out)" if self._left_out else ""
        self._left_out = 0
        with contextlib.suppress(OSError):  # a full disk must not end the keeper
            os.write(1, f"{line}{more}\n".encode(errors="replace"))


class FrameRefused(Exception):
    """No keeper of this run would send this; the text ends a sentence."""


class _Macs:
    """The MACs of one direction; each frame has its number in it."""

    def __init__(self, start: hashlib.blake2b) -> None:
        self._start = start
        self._frames = 0

    def next(self, payload: bytes) -> bytes:
        mac = self._start.copy()
        mac.update(self._frames.to_bytes(8, "big"))
        mac.update(payload)
        self._frames += 1
        return mac.digest()


class FrameChannel:
    """One end of one connection. Nothing here blocks."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        link: socket.socket,
        key: bytes,
        owner: Post,  # gets the events, never from within `put`
        *,
        is_hub: bool,
    ) -> None:
        link.setblocking(False)
        with contextlib.suppress(OSError):  # the other end may be gone already
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector = selector
        self._link = link
        self._key = key
        self._owner = owner
        self._is_hub = is_hub
        self._nonce = os.urandom(_NONCE_BYTES)
        self._in = bytearray()
        self._out = bytearray(_MAGIC[is_hub] + self._nonce)
        self._limit = _STRANGERS_BYTES
        self._sealing: _Macs | None = None  # from the other end's nonce on
        self._checking: _Macs | None = None
        self._wants_to_write = False
        self.rank: int | None = None  # of the keeper at the other end, once it is known
        self.life = ""
        self.is_open = True
        self.is_broken = False  # nothing can be sent any more; received bytes may still be read
        self.since = self.heard_at = self.sent_at = time.monotonic()
        selector.register(link, selectors.EVENT_READ, self._ready)
        self.flush()

    @property
    def waiting_bytes(self) -> int:
        return len(self._out)

    def trust(self, rank: int, life: str) -> None:
        """The other end is authenticated: accept larger frames."""
        self.rank, self.life = rank, life
        self._limit = MOST_BYTES

    def peer_name(self) -> str:
        try:
            host, port = self._link.getpeername()[:2]
        except OSError:
            return "an unknown address"
        return f"{host}:{port}"

    # -- out ---------------------------------------------------------------------

    def put(self, payload: bytes) -> None:
        """Sign a frame and queue it behind the others; `flush` sends."""
        assert self._sealing is not None, "the other end's nonce has not come yet"
        self._out += len(payload).to_bytes(4, "big") + self._sealing.next(payload)
        self._out += payload
        self.sent_at = time.monotonic()

    def flush(self) -> None:
        """Send what is queued, as far as the socket accepts it."""
        while self._out and self.is_open and not self.is_broken:
            try:
                sent = self._link.send(self._out)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                # The owner learns of it from the selector, not in the middle of a send.
                self.is_broken = True
                break
            del self._out[:sent]
        if self.is_open and self._wants_to_write != bool(self._out and not self.is_broken):
            self._wants_to_write = not self._wants_to_write
            write = selectors.EVENT_WRITE if self._wants_to_write else 0
            self._selector.modify(self._link, selectors.EVENT_READ | write, self._ready)

    # -- in ----------------------------------------------------------------------

    def _ready(self) -> None:
        # Closed by another event of the same select.
        if not self.is_open:
            return
        if self._wants_to_write:
            self.flush()
            if self._sealing is not None:
                self._owner.channel_drained(self)
        self.read()

    def read(self) -> None:
        """Read what has arrived, and pass on whole frames."""
        if not self.is_open:
            return
        try:
            data = self._link.recv(_CHUNK_BYTES)
        except (BlockingIOError, InterruptedError):
            if self.is_broken:
                self.end()
            return
        except OSError:
            self.end()
            return
        if not data:
            self.end("it ended in the middle of a frame" if self._in else None)
            return
        self.heard_at = time.monotonic()
        self._in += data
        try:
            while self.is_open and (said := self._next_frame()) is not None:
                self._owner.channel_heard(self, said)
        except FrameRefused as refused:
            self.end(str(refused))

    def _next_frame(self) -> dict[str, Any] | None:
        if self._checking is None and not self._take_nonce():
            return None
        if not self.is_open or len(self._in) < _HEAD_BYTES:
            return None
        length = int.from_bytes(self._in[:4], "big")
        if length > self._limit:
            raise FrameRefused(f"it announces a frame of {length} bytes")
        end = _HEAD_BYTES + length
        if len(self._in) < end:
            return None
        mac, payload = bytes(self._in[4:_HEAD_BYTES]), bytes(self._in[_HEAD_BYTES:end])
        del self._in[:end]
        assert self._checking is not None
        if not hmac.compare_digest(mac, self._checking.next(payload)):
            raise FrameRefused("its frame is not signed with the key of this run")
        return parse(payload)

    def _take_nonce(self) -> bool:
        magic = _MAGIC[not self._is_hub]
        if not magic.startswith(self._in[: len(magic)]):
            raise FrameRefused("it is not a keeper")
        end = len(magic) + _NONCE_BYTES
        if len(self._in) < end:
            return False
        theirs = bytes(self._in[len(magic) : end])
        del self._in[:end]
        nonces = self._nonce + theirs if self._is_hub else theirs + self._nonce
        by_hub = _Macs(keyed(self._key, b"from the hub", nonces))
        by_member = _Macs(keyed(self._key, b"from a member", nonces))
        self._sealing, self._checking = (by_hub, by_member) if self._is_hub else (by_member, by_hub)
        self._owner.channel_opened(self)
        return True

    # -- the end -----------------------------------------------------------------

    def end(self, reason: str | None = None) -> None:
        """Close, and tell the owner."""
        if self.is_open:
            if reason is not None:
                reason = f"The connection with {self.peer_name()} was dropped: {reason}."
            self.close()
            self._owner.channel_ended(self, reason)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._selector.unregister(self._link)
            self._link.close()

    def say_last(self) -> bool:
        """Send the rest, then shut down; True while the other end is open.

        What it still sends is read and dropped. Closing with unread bytes would reset the
        connection, and a reset destroys data that we have sent and that has not arrived yet.
        """
        self.flush()
        try:
            if not self._out or self.is_broken:
                self._link.shutdown(socket.SHUT_WR)
            if self._link.recv(_CHUNK_BYTES):
                return True
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            pass
        self.close()
        return False


def say_goodbye(channels: list[FrameChannel], seconds: float) -> None:
    """Close connections so that sent data still arrives, within a time limit."""
    until = time.monotonic() + seconds
    left = channels
    while (left := [each for each in left if each.say_last()]) and time.monotonic() < until:
        time.sleep(_LAST_SECONDS)
    for channel in channels:
        channel.close()


def parse(payload: bytes) -> dict[str, Any]:
    """The JSON object in `payload`."""
    try:
        said = json.loads(payload)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise FrameRefused("its content is not a JSON object")
    return said
