"""Which slots of an arena have memory.

    at the start     one slot, so that the first snapshot comes soon; then the others
    usually          two: the newest whole one, which is never written to, and the other one
    during a write   a third if there is plenty: the keeper holds one, and one may be the newest

With several ranks there are always three: the newest one, the newest that all ranks have, and one
to write to. With fewer, a rank that is ahead of the others would wait for them. If two do not fit,
one slot is used. It is written over, and a kill during the copy leaves none.

Ranges of the image that the slots share have memory in slot 0 only. If a tensor in them
changes, all slots get memory of their own for them, in the background (`unshare`).

Slots get and lose their memory in one thread, one after another. A slot that does not have all its
memory is absent for every process (see _store/memory/arena.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from holdfast._store.commit.fault_points import fault_point
from holdfast._store.format.threads import start_thread
from holdfast._store.memory.arena import Arena
from holdfast._store.memory.backing import NO_ROOM, Backing, has_memory, has_plenty
from holdfast._store.memory.pages import (
    Piece,
    for_pieces,
    give_memory,
    pieces_of,
    take_memory,
    touch,
)

if TYPE_CHECKING:
    from holdfast.torch.device import Devices

_ASK_SECONDS = 1.0  # between two looks at the free memory
_COPY_BYTES = 32 << 20


class _Closed(Exception):
    """The arena is closed while a slot gets its memory."""


class SlotMemory:
    """Gives the slots of one arena their memory, and takes it back."""

    def __init__(
        self, arena: Arena, backing: Backing, header: bytes, usual: int, say: Callable[[str], None]
    ) -> None:
        self._arena = arena
        self._backing = backing
        self._header = header
        self._say = say
        self.usual = usual  # slots that are kept
        # A device that registers the memory of slots for its copies; set before a slot gets any.
        self.registry: Devices | None = None
        self._rest: Callable[[], object] | None = self._build_missing  # after the first snapshot
        self._thread: threading.Thread | None = None
        self._asked = 0.0
        self._is_closed = False
        self.is_changing = False  # the slots: none can be written to meanwhile

    @property
    def overwrites(self) -> bool:
        """True if the only slot is written over."""
        return self.usual == 1

    @property
    def is_at_work(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def build(self, slot: int) -> bool:
        """Give a slot its memory, in this thread; False if there is not enough."""
        arena = self._arena

        def has_memory(at: int, size_bytes: int) -> None:
            fault_point(f"slot-{slot}-half-built")
            self._register(slot, at, size_bytes)

        try:
            place = arena.slot_offset(slot), arena.slot_bytes
            shared = self._shared_of(slot)
            built = give_memory(arena.descriptor, arena.mapped, *place, has_memory, shared)
        except BaseException:
            if self.registry is not None:
                self.registry.forget(slot)
            raise
        if built:
            fault_point(f"slot-{slot}-built")
            arena.add(slot, self._header)
            fault_point(f"slot-{slot}-added")
        return built

    def build_rest(self) -> None:
        """Give the other usual slots their memory, in the background; only the first call does."""
        work, self._rest = self._rest, None
        if work is not None and (self._missing() or work != self._build_missing):
            # A device's copy would register the slot too, and training waits longer for two.
            self.is_changing = work != self._build_missing and self.registry is not None
            self._start(work)

    def take_over(self) -> None:
        """Use the slots as they are; touch and register them after the first snapshot.

        During the first step of an attempt a driver loads its kernels, and touching or registering
        memory meanwhile makes that step twice as long.
        """

        def work() -> None:
            try:
                for slot in self._arena.present():
                    place = self._arena.slot_offset(slot), self._arena.slot_bytes
                    pieces = pieces_of(*place, self._shared_of(slot))
                    register = functools.partial(self._register, slot)
                    for_pieces(pieces, lambda piece: touch(self._arena.mapped, *piece), register)
            finally:
                self.is_changing = False
            self._build_missing()

        self._rest = work

    def grow(self) -> None:
        """No slot is free during a write: add one, in the background, if there is plenty."""
        absent = [slot for slot in range(self._arena.slots) if slot not in self._arena.present()]
        now = time.monotonic()
        if self.usual != 2 or not absent or self.is_at_work or now < self._asked + _ASK_SECONDS:
            return
        self._asked = now
        if has_plenty(self._backing, self._arena.slot_bytes):
            self._start(lambda: self.build(absent[0]))

    def shrink(self, held: Collection[int]) -> None:
        """No write is in progress: give the memory of the third slot back, in the background."""
        if self.usual != 2 or len(self._arena.present()) <= 2 or self.is_at_work:
            return
        slot = self._arena.drop(held)
        if slot is not None:
            fault_point("slot-dropped")
            self._start(lambda: self._give_back(slot))

    def unshare(self) -> None:
        """A tensor in a shared range has changed: end the sharing, in the background."""
        if self.is_at_work:
            return  # the next boundary tries again
        self.is_changing = True
        self._start(self._unshare)

    def _unshare(self) -> None:
        arena = self._arena
        others = [slot for slot in arena.present() if slot != 0]
        try:
            for slot in others:
                while not arena.try_lock(slot):  # the keeper reads it
                    if self._is_closed:
                        raise _Closed
                    time.sleep(0.001)
            size_bytes = sum(size for _, size in arena.shared) * len(others)
            if not (has_memory(size_bytes) and all(self._copy_shared(slot) for slot in others)):
                for slot in others:
                    arena.remove(slot)
                    take_memory(arena.descriptor, arena.slot_offset(slot), arena.slot_bytes)
                self.usual = 1
                self._say(only_one("tensors change that did not change before, and memory allows"))
            fault_point("slots-copied")
            arena.share(())
            fault_point("slots-unshared")
            for slot in arena.present()[1:]:
                if self.registry is not None:
                    self.registry.forget(slot)  # the pieces had other edges
                for piece in pieces_of(arena.slot_offset(slot), arena.slot_bytes):
                    self._register(slot, *piece)
        finally:
            for slot in others:
                arena.unlock(slot)
            self.is_changing = False

    def _copy_shared(self, slot: int) -> bool:
        """Give a slot memory of its own for the shared ranges; False if there is no room.

        The slot still maps those of slot 0, so the bytes are written to the file.
        """
        arena, start = self._arena, self._arena.slot_offset(slot)
        source = arena.image(0)
        for first, size_bytes in arena.shared:
            try:
                os.posix_fallocate(arena.descriptor, start + first, size_bytes)
            except OSError as error:
                if error.errno in NO_ROOM:
                    return False
                raise
            for at in range(first, first + size_bytes, _COPY_BYTES):
                end = min(at + _COPY_BYTES, first + size_bytes)
                os.pwrite(arena.descriptor, source[at:end], start + at)
            fault_point("slots-half-copied")
        return True

    def _shared_of(self, slot: int) -> list[Piece]:
        """The ranges in the mapping for which a slot has no memory of its own."""
        start = self._arena.slot_offset(slot)
        return [(start + at, size) for at, size in self._arena.shared] if slot else []

    def close(self) -> None:
        self._is_closed = True
        if self._thread is not None:
            self._thread.join()

    def _missing(self) -> list[int]:
        absent = set(range(self._arena.slots)) - set(self._arena.present())
        return sorted(absent)[: max(0, self.usual - len(self._arena.present()))]

    def _register(self, slot: int, start: int, size_bytes: int) -> None:
        if self._is_closed:
            raise _Closed
        if self.registry is not None:
            self.registry.register(slot, start, size_bytes)

    def _build_missing(self) -> None:
        for slot in self._missing():
            why = "memory allows"
            try:
                # The training has grown since the memory was found to be enough.
                shared_bytes = sum(size for _, size in self._shared_of(slot))
                built = has_memory(self._arena.slot_bytes - shared_bytes) and self.build(slot)
            except _Closed:
                raise
            except Exception as error:  # noqa: BLE001  the training goes on with fewer
                built, why = False, f"a slot cannot be made ({error}), which leaves"
            if not built:
                self.usual = len(self._arena.present())
                if self.overwrites:
                    self._say(only_one(why))
                return

    def _give_back(self, slot: int) -> None:
        arena = self._arena
        if self.registry is not None:
            self.registry.forget(slot)
        taken = take_memory(arena.descriptor, arena.slot_offset(slot), arena.slot_bytes)
        fault_point("slot-given-back")
        if not taken:  # the system refuses: it keeps the slot
            arena.add(slot, self._header)
        arena.unlock(slot)

    def _start(self, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                with contextlib.suppress(_Closed):
                    work()
            except Exception as error:  # noqa: BLE001  a thread's error would be lost
                self._say(f"a slot for snapshots could not be made: {error}")

        if self._thread is not None:
            self._thread.join()
        self._thread = start_thread(run, name="holdfast-slots")
        if self._thread is None:  # no more threads: the trainer waits
            run()


def only_one(why: str) -> str:
    """What one slot means, after its cause."""
    return (
        f"{why} one snapshot in memory, not two: a kill while it is being replaced costs the work "
        "since the last checkpoint."
    )
