"""What the hub knows: of each rank, and of all that is on its way."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast._keeper.protocol import UNREACHABLE_SECONDS
from holdfast._keeper.ranks.ending import Cause, Ending
from holdfast._store.commit.write_queue import Key, Urgency

_PACE_SECONDS = 0.02  # between two looks that tell how quick a rank is


class Books(Protocol):
    """What the hub does outside of itself."""

    def begin(self, key: Key) -> str | None: ...
    def commit(self, key: Key, reason: str, files: dict[int, dict[str, Any]]) -> None: ...
    def note(self, event: str, **fields: Any) -> None: ...
    def set_aside_void(self) -> None: ...
    def write_seconds(self) -> float: ...
    def grace_of(self, number: int) -> float | None: ...
    def preemption_seconds(self) -> float | None: ...
    @property
    def has_job(self) -> bool: ...
    def settle(self, wish: Wish, then: Callable[[Wish], None]) -> None: ...
    def requeue(self, step: int | None, then: Callable[[str, int], None]) -> None: ...


@dataclass
class Seat:
    """What is known of one rank."""

    rank: int
    is_here: bool = False
    held: set[Key] = field(default_factory=set)
    ended: Cause | None = None  # its trainer is dead or has left
    released: bool = False  # its keeper may go
    lost_at: float | None = None
    past: int = -1  # what it has not saved up to this mark, it cannot save any more
    beat: dict[str, Any] = field(default_factory=dict)

    pace: tuple[float, int, float] = (0.0, 0, 0.0)  # when it was seen where, and marks a second

    @property
    def trains(self) -> bool:
        return self.is_here and self.ended is None

    def see(self, now: float, mark: int) -> None:
        """Note how far it has come."""
        when, seen, rate = self.pace
        if mark >= seen:  # also if it stands still: it may have been quick before
            if seen and now - when >= _PACE_SECONDS:
                rate = (mark - seen) / (now - when)
            self.pace = (now, mark, rate)

    def expected_at(self, when: float) -> float:
        """The mark that it will have reached."""
        then, mark, rate = self.pace
        return mark + rate * (when - then)


@dataclass
class Wish:
    """Something that all ranks are to do at one boundary."""

    kind: str  # "stop" or "save"
    reason: str
    status: int = 0
    signal: int = 0
    grace: float | None = None
    rank: int = 0


@dataclass
class Round:
    """One agreement on its way."""

    number: int
    wish: Wish
    began: float
    asked: set[int]
    marks: dict[int, int] = field(default_factory=dict)


@dataclass
class Commit:
    """One checkpoint on its way."""

    key: Key
    reason: str
    began: float
    number: int = 0  # of this try to write it
    is_writing: bool = False
    asked: set[int] = field(default_factory=set)  # those who know that it is to be written
    files: dict[int, dict[str, Any]] = field(default_factory=dict)
    is_closing: bool = False  # the manifest is being written
    partial: str = ""  # the folder that the parts go to
    is_last: bool = False  # only the newest state counts now
    is_ordered: bool = False  # by trainers, which keep its slot
    write_began: float = 0.0

    @property
    def urgency(self) -> Urgency:
        found = Urgency.of(self.reason, is_last=self.is_last)
        return max(found, Urgency.ASKED) if self.is_ordered else found

    @property
    def is_kept(self) -> bool:
        return self.is_closing


class Table:
    """The state that agreements, checkpoints and endings share."""

    def __init__(
        self,
        size: int,
        attempt: int,
        send: Callable[..., None],
        books: Books,
        clock: Callable[[], float] = time.monotonic,
        unreachable_seconds: float = UNREACHABLE_SECONDS,
    ) -> None:
        self._size = size
        self._attempt = attempt
        self._send = send
        self._books = books
        self._clock = clock
        self._unreachable_seconds = unreachable_seconds
        self.seats = {rank: Seat(rank) for rank in range(size)}
        self._round: Round | None = None
        self._rounds = int(clock() * 1000)  # a hub before this one had smaller ones
        self._waiting: list[Wish] = []
        self.stop: Wish | None = None
        self._decision: dict[str, Any] | None = None  # the newest
        self._insure_at: float | None = None
        self._kill_at: float | None = None  # when all may be killed
        self._plan: tuple[int, float] | None = None  # mark, and since when
        self._due_reason: str | None = None  # why the next snapshot is to be kept
        self._commits: dict[Key, Commit] = {}
        self._writes = self._rounds  # numbered in the same way
        self.common: Key | None = None
        self.durable: Key | None = None
        self.void_step: float = math.inf  # from which on a rule has called everything bad
        self._ending: Ending | None = None
        self._afterwards: dict[str, Any] | None = None  # what became of a requeue
        self._is_requeueing = False
        self.straggler: dict[str, Any] | None = None
        self.waits: dict[int, deque[float]] = {}  # of each rank, of late
        self._named: set[int] = set()
        self._dangers: dict[str, float] = {}  # when it was said that a host's memory gets full
        self.prints: dict[int, list[str]] = {}  # of each rank's first batches
        self.laps: dict[tuple[int, int], dict[int, int]] = {}  # (epoch, loop): batches of each rank

    def training_ranks(self) -> list[int]:
        return [rank for rank, seat in self.seats.items() if seat.trains]

    def _see(self, seat: Seat, mark: int) -> None:
        """A rank is known to have come so far."""
        raise NotImplementedError

    def _plan_ahead(self) -> None:
        """Set a snapshot for a boundary that no rank has reached yet."""
        raise NotImplementedError

    def _give_up_hopeless(self) -> None:
        """See whether checkpoints are on their way that can never be whole."""
        raise NotImplementedError

    def _those_who_go_on(self) -> list[int]:
        """Also those who are not here yet: a hub that was replaced must wait for them."""
        return [rank for rank, seat in self.seats.items() if seat.ended is None]

    def _is_void(self, key: Key) -> bool:
        return key[1] // 2 >= self.void_step

    def _is_durable(self, key: Key) -> bool:
        return self.durable is not None and key <= self.durable
