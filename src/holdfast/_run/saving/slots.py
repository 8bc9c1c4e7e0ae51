"""An arena for one layout of the state, and the ways by which tensors get into its slots."""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast._adapters.registry import adapter_of
from holdfast._run.saving.slot_memory import SlotMemory
from holdfast._state.capture import Captured
from holdfast._store.format.image import PAGE, ImagePlan, TensorSpec
from holdfast._store.format.threads import run_all, start_thread
from holdfast._store.memory.arena import MAX_SHARED, Arena, Range
from holdfast._store.memory.backing import Backing
from holdfast._store.memory.pages import split

if TYPE_CHECKING:
    from holdfast.torch.device import Devices

# -- Copies of raw bytes within this process, prepared once and repeated ---------------------------
# Several threads copy large ones in chunks. For small ones a call each would take longer than the
# copy: process_vm_readv takes a thousand at a time. Where it is refused (a sandbox may), they are
# copied one by one.


_LARGE_BYTES = 128 << 10
_LEAST_PIECE, _LARGEST_PIECE = 1 << 20, 32 << 20
_BATCH = 1024  # places in one system call
_BATCH_BYTES = 8 << 20
_ALONE_BYTES = 4 << 20  # less is copied before another thread has started
_MOST_THREADS = 8

_LEAST_SHARED_BYTES = 1 << 20
_libc = ctypes.CDLL(None)

Move = tuple[int, int, int]  # target address, source address, bytes


class RawCopies:
    """Copies between fixed addresses of mapped memory."""

    def __init__(self, moves: Iterable[Move], *, compare: bool = False) -> None:
        joined = _join(sorted(moves))
        self.size_bytes = sum(size for *_, size in joined)
        self._threads = min(_MOST_THREADS, os.cpu_count() or 1)
        if self.size_bytes <= _ALONE_BYTES:
            self._threads = 1
        share = self.size_bytes // (4 * self._threads)
        piece = min(max(share, _LEAST_PIECE), _LARGEST_PIECE)
        job = _compare if compare else ctypes.memmove  # without the interpreter's lock
        self._jobs: list[Callable[[], object]] = []
        small: list[Move] = []
        for target, source, size in joined:
            if size < _LARGE_BYTES and not compare:
                small.append((target, source, size))
                continue
            for at in range(0, size, piece):
                length = min(piece, size - at)
                self._jobs.append(functools.partial(job, target + at, source + at, length))
        self._jobs += _batches(small)

    def run(self) -> None:
        """Make all copies; returns when the last byte is there."""
        run_all(self._jobs, self._threads)


def _join(moves: Iterable[Move]) -> list[Move]:
    joined: list[Move] = []
    for target, source, size in moves:
        before, origin, length = joined[-1] if joined else (0, 0, 0)
        if joined and (before + length, origin + length) == (target, source):
            joined[-1] = (before, origin, length + size)
        elif size:
            joined.append((target, source, size))
    return joined


class SharedChanged(Exception):
    """A tensor in a memory range that the slots share has changed."""


def _compare(target: int, source: int, size: int) -> None:
    if _libc.memcmp(ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size)):
        raise SharedChanged


def _batches(moves: list[Move]) -> list[Callable[[], None]]:
    found: list[Callable[[], None]] = []
    batch: list[Move] = []
    size_bytes = 0
    for move in moves:
        if len(batch) == _BATCH or size_bytes + move[2] > _BATCH_BYTES:
            found.append(_Batch(batch))
            batch, size_bytes = [], 0
        batch.append(move)
        size_bytes += move[2]
    if batch:
        found.append(_Batch(batch))
    return found


