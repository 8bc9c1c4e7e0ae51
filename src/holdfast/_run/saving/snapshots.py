"""Snapshots: the state of one boundary, copied into a free slot.

The trainer waits only if `patience_seconds` says so. While the first slot is being built, a device
copies, or no slot is free, there is no snapshot, and the next boundary tries again. How many slots
there are is in slot_memory.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast._environment.processes.proc import FairDeadline
from holdfast._run.saving.arena_builder import ArenaBuilder, AsyncCopies, Generation, WaitingArena
from holdfast._state.capture import Captured
from holdfast._store.memory.arena import Arena
from holdfast._store.memory.backing import Backing

_HASHING_SECONDS = 5.0  # for which a snapshot waits until the one before it is hashed
_LINGER_SECONDS = 5.0  # for which a third slot stays after the last write
_LOOK_SECONDS = 0.02
_CLOSING_SECONDS = 5.0  # for a device that may never answer again


@dataclass(frozen=True)
class Taken:
    """A snapshot: whole, or in flight from a device."""

    generation: int
    slot: int
    sequence: int
    mark: int
    seconds: float  # the processor's part of the copy
    device_seconds: float = 0.0  # of the device's time
    is_hidden: bool = False  # the device had work meanwhile, so `seconds` cost training nothing
    ended: float = 0.0  # when the processor's part was done, by time.perf_counter()

    @property
    def step(self) -> int:
        return self.mark // 2


class Snapshots:
    def __init__(
        self,
        *,
        run_id: str,
        attempt: int,
        announce: Callable[[Arena, Backing], None],
        say: Callable[[str], None],
        rank: int = 0,
        folder: str = "",
        common: Callable[[], int] = lambda: -1,
        landed: Callable[[Taken, bool], None] = lambda *_: None,
        attend: Callable[[], None] = lambda: None,
        readers: Callable[[], list[int]] = list,
        most_bytes: int | None = None,
        has_peers: bool = False,
    ) -> None:
        self._has_peers = has_peers  # there are other ranks
        self._builder = ArenaBuilder(
            (run_id, attempt, rank), say, folder=folder, most_bytes=most_bytes, has_peers=has_peers
        )
        self._common = common  # the mark of the newest snapshot that all ranks hold
        self._announce = announce
        self._current: Generation | None = None
        self._sequence = 0
        self._promised: dict[int, int] = {}
        self._released_at = 0.0  # when the last write ended
        self._attend = attend  # called while waiting: replaces a keeper that died
        self._readers = readers  # pids of the processes that hold slots for a while
        self._landed = landed  # called with a copy of a device that has ended, and its success
        self._copies_in_flight = AsyncCopies(say)
        self.in_flight: Taken | None = None
        self._whole = threading.Lock()  # while a slot becomes whole, or void
        self.newest: Taken | None = None

    @property
    def arena(self) -> tuple[Arena, Backing] | None:
        """The current arena, for a keeper that starts later."""
        return (self._current.arena, self._current.backing) if self._current else None

    @property
    def impossible(self) -> bool:
        """True if there is no memory for slots: checkpoints only."""
        return self._builder.impossible

    def adopt(self, waiting: WaitingArena) -> None:
        """Use the arena of the previous attempt from the first snapshot on, if it fits."""
        self._builder.adopt(waiting)

    def take(
        self,
        captured: Captured,
        head: dict[str, Any],
        mark: int,
        *,
        patience_seconds: float = 0.0,
        is_counted: bool = False,
    ) -> Taken | None:
        """Copy a captured state into a free slot; None if there is none within the patience.

        `is_counted`: a checkpoint is due at this very step, so the last hashed slot may go.
        A copy by a device may still be `in_flight` when this returns.
        """
        began = time.perf_counter()
        deadline = FairDeadline(patience_seconds, self._readers)
        if not self._copies_in_flight.wait(deadline.at):
            return None
        scalars = captured.scalars({**head, "step": mark // 2})
        if self._current is None or not self._current.fits(captured, len(scalars)):
            built = self._builder.take(captured, len(scalars), deadline.at)
            if built is None:
                return None
            self._switch_to(built)
            began = time.perf_counter()  # an arena is built once: exclude it from the copy's time
        generation = self._current
        assert generation is not None
        self._give_third_back(generation)
        is_asked_for, looked = patience_seconds > 0, time.monotonic()
        keeps_hashed = not (is_asked_for or is_counted)
        while (slot := self._begin(generation, captured, keeps_hashed, is_asked_for)) is None:
            if deadline.is_over():
                return None
            if time.monotonic() - looked >= _LOOK_SECONDS:
                self._attend()  # the keeper may have died while it read a slot
                looked = time.monotonic()
            time.sleep(0.001)
        copy = None
        try:
            copy = generation.begin(slot, captured, careful=is_asked_for)
            generation.fill(slot, captured, scalars)
        except BaseException:
            if copy is None:
                generation.arena.abandon(slot)
            else:  # the device still writes there
                self._copies_in_flight.expect(copy, lambda _: generation.arena.abandon(slot))
            raise
        self._sequence += 1
        ended = time.perf_counter()
        costs = (ended - began, *generation.device_cost, ended)
        taken = Taken(generation.arena.generation, slot, self._sequence, mark, *costs)
        if copy is None:
            self._finish(generation, taken)
        else:
            self.in_flight = taken
            self._copies_in_flight.expect(copy, lambda good: self._land(generation, taken, good))
        return taken

    def _begin(
        self, generation: Generation, captured: Captured, keeps_hashed: bool, is_asked_for: bool
    ) -> int | None:
        if generation.memory.is_changing:
            return None
        slot = generation.arena.begin(
            self._held(),
            self._common(),
            keep_hashed=keeps_hashed and self._keeps_hashed(generation),
            overwrite=generation.memory.overwrites,
        )
        if slot is None:
            if self._promised:  # a write is in progress
                generation.memory.grow()
            if is_asked_for:
                generation.arena.want()
        elif generation.has_changed(slot, captured, careful=is_asked_for):
            generation.arena.abandon(slot)
            generation.memory.unshare()
            return None
        return slot

    def _give_third_back(self, generation: Generation) -> None:
        """If no write has been in progress for a while.

        Before a slot is chosen: while a device copies, all three may be needed.
        """
        if not self._promised and time.monotonic() >= self._released_at + _LINGER_SECONDS:
            generation.memory.shrink(self._held())

    def _keeps_hashed(self, generation: Generation) -> bool:
        """True if a snapshot is to wait until the newest one is hashed.

        So one of two or three slots is always hashed, and a state survives a kill of both
        processes. If the keeper gets no CPU time we stop waiting; otherwise a kill of the trainer
        would lose more and more work.
        """
        newest = generation.arena.newest()
        return (
            not generation.memory.overwrites
            and not self._has_peers
            and newest is not None
            and time.time() - newest.captured_at < _HASHING_SECONDS
        )

    def can_take(self, *, is_counted: bool = False) -> bool:
        """True if a snapshot can be taken now: else not even a capture is worth its time."""
        if self.is_busy or self._builder.is_building:
            return False
        generation = self._current
        if generation is None or self._builder.built is not None:
            return True
        if generation.memory.is_changing:
            return False
        self._give_third_back(generation)
        slot = generation.arena.lock_free(
            self._held(),
            self._common(),
            keep_hashed=not is_counted and self._keeps_hashed(generation),
            overwrite=generation.memory.overwrites,
        )
        if slot is not None:
            generation.arena.unlock(slot)
            return True
        if self._promised:
            generation.memory.grow()
        generation.arena.want_hashed()
        return False

    @property
    def is_busy(self) -> bool:
        """True while a device copies: another snapshot cannot begin."""
        return not self._copies_in_flight.is_free.is_set()

    def wait_for_copies(self, seconds: float) -> bool:
        return self._copies_in_flight.wait(time.monotonic() + seconds)

    @property
    def is_building(self) -> bool:
        if self._builder.is_building:
            return True
        found = [each for each in (self._current, self._builder.built) if each is not None]
        return any(each.memory.is_at_work for each in found)

    def hashed_at(self) -> float | None:
        """When the newest snapshot was hashed, by the monotonic clock; None if it is not."""
        newest, generation = self.newest, self._current
        if newest is None or generation is None or self.in_flight is not None:
            return None
        if newest.generation != generation.arena.generation:
            return None
        return generation.arena.hashed_at(newest.slot, newest.sequence)

    def _finish(self, generation: Generation, taken: Taken) -> None:
        generation.arena.finish(taken.slot, sequence=taken.sequence, mark=taken.mark)
        generation.finished(taken.slot)
        generation.memory.build_rest()
        self.newest = taken

    def _land(self, generation: Generation, taken: Taken, good: bool) -> None:
        """In the thread of the copies: the device has copied, or failed."""
        with self._whole:
            good = good and self.in_flight is taken  # else it has become void
            self.in_flight = None
            if good:
                self._finish(generation, taken)
            else:
                generation.arena.abandon(taken.slot)
                if generation.found_change:
                    generation.memory.unshare()
        self._landed(taken, good)

    def void_from(self, step: int) -> None:
        with self._whole:
            if self.in_flight is not None and self.in_flight.step >= step:
                self.in_flight = None
            if self._current is None:
                return
            arena = self._current.arena
            arena.void_from(step)
            record = arena.newest()
            self.newest = None
            if record is not None:
                place = (arena.generation, record.slot, record.sequence, record.mark)
                self.newest = Taken(*place, seconds=0.0)

    def promise(self, taken: Taken) -> None:
        """Keep this slot until `release_slot`: it is to become a checkpoint."""
        self._promised[taken.sequence] = taken.slot

    def release_slot(self, sequence: int) -> None:
        self._released_at = time.monotonic()
        self._promised.pop(sequence, None)

    def release_slots(self) -> None:
        self._promised.clear()

    def close(self) -> None:
        """Unmap the memory; the keeper removes the files."""
        self._builder.join()
        has_ended = self.wait_for_copies(_CLOSING_SECONDS)
        self._copies_in_flight.close()
        if not has_ended:  # the device may still write there: unmapped when the process ends
            return
        if self._current is not None:
            self._current.close()
            self._current = None
        self._builder.close()

    def _held(self) -> set[int]:
        return set(self._promised.values())

    def _switch_to(self, generation: Generation) -> None:
        former, self._current = self._current, generation
        self._promised.clear()
        self._announce(generation.arena, generation.backing)
        # The keeper maps the former arena itself, and removes its file when the first slot of
        # this one is whole.
        if former is not None:
            former.close()
