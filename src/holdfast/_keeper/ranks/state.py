"""What the parts of the hub share: the ranks, and the way to the run folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast._keeper.protocol import (
    FromHub,
)
from holdfast._store.commit.write_queue import Key

_PACE_SECONDS = 0.02  # between two observations that give a rank's speed


class HubServices(Protocol):
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
    def settle(self, wish: RankRequest, then: Callable[[RankRequest], None]) -> None: ...
    def requeue(self, step: int | None, then: Callable[[str, int], None]) -> None: ...


@dataclass
class EndCause:
    """How one rank ended, or why all do."""

    rank: int
    how: str
    kind: str
    host: str = ""
    status: int = 0

    def sentence(self) -> str:
        """For the last line of the other ranks."""
        if self.kind in ("asked", "hung"):
            return self.how
        where = f" on {self.host}" if self.host else ""
        return f"rank {self.rank}{where} {self.how}"


@dataclass
class Seat:
    """What is known of one rank."""

    rank: int
    is_here: bool = False
    held: set[Key] = field(default_factory=set)
    ended: EndCause | None = None  # its trainer is dead or has left
    released: bool = False  # its keeper may go
    lost_at: float | None = None
    past: int = -1  # up to this mark it cannot save any more what it has not saved
    beat: dict[str, Any] = field(default_factory=dict)

    pace: tuple[float, int, float] = (0.0, 0, 0.0)  # time, mark, and marks a second

    @property
    def trains(self) -> bool:
        return self.is_here and self.ended is None

    def see(self, now: float, mark: int) -> None:
        """Record how far it has come."""
        when, seen, rate = self.pace
        if mark >= seen:  # also if it stands still: it may have been fast before
            if seen and now - when >= _PACE_SECONDS:
                rate = (mark - seen) / (now - when)
            self.pace = (now, mark, rate)

    def expected_at(self, when: float) -> float:
        """The mark that it will have reached."""
        then, mark, rate = self.pace
        return mark + rate * (when - then)


@dataclass
class RankRequest:
    """A request that all ranks do something at one boundary."""

    kind: str  # "stop" or "save"
    reason: str
    status: int = 0
    signal: int = 0
    grace: float | None = None
    rank: int = 0


class HubState:
    """The ranks, and what the parts of the hub reach the outside with."""

    def __init__(
        self,
        size: int,
        attempt: int,
        send: Callable[[int, FromHub], None],
        services: HubServices,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = size
        self.attempt = attempt
        self.send = send
        self.services = services
        self.clock = clock
        self.seats = {rank: Seat(rank) for rank in range(size)}

    def send_all(self, message: FromHub) -> None:
        for rank in self.seats:
            self.send(rank, message)

    def training_ranks(self) -> list[int]:
        return [rank for rank, seat in self.seats.items() if seat.trains]

    def remaining_ranks(self) -> list[int]:
        """Also those that are not here yet: a hub that was replaced must wait for them."""
        return [rank for rank, seat in self.seats.items() if seat.ended is None]
