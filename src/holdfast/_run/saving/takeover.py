"""The arena of the previous attempt, which this one takes over instead of building its own.

Its slots are reserved and touched already. Until the first snapshot it stays a waiting
arena with the state that this attempt began from, guarded by its own process. So a kill before that
leaves it to the attempt after this one. The claim ends with a rename. A kill within it finds the
same state on disk: only an arena whose newest state is durable waits at all.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

from holdfast._store.format.image import ImagePlan
from holdfast._store.memory.arena import Arena
from holdfast._store.memory.backing import Backing, arena_path
from holdfast._store.memory.waiting import claim


class WaitingArena:
    """A waiting arena that this attempt has read its state from."""

    def __init__(
        self, arena: Arena, path: Path, plan: ImagePlan, attempt: int, slot: int = 0
    ) -> None:
        self.arena = arena
        self._slot = slot  # the verified one
        self.plan = plan  # of the verified slot
        self._path = path
        self._attempt = attempt
        self._taken = arena_path(arena.run_id, attempt, 1)
        self._is_free = False

    @property
    def backing(self) -> Backing:
        """As it will be once it is taken."""
        return Backing(self.arena.descriptor, self._taken)

    def free(self) -> None:
        """The state in it is not needed any more: the slots may be written to."""
        self._is_free = True

    def repair_headers(self) -> None:
        """Give every slot the header of the verified one: those of others are not verified."""
        for slot in self.arena.present():
            self.arena.image(slot)[: len(self.plan.header)] = self.plan.header

    def take(self) -> bool:
        """Make it the empty arena of this attempt; False if it is gone, or still read."""
        if not self._is_free:
            return False
        # The slot that was read is mapped into this process already.
        prepare = functools.partial(self.arena.take_over, self._attempt, self._slot)
        return claim(self.arena.descriptor, self._path, self._taken, prepare)

    def drop(self) -> None:
        """Remove it: it does not fit, or the run ends without it."""
        with contextlib.suppress(OSError):
            self._path.unlink()
