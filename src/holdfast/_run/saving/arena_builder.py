"""The arenas of an attempt: one for each layout of its state, and how tensors get into its slots.

A small one is built at once, a large one in the background. How many slots it has depends on the
free memory and on `Settings(memory=…)`. The arena of the previous attempt is used instead if it is
still there and fits.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import queue
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast._adapters.registry import adapter_of
from holdfast._run.saving.slot_memory import SlotMemory, only_one
from holdfast._state.capture import Captured
from holdfast._store.format.image import PAGE, ImagePlan, TensorSpec, plan_image
from holdfast._store.format.threads import run_all, start_thread
from holdfast._store.memory.arena import MAX_SHARED, Arena, Range, arena_bytes
from holdfast._store.memory.backing import Backing, arena_path, reserve
from holdfast._store.memory.pages import split
from holdfast._store.memory.waiting import claim
from holdfast._text import size as in_words

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


# -- Building an arena: when, with how many slots, and in which memory -----------------------------


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
        needed = f"{slots_of} of {in_words(plan.size_bytes)}"
        too_little = f"too little memory ({needed})"
        if allowed < least:
            self._give_up(f"memory={in_words(most)} is too little ({needed})")
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
            self._say(
                only_one(f"memory={in_words(most)} allows" if allowed == 1 else "memory allows")
            )
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
