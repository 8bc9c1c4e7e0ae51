"""What is held in memory and what is on disk: the arenas, the writer, and how long a save takes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from holdfast._keeper.mapped_arenas import Hasher, HeldArena, Holdings
from holdfast._keeper.writer import CheckpointWriter, Closing, WriteJob, WriteOutcome
from holdfast._store.commit.chunks import QUIET
from holdfast._store.commit.write import Policy, is_replaced
from holdfast._store.memory.arena import SlotRecord

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
            QUIET.end()
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
        if attempt == self._policy.attempt:
            self.durable_sequence = max(self.durable_sequence, sequence)
            self.durable_step = step

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
        """The next attempt may take the arena over: its newest state is durable.

        Before exit.json is there: the next attempt begins as soon as it sees that.
        """
        newest = None if self._waiting is not None else self.holdings.newest()
        if newest is not None and newest[1].sequence <= self.durable_sequence:
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
        self.save_seconds = max(seconds, 0.8 * (self.save_seconds or 0.0))
        self.writer.measured_seconds = self.save_seconds

    def write_seconds(self) -> float:
        """An upper estimate for one write."""
        speed = self.writer.bytes_per_second or 2 * _GUESSED_BYTES_PER_SECOND
        by_size = self.holdings.slot_bytes() / speed
        return 2 * max(by_size, self.writer.seconds_of_a_write() or 0.0)
