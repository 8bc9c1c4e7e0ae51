"""Hang detection in one keeper: the watch over its trainer, and the judge of all ranks.

The keeper of rank 0, or of a single process, has both. The other ranks have only the watch and send
its reports to the judge.

While all is well the watch reads a few shared words and nothing else. When its patience is over it
inspects the processes in a thread, since reading stacks takes a while. `judge.py` decides for all
ranks what the results mean.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name
from holdfast._environment.processes.patience import Patience, Sight
from holdfast._environment.processes.proc import read_schedstat
from holdfast._keeper import protocol
from holdfast._keeper.hangs.judge import HangJudge
from holdfast._keeper.hangs.record import (
    file_hang,
    file_look,
    paused_sentence,
    say_in_place_of,
    shorten,
    told_of,
)
from holdfast._keeper.trainer import age_of, is_stopped_or_traced, state_of
from holdfast._store.folder import journal
from holdfast._store.folder.supervised import tell_leader_of_hang
from holdfast._store.memory import control

if TYPE_CHECKING:
    from holdfast._environment.processes.inspect import Looker
    from holdfast._keeper.keeper import Keeper

_TELL_AGAIN_SECONDS = 10.0  # the judge may have been replaced
_LOOK_SECONDS = 8.0  # without progress, after which an inspection is abandoned
_LOOKING_SECONDS = 3.0  # between two reports that an inspection makes progress
_MOST_ABANDONED = 3  # inspections that did not end: each holds a thread
_HELD_LOOK_SECONDS = 1.0
_DEAF_SECONDS = 5.0  # without a pulse, at a hang: no Python code of the trainer runs
_STALE_SECONDS = 10.0  # without a pulse: then the trainer's word about a debugger is outdated


@dataclass(eq=False)
class Inspections:
    """Inspections of one tree of processes, in a thread that may never come back."""

    _pid: int
    _make_looker: Callable[[], Looker]
    _answer: Callable[[list[int], dict[str, Any]], None]
    _ranks: int

    def __post_init__(self) -> None:
        self._looker: Looker | None = None
        self._rounds: list[int] = []  # that wait for the inspection in progress
        self._began = self._reported_at = 0.0
        self._number = 0
        self._abandoned = 0
        self._found: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()

    def ask(self, number: int) -> None:
        self._rounds.append(number)
        if len(self._rounds) > 1:
            return  # one is in progress
        if self._abandoned >= _MOST_ABANDONED:
            self._conclude(_nothing(self._pid, "earlier inspections did not end"))
            return
        self._began = self._reported_at = time.monotonic()
        self._number += 1
        act = (self._number,)
        threading.Thread(target=self._look, args=act, name="look", daemon=True).start()

    def _look(self, number: int) -> None:
        try:
            if self._looker is None:
                self._looker = self._make_looker()
            found = shorten(self._looker.look(), self._ranks)  # in this thread: it may take long
        except Exception as error:  # noqa: BLE001  the keeper must go on
            traceback.print_exc()
            found = _nothing(self._pid, f"the inspection failed: {error!r}")
        self._found.put((number, found))

    def poll(self, now: float) -> list[int]:
        """Answer what is done; returns the rounds whose judge is to know that it makes progress."""
        while not self._found.empty():
            number, look = self._found.get_nowait()
            if number == self._number and self._rounds:
                self._conclude(look)
            else:
                self._abandoned -= 1
        if not self._rounds:
            return []
        looker = self._looker
        alive_at = max(self._began, 0.0 if looker is None else looker.alive_at)
        if now - alive_at >= _LOOK_SECONDS:
            self._abandoned += 1
            self._number += 1
            self._looker = None
            self._conclude(_nothing(self._pid, "the inspection did not end"))
        elif now - self._reported_at > _LOOKING_SECONDS:
            self._reported_at = now
            return list(self._rounds)
        return []

    def _conclude(self, look: dict[str, Any]) -> None:
        rounds, self._rounds = self._rounds, []
        self._answer(rounds, look)


class HangWatch:
    """The watch over one trainer, which reports to the judge."""

    def __init__(
        self,
        words: Any,
        pid: int,
        rank: int,
        given_seconds: float | None,
        judge: protocol.ToHub,
        make_looker: Callable[[], Looker],
        ranks: int = 1,
    ) -> None:
        self._words = words
        self._pid = pid
        self._rank = rank
        self._judge = judge
        self.inspections = Inspections(pid, make_looker, self._answer, ranks)
        self._patience = Patience(given_seconds)
        self._phase: str | None = None
        self._boundary = 0
        # Seconds of the main thread on a processor and waiting for one, at the first poll after
        # the boundary, and now.
        self._counted_before: tuple[float, float] | None = None
        self._counted: tuple[float, float] | None = None
        self._boottime = _asleep_seconds()
        self._told_at: float | None = None  # when it was reported that the patience is over
        self._told_boundary = 0
        self._paused_at: float | None = None  # by the calendar
        self._hold_by = ""  # what holds it, if that can be observed from outside
        self._hold_look_at = 0.0
        self._is_held = False

    # -- in the keeper's loop -------------------------------------------------------

    def observe(self, now: float, phase: str | None, *, is_over: bool) -> None:
        """Read the shared words; `is_over` if the trainer is gone, or leaves."""
        words, self._phase = self._words, phase
        in_loop, paused = bool(words[control.IN_LOOP]), self._debugger()
        # A kernel between two cells waits for a person.
        is_idle = words[control.DONE] or (words[control.STAYS] and not in_loop)
        asleep = _asleep_seconds()
        if asleep - self._boottime > 1.0:
            self._patience.restart(now)
        self._boottime = asleep
        if paused and self._paused_at is None:
            self._paused_at = time.time()
        elif not paused:
            self._paused_at = None
        before, boundary = self._boundary, int(words[control.BOUNDARY_NS])
        self._boundary = boundary
        # It is not read while steps are made.
        pid, is_new = self._pid, boundary != before
        self._counted = None if is_new else read_schedstat(f"/proc/{pid}/task/{pid}")
        self._counted_before = None if is_new else self._counted_before or self._counted
        if self._hold_by and now >= self._hold_look_at:
            self._hold_look_at = now + _HELD_LOOK_SECONDS
            self._is_held = is_stopped_or_traced(self._pid)
            self._hold_by = self._hold_by if self._is_held else ""
        self._patience.see(
            Sight(
                now=now,
                step=int(words[control.STEP]),
                boundary=boundary / 1e9,
                in_loop=in_loop,
                loop_began=words[control.LOOP_NS] / 1e9,
                loop_step=int(words[control.LOOP_STEP]),
                rests=bool(words[control.REST]),
                phase=phase,
                epoch=int(words[control.EPOCH]),
                is_judged=not (is_over or is_idle),
                is_ours=bool(words[control.WORK]),
                is_held=bool(paused) or self._is_held,
                is_slowed=bool(words[control.DISTURBED] & control.SLOWING),
                waited=None if self._counted is None else self._counted[1],
            )
        )
        self._tell(now)
        for number in self.inspections.poll(now):
            self._judge.looking(round=number)

    def _tell(self, now: float) -> None:
        if not self._patience.is_over(now):
            if self._told_at is not None:
                self._told_at = None
                moved = int(self._words[control.BOUNDARY_NS]) != self._told_boundary
                self._judge.going(moved=moved)
            return
        if self._told_at is None or now - self._told_at > _TELL_AGAIN_SECONDS:
            if self._told_at is None:
                self._told_boundary = int(self._words[control.BOUNDARY_NS])
            self._told_at = now
            self._judge.stuck(**self._standing(now))

    def _standing(self, now: float) -> dict[str, Any]:
        patience = self._patience
        return {
            "stretch": patience.kind,
            "stood": round(patience.stood(now), 2),
            "patience": patience.limit(),
            "how": "learned" if patience.given_seconds is None else "given",
            "paused": control.DEBUGGERS[self._debugger()],
        }

    def restart_clock(self) -> None:
        """Count from now on: this rank or another one was held by a person."""
        self._patience.restart(time.monotonic())

    def hold(self, by: str, *, is_seen: bool) -> None:
        """A person holds this rank or another; `is_seen`: this keeper can observe the end of it."""
        self._patience.taint()
        if is_seen:
            self._hold_by, self._hold_look_at, self._is_held = by, 0.0, True

    @property
    def is_paused(self) -> bool:
        """True if the trainer reports that a debugger holds it."""
        return bool(self._debugger())

    @property
    def is_deaf(self) -> bool:
        """True if no thread of the trainer runs: a call may hold the interpreter."""
        return (age_of(int(self._words[control.PULSE_NS])) or 0.0) > _DEAF_SECONDS

    def beat(self) -> dict[str, Any]:
        by, pulse = self._debugger(), int(self._words[control.PULSE_NS])
        paused = None
        if by and self._paused_at is not None:
            name, since = control.DEBUGGERS[by], round(self._paused_at, 1)
            paused = {"by": name, "rank": self._rank, "since": since}
        return {
            "paused": paused,
            "pulse_age": age_of(pulse),
            "pace": {
                "usual": _rounded(self._patience.usual),
                "best": _rounded(self._patience.best),
                "now": _rounded(self._patience.newest),
                "disturbed": self._disturbed(),
            },
        }

    def _answer(self, rounds: list[int], look: dict[str, Any]) -> None:
        whole = {**look, **self._words_now()}
        for number in rounds:
            self._judge.looked(round=number, look=whole)

    def _words_now(self) -> dict[str, Any]:
        words, now = self._words, time.monotonic()
        ran = waited = None
        if self._counted is not None and self._counted_before is not None:
            ran, waited = (self._counted[i] - self._counted_before[i] for i in (0, 1))
        return {
            "rank": self._rank,
            "step": int(words[control.STEP]),
            "mark": int(words[control.MARK]),
            # In the first step no boundary was passed yet: then since the loop began.
            "boundary_age": age_of(int(words[control.BOUNDARY_NS] or words[control.LOOP_NS])),
            "pulse_age": age_of(int(words[control.PULSE_NS])),
            "phase": self._phase,
            "in_loop": bool(words[control.IN_LOOP]),
            "rests": bool(words[control.REST]),
            "work": int(words[control.WORK]),
            "disturbed": self._disturbed(),
            "compiles": int(words[control.COMPILES]),
            "usual_step_seconds": _rounded(self._patience.usual),
            # Of the main thread, in the step in progress.
            "step_cpu": _rounded(ran),
            "step_waited": _rounded(waited),
            **self._standing(now),
        }

    def _debugger(self) -> int:
        """The debugger that holds it, as an index; at a prompt the pulse goes on."""
        found = int(self._words[control.PAUSED])
        if not found or (age_of(int(self._words[control.PULSE_NS])) or 0.0) > _STALE_SECONDS:
            return 0
        return found if found < len(control.DEBUGGERS) else len(control.DEBUGGERS) - 1

    def _disturbed(self) -> list[str]:
        bits = int(self._words[control.DISTURBED])
        return [name for bit, name in enumerate(control.DISTURBANCES) if bits >> bit & 1]


def _nothing(pid: int, why: str) -> dict[str, Any]:
    """An inspection without a result, except for what the kernel always reports."""
    state = state_of(pid)
    # Most files of /proc/<pid> block on the disk that the process waits for.
    processes = [{"pid": pid, "state": state, "threads": []}] if state in ("D", "T") else []
    return {
        "time": time.time(),
        "host": host_name(),
        "pid": pid,
        "by": "none",
        "stacks_error": why,
        "processes": processes,
    }


def _asleep_seconds() -> float:
    """How long the machine has slept in total: the monotonic clock excludes it."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


