"""Snapshots: the state of one boundary, copied into a free slot.

The trainer never waits here unless it is told to: while an arena is being built
or every free slot is being read, there is simply no snapshot, and the next
boundary tries again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast._record.image import ImagePlan, encode_scalars, plan_image
from holdfast._save.arena import Arena, arena_bytes
from holdfast._save.backing import Backing, populate, reserve
from holdfast._save.capture import Captured, adapter_of

_BUILD_AT_ONCE_BYTES = 32 << 20
_MOST_IN_VAIN = 3


@dataclass(frozen=True)
class Taken:
    """A snapshot that is whole."""

    generation: int
    slot: int
    sequence: int
    mark: int
    seconds: float

    @property
    def step(self) -> int:
        return self.mark // 2


class _Generation:
    """An arena for one layout of the state, with the views that snapshots are copied into."""

    def __init__(self, arena: Arena, backing: Backing, plan: ImagePlan) -> None:
        self.arena = arena
        self.backing = backing
        self.plan = plan
        places: dict[str, list[int]] = {}
        for index, spec in enumerate(plan.specs):
            places.setdefault(spec.kind, []).append(index)
        self._indices = places
        self._targets = {
            (slot, kind): adapter_of(kind).destinations(
                arena.mapped,
                [(plan.specs[i], plan.offsets[i]) for i in indices],
                arena.slot_offset(slot),
            )
            for slot in range(arena.slots)
            for kind, indices in places.items()
        }

    def fill(self, slot: int, values: list[Any], scalars: bytes) -> None:
        for kind, indices in self._indices.items():
            adapter_of(kind).copy_all(self._targets[slot, kind], [values[i] for i in indices])
        start = self.arena.slot_offset(slot) + self.plan.scalars.offset
        capacity = self.plan.scalars.size_bytes
        self.arena.mapped[start : start + capacity] = scalars.ljust(capacity)

    def close(self) -> None:
        self._targets.clear()
        self.arena.close()


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
        common: Callable[[], int] = lambda: -1,
    ) -> None:
        self._run_id = run_id
        self._attempt = attempt
        self._rank = rank
        self._common = common  # the mark of the newest snapshot that all ranks hold
        self._announce = announce
        self._say = say
        self._current: _Generation | None = None
        self._building: threading.Thread | None = None
        self._built: _Generation | None = None
        self._number = 0
        self._sequence = 0
        self._in_vain = 0  # arenas in a row whose layout was gone before they were used
        self._promised: dict[int, int] = {}
        self.impossible = False  # there is no memory for slots: checkpoints only
        self.newest: Taken | None = None

    @property
    def slots(self) -> int:
        return self._current.arena.slots if self._current else 0

    @property
    def arena(self) -> tuple[Arena, Backing] | None:
        """The arena of the moment, for a keeper that starts late."""
        return (self._current.arena, self._current.backing) if self._current else None

    def take(
        self, captured: Captured, head: dict[str, Any], mark: int, *, patience_seconds: float = 0.0
    ) -> Taken | None:
        """Copy a captured state into a free slot; None if there is none within the patience."""
        began = time.perf_counter()
        deadline = time.monotonic() + patience_seconds
        scalars = encode_scalars({**head, "step": mark // 2, "tree": captured.tree})
        if not self._fits(self._current, captured, len(scalars)):
            if not self._renew(captured, len(scalars), deadline):
                return None
            began = time.perf_counter()  # building is paid once, copying each time
        generation = self._current
        assert generation is not None
        slot = generation.arena.begin(self._held(), self._common())
        while slot is None:
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.001)
            slot = generation.arena.begin(self._held(), self._common())
        try:
            generation.fill(slot, captured.values, scalars)
        except BaseException:
            generation.arena.abandon(slot)
            raise
        self._sequence += 1
        generation.arena.finish(slot, sequence=self._sequence, mark=mark)
        self.newest = Taken(
            generation=generation.arena.generation,
            slot=slot,
            sequence=self._sequence,
            mark=mark,
            seconds=time.perf_counter() - began,
        )
        return self.newest

    def void_from(self, step: int) -> None:
        """Hold nothing any more from this step on: the newest is then one before it."""
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
        """Leave this slot alone until `settle`: it is to become a checkpoint."""
        self._promised[taken.sequence] = taken.slot

    def settle(self, sequence: int) -> None:
        self._promised.pop(sequence, None)

    def close(self) -> None:
        """Let go of the memory; whoever removes the files has done so or will."""
        if self._building is not None:
            self._building.join()
        for generation in (self._current, self._built):
            if generation is not None:
                generation.close()
        if self._built is not None:
            self._built.backing.remove()
        self._current = self._built = None

    def _held(self) -> set[int]:
        return set(self._promised.values())

    def _renew(self, captured: Captured, scalars_bytes: int, deadline: float) -> bool:
        """Go over to a generation for this layout, building one first; False if not yet."""
        while not self.impossible:
            if self._building is None and not self._fits(self._built, captured, scalars_bytes):
                self._start_building(plan_image(captured.specs, scalars_bytes))
            if self._building is not None:
                self._building.join(max(0.0, deadline - time.monotonic()))
                if self._building.is_alive():
                    return False
                self._building = None
            if self._fits(self._built, captured, scalars_bytes):
                self._adopt()
                return True
        return False

    @staticmethod
    def _fits(generation: _Generation | None, captured: Captured, scalars_bytes: int) -> bool:
        return (
            generation is not None
            and scalars_bytes <= generation.plan.scalars.size_bytes
            and list(generation.plan.specs) == captured.specs
        )

    def _start_building(self, plan: ImagePlan) -> None:
        if self._built is not None:  # made for a layout that was gone before it was ready
            self._built.close()
            self._built.backing.remove()
            self._built = None
            self._in_vain += 1
            if self._in_vain >= _MOST_IN_VAIN:
                self._give_up("the state changes its tensors' names or sizes too often")
                return
        self._number += 1
        if 3 * plan.size_bytes <= _BUILD_AT_ONCE_BYTES:
            self._build(plan, self._number)
            return
        self._building = threading.Thread(
            target=self._build, args=(plan, self._number), name="holdfast-arena", daemon=True
        )
        self._building.start()

    def _build(self, plan: ImagePlan, number: int) -> None:
        for slots in (3, 2):
            size = arena_bytes(plan.size_bytes, len(plan.specs) + 2, slots)
            backing = reserve(self._run_id, self._attempt, number, size, self._rank)
            if backing is not None:
                break
        else:
            self._give_up(f"too little memory (two slots of {plan.size_bytes / 2**30:.2f} GB)")
            return
        try:
            self._built = self._format(backing, plan, number, slots)
        except Exception as error:  # noqa: BLE001  a thread's error would be lost, and tried again
            backing.remove()
            self._give_up(f"{type(error).__name__}: {error}")
            return
        if backing.path is None and self._current is None:
            self._say(
                "/dev/shm has no room for the snapshots, so they live in memory that goes with "
                "trainer and keeper: if both are killed, what is left is the last checkpoint."
            )
        if slots == 2:
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

    def _format(self, backing: Backing, plan: ImagePlan, number: int, slots: int) -> _Generation:
        arena = Arena.create(
            backing.descriptor,
            run_id=self._run_id,
            attempt=self._attempt,
            generation=number,
            slots=slots,
            plan=plan,
        )
        populate(arena.mapped)
        return _Generation(arena, backing, plan)

    def _adopt(self) -> None:
        former, self._current, self._built = self._current, self._built, None
        assert self._current is not None
        self._in_vain = 0
        self._promised.clear()
        self._announce(self._current.arena, self._current.backing)
        # The keeper has its own mapping of the former arena, and removes that file
        # when the first slot of this one is whole.
        if former is not None:
            former.close()
