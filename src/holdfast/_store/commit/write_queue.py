"""The policy of the keeper's writes: which state is next, and which is skipped.

    background   the cadence wants a checkpoint: at most one waits, the newest
    asked        an explicit save of this boundary: written in the order of the boundaries
    last         a stop, a deadline or a death: only the newest state counts

A last write drops everything older that waits. An older write in progress is given up for it,
unless only that one can be durable in the time that is left. An explicit save is still written
first if that takes less than a second (`patient`): on a fast disk no best state is lost. Nothing
older than the newest durable checkpoint is ever published. A background write that waits has no
slot: it takes the newest one when its turn comes, so that waiting holds no memory.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from holdfast._errors import SaveFailed

Key = tuple[int, int]  # (attempt, mark): the greater one is the newer state
CADENCE = "cadence"  # the reason of a checkpoint that is due by time or steps


class Urgency(enum.IntEnum):
    BACKGROUND = 0
    ASKED = 1
    LAST = 2

    @classmethod
    def of(cls, reason: str, *, is_last: bool) -> Urgency:
        if is_last:
            return cls.LAST
        return cls.BACKGROUND if reason == CADENCE else cls.ASKED


class Write(Protocol):
    """A state that will become a checkpoint."""

    @property
    def key(self) -> Key: ...
    @property
    def urgency(self) -> Urgency: ...
    @property
    def is_kept(self) -> bool:
        """Whether it is never dropped: the trainer leaves when it is durable."""


W = TypeVar("W", bound=Write)


class Superseded(SaveFailed):
    """A newer state is durable, or is written in place of this one."""


def sort_out(
    waiting: Sequence[W], durable: Key | None, *, patient: bool = False
) -> tuple[list[W], list[W]]:
    """The writes in order, and those that are dropped."""
    last = max((each.key for each in waiting if each.urgency is Urgency.LAST), default=None)
    newest = max((each.key for each in waiting), default=None)

    def is_dropped(write: W) -> bool:
        if write.is_kept:
            return False
        if durable is not None and write.key < durable:
            return True
        if last is not None and write.key < last:
            return not (patient and write.urgency is Urgency.ASKED)
        return write.urgency is Urgency.BACKGROUND and newest is not None and write.key < newest

    dropped = [each for each in waiting if is_dropped(each)]
    kept = [each for each in waiting if each not in dropped]
    return sorted(kept, key=lambda each: (each.key, -each.urgency)), dropped


def gives_way(
    under_way: Write,
    write: Write,
    *,
    elapsed_seconds: float,
    needed_seconds: float,
    left_seconds: float | None,
    patient: bool = False,
) -> bool:
    """Whether `write` begins at once, and the older one in progress is given up for it.

    `left_seconds` is the time until a kill, if there is a deadline.
    """
    if write.urgency is not Urgency.LAST or write.key <= under_way.key or under_way.is_kept:
        return False
    if patient and under_way.urgency is Urgency.ASKED:
        return False
    if left_seconds is None or needed_seconds <= left_seconds:
        return True
    # The newest state cannot be durable in time: the one in progress may be.
    return needed_seconds - elapsed_seconds > left_seconds


def expected_seconds(measured: float | None, elapsed: float) -> float:
    """How long a write takes: like the slowest recent one, or twice the time of the current one.

    `elapsed` is the time of a write in progress.
    """
    return max(measured or 2 * elapsed, elapsed)


class PublishOrder:
    """Checkpoints get their names, and are recorded, in the order of their states.

    Two writes may be in progress at once, and the older one may finish last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[str, Key] = {}

    @contextlib.contextmanager
    def take(self, what: str, key: Key) -> Iterator[None]:
        """Held while a checkpoint gets its `name`, or its `note` in the journal.

        Raises Superseded if a newer checkpoint came first. A checkpoint that has its name but no
        journal line is then durable too, because the newer one's folder flush covered both names.
        """
        with self._lock:
            if key < self._newest.get(what, key):
                raise Superseded("a newer step is durable")
            yield
            self._newest[what] = key

    def forget(self) -> None:
        """A rule has called the newest ones bad: older ones count again."""
        with self._lock:
            self._newest.clear()
