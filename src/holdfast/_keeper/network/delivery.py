"""What one keeper has told another and heard from it: each message once, and in order.

A message has a number, counted from 1 by its sender for this receiver. The sender keeps it until
its receipt is acknowledged; the receiver remembers the last number it has had, and drops what
comes again. So both may say everything twice, over connections and by mail, and nothing is lost
or doubled. A keeper that takes another's place has a new life: it counts anew, and gets what the
former life had not acknowledged.
"""

from __future__ import annotations

import os
import re
import time

LIFE = re.compile(r"[0-9a-f]{24}")


def new_life() -> str:
    """A name for one life of a keeper; as text, a later one is greater."""
    return f"{time.time_ns():016x}{os.urandom(4).hex()}"


class Ledger:
    """The messages between this life of ours and one other rank's keeper."""

    def __init__(self, life: str) -> None:
        self.life = life
        self.peer_life: str | None = None
        self.first = 1  # the oldest that is not acknowledged
        self.next = 1  # the number of the next message
        self._kept: dict[int, bytes] = {}
        self._had: dict[str, int] = {}  # by life of the other
        self._replaced: set[str] = set()

    # -- what we say -------------------------------------------------------------

    def post(self, message: bytes) -> None:
        self._kept[self.next] = message
        self.next += 1

    def kept(self, number: int) -> bytes:
        return self._kept[number]

    def acknowledged(self, number: int) -> None:
        """The other has had all up to `number`."""
        while self.first <= number and self.first < self.next:
            del self._kept[self.first]
            self.first += 1

    # -- what we hear ------------------------------------------------------------

    def had(self, life: str | None) -> int:
        """The last number that we have had of this life of the other."""
        return 0 if life is None else self._had.get(life, 0)

    def take(self, life: str, number: int) -> bool:
        """Note that `number` has come; False if we have had it.

        A connection may leave out numbers, and mail must not: the sender says everything in
        order on each connection, from the oldest that nobody has acknowledged.
        """
        if number <= self.had(life):
            return False
        self._had[life] = number
        return True

    # -- whose place the other has taken -----------------------------------------

    def was_replaced(self, life: str) -> bool:
        return life in self._replaced

    def meet(self, life: str) -> bool:
        """A connection says which life is at its other end; False if a later one was here.

        Without that, a host that was given up and comes back would push out its successor.
        """
        if life in self._replaced:
            return False
        if self.peer_life not in (None, life):
            assert self.peer_life is not None
            self._replaced.add(self.peer_life)
        self.peer_life = life
        return True

    def meet_by_mail(self, life: str) -> None:
        """A letter names a life: it counts if it began later, as far as clocks can tell.

        It does not replace the one we know for good, since letters of the dead lie about.
        """
        if life not in self._replaced and (self.peer_life is None or life > self.peer_life):
            self.peer_life = life
