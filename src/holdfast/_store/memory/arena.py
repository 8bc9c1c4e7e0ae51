"""The arena: shared memory with slots, of which one is always whole.

    page 0     what it is: run, attempt, generation, sizes, and the run's folder
    page 1     a record for each slot: state, sequence, step, when, hashed;
               behind them, until when the arena waits for the next attempt, and which
               ranges of the image that the slots share
    tables     for each slot, the checksums of its ranges, filled by the keeper
    slots      each an image (see image.py), on a page of its own

A slot may be absent: its range of the file has no memory, and nothing touches it. The writer adds
and removes slots while it runs.

Tensors that never change are held once. Shared ranges have memory in slot 0 only, and the other
slots map it. They are filled once and never written to again. When a tensor in one of them changes
after all, every slot first gets memory of its own with the same bytes, and only then is the range
written to. So a whole slot stays whole.

The writer marks a slot as being written, copies, and marks it whole with the next sequence number;
a kill at any instant leaves the slots before it whole. Each slot has a POSIX lock, which ends with
its process: the writer holds it while it copies (also while a device still copies), a keeper while
it reads. Locks also order memory between the two processes.

Standard library only: the keeper maps it too.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import struct
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast._store.format.image import PAGE, ImagePlan, header_bytes, parse_header

_MAGIC = b"holdfast-arena-2"
_HEAD = struct.Struct("<16s32sQQQQQQ")
_ATTEMPT_OFFSET = 48  # of attempt and generation in the head
_EMPTY, _WRITING, _WHOLE, _ABSENT = 0, 1, 2, 3
_MAP_FIXED = 0x10
_RECORD_WORDS = 8
_STATE, _SEQUENCE, _MARK, _TIME, _HASHED, _HASHED_NS, _WANTED = range(7)
NOW, HASHED_SOON = 1, 2  # how a slot is wanted; 0: not
DIGEST_BYTES = 16
MAX_SLOTS = 8
_WAITS_UNTIL = MAX_SLOTS * _RECORD_WORDS  # a time in nanoseconds; 0: its attempt goes on
_SHARED = _WAITS_UNTIL + 1  # to the end of the page: first page and number of pages of each range
MAX_SHARED = PAGE // 8 - _SHARED
_SHARED_AT = PAGE + 8 * _SHARED

Range = tuple[int, int]  # offset, bytes


class NotAnArena(ValueError):
    """The file is not an arena, or not a private one of this user."""


@dataclass(frozen=True)
class SlotRecord:
    """A whole slot."""

    slot: int
    sequence: int
    mark: int  # of its boundary
    captured_at: float
    is_hashed: bool

    @property
    def step(self) -> int:
        return self.mark // 2


def arena_bytes(plan_bytes: int, ranges: int, slots: int) -> int:
    """The size of an arena for images of `plan_bytes` with `ranges` checksums each."""
    return 2 * PAGE + slots * (_table_bytes(ranges) + plan_bytes)


def used_bytes(file: int | Path) -> int:
    """The memory that a file in memory takes now: less than its size, if slots are absent."""
    return os.stat(file).st_blocks * 512  # noqa: PTH116  also of a descriptor


def _table_bytes(ranges: int) -> int:
    return -(-ranges * DIGEST_BYTES // PAGE) * PAGE


class Arena:
    def __init__(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size < 3 * PAGE:
            raise NotAnArena("not an arena")
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise NotAnArena("not a private file of this user")
        self.descriptor = descriptor
        self.mapped = mmap.mmap(descriptor, status.st_size)
        magic, run_id, attempt, generation, slots, size, table, ranges = _HEAD.unpack_from(
            self.mapped
        )
        if magic != _MAGIC or not 1 <= slots <= MAX_SLOTS:
            raise NotAnArena("not an arena of this version")
        if status.st_size < 2 * PAGE + slots * (table + size):
            raise NotAnArena("cut short")
        self.run_id = run_id.decode("ascii", "replace")
        self.attempt = int(attempt)
        self.generation = int(generation)
        self.slots = int(slots)
        self.slot_bytes = int(size)
        self.ranges = int(ranges)
        self._table = int(table)
        #: Where its run was, by the real path; empty if that is not known.
        self.folder = os.fsdecode(self.mapped[_HEAD.size : PAGE].partition(b"\0")[0])
        self._words = memoryview(self.mapped)[PAGE : 2 * PAGE].cast("Q")
        #: The ranges of the image that the slots share, in order.
        self.shared: list[Range] = []
        self._shared_words = bytes(PAGE - 8 * _SHARED)
        self.sync_shared()

    @classmethod
    def create(
        cls,
        descriptor: int,
        *,
        run_id: str,
        attempt: int,
        generation: int,
        slots: int,
        plan: ImagePlan,
        folder: str = "",
        present: int | None = None,
    ) -> Arena:
        """Format a file; the first `present` slots (default: all) have their memory already."""
        ranges = len(plan.specs) + 2
        head = _HEAD.pack(
            _MAGIC,
            run_id.encode(),
            attempt,
            generation,
            slots,
            plan.size_bytes,
            _table_bytes(ranges),
            ranges,
        )
        head += os.fsencode(folder)
        os.pwrite(descriptor, head if len(head) < PAGE else head[: _HEAD.size], 0)
        arena = cls(descriptor)
        for slot in range(slots):
            if present is None or slot < present:
                arena.add(slot, plan.header)
            else:
                arena._set(slot, _STATE, _ABSENT)
        return arena

    def slot_offset(self, slot: int) -> int:
        return 2 * PAGE + self.slots * self._table + slot * self.slot_bytes

    def image(self, slot: int) -> memoryview:
        start = self.slot_offset(slot)
        return memoryview(self.mapped)[start : start + self.slot_bytes]

    def plan(self, slot: int) -> ImagePlan:
        """The plan of a slot's image, read from its header; ValueError if it is damaged."""
        image = self.image(slot)
        length = header_bytes(image)
        if not PAGE <= length <= self.slot_bytes:
            raise ValueError("the header's length is out of range")
        plan = parse_header(bytes(image[:length]))
        if plan.size_bytes != self.slot_bytes or len(plan.specs) + 2 != self.ranges:
            raise ValueError("the header does not fit the slot")
        return plan

    def sync_shared(self) -> None:
        """Map the shared ranges as the writer has them now; no other slot than 0 is in use."""
        words = self.mapped[_SHARED_AT : 2 * PAGE]
        if words == self._shared_words:
            return
        found = [divmod(word, 1 << 32) for word in memoryview(words).cast("Q") if word]
        shared = [(first * PAGE, pages * PAGE) for first, pages in found]
        if any(start + size > self.slot_bytes for start, size in shared):
            raise NotAnArena("a shared range is outside of the slot")
        before, self.shared, self._shared_words = set(self.shared), shared, words
        for slot in range(1, self.slots):
            for start, size in before - set(shared):
                _map(self, slot, start, size, slot)
            for start, size in set(shared) - before:
                _map(self, slot, start, size, 0)

    # -- the writer ---------------------------------------------------------

    def share(self, ranges: Sequence[Range]) -> None:
        """Share these ranges, in whole pages, and no other ones.

        No other slot than 0 is present then, or the writer holds the locks of all slots and gives
        each its own bytes.
        """
        words = [start // PAGE << 32 | size // PAGE for start, size in ranges]
        table = struct.pack(f"<{len(words)}Q", *words)
        self.mapped[_SHARED_AT : 2 * PAGE] = table.ljust(PAGE - 8 * _SHARED, b"\0")
        self.sync_shared()

    def add(self, slot: int, header: bytes) -> None:
        """An absent slot has got its memory: from now on it can be chosen."""
        start = self.slot_offset(slot)
        self.mapped[start : start + len(header)] = header
        self._set(slot, _SEQUENCE, 0)
        self._set(slot, _STATE, _EMPTY)

    def drop(self, held: Collection[int] = ()) -> int | None:
        """Make a slot absent that is not needed, and return it; None if all are.

        The newest whole slot, the newest hashed one and those that are held or in use stay. The
        slot stays locked until `unlock`: first its memory is given back.
        """
        whole = self.whole()
        needed = {record.slot for record in (*whole[:1], *[r for r in whole if r.is_hashed][:1])}
        needed |= {0} if self.shared else set()
        for slot in self.present():
            if slot in held or slot in needed or self._word(slot, _STATE) == _WRITING:
                continue
            if self.try_lock(slot):
                self.remove(slot)
                return slot
        return None

    def remove(self, slot: int) -> None:
        """Make a slot absent that is locked."""
        self._set(slot, _STATE, _ABSENT)
        self._set(slot, _SEQUENCE, 0)
        self._set(slot, _HASHED, 0)

    def begin(
        self,
        held: Collection[int] = (),
        mark: int = -1,
        *,
        keep_hashed: bool = False,
        overwrite: bool = False,
    ) -> int | None:
        """Lock a slot for writing and mark it torn; None if no slot is free.

        The newest whole slot is never chosen: it is what remains after a kill. Nor is that of
        `mark`, the newest that all ranks have. The newest hashed slot is the last choice, or
        with `keep_hashed` none: it is what remains after a kill of trainer and keeper.
        `overwrite`: there is one slot only, and a kill during the copy leaves none.
        """
        slot = self.lock_free(held, mark, keep_hashed=keep_hashed, overwrite=overwrite)
        if slot is not None:
            self._set(slot, _STATE, _WRITING)
            self._set(slot, _HASHED, 0)
            for each in range(self.slots):
                self._set(each, _WANTED, 0)
        return slot

    def want(self) -> None:
        """The trainer waits for a slot: a keeper that hashes an older one lets it go."""
        for record in self.whole()[1:]:
            self._set(record.slot, _WANTED, NOW)

    def want_hashed(self) -> None:
        """A snapshot is due, and none can be made until a slot is hashed."""
        for record in self.whole():
            if self.wanted(record.slot) != NOW:
                self._set(record.slot, _WANTED, HASHED_SOON)

    def wanted(self, slot: int) -> int:
        """How the trainer wants a slot: NOW, HASHED_SOON, or 0 if not."""
        return self._word(slot, _WANTED)

    def lock_free(
        self, held: Collection[int], mark: int, *, keep_hashed: bool, overwrite: bool
    ) -> int | None:
        """Lock the slot that `begin` would mark; only while this process writes to none."""
        whole = self.whole()
        newest = set() if overwrite else {record.slot for record in whole[:1]}
        hashed = {record.slot for record in [r for r in whole if r.is_hashed][:1]}
        if keep_hashed:
            newest |= hashed
        oldest_first = sorted(
            self.present(), key=lambda slot: (slot in hashed, self._word(slot, _SEQUENCE))
        )
        for slot in oldest_first:
            if slot in held or slot in newest:
                continue
            if self._word(slot, _STATE) == _WHOLE and self._word(slot, _MARK) == mark:
                continue
            if self.try_lock(slot):
                return slot
        return None

    def finish(self, slot: int, *, sequence: int, mark: int) -> None:
        """Mark a slot whole: from now on it survives a kill."""
        self._set(slot, _MARK, mark)
        self._set(slot, _TIME, time.time_ns())
        self._set(slot, _SEQUENCE, sequence)
        self._set(slot, _STATE, _WHOLE)
        self.unlock(slot)

    def abandon(self, slot: int) -> None:
        """Give up a slot: it is free again."""
        self._set(slot, _SEQUENCE, 0)
        self._set(slot, _STATE, _EMPTY)
        self.unlock(slot)

    # -- both ---------------------------------------------------------------

    def void_from(self, step: int) -> bool:
        """Empty the slots from this step on, which a rule has called bad.

        Without the lock: a reader of such a slot finds at its commit that it is void.
        """
        found = [record for record in self.whole() if record.step >= step]
        for record in found:
            self._set(record.slot, _STATE, _EMPTY)
            self._set(record.slot, _SEQUENCE, 0)
        return bool(found)

    def try_lock(self, slot: int) -> bool:
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
        except OSError:
            return False
        return True

    def unlock(self, slot: int) -> None:
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, slot)

    def whole(self) -> list[SlotRecord]:
        """The whole slots, newest first."""
        found = [
            SlotRecord(
                slot=slot,
                sequence=self._word(slot, _SEQUENCE),
                mark=self._word(slot, _MARK),
                captured_at=self._word(slot, _TIME) / 1e9,
                is_hashed=self._word(slot, _HASHED) == self._word(slot, _SEQUENCE),
            )
            for slot in range(self.slots)
            if self._word(slot, _STATE) == _WHOLE
        ]
        return sorted(found, key=lambda record: -record.sequence)

    def present(self) -> list[int]:
        """The slots that have memory."""
        return [slot for slot in range(self.slots) if self._word(slot, _STATE) != _ABSENT]

    def newest(self) -> SlotRecord | None:
        return next(iter(self.whole()), None)

    # -- between two attempts -----------------------------------------------

    @property
    def waits_until(self) -> float | None:
        """Until when it waits for the next attempt of its run; None if it does not."""
        return self._words[_WAITS_UNTIL] / 1e9 or None

    def wait_until(self, at: float) -> None:
        """Its trainer is dead, and its newest slot is durable: the next attempt may take it."""
        self._words[_WAITS_UNTIL] = int(at * 1e9)

    def take_over(self, attempt: int, first: int = 0) -> None:
        """Make it the empty arena of another attempt, which writes to the slot `first` first.

        The slots first: with the new number, they would be states that this attempt never had.
        """
        first = 0 if self.shared else first  # the shared ranges are filled there
        for slot in self.present():
            self._set(slot, _STATE, _EMPTY)
            self._set(slot, _SEQUENCE, slot != first)
            self._set(slot, _HASHED, 0)
        self.attempt, self.generation = attempt, 1
        struct.pack_into("<QQ", self.mapped, _ATTEMPT_OFFSET, self.attempt, self.generation)
        self._words[_WAITS_UNTIL] = 0

    # -- the keeper ---------------------------------------------------------

    def set_digests(self, slot: int, sequence: int, digests: Sequence[bytes]) -> None:
        """Store the checksums of a slot that is locked."""
        start = 2 * PAGE + slot * self._table
        joined = b"".join(digests)
        self.mapped[start : start + len(joined)] = joined
        self._set(slot, _HASHED_NS, time.monotonic_ns())
        self._set(slot, _HASHED, sequence)

    def hashed_at(self, slot: int, sequence: int) -> float | None:
        """When a slot was hashed, by the monotonic clock; None if it is not, or is another one."""
        if self._word(slot, _SEQUENCE) != sequence or self._word(slot, _HASHED) != sequence:
            return None
        return self._word(slot, _HASHED_NS) / 1e9

    def digests(self, slot: int) -> list[bytes]:
        """The checksums of a hashed slot, in the order of its plan's extents."""
        start = 2 * PAGE + slot * self._table
        ends = range(start, start + self.ranges * DIGEST_BYTES, DIGEST_BYTES)
        return [bytes(self.mapped[at : at + DIGEST_BYTES]) for at in ends]

    def close(self) -> None:
        """Unmap; if there are views, the mapping ends with the last one."""
        self._words.release()
        with contextlib.suppress(BufferError):
            self.mapped.close()
        with contextlib.suppress(OSError):
            os.close(self.descriptor)
        self.descriptor = -1

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _word(self, slot: int, index: int) -> int:
        return self._words[slot * _RECORD_WORDS + index]

    def _set(self, slot: int, index: int, value: int) -> None:
        self._words[slot * _RECORD_WORDS + index] = value


def _map(arena: Arena, slot: int, start: int, size_bytes: int, source: int) -> None:
    """Map a range of `slot` to the memory of the slot `source`."""
    import ctypes  # the keeper starts faster without it

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    address = ctypes.addressof(ctypes.c_char.from_buffer(arena.mapped))
    address += arena.slot_offset(slot) + start
    access = mmap.PROT_READ | mmap.PROT_WRITE
    found = libc.mmap(
        ctypes.c_void_p(address),
        ctypes.c_size_t(size_bytes),
        access,
        mmap.MAP_SHARED | _MAP_FIXED,
        arena.descriptor,
        ctypes.c_long(arena.slot_offset(source) + start),
    )
    if found != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
