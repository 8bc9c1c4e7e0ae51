"""Saves the state at boundaries: when it is copied, ordered from the keeper, and waited for."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any

from holdfast._adapters.metrics import Metrics
from holdfast._adapters.registry import adapter_of
from holdfast._errors import SaveFailed
from holdfast._run.saving.cadence import Cadence, WriteTiming
from holdfast._run.saving.keeper_client import Handle, KeeperClient
from holdfast._run.saving.script_state import ForgottenState
from holdfast._run.signals.handlers import uninterruptible
from holdfast._settings import Settings
from holdfast._state.capture import Captured, capture_generators
from holdfast._state.capture_cache import CaptureCache, ObjectGraphCache, Shares
from holdfast._state.fit import class_names
from holdfast._store.commit.chunks import CommitThreads
from holdfast._store.commit.dedup import newest_former
from holdfast._store.commit.source import Ranges, Source
from holdfast._store.commit.write import Policy, State, keep_checkpoint, remove_old
from holdfast._store.format.image import encode_scalars, plan_image
from holdfast._store.memory.control import COMMON, SAVES, SNAPSHOTS, STEP, at_work, mark_of
from holdfast._text import say

if TYPE_CHECKING:
    from holdfast._run.saving.rank_orders import RankAgreement
    from holdfast._run.saving.snapshots import Snapshots, Taken

_SLOT_SECONDS = 60.0  # not counting the time in which the keeper waits for a processor
_BAD = "a rule has called this step bad"
_REST_SECONDS = 0.5  # for a slot, before a phase that may take minutes
_IN_FLIGHT_SECONDS = 5.0  # for a copy that a device has started


class TimedHandle(Handle):
    """A checkpoint that the cadence asked for."""

    def __init__(self, control: Any, step: int) -> None:
        super().__init__("cadence")
        self._control = control
        self._began = time.monotonic()
        self._began_step = step
        self._ended: tuple[float, int] | None = None

    def ordered(self) -> None:
        """The trainer has waited until now, and goes on."""
        self._began = time.monotonic()

    def resolve(self, error: str | None = None) -> None:
        # The words may be released before the last checkpoint is resolved.
        with contextlib.suppress(ValueError):
            if error is None:
                self._ended = (time.monotonic(), int(self._control[STEP]))
        super().resolve(error)

    def writing(self, now: float, step: int) -> WriteTiming | None:
        """Its timing, until now if it is not durable yet.

        None if it failed, or if the trainer wrote it itself and waited.
        """
        ended = (now, step) if not self.done else self._ended
        if ended is None or ended[0] <= self._began:
            return None
        return WriteTiming(self._began, self._began_step, *ended)


@dataclass(eq=False)
class Saver:
    """Saves the state of one attempt: in memory, and through the keeper on disk."""

    _state: dict[str, Any]
    _metrics: Metrics
    _keeper: KeeperClient
    _cadence: Cadence
    _where: Callable[[], Mapping[str, Any]]  # gives the position in data and loops
    _ranks: RankAgreement | None
    _is_bad: Callable[[], bool]  # a state that a rule has called bad is never saved
    _settings: Settings
    is_new: InitVar[bool]

    def __post_init__(self, is_new: bool) -> None:
        state, keeper, ranks = self._state, self._keeper, self._ranks
        # Of several ranks each captures its share.
        self._cache = CaptureCache() if ranks is None else Shares(ranks.rank, ranks.size, state)
        self.wanted: list[Handle] = []
        self._timed: TimedHandle | None = None  # the last one that the cadence asked for
        self.forgotten = ForgottenState(state, is_new=is_new)
        self._beside_tensors = ObjectGraphCache()
        self._beside: dict[str, Any] = {}  # the part of the head that `where` gives
        self._trainer = threading.current_thread()
        self.snapshots: Snapshots | None = None  # none without a keeper
        self._failed_at: int | None = None  # the step that was to be the last one
        self._ordered: dict[int, list[Handle]] = {}  # by sequence: those whose copy is in flight
        self._in_flight_lock = threading.Lock()
        if keeper.has_keeper:
            from holdfast._run.saving.snapshots import Snapshots
            from holdfast._store.memory.backing import total_bytes

            policy = keeper.policy
            self.snapshots = Snapshots(
                run_id=policy.run_id,
                attempt=policy.attempt,
                announce=keeper.announce,
                say=say,
                rank=policy.rank,
                folder=os.path.realpath(policy.layout.folder),
                common=lambda: int(keeper.words[COMMON]) - 1,
                landed=self._on_copied,
                attend=keeper.check_keeper,
                readers=keeper.keeper_pids,
                most_bytes=self._settings.memory_bytes(total_bytes),
                has_peers=ranks is not None,
            )
            keeper.snapshots = self.snapshots

    @property
    def newest(self) -> Taken | None:
        return self.snapshots.newest if self.snapshots else None

    def want(self, handle: Handle) -> Handle:
        """Take a checkpoint at the next boundary; from any thread."""
        handle.trainer = self._trainer
        handle.attend = self._keeper.check_keeper
        handle.words = self._keeper.words
        self.wanted.append(handle)
        return handle

    def _begin_boundary(self, step: int) -> None:
        """See whether the last snapshot, and the building of slots, are over."""
        self._trainer = threading.current_thread()
        snapshots, meter = self.snapshots, self._cadence.meter
        if snapshots is None:
            return
        if (ended := snapshots.hashed_at()) is not None:
            meter.end_snapshot(step, ended)
        if snapshots.newest is not None and not snapshots.is_building:
            meter.end_building(step)

    def pass_boundary(self, now: float, step: int) -> None:
        """Save what is due at this boundary, without waiting for the disk."""
        self._begin_boundary(step)
        if self.wanted:
            # This boundary was asked for, so it waits for a slot if it must.
            handles = list(self.wanted)
            self._begin_checkpoint(step, handles, _SLOT_SECONDS)
            for handle in handles:
                if handle.step is None:
                    self.wanted.remove(handle)
                    handle.resolve(f"no slot became free within {_SLOT_SECONDS:.0f} s")
        elif self._cadence.checkpoint_due(now, step):
            self._begin_in_time(now, step)
        elif self._cadence.snapshot_due(now):
            self._take_snapshot(step, 0.0)

    def pass_together(self, now: float, step: int, mark: int, decided: str | None) -> None:
        """The same with several ranks, which save the same boundary."""
        assert self._ranks is not None
        self._begin_boundary(step)
        ranks, cadence = self._ranks, self._cadence
        by_count = cadence.counts_steps and cadence.checkpoint_due(now, step)
        if decided is not None or by_count:
            # First the reason that all ranks share: it goes into the manifest.
            handles = [Handle(decided or "cadence"), *self.wanted]
            self._begin_checkpoint(step, handles, _SLOT_SECONDS)
        elif ranks.is_planned(mark) and self._take_snapshot(step, 0.0) is None:
            ranks.missed(mark, "no slot was free")
        if self._can_snapshot() and not cadence.counts_steps and cadence.checkpoint_due(now, step):
            ranks.propose(mark, "cadence")
            cadence.took_checkpoint(now, step)
        elif self._can_snapshot() and cadence.snapshot_due(now):
            ranks.propose(mark, None)

    @uninterruptible
    def rest_at(self, step: int, *, at_any_cost: bool = False) -> None:
        """Have this boundary in memory: no other comes for a while, and a stop needs it."""
        in_flight = None if self.snapshots is None else self.snapshots.in_flight
        if any(each is not None and each.step == step for each in (self.newest, in_flight)):
            return
        if at_any_cost:
            self._begin_checkpoint(step, [Handle("left")], _SLOT_SECONDS)
        elif self._can_snapshot() and self._cadence.affords_rest(time.monotonic()):
            self._take_snapshot(step, _REST_SECONDS)

    def save_and_wait(self, step: int, reason: str, *, is_last: bool) -> bool:
        """Make this boundary durable now; False, with a line, if that fails.

        `is_last`: before older ones that wait for the disk.
        """
        handle = Handle(reason, is_last=is_last)
        if is_last:
            self._keeper.make_way()
        try:
            self._begin_checkpoint(step, [*self.wanted, handle], _SLOT_SECONDS)
            if handle.step is None:
                handle.resolve(f"no slot became free within {_SLOT_SECONDS:.0f} s")
            self._keeper.wait(handle)
        except SaveFailed as error:
            self._tell_failure(step, error)
            return False
        return True

    def keep_last(self, reason: str) -> bool:
        if self.snapshots is not None:
            self.snapshots.wait_for_copies(_IN_FLIGHT_SECONDS)
        newest = self.newest
        if newest is None or newest.sequence <= self._keeper.durable_sequence:
            return True
        if not self._keeper.has_keeper:
            return False
        handle = Handle(reason)
        handle.step = newest.step
        try:
            self._keeper.order(newest, [handle])
            self._keeper.wait(handle)
        except SaveFailed as error:
            self._tell_failure(newest.step, error)
            return False
        return True

    def _tell_failure(self, step: int, error: SaveFailed) -> None:
        if self._failed_at != step:  # else it was tried again, and has been said
            say(f"step {step} could not be made durable: {error}.")
        self._failed_at = step

    def slots(self) -> list[tuple[int, memoryview]]:
        if self.snapshots is None or self.snapshots.arena is None:
            return []
        arena, _ = self.snapshots.arena
        return [(record.step, arena.image(record.slot)) for record in arena.whole()]

    def void_from(self, step: int) -> None:
        """A rule has called everything from this step on bad: drop it."""
        self._refuse_wanted(_BAD)
        if self.snapshots is not None:
            self.snapshots.void_from(step)

    def close(self) -> None:
        self._refuse_wanted("the run was closed before the next boundary")
        if self.snapshots is not None:
            self.snapshots.close()

    def _refuse_wanted(self, why: str) -> None:
        while self.wanted:
            self.wanted.pop().resolve(why)

    def _begin_in_time(self, now: float, step: int) -> None:
        """A checkpoint is due by the clock; the previous one gives the cost."""
        if self._timed is not None and self._timed.done:
            self._note_writing(self._timed, now, step)
            self._timed = None
        timed = TimedHandle(self._keeper.words, step)
        self._begin_checkpoint(step, [timed], 0.0)
        if timed.step is None:
            return  # no slot: the next boundary tries again
        if self._timed is not None:  # still being written, longer than the interval
            self._note_writing(self._timed, now, step)
        self._timed = timed
        timed.ordered()

    def _note_writing(self, timed: TimedHandle, now: float, step: int) -> None:
        writing = timed.writing(now, step)
        if writing is not None:
            self._cadence.wrote_checkpoint(writing, now, step)

    def _begin_checkpoint(self, step: int, handles: list[Handle], patience_seconds: float) -> None:
        handles, waited = list(handles), None
        if self._is_bad():
            _resolve(handles, step, _BAD)
            return
        if self._can_snapshot():
            taken = self._take_snapshot(step, patience_seconds)
            if taken is not None:
                self._order(taken, handles)
            elif self._can_snapshot():
                return  # no free slot yet: the next boundary tries again
        if not self._can_snapshot() and self._ranks is None:
            began = time.monotonic()
            with at_work(self._keeper.words, SAVES):
                self._write_here(step, handles)
            waited = time.monotonic() - began
        elif not self._can_snapshot():
            why = "there is no memory for snapshots, which several ranks need"
            _resolve(handles, step, why)
        for handle in handles:
            if handle in self.wanted:
                self.wanted.remove(handle)
        self._cadence.took_checkpoint(time.monotonic(), step, waited)

    def _can_snapshot(self) -> bool:
        return (
            self._keeper.has_keeper and self.snapshots is not None and not self.snapshots.impossible
        )

    def _capture(self, step: int) -> Captured:
        where = self._where()
        self._beside = where["head"]
        extra = {"generators": capture_generators(), "position": where["position"]}
        captured = self._cache.capture(self._state, extra)
        for line in self.forgotten.check(captured, step, in_first_epoch=where["in_first_epoch"]):
            say(line)
        if self._keeper.policy.rank:
            return captured
        return self._beside_tensors.add_to(captured, self._state)

    def _head(self) -> dict[str, Any]:
        return {
            "attempt": self._keeper.policy.attempt,
            "world": self._keeper.policy.size,
            "common": self._cache.print,
            "classes": class_names(self._state),
            "metrics": self._metrics.values(),
            "best": self._metrics.best,
            **self._beside,
        }

    def _take_snapshot(self, step: int, patience_seconds: float) -> Taken | None:
        if not self._can_snapshot():
            self._cadence.forget_snapshots()
            return None
        if self._is_bad():
            return None
        assert self.snapshots is not None
        # Others wait until the one before is hashed; a checkpoint that is due by count is exact.
        is_counted = self._cadence.counts_steps and self._cadence.checkpoint_due(0.0, step)
        meter = self._cadence.meter
        if patience_seconds == 0 and not self.snapshots.can_take(is_counted=is_counted):
            if self.snapshots.is_building:
                meter.begin_building(step)
            self._cadence.missed_snapshot(time.monotonic())
            return None
        began = time.perf_counter()
        with at_work(self._keeper.words, SAVES):
            captured, head = self._capture(step), self._head()
            capturing = time.perf_counter() - began
            mark = mark_of(step, bool(self._beside.get("at_turn")))
            taken = self.snapshots.take(
                captured, head, mark, patience_seconds=patience_seconds, is_counted=is_counted
            )
        if self._keeper.logged is not None and (late := self._metrics.take_late()):
            self._keeper.logged.append((step - 1, late))
        if taken is None:
            if self.snapshots.is_building:
                meter.begin_building(step)
            waited = patience_seconds > 0  # that time was asked for
            spent = 0.0 if waited else time.perf_counter() - began
            self._cadence.missed_snapshot(time.monotonic(), spent)
            return None
        meter.begin_snapshot(step)
        self._keeper.words[SNAPSHOTS] += 1
        if taken is self.snapshots.newest:
            self._keeper.snapshot_taken(taken)
        if self._ranks is not None:
            self._ranks.taken()
        after = time.perf_counter() - taken.ended
        here = 0.0 if taken.is_hidden else capturing + taken.seconds + after
        self._cadence.took_snapshot(time.monotonic(), here + taken.device_seconds)
        return taken

    def _on_copied(self, taken: Taken, good: bool) -> None:
        """In the thread of the copies: a device has copied a snapshot, or lost it."""
        with self._in_flight_lock:
            handles = self._ordered.pop(taken.sequence, [])
        if good:
            self._keeper.snapshot_taken(taken)
            if handles:
                self._keeper.order(taken, handles)
            return
        if self.snapshots is not None:
            self.snapshots.release_slot(taken.sequence)
        if self._ranks is not None:
            self._ranks.missed(taken.mark, "the copy from the device was lost")
        for handle in handles:
            handle.resolve("the copy from the device was lost")

    def _order(self, taken: Taken, handles: list[Handle]) -> None:
        assert self.snapshots is not None
        self.snapshots.promise(taken)
        for handle in handles:
            handle.step = taken.step
        with self._in_flight_lock:
            if self.snapshots.in_flight is taken:
                self._ordered[taken.sequence] = handles
                return
        self._keeper.order(taken, handles)

    def _write_here(self, step: int, handles: list[Handle]) -> None:
        """Without slots or keeper the trainer writes itself, and training waits."""
        error = None
        try:
            reason = handles[0].reason
            write_direct(self._keeper.policy, self._capture(step), self._head(), step, reason)
        except SaveFailed as failed:
            error = str(failed)
            # The run hears it as of a keeper.
            self._keeper.hear_run({"kind": "failed", "order": None, "step": step, "error": error})
        else:
            newest = self.newest
            self._keeper.record_written(step, 0 if newest is None else newest.sequence)
        _resolve(handles, step, error)


def _resolve(handles: list[Handle], step: int, error: str | None) -> None:
    for handle in handles:
        handle.step = step
        handle.resolve(error)


# -- A checkpoint written by the trainer itself, without arena or keeper ---------------------------
# For machines without memory for slots, and for systems without a keeper. Training waits meanwhile.


def write_direct(
    policy: Policy, captured: Captured, head: dict[str, Any], step: int, reason: str
) -> None:
    """Write a captured state; returns when it is durable."""
    scalars = encode_scalars({**head, "step": step, "tree": captured.tree})
    plan = plan_image(captured.specs, len(scalars))
    by_name = dict(zip((s.name for s in captured.specs), captured.values, strict=True))
    views = [memoryview(plan.header)]
    views += [adapter_of(s.kind).bytes_of(by_name[s.name]) for s, _ in plan.in_file_order()]
    views.append(memoryview(scalars.ljust(plan.scalars.size_bytes)))
    state = State(policy.attempt, step, reason, head["metrics"], bool(head.get("at_turn")))
    former = newest_former(policy.layout, policy.line, policy.rank)
    source = Source(views, Ranges.of(plan.extents()))
    keep_checkpoint(policy, state, source, CommitThreads(is_background=False), former)
    remove_old(policy)
