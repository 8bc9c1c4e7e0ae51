"""The keeper's loop: receives what the trainer sends, its signals and its death.

It lives as long as the trainer's run. It learns of the death from a pidfd: the end of a pipe would
not come while a data-loader worker holds a copy of the other end. The decider chooses the reaction
to each event; see `decider.py`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import time
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from holdfast import _errors
from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name, of_process
from holdfast._keeper import protocol
from holdfast._keeper.cloud_notices import NoticeReactions, open_watch
from holdfast._keeper.decider import SLOT_GONE
from holdfast._keeper.hangs.monitor import HangMonitor
from holdfast._keeper.memory_alarm import MemoryWatch
from holdfast._keeper.series import SeriesWriter
from holdfast._keeper.start_facts import complete_start
from holdfast._keeper.storage import HeldArena, Storage
from holdfast._keeper.time_limit import TimeLimit
from holdfast._keeper.timers import Timers, in_background
from holdfast._keeper.trainer import PostMortem, SignalReader, Trainer, age_of
from holdfast._store.commit.write import is_replaced
from holdfast._store.folder import journal
from holdfast._store.folder.attempts import BEAT_SECONDS, write_json
from holdfast._store.folder.requests import take_requests
from holdfast._store.memory import control
from holdfast._store.memory.arena import SlotRecord, used_bytes

if TYPE_CHECKING:
    from holdfast._keeper.decider import Decider
    from holdfast._keeper.job import JobWatch
    from holdfast._store.mirror.child import Mirror

_POLL_SECONDS = 0.25
_EARLY_BEATS = 8
_MOST_PENDING = 1000
_RECENT_SECONDS = 60.0
_BEATS = 64  # at least _RECENT_SECONDS / BEAT_SECONDS


class Keeper:
    """One keeper, for one attempt of one run."""

    def __init__(self, config: protocol.KeeperConfig, decider: Decider) -> None:
        self.policy = policy = config.policy
        self.config = config
        self.journal = functools.partial(
            journal.append, policy.layout.journal, attempt=policy.attempt
        )
        self.timers = Timers()
        self.selector = selectors.DefaultSelector()
        self.decider = decider
        self.storage = Storage(policy, decider.on_written, decider.on_closed)
        self.trainer = Trainer(
            config,
            self.timers,
            self.journal,
            is_paused=lambda: self.hangs.watch.is_paused,
            gone=self._trainer_counts_as_dead,
        )
        self.signals = SignalReader(config.signals, config.numbers, self.trainer.words)
        grace = config.grace_seconds
        self.time_limit = TimeLimit(
            _open_job(config), grace, self.trainer, self.storage, self.journal
        )
        self.memory = MemoryWatch(config.trainer_pid, config.counters)
        self.hangs = HangMonitor(self)
        self.identity = asdict(of_process())
        self._series = SeriesWriter(policy.layout.series(policy.attempt), self.trainer.words)
        self._notices: NoticeReactions | None = None  # on a machine of a cloud
        self._mirror: Mirror | None = None
        self._change = Change()
        self._beats = 0
        self._is_done = False
        decider.attach(self)

    def run(self) -> None:
        self.selector.register(self.timers, selectors.EVENT_READ, self.timers.drain)
        self.selector.register(self.trainer.messages, selectors.EVENT_READ, self._receive)
        self.selector.register(self.config.signals, selectors.EVENT_READ, self._receive_signals)
        if self.config.pidfd is not None:
            self.selector.register(self.config.pidfd, selectors.EVENT_READ, self._on_death)
        if self.policy.mirror is not None and self.policy.rank == 0:  # it copies for all ranks
            from holdfast._store.mirror.child import Mirror  # slow to import

            self._mirror = Mirror(self.policy, lambda text: self.trainer.tell.mirror(text=text))
        self._open_notices()
        if self.policy.rank == 0:
            in_background(lambda: complete_start(self.policy.layout, self.policy.attempt))
        self.timers.after(0.0, self._watch_memory, "memory")
        self.timers.after(0.0, self._beat)
        self.timers.after(0.0, self._poll)
        while not self._is_done:
            self.timers.run_due()
            next_tick = self.decider.tick(time.monotonic())
            if self._is_done:
                break
            wait = min(self.timers.next_at(), next_tick) - time.monotonic()
            for key, _ in self.selector.select(max(0.0, wait)):
                key.data()
            if self.config.pidfd is None and os.getppid() != self.trainer.pid:
                self.decider.on_death()
        self.timers.close()
        if self._mirror is not None:
            self._mirror.leave()

    def finish(self) -> None:
        self._is_done = True
        self.timers.clear()

    def _open_notices(self) -> None:
        """One keeper of each machine asks its cloud, for all ranks there."""
        if self.policy.notices == "off" or variables.whole_number("LOCAL_RANK"):
            return
        watch = open_watch(
            self.policy.notices, host_name(), variables.text("HOLDFAST_NOTICES_ADDRESS")
        )
        if watch is not None:
            self._notices = NoticeReactions(watch, self.decider, self.time_limit.needed_seconds)

    # -- by the clock -----------------------------------------------------------

    def _poll(self) -> None:
        now = time.monotonic()
        is_first = self.policy.rank == 0  # it acts for all ranks
        if is_first:
            for kind, details in take_requests(self.policy.layout, self.policy.attempt):
                self.decider.on_request(kind, details)
        if not self.decider.is_trainer_gone:
            self.time_limit.poll(now, self.decider)
        if self._notices is not None and not self.trainer.is_leaving:
            self._notices.poll(now)
        self.hangs.poll(now)
        if is_first and not self.decider.is_trainer_gone:
            self._series.poll(now, self._row_facts)
        if self._mirror is not None:
            self._mirror.poll(now, (self.storage.durable_sequence, self.storage.durable_step))
        self.timers.at(now + _POLL_SECONDS, self._poll)

    def _watch_memory(self) -> None:
        """Save what there is before memory is full."""
        now = time.monotonic()
        self.memory.sample(now)
        save_seconds = self.storage.save_seconds or self.storage.write_seconds()
        needed = (self.time_limit.pace.step_seconds or 0.0) + save_seconds
        alarm = self.memory.alarm(now, needed, is_busy=not self.storage.writer.is_idle)
        if alarm is not None and not self.trainer.is_leaving:
            self.decider.on_memory_alarm(alarm)
            self._publish_beat()  # with what is used: the keeper may be killed as well
        if self.memory.next_at is not None:
            self.timers.at(self.memory.next_at, self._watch_memory, "memory")

    def stop_watching_memory(self) -> None:
        """The trainer is gone."""
        self.memory.stop()
        self.timers.cancel("memory")

    # -- from the trainer -------------------------------------------------------

    def _receive_signals(self) -> None:
        try:
            for arrival in self.signals.read():
                if not self.time_limit.is_requeued():
                    self.decider.on_signal(arrival)
        except EOFError:  # closed, while the trainer lives on: no signal comes any more
            self.selector.unregister(self.config.signals)

    def _receive(self) -> None:
        try:
            received = protocol.receive(self.trainer.messages, waits=False)
        except BlockingIOError:
            return  # `receive_pending` has taken it, after the same select
        if received is None:
            # The trainer's end is closed: it has died, as the pidfd will report, or has
            # become another program by exec, which says no goodbye either.
            self.selector.unregister(self.trainer.messages)
            self.trainer.is_gone_without_goodbye()
            return
        self._dispatch(*received)

    def receive_pending(self) -> None:
        """Receive all that the trainer has sent: a keeper that starts late knows no arena yet."""
        for _ in range(_MOST_PENDING):
            if not any(key.fileobj is self.trainer.messages for key, _ in self.selector.select(0)):
                return
            self._receive()

    def receive_rest(self) -> None:
        """What a trainer had sent before it died, as far as it still counts."""
        with contextlib.suppress(BlockingIOError):
            while (received := protocol.receive(self.trainer.messages, waits=False)) is not None:
                data, descriptors = received
                if data["kind"] == "arena":
                    self.storage.holdings.hold(descriptors[0], data.get("path"))
                elif data["kind"] in ("void", "metrics", "wrote"):
                    self._dispatch(data, [])

    def _dispatch(self, fields: dict[str, Any], descriptors: list[int]) -> None:
        kind = fields.pop("kind")
        if not protocol.receive_call(self, kind, *descriptors, **fields):
            self.decider.on_message(kind, fields)

    def on_arena(self, descriptor: int, path: str | None = None) -> None:
        self.storage.holdings.hold(descriptor, path)
        self.decider.on_arena()

    def on_snapshot(self, generation: int, sequence: int) -> None:
        self.storage.announce(sequence)
        found = self.storage.slot(generation, sequence)
        if found is not None:
            self.storage.hasher.want(*found)
        self.decider.on_snapshot(generation)

    def on_persist(
        self,
        order: int,
        generation: int,
        sequence: int,
        reason: str,
        last: bool,  # only the newest state counts now
    ) -> None:
        self.storage.announce(sequence)
        found = self.storage.slot(generation, sequence)
        if found is None:
            self.trainer.tell.failed(order=order, error=SLOT_GONE)
        else:
            self.decider.on_order(order, found, reason, is_last=last)

    def on_wrote(self, step: int, sequence: int) -> None:
        """The trainer has written a checkpoint; the snapshots up to this one are older."""
        self.storage.mark_durable(self.policy.attempt, step, sequence)

    def on_last(self) -> None:
        """The last snapshot is about to be taken."""
        self.storage.hasten()
        self.storage.writer.drop_waiting()

    def on_salvage(self, descriptor: int, path: str, sequence: int) -> None:
        held = self.storage.holdings.hold(descriptor, path)
        record = None if held is None else held.find(sequence)
        if held is not None and record is not None:
            held.wait_until_free(record.slot)
            self.decider.on_salvage(held, record)

    def on_phase(self, name: str | None) -> None:
        self.trainer.phase = name
        self._series.see_phase(name)

    def on_metrics(self, m: dict[str, list[Any]]) -> None:
        self._series.take(m)

    def on_void(self, step: int, reason: str) -> None:
        self.storage.invalidate_from(step)
        self.decider.on_invalid(step, reason)

    def on_leaving(self, status: int, seconds: float) -> None:
        self.trainer.leaves(status, seconds)
        self.decider.on_leaving()

    def on_goodbye(self) -> None:
        self.decider.on_goodbye()

    def on_settle(self, reason: str, status: int, signal: int, step: int | None) -> None:
        """The trainer has stopped, durably: say why that was, and have the job come back."""
        job, tell = self.time_limit.job, self.trainer.tell
        if job is None:
            tell.settled(reason=reason, status=status)
            return

        def resolve() -> None:
            why, found = job.resolve_stop(reason, status, signal)
            # First this: once the job is requeued, little is left of its log.
            tell.settled(reason=why, status=found)
            if found == _errors.REQUEUE:
                tell.requeued(**asdict(job.requeue(step)))

        in_background(resolve)

    # -- its death --------------------------------------------------------------

    def _on_death(self) -> None:
        self.memory.wait_for_room()
        self.decider.on_death()

    def _trainer_counts_as_dead(self) -> None:
        if state := self.trainer.state_after_kill():
            self.hangs.report_survivor(self.trainer.pid, state)
        self.decider.on_death()

    def examine_death(self) -> PostMortem:
        """Record what can be observed of a death now, before anything that takes time."""
        self.stop_watching_memory()
        death = PostMortem(self.config, self.memory, self.signals.recent)
        death.note(
            step=self.trainer.step,
            durable_step=self.storage.durable_step,
            asked=self.decider.stop_reason(),
            left_status=self.trainer.leave_status,
        )
        if self.is_unexpected(death):
            death.write(durable=False)
        return death

    def is_unexpected(self, death: PostMortem) -> bool:
        """True unless the trainer has left, or was to, or the run folder is gone."""
        is_known = self.trainer.is_leaving or self.trainer.was_killed
        if is_known or death.is_as_told(self.trainer.leave_status):
            return False
        return self.storage.has_folder()

    def record_death(self, death: PostMortem | None) -> None:
        path, status = self.policy.layout.exit(self.policy.attempt), self.trainer.leave_status
        if death is not None and death.ask() and self.is_unexpected(death):
            status = None  # it was told to leave, and something else ended it first
        how = None if death is None else death.how
        record = {
            "status": status,
            "how": "left" if status is not None else how or "died",
            "step": self.trainer.step,
            "durable_step": self.storage.durable_step,
        }
        if self.storage.has_folder() and not path.exists():
            self.journal("death", **record)
            with contextlib.suppress(OSError):
                write_json(path, record)

    # -- what others read -------------------------------------------------------

    def _beat(self) -> None:
        self._publish_beat()
        # Often at first: `holdfast status` may be asked as soon as a run has started.
        seconds = BEAT_SECONDS if self._beats > _EARLY_BEATS else _POLL_SECONDS
        self.timers.after(seconds, self._beat)

    def _publish_beat(self) -> None:
        self._beats += 1
        words, job = self.trainer.words, self.time_limit.job
        beat = {
            "beat": self._beats,
            "keeper": self.identity,
            "time": time.time(),
            **standing_of(words),
            **held_of(self.storage.holdings.newest()),
            "durable_step": self.storage.durable_step,
            "phase": self.trainer.phase,
            "step_seconds": self.time_limit.pace.step_seconds,
            "save_seconds": self.storage.save_seconds,
            "slurm": None if job is None else job.beat(),
            "memory": self.memory.newest,
            "counters": self.memory.before,
            **self.hangs.beat(),
        }
        beat["pace"] |= self._change.observe(time.monotonic(), self.memory.newest, words)
        self.decider.publish_beat(beat)
        numbers: list[int] = []
        with contextlib.suppress(OSError):
            numbers = self.policy.layout.attempt_numbers()
        if numbers and numbers[-1] > self.policy.attempt and not self.trainer.is_leaving:
            error = f"attempt {numbers[-1]} took over"
            self.trainer.tell.fenced(order=None, step=None, error=error)

    def write_beat(self, beat: dict[str, Any]) -> None:
        if is_replaced(self.policy.layout, self.policy.run_id):
            return
        with contextlib.suppress(OSError):
            write_json(self.policy.layout.heartbeat(self.policy.attempt), beat, durable=False)

    def _row_facts(self) -> dict[str, Any]:
        """What a row of the series has that is not in the shared words."""
        return {
            "mem_step": held_of(self.storage.holdings.newest())["memory_step"],
            "disk_step": self.storage.durable_step,
            "memory": self.memory.newest,
            **self.decider.row_facts(),
        }

    def end_series(self) -> None:
        if self.policy.rank == 0:  # one series, with one writer
            self._series.end(self._row_facts)


def _open_job(config: protocol.KeeperConfig) -> JobWatch | None:
    if config.job is None or config.policy.rank > 0:  # one keeper asks SLURM, for all ranks
        return None
    from holdfast._environment.slurm.job import Job  # only where there is a job
    from holdfast._keeper.job import JobWatch

    policy = config.policy
    return JobWatch(Job(**config.job), policy.layout, policy.attempt, policy.requeue_limit)


# -- What a heartbeat contains about the trainer and the snapshots in memory -----------------------


class Change:
    """Memory in undisturbed times against now, and recent compilations."""

    def __init__(self) -> None:
        self._usual_bytes: int | None = None
        self._compiles: deque[tuple[float, int]] = deque(maxlen=_BEATS)

    def observe(self, now: float, sample: dict[str, Any] | None, words: Any) -> dict[str, Any]:
        """Record one heartbeat; returns what it contains of this."""
        used = sample or {}
        parts = [used.get(name) for name in ("rss", "workers")]
        size = sum(part for part in parts if isinstance(part, int)) or None
        if size is not None and not words[control.DISTURBED] & control.SLOWING:
            self._usual_bytes = size
        made = int(words[control.COMPILES])
        self._compiles.append((now, made))
        while now - self._compiles[0][0] > _RECENT_SECONDS:
            self._compiles.popleft()
        return {
            "memory": {"usual": self._usual_bytes, "now": size},
            "compiles_lately": made - self._compiles[0][1],
        }


def standing_of(words: Any) -> dict[str, Any]:
    """The trainer's position, from the shared words."""
    return {
        "step": int(words[control.STEP]),
        "boundary_age_seconds": age_of(int(words[control.BOUNDARY_NS])),
        "epoch": int(words[control.EPOCH]) or None,
        "epochs": int(words[control.EPOCHS]) or None,
    }


def held_of(newest: tuple[HeldArena, SlotRecord] | None) -> dict[str, Any]:
    """The newest snapshot in memory, the slots that have memory, and how much it is."""
    slots = slots_bytes = None
    if newest is not None:
        arena = newest[0].arena
        with contextlib.suppress(OSError, ValueError):  # another thread has just closed it
            slots, slots_bytes = len(arena.present()), used_bytes(arena.descriptor)
    return {
        "memory_step": None if newest is None else newest[1].step,
        "memory_time": None if newest is None else newest[1].captured_at,
        "slots": slots,
        "slots_bytes": slots_bytes,
        "in_shm": newest is not None and newest[0].path is not None,
    }
