"""Ports for tests that must know one before anybody listens at it."""

from __future__ import annotations

import random
import socket

# Below those that the system gives out itself: no connection that is made meanwhile takes it.
_RANGE = range(20_000, 32_000)


def free_port() -> int:
    """A port of this host where nobody listens."""
    for port in random.Random().sample(_RANGE, 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("there is no free port")
