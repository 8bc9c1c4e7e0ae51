"""What is held in memory and what is on disk: mapped arenas, their hashing, and the writer."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from holdfast._errors import SaveFailed
from holdfast._keeper.writer import CheckpointWriter, Closing, WriteJob, WriteOutcome
from holdfast._store.commit.chunks import PRIORITY
from holdfast._store.commit.source import Hashing, Ranges, Source, threads_for
from holdfast._store.commit.write import Policy, is_replaced
from holdfast._store.format.checksum import digest
from holdfast._store.format.image import PAGE, header_bytes, read_extents
from holdfast._store.format.threads import start_thread
from holdfast._store.memory.arena import HASHED_SOON, NOW, Arena, NotAnArena, SlotRecord

_DYING_SECONDS = 10.0
_LOOK_SECONDS = 0.02
_MOST_HASHERS = max(1, min(4, (os.cpu_count() or 1) // 4))  # the training needs the other cores


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

    def wait_until_free(self, slot: int) -> None:
        """Wait until a dead process has let a slot go.

        A killed process keeps its locks until its last thread has ended, and a thread in the
        background may get no CPU time for a while.
        """
        deadline = time.monotonic() + _DYING_SECONDS
        while not self.arena.try_lock(slot):
            if time.monotonic() > deadline:
                print(f"slot {slot} of attempt {self.arena.attempt} is still locked", flush=True)
                return
            time.sleep(0.01)
        self.arena.unlock(slot)

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
                    source.hashing = Hashing.known(self.arena.digests(record.slot))
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
        """Hash a pinned slot in the background, or leave the rest if the trainer needs the slot.

        If the next snapshot waits for the checksums (`can_take` in _run/saving/snapshots.py),
        threads at full priority take over. On a busy machine background threads get no CPU time
        for seconds, and the newest snapshot would become that old.
        """
        source = self.source(record)
        hashing = source.hashing
        most = min(threads_for(source.ranges.sizes), _MOST_HASHERS)

        def work(priority: _Priority) -> None:
            with priority():
                hashing.work(until=lambda: self.arena.wanted(record.slot) == NOW)

        workers, is_hurried = _start(work, PRIORITY.background, most), False
        while working := [each for each in workers if each.is_alive()]:
            working[0].join(_LOOK_SECONDS)
            if not is_hurried and self.arena.wanted(record.slot) == HASHED_SOON:
                is_hurried = True
                PRIORITY.raise_threads()
                workers += _start(work, PRIORITY.hurry, most)
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


_Priority = Callable[[], contextlib.AbstractContextManager[None]]


def _start(
    work: Callable[[_Priority], None], priority: _Priority, count: int
) -> list[threading.Thread]:
    """Threads that do this work; if the system has no more, it is done before this returns."""
    started: list[threading.Thread] = []
    for _ in range(count):
        thread = start_thread(work, priority, name="hashing")
        if thread is None:
            if not started:
                work(contextlib.nullcontext)
            break
        started.append(thread)
    return started


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

    def retire_salvaged(self, attempt: int) -> None:
        """The state that an earlier attempt had left is durable."""
        with self._lock:
            done = [held for held in self._salvaged if held.arena.attempt == attempt]
            self._salvaged = [held for held in self._salvaged if held not in done]
        for held in done:
            held.retire()

    def _whole(self) -> list[tuple[HeldArena, SlotRecord]]:
        with self._lock:
            arenas = [*self._own.values(), *self._salvaged]
        return [(held, record) for held in arenas for record in held.whole()]

    def hash_newest(self) -> None:
        """Hash the newest slot: without checksums the next start does not trust it."""
        found = self.newest()
        if found is not None and found[0].pin(found[1]):
            with PRIORITY.hurry():
                found[0].digests(found[1])
            found[0].unpin(found[1].slot)

    def begin_waiting(self, until: float) -> HeldArena | None:
        """Offer the arena with the newest slot to the next attempt, and hold it no more.

        If no slot is whole, the newest arena: its memory is built already. None if there is none: a
        memfd has no name by which another process could find it.
        """
        found = self.newest()
        held = found[0] if found is not None else self._own.get(max(self._own, default=0))
        if held is None or held.path is None:
            return None
        self.hash_newest()
        if not held.wait_until(until):
            return None
        with self._lock:  # from now on another attempt may write to it
            self._own.pop(held.arena.generation, None)
        return held

    def slot_bytes(self) -> int:
        """The size of a slot: the largest of all generations."""
        return max((held.arena.slot_bytes for held in self._own.values()), default=0)

    def release(self, *, remove: bool) -> None:
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
                    held.hash_until_wanted(record)
                except (ValueError, OSError, RuntimeError, SaveFailed) as error:
                    print(f"step {record.step} could not be hashed: {error}", flush=True)
                finally:
                    held.unpin(record.slot)


_GUESSED_BYTES_PER_SECOND = 100e6


class Storage:
    """The states of one attempt. `written` and `closed` are called by the writer's threads."""

    def __init__(
        self,
        policy: Policy,
        written: Callable[[WriteOutcome], None],
        closed: Callable[[Closing, str | None, bool], None],
    ) -> None:
        self._policy = policy
        self.hasher = Hasher()
        self.holdings = Holdings(policy.attempt)
        self.writer = CheckpointWriter(policy, written, closed, self.newest_announced)
        self.save_seconds: float | None = None  # the slowest recent checkpoint
        self.durable_sequence = 0
        self.durable_step: int | None = None
        self.failed_step: int | None = None  # which the disk did not take
        self.invalid_from: float = math.inf  # the step from which on a rule called all states bad
        self._is_urgent = False
        self._announced = 0  # the newest snapshot of which a message has been received
        self._waiting: HeldArena | None = None  # offered to the next attempt

    def hasten(self) -> None:
        """The run is about to end: nothing in this process gives way to the trainer any more."""
        if not self._is_urgent:
            self._is_urgent = True
            PRIORITY.end()
            self.hasher.rest()
            self.writer.hurry()

    def slot(self, generation: int, sequence: int) -> tuple[HeldArena, SlotRecord] | None:
        held = self.holdings.of(generation)
        record = None if held is None else held.find(sequence)
        return None if held is None or record is None else (held, record)

    def announce(self, sequence: int) -> None:
        self._announced = max(sequence, self._announced)

    def newest_announced(self) -> tuple[HeldArena, SlotRecord] | None:
        """The newest slot of those that the trainer has sent a message about.

        The order to save an older one may still be on its way, and would be dropped as too old.
        """
        return self.holdings.newest(self._announced)

    def persist_newest(self, reason: str, leave_status: int | None = None) -> bool:
        """Write the newest whole slot unless it is durable already; False if there is none."""
        for _ in range(100):
            newest = self.holdings.newest()
            if newest is None or newest[1].sequence <= self.durable_sequence:
                return False
            held, record = newest
            if held.pin(record):
                job = WriteJob(held, record, reason, leave_status=leave_status, is_last=True)
                self.writer.submit(job)
                return True
            time.sleep(0.01)  # the trainer has just made a newer one whole
        return False

    def salvage(self, held: HeldArena, record: SlotRecord) -> None:
        """Make durable what an earlier attempt left in memory, then remove its file."""
        if held.pin(record):
            self.holdings.salvage(held)
            self.writer.submit(WriteJob(held, record, "salvaged"))
            threading.Thread(target=self._retire_when_idle, args=(held,), daemon=True).start()

    def _retire_when_idle(self, held: HeldArena) -> None:
        self.writer.wait_idle()
        held.retire(remove=not self.has_failed())

    def mark_durable(self, attempt: int, step: int, sequence: int = 0) -> None:
        """A checkpoint is committed; that of another attempt was salvaged."""
        self.failed_step = None
        if attempt == self._policy.attempt and sequence >= self.durable_sequence:
            self.durable_sequence, self.durable_step = sequence, step

    def learn_durable(self, step: int | None) -> None:
        """The hub knows which step is durable; None: none is."""
        if step is not None:
            self.durable_step = step

    def mark_failed(self, step: int, *, is_fenced: bool) -> None:
        self.failed_step = None if is_fenced else step

    def invalidate_from(self, step: int) -> None:
        """A rule has called every state from this step on bad."""
        self.invalid_from = min(step, self.invalid_from)
        self.holdings.void_from(step)
        if self.durable_step is not None and self.durable_step >= step:
            self.durable_step = None
        self.durable_sequence = 0  # the slots before that step may have lower numbers
        self.writer.forget_durable()

    def has_failed(self) -> bool:
        """True if the disk did not take a state that the next start needs."""
        failed = self.failed_step
        if failed is None or failed >= self.invalid_from:
            return False
        return self.durable_step is None or failed > self.durable_step

    def has_folder(self) -> bool:
        """True if the run folder exists, and another run has not replaced it."""
        layout = self._policy.layout
        return layout.identity.exists() and not is_replaced(layout, self._policy.run_id)

    @property
    def keeps_memory(self) -> bool:
        return self._policy.keep_memory_seconds > 0

    def offer_memory(self) -> None:
        """The next attempt may take the arena over: its newest state, if any, is durable.

        Before exit.json is there: the next attempt begins as soon as it sees that.
        """
        newest = self.holdings.newest()
        is_durable = newest is None or newest[1].sequence <= self.durable_sequence
        if self._waiting is None and is_durable:
            until = time.time() + self._policy.keep_memory_seconds
            self._waiting = self.holdings.begin_waiting(until)

    def withdraw_offer(self) -> None:
        """No other attempt is to come."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.retire()

    def release(self, *, is_needed: bool) -> None:
        """Remove the arenas.

        One with a state that is on no disk stays for the next start. One that was offered to the
        next attempt stays for its time.
        """
        if self._waiting is not None and self._waiting.path is not None:
            from holdfast._store.memory.waiting import start_guard  # a death is rare

            policy = self._policy
            log = policy.layout.keeper_log(policy.attempt, policy.rank)
            if start_guard(self._waiting.path, policy.keep_memory_seconds, log):
                self._waiting.retire(remove=False)
                self._waiting = None
        self.withdraw_offer()
        if is_needed:
            print("the arenas stay: their newest state is not on disk", flush=True)
            self.holdings.hash_newest()
        self.holdings.release(remove=not is_needed)

    # -- how long it takes ------------------------------------------------------

    def record_save(self, seconds: float) -> None:
        # A limit on the speed of background writes would make this longer, and with it the time
        # that `Decider._insure_within` reserves before a deadline.
        self.save_seconds = max(seconds, 0.8 * (self.save_seconds or 0.0))
        self.writer.measured_seconds = self.save_seconds

    def write_seconds(self) -> float:
        """An upper estimate for one write."""
        speed = self.writer.bytes_per_second or 2 * _GUESSED_BYTES_PER_SECOND
        by_size = self.holdings.slot_bytes() / speed
        return 2 * max(by_size, self.writer.seconds_of_a_write() or 0.0)
