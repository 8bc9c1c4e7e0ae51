"""Builds the arenas of an attempt: one for each layout of its state.

A small one is built at once, a large one in the background. How many slots it has depends on the
free memory and on `Settings(memory=…)`. The arena of the previous attempt is used instead if it is
still there and fits.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from holdfast._adapters.registry import adapter_of
from holdfast._run.saving.slot_memory import SlotMemory, only_one
from holdfast._run.saving.slots import Generation, shareable
from holdfast._state.capture import Captured
from holdfast._store.format.image import ImagePlan, TensorSpec, plan_image
from holdfast._store.memory.arena import Arena, arena_bytes
from holdfast._store.memory.backing import Backing, arena_path, reserve
from holdfast._store.memory.waiting import claim
from holdfast._text import size

_SMALL_BYTES = 32 << 20  # three slots that are built at once, and stay
_SMALL_TENSORS = 2000
_MOST_IN_VAIN = 3


@dataclass(eq=False)
class ArenaBuilder:
    """Builds one arena at a time, and holds it until it is taken."""

    _owner: tuple[str, int, int]  # run, attempt and rank
    _say: Callable[[str], None]
    folder: str = ""
    most_bytes: int | None = None  # that the slots may take
    has_peers: bool = False  # there are other ranks
    impossible: bool = False  # there is no memory for slots: checkpoints only
    built: Generation | None = None  # and not taken yet
    _thread: threading.Thread | None = None
    _waiting: WaitingArena | None = None  # of the previous attempt; see `adopt`
    _frozen: Collection[int] = ()  # tensors of the layout that probably never change
    _number: int = 0
    _in_vain: int = 0  # arenas in a row whose layout changed before they were used
    _has_built: bool = False

    @property
    def is_building(self) -> bool:
        """True while the first slot of an arena gets its memory."""
        return self._thread is not None and self._thread.is_alive()

    def adopt(self, waiting: WaitingArena) -> None:
        """Use the arena of the previous attempt from the first snapshot on, if it fits."""
        self._waiting = waiting
        self._number = 1
        try:
            waiting.repair_headers()
            self.built = self._take_over(waiting.arena, waiting.backing, waiting.plan)
        except Exception as error:  # noqa: BLE001  an arena of our own is built instead
            self._say(f"the memory of the previous attempt cannot be used: {error}")
            self._drop_waiting()

    def take(self, captured: Captured, scalars_bytes: int, deadline: float) -> Generation | None:
        """An arena for this layout, building it first; None if it is not ready by then."""
        while not self.impossible:
            if self._thread is None and not self._fits(captured, scalars_bytes):
                pairs = enumerate(zip(captured.specs, captured.values, strict=True))
                self._frozen = [
                    index
                    for index, (spec, value) in pairs
                    if adapter_of(spec.kind).is_frozen(value)
                ]
                self._start_building(captured.specs, scalars_bytes)
            if self._thread is not None:
                self._thread.join(max(0.0, deadline - time.monotonic()))
                if self._thread.is_alive():
                    return None
                self._thread = None
            if not self._fits(captured, scalars_bytes):
                continue
            if self._waiting is None or self._waiting.take():
                self._waiting, self._in_vain = None, 0
                found, self.built = self.built, None
                return found
            self._drop_waiting()  # it is gone, or still read
        return None

    def close(self) -> None:
        """Wait for the thread, and remove an arena that was not taken."""
        self.join()
        self._remove_built()
        self._drop_waiting()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _remove_built(self) -> bool:
        built, self.built = self.built, None
        if built is not None:
            built.close()
            built.backing.remove()
        return built is not None

    def _drop_waiting(self) -> None:
        """Do without the arena of the previous attempt: it does not fit, or the run ends."""
        if self._waiting is not None:
            with contextlib.suppress(OSError):
                self._waiting.path.unlink()
            self._waiting = None
            if self.built is not None:
                self.built.close()
                self.built = None

    def _fits(self, captured: Captured, scalars_bytes: int) -> bool:
        return self.built is not None and self.built.fits(captured, scalars_bytes)

    def _start_building(self, specs: list[TensorSpec], scalars_bytes: int) -> None:
        self._drop_waiting()
        if self._remove_built():  # its layout changed before it was ready
            self._in_vain += 1
            if self._in_vain >= _MOST_IN_VAIN:
                self._give_up("the state changes its tensors' names or sizes too often")
                return
        self._number += 1
        what = (specs, scalars_bytes, self._number)
        if _is_small(specs, scalars_bytes):
            self._build(*what)
            return
        self._thread = threading.Thread(
            target=self._build, args=what, name="holdfast-arena", daemon=True
        )
        self._thread.start()

    def _build(self, specs: list[TensorSpec], scalars_bytes: int, number: int) -> None:
        run_id, attempt, rank = self._owner
        plan = plan_image(specs, scalars_bytes)
        bytes_of = [arena_bytes(plan.size_bytes, len(specs) + 2, slots) for slots in range(4)]
        most = float("inf") if self.most_bytes is None else self.most_bytes
        allowed = max((slots for slots in (1, 2, 3) if bytes_of[slots] <= most), default=0)
        is_small = _is_small(specs, scalars_bytes)
        frozen = () if is_small else self._frozen
        shared_bytes = sum(size for _, size in shareable(plan, frozen))
        wanted = 3 if self.has_peers or is_small else 2
        least = 2 if self.has_peers else 1
        slots_of = "two slots" if least == 2 else "one slot"
        needed = f"{slots_of} of {size(plan.size_bytes)}"
        too_little = f"too little memory ({needed})"
        if allowed < least:
            self._give_up(f"memory={size(most)} is too little ({needed})")
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
            self._give_up(too_little)
            return
        try:
            self.built = self._format(
                backing, plan, number, slots, usual, frozen, is_small=is_small
            )
        except Exception as error:  # noqa: BLE001  a thread's error would be lost
            backing.remove()
            self._give_up(f"{type(error).__name__}: {error}")
            return
        if self.built is None:
            backing.remove()
            self._give_up(too_little)
            return
        if backing.path is None and not self._has_built:
            self._say(
                f"{backing.why_not_shm}, so the snapshots are in memory that ends with trainer "
                "and keeper: if both are killed, only the last checkpoint is left."
            )
        self._has_built = True
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
        frozen: Collection[int],
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
            folder=self.folder,
            present=0,
        )
        memory = SlotMemory(arena, backing, plan.header, usual, self._say)
        generation = Generation(arena, backing, plan, memory)
        generation.share(frozen)
        # A rank needs two: it may not write over the one that all ranks have.
        first = usual if is_small else 2 if self.has_peers else 1
        if not all(memory.build(slot) for slot in range(first)):
            generation.close()
            return None
        return generation

    def _take_over(self, arena: Arena, backing: Backing, plan: ImagePlan) -> Generation:
        """A generation in the arena of an earlier attempt: slots without memory get it."""
        is_small = _is_small(list(plan.specs), plan.scalars.size_bytes)
        usual = min(arena.slots, 3 if self.has_peers or is_small else 2)
        memory = SlotMemory(arena, backing, plan.header, usual, self._say)
        generation = Generation(arena, backing, plan, memory)
        memory.take_over()
        return generation


def _is_small(specs: list[TensorSpec], scalars_bytes: int) -> bool:
    size_bytes = sum(spec.size_bytes for spec in specs) + scalars_bytes
    return 3 * size_bytes <= _SMALL_BYTES and len(specs) <= _SMALL_TENSORS


# -- The arena of the previous attempt, which this one takes over instead of building its own ------
# Its slots are reserved and touched already. Until the first snapshot it stays a waiting arena with
# the state that this attempt began from, guarded by its own process. So a kill before that leaves
# it to the attempt after this one. The claim ends with a rename. A kill within it finds the same
# state on disk: only an arena whose newest state is durable waits at all.


@dataclass(eq=False)
class WaitingArena:
    """A waiting arena that this attempt has read its state from."""

    arena: Arena
    path: Path
    plan: ImagePlan  # of the verified slot
    attempt: int
    slot: int = 0  # the verified one
    is_free: bool = False  # the state in it is not needed any more: its slots may be written to

    @property
    def backing(self) -> Backing:
        """As it will be once it is taken."""
        return Backing(self.arena.descriptor, arena_path(self.arena.run_id, self.attempt, 1))

    def repair_headers(self) -> None:
        """Give every slot the header of the verified one: those of others are not verified."""
        for slot in self.arena.present():
            self.arena.image(slot)[: len(self.plan.header)] = self.plan.header

    def take(self) -> bool:
        """Make it the empty arena of this attempt; False if it is gone, or still read."""
        if not self.is_free:
            return False
        # The slot that was read is mapped into this process already.
        prepare = functools.partial(self.arena.take_over, self.attempt, self.slot)
        return claim(
            self.arena.descriptor,
            self.path,
            arena_path(self.arena.run_id, self.attempt, 1),
            prepare,
        )
