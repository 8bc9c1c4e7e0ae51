"""What a cloud can announce, in one form for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeGuard

_MOST_LETTERS = 40


@dataclass(frozen=True)
class Notice:
    """One thing that is going to happen to this machine."""

    key: str  # the same at every look, however the time that is left changes
    what: str  # "interruption", "preemption", "maintenance", "reboot", …
    reason: str  # for the person who reads the log
    stops: bool  # False: the machine goes on, and a checkpoint is enough
    ends_at: float | None = None  # on the clock of time.monotonic(); None: not told


class NoticeSource(Protocol):
    """One cloud. Its name is also in `provider.CLOUDS` and in `Settings.notices`."""

    cloud: str  # as users read it
    interval_seconds: float  # between two looks

    def look(self) -> list[Notice]:
        """All that is announced now; raises NoAnswer, or Closed if asking again is useless.

        Words from outside pass `is_word` first.
        """


def is_word(value: object) -> TypeGuard[str]:
    """Whether something from outside may stand in a sentence on somebody's terminal.

    >>> is_word("terminate"), is_word("a\\nb"), is_word(7)
    (True, False, False)
    """
    return isinstance(value, str) and 0 < len(value) <= _MOST_LETTERS and value.isprintable()


class NoAnswer(Exception):
    """Nobody answered in time, or what came is not what the documents say."""


class Closed(NoAnswer):
    """The service is there and will not tell us: no use in asking again."""
