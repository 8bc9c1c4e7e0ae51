"""Ends of the keepers' post, each with a loop of its own, and a network that can be cut."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from holdfast._keeper.network.endpoint import HubPost, MemberPost, NetworkPace, PostOwner
from tests.support import wait_until

KEY = b"k" * 32
# Ten times as quick as in life; what is late on a busy machine only costs a connection.
QUICK = NetworkPace(
    beat_seconds=0.1,
    silence_seconds=0.5,
    greet_seconds=0.5,
    mail_after_seconds=0.1,
    look_seconds=0.05,
    look_on_seconds=0.5,
)


class End:
    """A post in a thread, as a keeper runs it."""

    def __init__(
        self, make: Callable[..., Any], key: bytes, mail: Path, *arguments: Any, **options: Any
    ) -> None:
        self.heard: list[tuple[int, dict[str, Any]]] = []
        self.events: list[tuple[str, int]] = []
        self.answer: Callable[[int, dict[str, Any]], None] = lambda rank, message: None
        self._selector = selectors.DefaultSelector()
        self._ours, self._wake = socket.socketpair()
        self._ours.setblocking(False)
        self._orders: deque[Callable[[], None]] = deque()
        self._selector.register(self._ours, selectors.EVENT_READ, self._obey)
        self._is_over = False
        owner = PostOwner(
            self._selector,
            key,
            mail,
            hear=self._hear,
            lost=lambda rank: self.events.append(("lost", rank)),
            found=lambda rank: self.events.append(("found", rank)),
        )
        self.post = make(owner, *arguments, **options)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, rank: int, kind: str, **fields: Any) -> None:
        self.do(partial(self.post.send, rank, kind, **fields))

    def do(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._wake.send(b".")

    def values(self, rank: int = 0) -> list[Any]:
        """What a rank has said, as far as it has been heard."""
        return [message["value"] for sender, message in list(self.heard) if sender == rank]

    def wait_for_values(self, count: int, rank: int = 0, seconds: float = 30.0) -> list[Any]:
        wait_until(lambda: len(self.values(rank)) >= count, seconds, f"{count} messages")
        return self.values(rank)

    def wait_connected(self, *ranks: int) -> None:
        wait_until(lambda: set(ranks) <= self.post.connected(), 10, f"connections with {ranks}")

    def close(self) -> None:
        if self._is_over:
            return
        self.do(self._end)  # after what was ordered before
        self._thread.join(10)
        self._selector.close()
        self._ours.close()
        self._wake.close()

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        self.heard.append((rank, message))
        self.answer(rank, message)

    def _obey(self) -> None:
        self._ours.recv(4096)
        while self._orders:
            self._orders.popleft()()

    def _end(self) -> None:
        self._is_over = True

    def _run(self) -> None:
        while not self._is_over:
            now = time.monotonic()
            self.post.tick(now)
            wait = min(self.post.next_at(), now + 1.0) - time.monotonic()
            for key, _ in self._selector.select(max(0.0, wait)):
                key.data()
        self.post.close()


class Echo(End):
    """Prints what it hears, and sends it back, from its first tick on: mail may lie there."""

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        print("heard", rank, message["value"], flush=True)
        self.send(rank, "echo", value=message["value"])


def hub(mail: Path, size: int, key: bytes = KEY, pace: NetworkPace | None = None) -> End:
    return End(HubPost, key, mail, size, loopback=True, pace=pace)


def member(
    mail: Path,
    rank: int,
    *ports: int,
    key: bytes = KEY,
    pace: NetworkPace | None = None,
    addresses: Callable[[], list[tuple[str, int]]] | None = None,
) -> End:
    ask = addresses or (lambda: [("127.0.0.1", port) for port in ports])
    return End(MemberPost, key, mail, rank, ask, pace=pace)


class Proxy:
    """Stands between: passes bytes on, can hang like a cut cable, and can cut like a reset."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._is_over = False
        self.hangs = False
        self.spoils_next = False
        self.from_member: list[bytes] = []  # of the connection made last
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """End all connections, and lose what was under way."""
        with self._lock:
            for link in self._pairs:
                link.close()
            self._pairs.clear()

    def close(self) -> None:
        self._is_over = True
        self._thread.join(10)
        self._listener.close()
        self.cut()

    def _run(self) -> None:
        while not self._is_over:
            with self._lock:
                links = [] if self.hangs else list(self._pairs)
                ready = select.select([self._listener, *links], [], [], 0)[0]
                for link in ready:
                    if link is self._listener:
                        self._accept()
                    elif link in self._pairs:
                        self._pass_on(link)
            if not ready:
                time.sleep(0.001)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            near.close()
            return
        self.from_member = []
        self._pairs[near], self._pairs[far] = far, near
        self._near = near

    def _pass_on(self, link: socket.socket) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = link.recv(1 << 16)
        if link is self._near:
            self.from_member.append(data)
        other = self._pairs[link]
        try:
            if not data:
                raise ConnectionResetError
            if self.spoils_next:
                self.spoils_next = False
                data = data[:-1] + bytes([data[-1] ^ 1])
            other.sendall(data)
        except OSError:
            for end in (link, other):
                self._pairs.pop(end).close()


def run_hub(folder: Path, size: int) -> None:
    """The hub of a process of its own."""
    end = Echo(HubPost, KEY, folder / "mail", size, loopback=True)
    port = folder / f".port-{os.getpid()}"
    port.write_text(str(end.post.port))
    port.rename(folder / "port")
    threading.Event().wait()


if __name__ == "__main__":
    run_hub(Path(sys.argv[1]), int(sys.argv[2]))
