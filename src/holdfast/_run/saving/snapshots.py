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

from holdfast._adapters.registry import adapter_of
from holdfast._environment.processes.proc import FairDeadline
from holdfast._run.saving.slot_memory import SlotMemory, only_one
from holdfast._run.saving.slots import AsyncCopies, Generation, shareable
from holdfast._run.saving.takeover import WaitingArena
from holdfast._state.capture import Captured
from holdfast._store.format.image import ImagePlan, TensorSpec, plan_image
from holdfast._store.memory.arena import Arena, arena_bytes
from holdfast._store.memory.backing import Backing, reserve
from holdfast._text import size

_SMALL_BYTES = 32 << 20  # three slots that are built at once, and stay
_SMALL_TENSORS = 2000
_HASHING_SECONDS = 5.0  # for which a snapshot waits until the one before it is hashed
_LINGER_SECONDS = 5.0  # for which a third slot stays after the last write
_LOOK_SECONDS = 0.02
_CLOSING_SECONDS = 5.0  # for a device that may never answer again
_MOST_IN_VAIN = 3


@dataclass(frozen=True)
class Taken:
    """A snapshot: whole, or in flight from a device."""

    generation: int
    slot: int
    sequence: int
    mark: int
    seconds: float  # the processor's part of the copy
    device_seconds: float = 0.0  # for which it keeps a device from its work
    is_hidden: bool = False  # the device had work meanwhile, so `seconds` cost training nothing
    ended: float = 0.0  # when the processor's part was done, by time.perf_counter()

    @property
    def step(self) -> int:
        return self.mark // 2