class _Batch:
    """Small copies in one call of process_vm_readv, on this very process."""

    def __init__(self, moves: list[Move]) -> None:
        sources: list[int] = []
        targets: list[int] = []
        for target, source, size in moves:
            sources += (source, size)
            if targets and targets[-2] + targets[-1] == target:
                targets[-1] += size
            else:
                targets += (target, size)
        self._sources = array("Q", sources)
        self._targets = array("Q", targets)
        self._bytes = sum(size for *_, size in moves)

    def __call__(self) -> None:
        targets, sources = self._targets, self._sources
        places = (
            *(targets.buffer_info()[0], len(targets) // 2),
            *(sources.buffer_info()[0], len(sources) // 2),
        )
        if _readv is not None and _readv(os.getpid(), *places, 0) == self._bytes:
            return
        place, room = self._targets[0], self._targets[1]
        spans = iter(zip(self._targets[2::2], self._targets[3::2], strict=True))
        for source, size in zip(self._sources[::2], self._sources[1::2], strict=True):
            if room == 0:
                place, room = next(spans)
            ctypes.memmove(place, source, size)
            place, room = place + size, room - size


_readv: Any = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    _span = (ctypes.c_void_p, ctypes.c_ulong)
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = [ctypes.c_int, *_span, *_span, ctypes.c_ulong]


@dataclass(frozen=True)
class _Ways:
    addresses: list[int] | None  # as captured
    shared: list[Range]  # that the slots shared
    raw: RawCopies  # of bytes at known addresses
    same: RawCopies | None  # compares the shared ranges; None: its address is unknown
    others: list[tuple[str, list[int], Sequence[Any]]]  # kind, indices, targets


class Generation:
    """An arena for one layout of the state, and the copies into its slots."""

    def __init__(self, arena: Arena, backing: Backing, plan: ImagePlan, memory: SlotMemory) -> None:
        self.arena = arena
        self.backing = backing
        self.plan = plan
        self.memory = memory
        places: dict[str, list[int]] = {}
        on_device: dict[str, list[int]] = {}
        for index, spec in enumerate(plan.specs):
            copies = adapter_of(spec.kind).copies_by_itself(spec)
            (on_device if copies else places).setdefault(spec.kind, []).append(index)
        self._indices = places
        self.specs_seen: list[TensorSpec] | None = None  # known to equal the plan's
        self._ways: dict[int, _Ways] = {}  # by slot
        self._on_device: list[int] = []
        self._copies: Devices | None = None
        for kind, indices in on_device.items():  # at most one: only torch does it yet
            self._on_device = indices
            self._copies = adapter_of(kind).device_copies(
                arena.mapped,
                [(plan.specs[i], plan.offsets[i]) for i in indices],
                [arena.slot_offset(slot) for slot in range(arena.slots)],
            )
        memory.registry = self._copies
        self._is_filled = False  # slot 0 has the shared ranges

    def share(self, frozen: Collection[int]) -> None:
        """Hold these tensors once; before another slot than 0 has memory."""
        on_device = set(frozen) & set(self._on_device)
        if on_device and self._copies is not None and not self._copies.can_compare():
            frozen = set(frozen) - on_device
        if ranges := shareable(self.plan, frozen):
            self.arena.share(ranges)

    def has_changed(self, slot: int, captured: Captured, *, careful: bool) -> bool:
        """True if a tensor in a shared range differs from slot 0.

        A device compares while it copies, unless it must not fail.
        """
        if not self.arena.shared or (slot == 0 and not self._is_filled):
            return False
        if not self._is_filled or (same := self._ways_of(slot, captured).same) is None:
            return True
        try:
            same.run()
        except SharedChanged:
            return True
        if self._copies is None:
            return False
        on_device = [captured.values[i] for i in self._on_device]
        return not self._copies.can_compare() or (
            careful and self._copies.has_changed(on_device, self.arena.shared)
        )

    def finished(self, slot: int) -> None:
        if slot == 0 and not self._is_filled:
            self._is_filled = True
            self._ways.clear()  # from now on nothing may write to the shared ranges

    def fits(self, captured: Captured, scalars_bytes: int) -> bool:
        """True if a state has the layout that this arena was made for."""
        if scalars_bytes > self.plan.scalars.size_bytes:
            return False
        if captured.specs is not self.specs_seen:
            if list(self.plan.specs) != captured.specs:
                return False
            self.specs_seen = captured.specs
        return True

    def begin(self, slot: int, captured: Captured, *, careful: bool) -> Any:
        """Start the copies from a device; returns the copy that is still in flight."""
        if self._copies is None:
            return None
        on_device = [captured.values[i] for i in self._on_device]
        shared = self.arena.shared if self._is_filled else []
        return self._copies.begin(slot, on_device, careful=careful, shared=shared)

    def fill(self, slot: int, captured: Captured, scalars: bytes) -> None:
        """Copy everything that is not on a device."""
        values = captured.values
        ways = self._ways_of(slot, captured)
        ways.raw.run()
        for kind, indices, targets in ways.others:
            adapter_of(kind).copy_all(targets, [values[i] for i in indices])
        start = self.arena.slot_offset(slot) + self.plan.scalars.offset
        capacity = self.plan.scalars.size_bytes
        self.arena.mapped[start : start + capacity] = scalars.ljust(capacity)

    def _ways_of(self, slot: int, captured: Captured) -> _Ways:
        """Valid as long as no tensor moves, and the shared ranges are the same."""
        ways, shared = self._ways.get(slot), self.arena.shared
        is_known = ways is not None and ways.addresses is captured.addresses
        if ways is None or not is_known or ways.shared is not shared:
            ways = self._ways[slot] = self._prepare(slot, captured.addresses)
        return ways

    def _prepare(self, slot: int, addresses: list[int] | None) -> _Ways:
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.arena.mapped))
        start += self.arena.slot_offset(slot)
        shared = self.arena.shared if self._is_filled else []
        plan, known = self.plan, addresses or [0] * len(self.plan.specs)
        moves = [
            (start + plan.offsets[i], known[i], plan.specs[i].size_bytes)
            for indices in self._indices.values()
            for i in indices
            if known[i]
        ]
        same: list[Move] | None = []
        if shared:
            ranges = [(start + at, size) for at, size in shared]
            parts = [
                (at, source + at - target, size, is_within)
                for target, source, whole in moves
                for at, size, is_within in split(target, whole, ranges)
            ]
            moves = [part[:3] for part in parts if not part[3]]
            same = [part[:3] for part in parts if part[3]]
        others = []
        for kind, indices in self._indices.items():
            left = [i for i in indices if not known[i]]
            places = ((plan.offsets[i], plan.specs[i].size_bytes) for i in left)
            if any(is_within for place in places for *_, is_within in split(*place, shared)):
                same = None
            if left:
                targets = adapter_of(kind).destinations(
                    self.arena.mapped,
                    [(plan.specs[i], plan.offsets[i]) for i in left],
                    self.arena.slot_offset(slot),
                )
                others.append((kind, left, targets))
        compares = None if same is None else RawCopies(same, compare=True)
        return _Ways(addresses, self.arena.shared, RawCopies(moves), compares, others)

    @property
    def device_cost(self) -> tuple[float, bool]:
        """For how long a snapshot keeps the device from its work, and whether that work has
        hidden the processor's part of the last one: then it cost training nothing."""
        copies = self._copies
        return (0.0, False) if copies is None else (copies.cost_seconds, copies.is_ahead)

    @property
    def found_change(self) -> bool:
        """True if a device has found that a tensor in a shared range has changed."""
        return self._copies is not None and self._copies.found_change

    def close(self) -> None:
        self._ways.clear()
        self.memory.close()
        if self._copies is not None:
            self._copies.close()
        self.arena.close()


