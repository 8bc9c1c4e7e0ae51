"""The transport between trainer and keeper: JSON datagrams, with descriptors where needed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

_MOST_BYTES = 1 << 16


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """A connection that keeps messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(link: socket.socket, kind: str, **fields: Any) -> None:
    """Send one message; it is lost if the other end is closed."""
    with contextlib.suppress(OSError):
        link.send(encode(kind, **fields))


def encode(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"kind": kind, **fields}).encode()
    assert len(data) <= _MOST_BYTES
    return data


class Outbox:
    """Messages to a process that may read slowly: they wait here, the sender never blocks."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def post(
        self, kind: str, descriptors: Sequence[int] = (), *, may_drop: bool = False, **fields: Any
    ) -> bool:
        """Send or queue a message. One that `may_drop` is dropped while others wait: False then."""
        with self._lock:
            if may_drop and self._waiting:
                return False
            # Duplicates: the sender may close its own before they are sent.
            self._waiting.append((encode(kind, **fields), [os.dup(d) for d in descriptors]))
        self.flush()
        return True

    def flush(self) -> None:
        """Send what is queued, as far as the socket accepts it."""
        with self._lock:
            while self._waiting:
                data, descriptors = self._waiting[0]
                try:
                    socket.send_fds(self._link, [data], descriptors, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                except OSError:
                    pass  # the other end is closed
                self._waiting.popleft()
                for descriptor in descriptors:
                    os.close(descriptor)


def receive(link: socket.socket, *, waits: bool = True) -> tuple[dict[str, Any], list[int]] | None:
    """The next message with its descriptors; None at the end.

    BlockingIOError if there is none now and it is not to wait.
    """
    flags = 0 if waits else socket.MSG_DONTWAIT
    try:
        # Not `socket.recv_fds`: it ignores its flags.
        data, ancillary, _, _ = link.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(4 * 4), flags)
    except BlockingIOError:
        raise
    except OSError:
        return None
    if not data:
        return None
    descriptors = array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return json.loads(data), descriptors.tolist()