class Snapshots:
    """Takes snapshots for one attempt of a run."""

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
        self._most_bytes = most_bytes  # that the slots may take
        self._has_peers = has_peers  # there are other ranks
        self._owner = (run_id, attempt, rank)
        self._folder = folder
        self._common = common  # the mark of the newest snapshot that all ranks hold
        self._announce = announce
        self._say = say
        self._current: Generation | None = None
        self._building: threading.Thread | None = None
        self._built: Generation | None = None
        self._waiting: WaitingArena | None = None  # of the previous attempt; see `adopt`
        self._frozen: list[int] = []  # tensors of the layout that probably never change
        self._number = 0
        self._sequence = 0
        self._in_vain = 0  # arenas in a row whose layout changed before they were used
        self._promised: dict[int, int] = {}
        self._settled_at = 0.0  # when the last write ended
        self._attend = attend  # called while waiting: replaces a keeper that died
        self._readers = readers  # pids of the processes that hold slots for a while
        self._landed = landed  # called with a copy of a device that has ended, and its success
        self._copies_in_flight = AsyncCopies(say)
        self._in_flight: Taken | None = None
        self._whole = threading.Lock()  # while a slot becomes whole, or void
        self.impossible = False  # there is no memory for slots: checkpoints only
        self.newest: Taken | None = None

    @property
    def arena(self) -> tuple[Arena, Backing] | None:
        """The current arena, for a keeper that starts later."""
        return (self._current.arena, self._current.backing) if self._current else None

    def adopt(self, waiting: WaitingArena) -> None:
        """Use the arena of the previous attempt from the first snapshot on, if it fits."""
        self._waiting = waiting
        self._number = 1
        try:
            waiting.repair_headers()
            self._built = self._take_over(waiting.arena, waiting.backing, waiting.plan)
        except Exception as error:  # noqa: BLE001  an arena of our own is built instead
            self._say(f"the memory of the previous attempt cannot be used: {error}")
            self._drop_waiting()

    def take(
        self, captured: Captured, head: dict[str, Any], mark: int, *, patience_seconds: float = 0.0
    ) -> Taken | None:
        """Copy a captured state into a free slot; None if there is none within the patience.

        A copy by a device may still be `in_flight` when this returns.
        """
        began = time.perf_counter()
        deadline = FairDeadline(patience_seconds, self._readers)
        if not self._copies_in_flight.wait(deadline.at):
            return None
        scalars = captured.scalars({**head, "step": mark // 2})
        if not self._fits(self._current, captured, len(scalars)):
            if not self._renew(captured, len(scalars), deadline.at):
                return None
            began = time.perf_counter()  # an arena is built once: exclude it from the copy's time
        generation = self._current
        assert generation is not None
        self._give_third_back(generation)
        is_asked_for = patience_seconds > 0
        slot = self._begin(generation, captured, is_asked_for=is_asked_for)
        looked = time.monotonic()
        while slot is None:
            if deadline.is_over():
                return None
            if time.monotonic() - looked >= _LOOK_SECONDS:
                self._attend()  # the keeper may have died while it read a slot
                looked = time.monotonic()
            time.sleep(0.001)
            slot = self._begin(generation, captured, is_asked_for=is_asked_for)
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
        taken = Taken(
            generation=generation.arena.generation,
            slot=slot,
            sequence=self._sequence,
            mark=mark,
            seconds=(ended := time.perf_counter()) - began,
            ended=ended,
            device_seconds=generation.device_seconds,
            is_hidden=generation.hides_the_processor,
        )
        if copy is None:
            self._finish(generation, taken)
        else:
            self._in_flight = taken
            self._copies_in_flight.expect(copy, lambda good: self._land(generation, taken, good))
        return taken

    def _begin(
        self, generation: Generation, captured: Captured, *, is_asked_for: bool
    ) -> int | None:
        if generation.memory.is_unsharing:
            return None
        slot = generation.arena.begin(
            self._held(),
            self._common(),
            keep_hashed=self._keeps_hashed(generation) and not is_asked_for,
            overwrite=generation.memory.overwrites,
        )
        if slot is None:
            self._grow(generation)
            if is_asked_for:
                generation.arena.want()
        elif generation.has_changed(slot, captured, careful=is_asked_for):
            generation.arena.abandon(slot)
            generation.memory.unshare()
            return None
        return slot

    def _grow(self, generation: Generation) -> None:
        if self._promised:  # a write is in progress
            generation.memory.grow()

    @property
    def _needs_no_third(self) -> bool:
        """True if no write has been in progress for a while."""
        return not self._promised and time.monotonic() >= self._settled_at + _LINGER_SECONDS

    def _give_third_back(self, generation: Generation) -> None:
        # Before a slot is chosen: while a device copies, all three may be needed.
        if self._needs_no_third:
            generation.memory.shrink(self._held())

    def _keeps_hashed(self, generation: Generation) -> bool:
        """True if a snapshot is to wait until the newest one is hashed.

        Of two slots one is then always hashed: also a kill of trainer and keeper leaves a state.
        The third slot is given back only between snapshots, so it is treated as gone before.
        A keeper that gets no processor is not waited for, since a kill of the trainer alone would
        cost more and more.
        """
        newest, memory = generation.arena.newest(), generation.memory
        return (
            (memory.is_double or (memory.usual == 2 and self._needs_no_third))
            and not self._has_peers
            and newest is not None
            and time.time() - newest.captured_at < _HASHING_SECONDS
        )

    @property
    def is_ready(self) -> bool:
        """True if a snapshot can be taken now: else not even a capture is worth its time."""
        if self.is_busy or (self._building is not None and self._building.is_alive()):
            return False
        generation = self._current
        if generation is None or self._built is not None:
            return True
        if generation.memory.is_unsharing:
            return False
        self._give_third_back(generation)
        has_free = generation.arena.has_free(
            self._held(),
            self._common(),
            keep_hashed=self._keeps_hashed(generation),
            overwrite=generation.memory.overwrites,
        )
        if not has_free:
            self._grow(generation)
        return has_free

    @property
    def in_flight(self) -> Taken | None:
        return self._in_flight

    @property
    def is_busy(self) -> bool:
        """True while a device copies: another snapshot cannot begin."""
        return not self._copies_in_flight.is_free

    def wait_for_copies(self, seconds: float) -> bool:
        return self._copies_in_flight.wait(time.monotonic() + seconds)

    @property
    def is_building(self) -> bool:
        """True while slots get their memory."""
        if self._building is not None and self._building.is_alive():
            return True
        found = [each for each in (self._current, self._built) if each is not None]
        return any(each.memory.is_at_work for each in found)

    def hashed_at(self) -> float | None:
        """When the newest snapshot was hashed, by the monotonic clock; None if it is not."""
        newest, generation = self.newest, self._current
        if newest is None or generation is None or self._in_flight is not None:
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
            good = good and self._in_flight is taken  # else it has become void
            self._in_flight = None
            if good:
                self._finish(generation, taken)
            else:
                generation.arena.abandon(taken.slot)
                if generation.found_change:
                    generation.memory.unshare()
        self._landed(taken, good)

    def void_from(self, step: int) -> None:
        """Drop all snapshots from this step on."""
        with self._whole:
            if self._in_flight is not None and self._in_flight.step >= step:
                self._in_flight = None
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
        """Keep this slot until `settle`: it is to become a checkpoint."""
        self._promised[taken.sequence] = taken.slot

    def settle(self, sequence: int) -> None:
        self._settled_at = time.monotonic()
        self._promised.pop(sequence, None)

    def settle_all(self) -> None:
        self._promised.clear()

    def close(self) -> None:
        """Unmap the memory; the keeper removes the files."""
        if self._building is not None:
            self._building.join()
        has_ended = self.wait_for_copies(_CLOSING_SECONDS)
        self._copies_in_flight.close()
        if not has_ended:  # the device may still write there: unmapped when the process ends
            return
        for generation in (self._current, self._built):
            if generation is not None:
                generation.close()
        if self._built is not None:
            self._built.backing.remove()
        self._current = self._built = None
        self._drop_waiting()

    def _held(self) -> set[int]:
        return set(self._promised.values())

    def _renew(self, captured: Captured, scalars_bytes: int, deadline: float) -> bool:
        """Switch to an arena for this layout, building it first; False if it is not ready."""
        while not self.impossible:
            if self._building is None and not self._fits(self._built, captured, scalars_bytes):
                self._frozen = [
                    index
                    for index, (spec, value) in enumerate(
                        zip(captured.specs, captured.values, strict=True)
                    )
                    if adapter_of(spec.kind).is_frozen(value)
                ]
                self._start_building(captured.specs, scalars_bytes)
            if self._building is not None:
                self._building.join(max(0.0, deadline - time.monotonic()))
                if self._building.is_alive():
                    return False
                self._building = None
            if self._fits(self._built, captured, scalars_bytes) and self._claim():
                self._adopt()
                return True
        return False

    def _claim(self) -> bool:
        """False if what was built is the arena of the previous attempt, and that is gone."""
        if self._waiting is None or self._waiting.take():
            self._waiting = None
            return True
        self._drop_waiting()
        return False

    def _drop_waiting(self) -> None:
        """Do without the arena of the previous attempt."""
        if self._waiting is not None:
            self._waiting.drop()
            self._waiting = None
            if self._built is not None:
                self._built.close()
                self._built = None

    @staticmethod
    def _fits(generation: Generation | None, captured: Captured, scalars_bytes: int) -> bool:
        return generation is not None and generation.fits(captured, scalars_bytes)

    def _start_building(self, specs: list[TensorSpec], scalars_bytes: int) -> None:
        self._drop_waiting()
        if self._built is not None:  # its layout changed before it was ready
            self._built.close()
            self._built.backing.remove()
            self._built = None
            self._in_vain += 1
            if self._in_vain >= _MOST_IN_VAIN:
                self._give_up("the state changes its tensors' names or sizes too often")
                return
        self._number += 1
        if self._is_small(specs, scalars_bytes):
            self._build(specs, scalars_bytes, self._number)
            return
        self._building = threading.Thread(
            target=self._build,
            args=(specs, scalars_bytes, self._number),
            name="holdfast-arena",
            daemon=True,
        )
        self._building.start()

    @staticmethod
    def _is_small(specs: list[TensorSpec], scalars_bytes: int) -> bool:
        size_bytes = sum(spec.size_bytes for spec in specs) + scalars_bytes
        return 3 * size_bytes <= _SMALL_BYTES and len(specs) <= _SMALL_TENSORS

    def _build(self, specs: list[TensorSpec], scalars_bytes: int, number: int) -> None:
        run_id, attempt, rank = self._owner
        plan = plan_image(specs, scalars_bytes)
        bytes_of = [arena_bytes(plan.size_bytes, len(specs) + 2, slots) for slots in range(4)]
        most = float("inf") if self._most_bytes is None else self._most_bytes
        allowed = max((slots for slots in (1, 2, 3) if bytes_of[slots] <= most), default=0)
        is_small = self._is_small(specs, scalars_bytes)
        frozen = [] if is_small else self._frozen
        shared_bytes = sum(size for _, size in shareable(plan, frozen))
        wanted = 3 if self._has_peers or is_small else 2
        least = 2 if self._has_peers else 1
        if allowed < least:
            self._give_up(f"memory={size(most)} is too little ({_slots_of(least, plan)})")
            return
        for usual in range(min(wanted, allowed), least - 1, -1):
            # The file has a place for a third slot, which gets memory during a write.
            slots = allowed if usual == wanted else usual
            try:
                backing = reserve(
                    run_id,
                    attempt,
                    number,
                    bytes_of[usual] - (usual - 1) * shared_bytes,
                    rank,
                    now_bytes=arena_bytes(0, len(specs) + 2, slots),
                    file_bytes=bytes_of[slots],
                )
            except OSError as error:
                self._give_up(f"the system refuses the memory for them ({error.strerror})")
                return
            if backing is not None:
                break
        else:
            self._give_up(f"too little memory ({_slots_of(least, plan)})")
            return
        try:
            self._built = self._format(
                backing, plan, number, slots, usual, frozen, is_small=is_small
            )
        except Exception as error:  # noqa: BLE001  a thread's error would be lost
            backing.remove()
            self._give_up(f"{type(error).__name__}: {error}")
            return
        if self._built is None:
            backing.remove()
            self._give_up(f"too little memory ({_slots_of(least, plan)})")
            return
        if backing.path is None and self._current is None:
            self._say(
                f"{backing.why_not_shm}, so the snapshots are in memory that ends with trainer "
                "and keeper: if both are killed, only the last checkpoint is left."
            )
        if usual == 1:
            self._say(only_one(f"memory={size(most)} allows" if allowed == 1 else "memory allows"))
        elif usual < wanted:
            self._say(
                "memory allows two snapshot slots, not three: while a checkpoint is being written "
                "no newer snapshot is taken."
            )

    def _give_up(self, why: str) -> None:
        self.impossible = True
        self._say(
            f"no snapshots in memory: {why}. Only checkpoints on disk are kept, and each holds up "
            "training while it is written."
        )

    def _format(
        self,
        backing: Backing,
        plan: ImagePlan,
        number: int,
        slots: int,
        usual: int,
        frozen: list[int],
        *,
        is_small: bool,
    ) -> Generation | None:
        """An arena with one slot, or those that must be there; None if there is no room."""
        run_id, attempt, _ = self._owner
        arena = Arena.create(
            backing.descriptor,
            run_id=run_id,
            attempt=attempt,
            generation=number,
            slots=slots,
            plan=plan,
            folder=self._folder,
            present=0,
        )
        memory = SlotMemory(arena, backing, plan.header, usual, self._say)
        generation = Generation(arena, backing, plan, memory)
        generation.share(frozen)
        # A rank needs two: it may not write over the one that all ranks have.
        first = usual if is_small else 2 if self._has_peers else 1
        if not all(memory.build(slot) for slot in range(first)):
            generation.close()
            return None
        return generation

    def _take_over(self, arena: Arena, backing: Backing, plan: ImagePlan) -> Generation:
        """A generation in the arena of an earlier attempt: slots without memory get it."""
        is_small = self._is_small(list(plan.specs), plan.scalars.size_bytes)
        usual = min(arena.slots, 3 if self._has_peers or is_small else 2)
        memory = SlotMemory(arena, backing, plan.header, usual, self._say)
        generation = Generation(arena, backing, plan, memory)
        memory.take_over()
        return generation

    def _adopt(self) -> None:
        former, self._current, self._built = self._current, self._built, None
        assert self._current is not None
        self._in_vain = 0
        self._promised.clear()
        self._announce(self._current.arena, self._current.backing)
        # The keeper maps the former arena itself, and removes its file when the first slot of
        # this one is whole.
        if former is not None:
            former.close()


def _slots_of(number: int, plan: ImagePlan) -> str:
    slots = "two slots" if number == 2 else "one slot"
    return f"{slots} of {size(plan.size_bytes)}"