def shareable(plan: ImagePlan, frozen: Collection[int]) -> list[Range]:
    """Whole pages of the image that hold nothing but frozen tensors, in long ranges."""
    joined: list[list[int]] = []  # beginning and end
    for index in sorted(frozen, key=lambda i: (plan.offsets[i], plan.specs[i].size_bytes)):
        start = plan.offsets[index]
        if not joined or joined[-1][1] != start:
            joined.append([start, start])
        joined[-1][1] += plan.specs[index].size_bytes
    pages = [(-(-first // PAGE) * PAGE, last // PAGE * PAGE) for first, last in joined]
    found = [(first, last - first) for first, last in pages if last - first >= _LEAST_SHARED_BYTES]
    return sorted(sorted(found, key=lambda each: -each[1])[:MAX_SHARED])


# -- Asynchronous copies by a device: a slot is whole when its copy has ended ----------------------
# The trainer goes on meanwhile. A thread waits for the device, so that the slot is marked whole as
# soon as its last byte has arrived, however long the next step takes. At most one copy is in
# flight; a kill before its end leaves the older slots. An adapter's `device_copies` makes them:
# `holdfast.torch.device.Devices` is the only kind yet.


class AsyncCopies:
    """Waits for the copies in flight, one at a time."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._queue: queue.SimpleQueue[tuple[Any, Callable[[bool], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self.is_free = threading.Event()
        self.is_free.set()

    def wait(self, deadline: float) -> bool:
        """True if all copies have ended by `deadline`, on the monotonic clock."""
        return self.is_free.wait(max(0.0, deadline - time.monotonic()))

    def expect(self, copy: Any, then: Callable[[bool], None]) -> None:
        """Call `then` in the thread when a copy has ended: with True if it succeeded."""
        if self._thread is None:
            self._thread = start_thread(self._work, name="holdfast-copies")
        if self._thread is None:  # no more threads: the trainer waits
            self._finish(copy, then)
            return
        self.is_free.clear()
        self._queue.put((copy, then))

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._finish(*item)
            finally:
                self.is_free.set()

    def _finish(self, copy: Any, then: Callable[[bool], None]) -> None:
        try:
            good = copy.wait()
        except Exception as error:  # noqa: BLE001  the device's: training itself will say more
            self._say(f"a snapshot was lost on its way from the device: {error}")
            good = False
        then(good)
