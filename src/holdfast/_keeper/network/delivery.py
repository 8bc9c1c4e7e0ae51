"""Delivery between two keepers: each message once, and in order.

The sender numbers its messages for one receiver from 1 and keeps each until it is acknowledged. The
receiver remembers the last number and drops what comes again. So both may send everything twice,
over connections and by mail, and nothing is lost or doubled. A keeper that replaces another has a
new life: it counts from 1 again, and gets what the former life had not acknowledged.
"""

from __future__ import annotations

import os
import re
import time

LIFE = re.compile(r"[0-9a-f]{24}")


def new_life() -> str:
    """An id for one keeper process; a later one sorts after it."""
    return f"{time.time_ns():016x}{os.urandom(4).hex()}"


class Ledger:
    """The messages between this keeper and that of one other rank."""

    def __init__(self, life: str) -> None:
        self.life = life
        self.peer_life: str | None = None
        self.first = 1  # the oldest that is not acknowledged
        self.next = 1  # the number of the next message
        self._kept: dict[int, bytes] = {}
        self._had: dict[str, int] = {}  # the last number, by life of the other
        self._replaced: set[str] = set()

    # -- sent --------------------------------------------------------------------

    def post(self, message: bytes) -> None:
        self._kept[self.next] = message
        self.next += 1

    def kept(self, number: int) -> bytes:
        return self._kept[number]

    def acknowledged(self, number: int) -> None:
        """The other end has received all up to `number`."""
        while self.first <= number and self.first < self.next:
            del self._kept[self.first]
            self.first += 1

    # -- received ----------------------------------------------------------------

    def had(self, life: str | None) -> int:
        """The last number received from this life of the other end."""
        return 0 if life is None else self._had.get(life, 0)

    def take(self, life: str, number: int) -> bool:
        """Record that `number` has arrived; False if it had already.

        A connection may skip numbers, mail must not: on each connection the sender repeats
        everything in order, from the oldest that is not acknowledged.
        """
        if number <= self.had(life):
            return False
        self._had[life] = number
        return True

    # -- replacements ------------------------------------------------------------

    def was_replaced(self, life: str) -> bool:
        return life in self._replaced

    def meet(self, life: str) -> bool:
        """A connection names the life at its other end; False if a later one has replaced it.

        Else a host that was given up and comes back would replace its successor.
        """
        if life in self._replaced:
            return False
        if self.peer_life not in (None, life):
            assert self.peer_life is not None
            self._replaced.add(self.peer_life)
        self.peer_life = life
        return True

    def meet_by_mail(self, life: str) -> None:
        """A letter names a life: it counts if it began later, by the clocks.

        It does not replace the known one for good: letters of dead keepers may remain.
        """
        if life not in self._replaced and (self.peer_life is None or life > self.peer_life):
            self.peer_life = life
