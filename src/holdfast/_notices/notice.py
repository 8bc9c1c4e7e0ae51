"""What a cloud can announce, in one form for all of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Notice:
    """One thing that is going to happen to this machine."""

    key: str  # the same at every look, however the time that is left changes
    what: str  # "interruption", "preemption", "maintenance", "reboot", …
    reason: str  # for the person who reads the log
    stops: bool  # False: the machine goes on, and a checkpoint is enough
    ends_at: float | None = None  # on the clock of time.monotonic(); None: not told


class NoAnswer(Exception):
    """Nobody answered in time, or what came is not what the documents say."""


class Closed(NoAnswer):
    """The service is there and will not tell us: no use in asking again."""