# -- The watch and the judge in one keeper ---------------------------------------------------------

_MOST_SAID = 4000
_BLIND_SECONDS = 60.0  # after an unexpected error


class HangMonitor:
    """The watch and the judge of one keeper. An error here never ends the keeper."""

    def __init__(self, keeper: Keeper) -> None:
        self._policy = policy = keeper.policy
        self._stacks = keeper.config.stacks
        self._trainer = trainer = keeper.trainer
        self._storage = keeper.storage
        self._decider = keeper.decider
        self.watch = HangWatch(
            trainer.words,
            trainer.pid,
            policy.rank,
            policy.hang_seconds,
            protocol.sender(self._post),
            self._make_looker,
            policy.size,
        )
        self._judge = HangJudge(self) if policy.rank == 0 else None
        self._blind_until = 0.0
        self._explained: queue.SimpleQueue[tuple[dict[str, Any], int | None]] = queue.SimpleQueue()

    # -- in the keeper's loop ------------------------------------------------------------

    def poll(self, now: float) -> None:
        """Read the trainer's progress; if all is well, only a few shared words."""
        if now < self._blind_until:
            return
        trainer = self._trainer
        try:
            is_leaving = trainer.is_leaving or trainer.leave_status is not None
            is_over = is_leaving or self._decider.is_trainer_gone
            self.watch.observe(now, trainer.phase, is_over=is_over)
            while self._judge is not None and not self._explained.empty():
                self._judge.explained(*self._explained.get_nowait())
            if self._judge is not None:
                self._judge.tick()
        except Exception:  # noqa: BLE001  the keeper must go on
            traceback.print_exc()
            self._blind_until = now + _BLIND_SECONDS

    def receive(self, rank: int, kind: str, /, **fields: Any) -> bool:
        """At the hub: a report of a rank's watch; False if it was for the hub itself."""
        assert self._judge is not None
        try:
            if kind in ("hello", "died", "farewell"):
                self._judge.on_going(rank, moved=False)  # what its former keeper had reported
            return protocol.receive_call(self._judge, kind, rank, **fields)
        except Exception:  # noqa: BLE001  as above
            traceback.print_exc()
            return False  # the hub ignores what it does not know

    # What the judge orders for this rank.
    def on_look(self, round: int) -> None:
        self.watch.inspections.ask(round)

    def on_restart_clock(self) -> None:
        self.watch.restart_clock()

    def on_guard(self, by: str, *, is_seen: bool) -> None:
        self.watch.hold(by, is_seen=is_seen)

    def ask_stacks(self, details: dict[str, Any]) -> None:
        """`holdfast stacks` asks what all ranks do now."""
        assert self._judge is not None
        layout, attempt, token = self._policy.layout, self._policy.attempt, details.get("token")
        self._judge.ask(lambda looks, missing: file_look(layout, attempt, token, looks, missing))

    @property
    def is_hung(self) -> bool:
        """True while a hang is found and not over."""
        return self._judge is not None and self._judge.beat()["hang"] is not None

    def beat(self) -> dict[str, Any]:
        found = self.watch.beat()
        if self._judge is None:
            return {**found, "hang": None}
        judged = self._judge.beat()
        return {**found, "hang": judged["hang"], "paused": judged["held"] or found["paused"]}

    def _post(self, kind: str, /, **fields: Any) -> None:
        link = self._decider.link
        if link is None:
            self.receive(0, kind, **fields)
        else:
            link.to_hub(kind, **fields)

    def _make_looker(self) -> Looker:
        from holdfast._environment.processes.inspect import Looker  # only in trouble

        return Looker(self._trainer.pid, fault_file=self._stacks)

    # -- what the judge has done --------------------------------------------------------------

    def ranks(self) -> list[int]:
        link = self._decider.link
        return [0] if link is None else link.training_ranks()

    def keeper(self, rank: int) -> protocol.FromHub:
        link = self._decider.link
        post = functools.partial(protocol.receive_call, self)
        found: protocol.FromHub = protocol.sender(
            post if link is None else functools.partial(link.from_hub, rank)
        )
        return found

    def say(self, kind: str, **fields: Any) -> None:
        if "sentence" in fields:
            fields["sentence"] = fields["sentence"][:_MOST_SAID]  # a message has its bounds
        fields["folder"] = str(self._policy.layout.folder)
        if kind == "hang" and self.watch.is_deaf:
            # The trainer could print it only when the hang is over.
            say_in_place_of(self._trainer.pid, told_of(fields))
            return
        self._trainer.post(kind, **fields)
        # A stopped trainer cannot print it before that is over. Without a leader, the person who
        # has stopped it stands before its terminal.
        if fields.get("is_deaf") and variables.led_folder() is not None:
            say_in_place_of(self._trainer.pid, paused_sentence(fields))

    def note(self, event: str, **fields: Any) -> None:
        step = self._trainer.step
        fields = {"step": step, "attempt": self._policy.attempt, **fields}
        journal.append(self._policy.layout.journal, event, **fields)

    def report_survivor(self, pid: int, state: str) -> None:
        """The trainer has survived SIGKILL: it waits for a disk in the kernel."""
        self.note("survives-kill", pid=pid, state=state)
        found = {} if self._judge is None else self._judge.record or {}
        if (place := variables.led_folder()) is not None:
            tell_leader_of_hang(place, {**found, "unkillable": [pid]})

    def facts(self) -> dict[str, Any]:
        """Further fields of the record of a hang."""
        restarts = self._policy.hang_restarts and not self._trainer.stays
        return {
            "attempt": self._policy.attempt,
            "policy": "restart" if restarts else "report",
            "durable_step": self._storage.durable_step,
        }

    def file(self, record: dict[str, Any], *, is_over: bool = False) -> None:
        done = None if is_over else lambda rank: self._explained.put((record, rank))
        file_hang(self._policy.layout, record, done)

    def secure(self, rank: int | None, *, restart: bool) -> None:
        """Make the newest snapshot durable: the next step may never come.

        With `restart` the trainer then leaves, and its supervisor starts it again.
        """
        self._decider.on_hang(rank if restart else None, restart=restart)
