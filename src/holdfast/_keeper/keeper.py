"""The keeper's loop: hears the trainer, its signals and its death.

It lives as long as the trainer's run and no longer. Death is learned from a
pidfd: the end of a pipe would not come while a data-loader worker holds a copy
of the other end. On its way it watches the trainer's memory, and saves what there
is before that is full.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from typing import Any

from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name
from holdfast._keeper import messages
from holdfast._keeper.cloud_notices import Noticed, open_watch
from holdfast._keeper.hangs.keeper_part import Hangs
from holdfast._keeper.heartbeat import Change, held_of, is_looked_at, standing_of, state_of
from holdfast._keeper.mapped_arenas import HeldArena
from holdfast._keeper.memory_alarm import Alarm, MemoryWatch
from holdfast._keeper.postmortem import PostMortem
from holdfast._keeper.requests import Asked
from holdfast._keeper.series import SeriesWriter
from holdfast._keeper.writer import Job, Outcome
from holdfast._store.commit.retention import MEMORY
from holdfast._store.commit.write import is_replaced
from holdfast._store.folder.attempts import BEAT_SECONDS, write_json
from holdfast._store.memory import control
from holdfast._store.mirror.child import Mirror

_REQUEST_SECONDS = 0.25
_EARLY_BEATS = 8
_KILL_AFTER_SECONDS = 5.0
_GONE_AFTER_SECONDS = 5.0
_SURVIVES_SECONDS = 20.0  # a SIGKILL: large memory takes its time, a dead disk takes all of it


class Keeper(Asked):
    """One keeper, for one attempt of one run."""

    def run(self) -> None:
        self._selector = selector = selectors.DefaultSelector()
        selector.register(self._ends.link, selectors.EVENT_READ, self._hear)
        selector.register(self._ends.signals, selectors.EVENT_READ, self._hear_signals)
        if self._ends.pidfd is not None:
            selector.register(self._ends.pidfd, selectors.EVENT_READ, self._bury)
        self._memory = MemoryWatch(self._ends.trainer_pid, self._ends.counters)
        self._hangs = Hangs(self)
        self._change = Change()
        path = self._policy.layout.series(self._policy.attempt)
        self._series = SeriesWriter(path, self._ends.control.words)
        mirror = Mirror.of(self._policy, lambda text: self._tell("mirror", text=text))
        self._begin()
        self._open_notices()
        next_beat = next_look = 0.0
        while not self._done:
            now = time.monotonic()
            self._tick(now)
            if self._memory.next_at is not None and now >= self._memory.next_at:
                self._watch_memory(now)
            if now >= next_beat:
                self._beat_now()
                # Often at first: somebody looks at `status` as soon as a run has started.
                next_beat = now + (BEAT_SECONDS if self._beat > _EARLY_BEATS else _REQUEST_SECONDS)
            if now >= next_look:
                self._look_for_requests()
                self._watch_clock(now)
                if self._noticed is not None and not self._is_leaving:
                    self._noticed.look(now)
                self._hangs.look(now)
                if self._policy.rank == 0 and not self._is_gone():
                    self._series.look(now, self._row_facts)
                if mirror is not None:
                    mirror.look(now, (self._durable_sequence, self._durable_step))
                next_look = now + _REQUEST_SECONDS
            if self._insure_at is not None and now >= self._insure_at:
                self._insure_at = None
                self._insure()
            if self._away_at is not None and now >= self._away_at:
                self._away_at = None
                if self._ends.control.words[control.REST] == control.RESTS:
                    self._leave_now(*self._away)
            if self._kill is not None and self._kill.is_over():
                self._kill = None
                self._kill_trainer()
            if self._gone is not None and self._gone.is_over():
                self._gone = None
                self._note_survivor()
                self._bury()
                continue
            timers = [next_beat, next_look, self._insure_at, self._away_at]
            timers += [self._memory.next_at, self._next_tick()]
            timers += [each.at for each in (self._kill, self._gone) if each is not None]
            wait = min(at for at in timers if at is not None) - time.monotonic()
            for key, _ in selector.select(max(0.0, wait)):
                key.data()
            if self._ends.pidfd is None and os.getppid() != self._ends.trainer_pid:
                self._bury()
        if mirror is not None:
            mirror.leave()

    def _open_notices(self) -> None:
        """One keeper of each machine asks its cloud, for all ranks there."""
        if self._policy.notices == "off" or variables.local_rank():
            return
        watch = open_watch(self._policy.notices, host_name(), variables.notices_address())
        if watch is not None:
            self._noticed = Noticed(watch, self, self._needed_seconds)

    # What a keeper that is one of several has to do besides:

    def _begin(self) -> None:
        """The loop begins."""

    def _tick(self, now: float) -> None:
        """Another turn of the loop."""

    def _next_tick(self) -> float | None:
        """When there is something to do in a turn of the loop."""
        return None

    # -- from the trainer -----------------------------------------------------

    def _hear(self) -> None:
        received = messages.receive(self._ends.link)
        if received is None:
            # The trainer's end is closed: it has died, as the pidfd will tell, or has
            # become another program by exec, which says no goodbye either.
            self._selector.unregister(self._ends.link)
            self._gone = self._deadline(_GONE_AFTER_SECONDS)
            return
        self._take_in(*received)

    def _take_in(self, message: dict[str, Any], descriptors: list[int]) -> None:
        kind = message["kind"]
        if kind == "arena":
            self._holdings.hold(descriptors[0], message.get("path"))
        elif kind == "snapshot":
            self._snapshot_taken(message["generation"], message["sequence"])
        elif kind == "persist":
            self._persist_ordered(message)
        elif kind == "last":
            self._make_way()
            self._writer.drop_waiting()
        elif kind == "settle":
            self._settle_stop(message)
        elif kind == "salvage":
            self._salvage(descriptors[0], message)
        elif kind == "phase":
            self._phase = message["name"]
            self._series.see_phase(self._phase)
        elif kind == "metrics":
            self._series.take(message["m"])
        elif kind == "void":
            self._take_void(message)
        elif kind == "leaving":
            # The trainer's own thread comes first, and may have to wait for the interpreter.
            margin = max(_KILL_AFTER_SECONDS, message["seconds"] / 2)
            self._kill = self._deadline(message["seconds"] + margin)
            self._leave_status = message["status"]
            self._is_leaving = True
            self._away_at = self._insure_at = None
            self._let_go_when_idle()
        elif kind == "goodbye":
            self._let_go_when_idle()
            self._done = True

    def _let_go_when_idle(self) -> None:
        self._writer.wait_idle()
        self._end_series()
        self._let_go()

    def _snapshot_taken(self, generation: int, sequence: int) -> None:
        self._holdings.drop_before(generation)
        held = self._holdings.of(generation)
        record = None if held is None else held.find(sequence)
        if held is not None and record is not None:
            self._hasher.want(held, record)

    def _persist_ordered(self, message: dict[str, Any]) -> None:
        held = self._holdings.of(message["generation"])
        record = None if held is None else held.find(message["sequence"])
        if held is None or record is None or not held.pin(record):
            self._tell("failed", order=message["order"], error="the slot is gone")
            return
        if message["last"]:
            self._insure_at = None
        job = Job(held, record, message["reason"], message["order"], is_last=message["last"])
        if not self._writer.submit(job):
            self._tell("waits", order=message["order"])

    def _take_void(self, message: dict[str, Any]) -> None:
        """A rule has called everything from some step on bad, and noted it durably."""
        self._void_from(message["step"])

    def _void_from(self, step: int) -> None:
        self._void_step = min(step, self._void_step)
        self._holdings.void_from(step)
        if self._durable_step is not None and self._durable_step >= step:
            self._durable_step = None
        self._durable_sequence = 0  # what is held from before that step may be older
        self._writer.forget_durable()

    def _salvage(self, descriptor: int, message: dict[str, Any]) -> None:
        """Make durable what an earlier attempt left in memory, and then remove that."""
        held = self._holdings.hold(descriptor, message["path"])
        if held is None:
            return
        record = held.find(message["sequence"])
        if record is not None and held.pin(record):
            self._holdings.salvage(held)
            self._writer.submit(Job(held, record, "salvaged"))
            threading.Thread(target=self._retire_when_idle, args=(held,), daemon=True).start()

    def _retire_when_idle(self, held: HeldArena) -> None:
        self._writer.wait_idle()
        held.retire(remove=not self._has_failed())

    # -- before memory is full ----------------------------------------------------

    def _watch_memory(self, now: float) -> None:
        self._memory.look(now)
        needed = (self._pace.step_seconds or 0.0) + (self._save_seconds or self._write_seconds())
        alarm = self._memory.alarm(now, needed, is_busy=not self._writer.is_idle)
        if alarm is not None and not self._is_leaving:
            self._save_before_the_limit(alarm)
            self._beat_now()  # with what is used: the keeper may be killed as well

    def _save_before_the_limit(self, alarm: Alarm) -> None:
        newest = self._holdings.newest()
        is_writing = self._persist_newest(MEMORY)
        if alarm.is_first:
            step = newest[1].step if newest is not None and is_writing else None
            self._journal("memory", step=step, **alarm.figures())
            self._tell("memory", step=step, **alarm.figures())
        # That one is of some time ago: the next boundary is worth more.
        self._tell("request", request="save", reason=MEMORY)

    # -- making durable ---------------------------------------------------------

    def _outcome(self, outcome: Outcome) -> None:
        job, record = outcome.job, outcome.job.record
        if outcome.error is None:
            self._failed_step = None
            self._note_save(outcome.seconds)
            if job.held.arena.attempt == self._policy.attempt:
                self._durable_sequence = max(self._durable_sequence, record.sequence)
                self._durable_step = record.step
            told = {"step": record.step, "sequence": record.sequence, "seconds": outcome.seconds}
            self._tell("durable", order=job.order, **told)
        elif outcome.is_dropped:
            self._tell("dropped", order=job.order, step=record.step, error=outcome.error)
        else:
            self._failed_step = None if outcome.is_fenced else record.step
            self._journal("save-failed", step=record.step, error=outcome.error)
            kind = "fenced" if outcome.is_fenced else "failed"
            self._tell(kind, order=job.order, step=record.step, error=outcome.error)
        if job.leave_status is not None:
            self._send_away(job.reason, job.leave_status)

    # -- the end ------------------------------------------------------------------

    def _bury(self) -> None:
        """The trainer is dead without a goodbye: save what it left, and say so."""
        self._make_way()
        self._end_series()
        death = self._examine()
        self._hear_the_rest()
        self._end_series()  # with what had been sent and not been heard yet
        self._persist_newest("death")
        self._writer.wait_idle()
        death.wait_for_status()
        if self._is_news(death):
            death.write(durable_step=self._durable_step)
        self._record_death(death.how)
        # What was durable went with a folder that was removed: memory has the only state.
        self._let_go(remove=self._is_leaving or self._has_folder())
        self._done = True

    def _examine(self) -> PostMortem:
        """Note all that can be seen of a death now, before anything that takes time."""
        self._memory.stop()
        death = PostMortem(self._policy, self._ends, self._memory, self._signals)
        death.note(
            step=int(self._ends.control.words[control.STEP]),
            durable_step=self._durable_step,
            asked=self._asked_for(),
            left_status=self._leave_status,
        )
        if self._is_news(death):
            death.write(durable=False)
        return death

    def _is_news(self, death: PostMortem) -> bool:
        """Whether somebody may ask why it died: not of one that has left, or was to."""
        is_known = self._is_leaving or self._has_killed
        return not is_known and not death.is_as_told(self._leave_status) and self._has_folder()

    def _asked_for(self) -> str | None:
        """Why the run was asked to stop, if it was."""
        return None if self._stop is None else self._stop[0]

    def _hear_the_rest(self) -> None:
        """What a trainer had sent before it died."""
        self._ends.link.setblocking(False)
        while (received := messages.receive(self._ends.link)) is not None:
            message, descriptors = received
            if message["kind"] == "arena":
                self._holdings.hold(descriptors[0], message.get("path"))
            elif message["kind"] == "void":
                self._take_void(message)
            elif message["kind"] == "metrics":
                self._series.take(message["m"])

    def _record_death(self, how: str | None = None) -> None:
        layout, attempt = self._policy.layout, self._policy.attempt
        step = int(self._ends.control.words[control.STEP])
        record = {
            "status": self._leave_status,
            "how": "left" if self._leave_status is not None else how or "died",
            "step": step,
            "durable_step": self._durable_step,
        }
        if self._has_folder() and not layout.exit(attempt).exists():
            self._journal("death", **record)
            with contextlib.suppress(OSError):
                write_json(layout.exit(attempt), record)

    def _has_failed(self) -> bool:
        """Whether the disk did not take a state that the next start needs."""
        failed = self._failed_step
        if failed is None or failed >= self._void_step:
            return False
        return self._durable_step is None or failed > self._durable_step

    def _let_go(self, *, remove: bool = True) -> None:
        """Remove the arenas; one with a state that is on no disk stays for the next start."""
        remove = remove and not self._has_failed()
        if not remove:
            print("the arenas stay: their newest state is not on disk", flush=True)
            self._holdings.hash_newest()
        self._holdings.let_go(remove=remove)

    def _kill_trainer(self) -> None:
        """The trainer said that it was leaving, or was told to, and is still there."""
        if self._ends.control.words[control.STAYS]:
            return  # a kernel holds more than our run
        if is_looked_at(self._ends.trainer_pid) or self._hangs.is_paused:
            return  # a debugger has it: never kill what a person looks at
        self._has_killed = True
        self._journal("killed-by-keeper", status=self._leave_status)
        if self._ends.pidfd is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._ends.pidfd, signal.SIGKILL)
        self._gone = self._deadline(_SURVIVES_SECONDS)

    def _note_survivor(self) -> None:
        """Of one that was killed and is still there: its next life must not wait for it."""
        pid = self._ends.trainer_pid
        if self._has_killed and (state := state_of(pid)) not in ("", "Z"):
            self._hangs.tell_of_survivor(pid, state)

    def _beat_now(self) -> None:
        self._beat += 1
        words = self._ends.control.words
        newest = self._holdings.newest()
        beat = {
            "beat": self._beat,
            "keeper": self._identity,
            "time": time.time(),
            **standing_of(words),
            **held_of(newest),
            "durable_step": self._durable_step,
            "phase": self._phase,
            "step_seconds": self._pace.step_seconds,
            "save_seconds": self._save_seconds,
            "slurm": None if self._job is None else self._job.beat(),
            "memory": self._memory.newest,
            "counters": self._memory.before,
            **self._hangs.beat(),
        }
        beat["pace"] |= self._change.see(time.monotonic(), self._memory.newest, words)
        self._publish_beat(beat)
        numbers: list[int] = []
        with contextlib.suppress(OSError):
            numbers = self._policy.layout.attempt_numbers()
        if numbers and numbers[-1] > self._policy.attempt and not self._is_leaving:
            self._tell("fenced", order=None, step=None, error=f"attempt {numbers[-1]} took over")

    def _row_facts(self) -> dict[str, Any]:
        """What a row of the series tells that is not in the shared words."""
        return {
            "mem_step": held_of(self._holdings.newest())["memory_step"],
            "disk_step": self._durable_step,
            "memory": self._memory.newest,
        }

    def _end_series(self) -> None:
        if self._policy.rank == 0:  # one series, with one hand
            self._series.end(self._row_facts)

    def _has_folder(self) -> bool:
        """Whether the run folder is there, and is not that of another run by now."""
        layout = self._policy.layout
        return layout.identity.exists() and not is_replaced(layout, self._policy.run_id)

    def _publish_beat(self, beat: dict[str, Any]) -> None:
        if is_replaced(self._policy.layout, self._policy.run_id):
            return
        with contextlib.suppress(OSError):
            write_json(self._policy.layout.heartbeat(self._policy.attempt), beat, durable=False)
