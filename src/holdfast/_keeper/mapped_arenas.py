"""Arenas that the keeper has mapped, and the hashing of their slots."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from pathlib import Path

from holdfast._errors import SaveFailed
from holdfast._store.commit.chunks import QUIET
from holdfast._store.commit.source import Hashing, KnownDigests, Ranges, Source
from holdfast._store.format.checksum import digest
from holdfast._store.format.image import PAGE, header_bytes, read_extents
from holdfast._store.memory.arena import Arena, NotAnArena, SlotRecord


class HeldArena:
    """An arena of some attempt, shared by the keeper's threads.

    The slot lock belongs to the process, so threads that read the same slot
    are counted here, and the last one unlocks it.
    """

    def __init__(self, arena: Arena, path: str | None) -> None:
        self.arena = arena
        self.path = Path(path) if path else None
        self._readers: dict[int, int] = {}
        self._guard = threading.Lock()
        self._hashing = threading.Lock()
        self._hashings: dict[tuple[int, int], Hashing] = {}  # by slot and sequence
        self._ranges: tuple[bytes, Ranges] | None = None  # by the checksum of the header
        self._retired = False

    def pin(self, record: SlotRecord) -> bool:
        """Lock a slot against the trainer; False if it holds another snapshot by now."""
        slot = record.slot
        with self._guard:
            if self._retired:
                return False
            if not self._readers.get(slot) and not self.arena.try_lock(slot):
                return False
            self.arena.sync_shared()  # nothing is unshared while one of these slots is locked
            same = any(r.slot == slot and r.sequence == record.sequence for r in self.arena.whole())
            if same:
                self._readers[slot] = self._readers.get(slot, 0) + 1
            elif not self._readers.get(slot):
                self.arena.unlock(slot)
            return same

    def unpin(self, slot: int) -> None:
        with self._guard:
            self._readers[slot] -= 1
            if not self._readers[slot]:
                self.arena.unlock(slot)
            self._close_if_idle()

    def ranges(self, record: SlotRecord) -> Ranges:
        """The offsets in a pinned slot; ValueError if its header is damaged."""
        image = self.arena.image(record.slot)
        length = header_bytes(image)
        if not PAGE <= length <= self.arena.slot_bytes:
            raise ValueError("the header's length is out of range")
        with self._hashing:
            # The header is the same in all slots, and slow to parse for a large state.
            seen = digest(image[:length])
            if self._ranges is None or self._ranges[0] != seen:
                extents = read_extents(bytes(image[:length]))
                end = extents[-1].offset + extents[-1].size_bytes
                if end != self.arena.slot_bytes or len(extents) != self.arena.ranges:
                    raise ValueError("the header does not fit the slot")
                self._ranges = (seen, Ranges.of(extents))
            return self._ranges[1]

    def source(self, record: SlotRecord) -> Source:
        """A pinned slot, with the checksums that are known already or are being computed."""
        ranges = self.ranges(record)
        with self._hashing:
            key = (record.slot, record.sequence)
            hashing = self._hashings.get(key)
            if hashing is None or hashing.has_failed:
                source = Source([self.arena.image(record.slot)], ranges)
                if any(r.sequence == record.sequence and r.is_hashed for r in self.arena.whole()):
                    source.hashing = KnownDigests(self.arena.digests(record.slot))
                source.hashing.then = functools.partial(self.arena.set_digests, *key)
                # The checksums of the snapshot that was in this slot before are not needed.
                kept = {k: h for k, h in self._hashings.items() if k[0] != record.slot}
                self._hashings = {**kept, key: source.hashing}
                return source
            return Source([self.arena.image(record.slot)], ranges, hashing)

    def digests(self, record: SlotRecord) -> list[bytes]:
        """The checksums of a pinned slot, computed once."""
        hashing = self.source(record).hashing
        hashing.work()
        return hashing.digests()

    def hash_until_wanted(self, record: SlotRecord) -> None:
        """Hash a pinned slot, or leave the rest if the trainer waits for the slot."""
        hashing = self.source(record).hashing
        hashing.work(until=lambda: self.arena.is_wanted(record.slot))
        if hashing.is_done:
            hashing.finish()  # raises what went wrong

    def whole(self) -> list[SlotRecord]:
        with self._guard:
            return [] if self._retired else self.arena.whole()

    def void_from(self, step: int) -> None:
        with self._guard:
            if not self._retired:
                self.arena.void_from(step)

    def wait_until(self, at: float) -> bool:
        """Offer it to the next attempt; False if it is unmapped."""
        with self._guard:
            if not self._retired:
                self.arena.wait_until(at)
            return not self._retired

    def find(self, sequence: int) -> SlotRecord | None:
        return next((r for r in self.arena.whole() if r.sequence == sequence), None)

    def retire(self, *, remove: bool = True) -> None:
        """Unmap the arena when the last reader is done, and remove its file now."""
        if remove and self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
        with self._guard:
            self._retired = True
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._retired and not any(self._readers.values()) and self.arena.descriptor >= 0:
            self._hashings.clear()  # they hold views of it
            self.arena.close()


class Holdings:
    """All mapped arenas of a keeper: those of its attempt, and those it salvages."""

    def __init__(self, attempt: int) -> None:
        self._attempt = attempt
        self._own: dict[int, HeldArena] = {}  # by generation
        self._salvaged: list[HeldArena] = []
        self._lock = threading.Lock()

    def hold(self, descriptor: int, path: str | None) -> HeldArena | None:
        """Map an arena from its descriptor; None if it is invalid."""
        try:
            held = HeldArena(Arena(descriptor), path)
        except NotAnArena as error:
            print(f"refused an arena: {error}", flush=True)
            os.close(descriptor)
            return None
        with self._lock:
            if held.arena.attempt == self._attempt:
                self._own[held.arena.generation] = held
        return held

    def salvage(self, held: HeldArena) -> None:
        """An arena of an earlier attempt is being written; it is removed afterwards."""
        with self._lock:
            self._salvaged.append(held)

    @property
    def salvages(self) -> bool:
        """True while an arena of an earlier attempt is being written."""
        return bool(self._salvaged)

    def of(self, generation: int) -> HeldArena | None:
        return self._own.get(generation)

    def drop_before(self, generation: int) -> None:
        """A newer generation holds a whole slot: unmap the older ones."""
        with self._lock:
            for number in [number for number in self._own if number < generation]:
                self._own.pop(number).retire()

    def newest(self, up_to: float = math.inf) -> tuple[HeldArena, SlotRecord] | None:
        """The newest whole slot of this attempt, of those up to a sequence number."""
        with self._lock:
            found = [(held, record) for held in self._own.values() for record in held.whole()]
        known = [pair for pair in found if pair[1].sequence <= up_to]
        return max(known, key=lambda pair: pair[1].sequence, default=None)

    def at(self, attempt: int, mark: int) -> tuple[HeldArena, SlotRecord] | None:
        """The slot of one boundary, of this attempt or of one that is salvaged."""
        found = [
            (held, r)
            for held, r in self._whole()
            if (held.arena.attempt, r.mark) == (attempt, mark)
        ]
        return max(found, key=lambda pair: pair[1].sequence, default=None)

    def boundaries(self) -> list[tuple[int, int]]:
        """(attempt, mark) of every whole slot."""
        return sorted({(held.arena.attempt, record.mark) for held, record in self._whole()})

    def void_from(self, step: int) -> None:
        """Invalidate every slot from this step on, of any attempt."""
        with self._lock:
            for held in (*self._own.values(), *self._salvaged):
                held.void_from(step)

    def retire_salvaged(self, attempt: int, *, remove: bool = True) -> None:
        """The state that an earlier attempt had left is durable."""
        with self._lock:
            done = [held for held in self._salvaged if held.arena.attempt == attempt]
            self._salvaged = [held for held in self._salvaged if held not in done]
        for held in done:
            held.retire(remove=remove)

    def _whole(self) -> list[tuple[HeldArena, SlotRecord]]:
        with self._lock:
            arenas = [*self._own.values(), *self._salvaged]
        return [(held, record) for held in arenas for record in held.whole()]

    def hash_newest(self) -> None:
        """Hash the newest slot: without checksums the next start does not trust it."""
        found = self.newest()
        if found is not None and found[0].pin(found[1]):
            with QUIET.hurry():
                found[0].digests(found[1])
            found[0].unpin(found[1].slot)

    def begin_waiting(self, until: float) -> HeldArena | None:
        """Offer the arena with the newest slot to the next attempt, and hold it no more.

        None if there is none: a memfd has no name by which another process could find it.
        """
        found = self.newest()
        if found is None or found[0].path is None:
            return None
        self.hash_newest()
        if not found[0].wait_until(until):
            return None
        with self._lock:  # from now on another attempt may write to it
            self._own.pop(found[0].arena.generation, None)
        return found[0]

    def slot_bytes(self) -> int:
        """The size of a slot: the largest of all generations."""
        return max((held.arena.slot_bytes for held in self._own.values()), default=0)

    def let_go(self, *, remove: bool) -> None:
        """Unmap all arenas; with `remove` delete their files too."""
        with self._lock:
            # Also the salvaged ones: the thread that retires them may come too late.
            for held in (*self._own.values(), *self._salvaged):
                held.retire(remove=remove)
            self._own.clear()


class Hasher:
    """Hashes the newest slot in the background, so that memory can be trusted on resume."""

    def __init__(self) -> None:
        self._wanted: tuple[HeldArena, SlotRecord] | None = None
        self._rests = False
        self._wake = threading.Condition()
        threading.Thread(target=self._work, name="hasher", daemon=True).start()

    def want(self, held: HeldArena, record: SlotRecord) -> None:
        """Hash this slot next, in place of an older one that was not begun."""
        with self._wake:
            self._wanted = None if self._rests else (held, record)
            self._wake.notify()

    def rest(self) -> None:
        """The run ends: the writer hashes its slot itself, and must not wait for this thread."""
        with self._wake:
            self._rests, self._wanted = True, None

    def _work(self) -> None:
        while True:
            with self._wake:
                while self._wanted is None:
                    self._wake.wait()
                held, record = self._wanted
                self._wanted = None
            if held.pin(record):
                try:
                    with QUIET.background():
                        held.hash_until_wanted(record)
                except (ValueError, OSError, RuntimeError, SaveFailed) as error:
                    print(f"step {record.step} could not be hashed: {error}", flush=True)
                finally:
                    held.unpin(record.slot)
