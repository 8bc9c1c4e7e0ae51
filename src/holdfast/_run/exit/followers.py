"""Whoever follows a run from outside of it: loggers, each with a process of its own.

They are told of the end when the state is durable, all of them first and then one after the other
is waited for: what they write at their end, they write at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Protocol


class Follower(Protocol):
    """What a run asks of a logger."""

    def hand_over(self) -> None:
        """A snapshot is near: what was logged is to be out of this process before it."""
        ...

    def begin_end(self, status: int) -> None:
        """The run leaves, with this exit status."""
        ...

    def wait_for_end(self) -> None:
        """Wait for a bounded time."""
        ...


def end_followers(followers: Iterable[Follower], status: int) -> None:
    """Let all of them finish what they have."""
    ending = list(followers)
    for follower in ending:
        with contextlib.suppress(Exception):  # the state is durable, and a curve is not worth it
            follower.begin_end(status)
    for follower in ending:
        with contextlib.suppress(Exception):
            follower.wait_for_end()
