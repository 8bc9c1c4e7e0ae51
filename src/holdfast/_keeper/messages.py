"""What trainer and keeper say to each other: JSON datagrams, with descriptors where needed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

_MOST_BYTES = 1 << 16


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """A connection that keeps messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(link: socket.socket, kind: str, descriptors: Sequence[int] = (), **fields: Any) -> bool:
    """Send one message; False if nobody listens any more."""
    data = json.dumps({"kind": kind, **fields}).encode()
    assert len(data) <= _MOST_BYTES
    try:
        if descriptors:
            socket.send_fds(link, [data], list(descriptors))
        else:
            link.send(data)
    except OSError:
        return False
    return True


def receive(link: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message with its descriptors; None at the end."""
    try:
        data, descriptors, _, _ = socket.recv_fds(link, _MOST_BYTES, 4)
    except OSError:
        return None
    if not data:
        return None
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return json.loads(data), descriptors
