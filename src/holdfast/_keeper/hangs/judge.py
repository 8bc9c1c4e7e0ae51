"""Decides whether a run hangs: one judge, for all ranks.

A rank whose patience is over reports that it is stuck. Then all ranks are inspected. As long as one
of them moves, computes, or is held by a person, the others wait for it, and that is no hang.

    stuck → inspect all → idle      → again after a moment → hang
                        → computes  → after four times the patience → hang
                                      (longer by what it waits for a processor)
                        → loops     → the same, after half as long again: it computes at a few
                                      lines of one function, and does not leave it
                        → moves     → slow: inspect again later
                        → is held   → wait until it is released; then all count from the start

The judge only decides: `HangMonitor` acts on processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast._environment.processes.activity import (
    activity_of,
    computes,
    held_thread,
    loop_of,
    unread_of,
    waiting_share,
)
from holdfast._environment.processes.patience import FIRST, FRESH, OUTSIDE, PHASE, STEP, WORK
from holdfast._keeper.hangs.record import NO_HANG

if TYPE_CHECKING:
    from holdfast._keeper.hangs.monitor import HangMonitor

# -- What one inspection shows: what a trainer does, what holds it, what it waits for --------------

_MOST_CROWDED = 60.0
_WAIT_SECONDS = 5.0  # for a save
_LONGEST_WAIT_SECONDS = 60.0  # for a phase that may take longer
LOOPS = "LOOPS"
AT_WORK = ("BUSY", LOOPS, "POLLS")  # perhaps at work: these get more time
_WAITS = ("wait4", "waitid")
_HELD_BY = {
    "STOPPED": "SIGSTOP",
    "FROZEN": "its cgroup",
    "UNREAD": "its own output, which no process reads",
}


def activity(look: dict[str, Any]) -> str:
    """What a trainer and its children do, as a name of `_environment/processes/activity.py`."""
    if look.get("paused"):
        return "PAUSED"
    # If nothing was observed, it has the benefit of the doubt.
    return activity_of(look).name if look.get("processes") else "MOVING"


def held_by(act: str, look: dict[str, Any]) -> str:
    """The name of what holds it."""
    if look.get("paused"):
        return str(look["paused"])
    processes = look.get("processes") or [{}]
    if act == "TRACED":
        return str(next((p["tracer_name"] for p in processes if p.get("tracer_name")), "a tracer"))
    if act in _HELD_BY:
        return _HELD_BY[act]
    found = held_thread(look)
    if found is None:
        return "a debugger"
    by, process, _ = found
    return by if process is processes[0] else f"{by} in its process {process.get('pid')}"


def is_deaf(act: str, look: dict[str, Any]) -> bool:
    """True if the trainer cannot print that it is held; under strace it can."""
    if act == "UNREAD":
        return 2 in unread_of(look)  # its stderr is not read either
    processes = look.get("processes") or [{}]
    return act in ("STOPPED", "FROZEN") or processes[0].get("state") == "t"


def wait_for(bound: dict[int, dict[str, Any]]) -> float | None:
    """How long to wait for a rank in a phase or a save; None if there is none."""
    waits = []
    for look in bound.values():
        left = (look.get("patience") or 0.0) - (look.get("stood") or 0.0)
        if look.get("stretch") in (PHASE, FIRST, OUTSIDE, WORK) and left > 0:
            most = _WAIT_SECONDS if look["stretch"] == WORK else _LONGEST_WAIT_SECONDS
            waits.append(min(max(left, 1.0), most))
    return min(waits, default=None)


def crowding(look: dict[str, Any]) -> float:
    """How many times longer work takes, because other processes use the processors.

    Without the trainer's main thread: its patience already excludes the time it waits.
    """
    trainer, *children = look.get("processes") or [{}]
    others = [each for each in trainer.get("threads") or [] if not each.get("is_main")]
    share = max(map(waiting_share, [{"threads": others}, *children]))
    return min(_MOST_CROWDED, 1.0 / max(1.0 - share, 1e-3))


def comes_back(lines: list[int]) -> bool:
    """True if it was seen at a line again after another one: a loop, and no long function.

    >>> comes_back([9, 10, 9]), comes_back([9, 9, 10, 11])
    (True, False)
    """
    visits = [line for i, line in enumerate(lines) if i == 0 or line != lines[i - 1]]
    return len(set(visits)) < len(visits)


def computed_far(look: dict[str, Any]) -> bool:
    """True if its main thread has computed far longer in this step than in a usual one."""
    ran, usual = look.get("step_cpu"), look.get("usual_step_seconds")
    return ran is None or usual is None or bool(ran > _FAR_TIMES * usual)


def computes_on(look: dict[str, Any], *, is_loop: bool = False) -> bool:
    """True if a process that computes moves on; `is_loop`: the trainer does so in a loop."""
    for number, process in enumerate(look.get("processes") or []):
        stack, has_moved = main_stack(process)
        has_moved = has_moved and not (is_loop and number == 0)
        # The position of a child that is not Python is unknown: the benefit of the doubt.
        is_unknown = number > 0 and not stack
        if computes(process) and (has_moved or is_unknown):
            return True
    return False


def _main_thread(process: dict[str, Any]) -> dict[str, Any]:
    return next((each for each in process.get("threads") or [] if each.get("is_main")), {})


def main_stack(process: dict[str, Any]) -> tuple[tuple[Any, ...], bool]:
    """The stack of the main thread, and True if it was observed to move."""
    thread = _main_thread(process)
    frames = thread.get("frames") or []
    stack = tuple((each.get("file"), each.get("line"), each.get("name")) for each in frames)
    return stack, bool(thread.get("moved"))


def by_cpu(look: dict[str, Any]) -> dict[int, Any]:
    """The stacks of the processes that compute, by pid."""
    busy = filter(computes, look.get("processes") or [])
    return {each.get("pid", 0): main_stack(each)[0] for each in busy}


def awaited_processes(look: dict[str, Any]) -> frozenset[int]:
    """If it waits for a program that it has started: the pids of its children."""
    trainer, *children = look.get("processes") or [{}]
    main = _main_thread(trainer)
    files = [str(each.get("file")) for each in main.get("frames") or []]
    is_waiting = main.get("call") in _WAITS or any(f.endswith("/subprocess.py") for f in files)
    return frozenset(each.get("pid", 0) for each in children if is_waiting)


def _by_function(stacks: dict[int, Any], pid: int) -> dict[int, Any]:
    """The same stacks, without the innermost line of the trainer."""
    if not stacks.get(pid):
        return stacks
    (file, _, name), *outer = stacks[pid]
    return {**stacks, pid: (file, name, *outer)}


def _trainer_pid(look: dict[str, Any]) -> int:
    return int((look.get("processes") or [{}])[0].get("pid") or 0)


ANSWER_SECONDS = 10.0  # without a report from a keeper that inspects its trainer
_AGAIN_SECONDS = 3.0  # between two inspections of an idle rank
# Between two inspections of a held rank, unless its keeper sees the end cheaply.
_HELD_SECONDS = 15.0
_UNANSWERED_SECONDS = 60.0  # until all are asked again, if no keeper has answered
_BUSY_TIMES = {"learned": 4.0, "given": 2.0}
# A loop over several lines may be work with an end, as an evaluation that is no phase.
_LOOP_TIMES = 1.5  # of the time for one line
_FAR_TIMES = 10.0
# Before a restart: some calls compute for long, and only many inspections show movement.
_LEAST_BUSY_SECONDS = {"learned": 300.0, "given": 15.0}
_LEAST_LOOP_SECONDS = {"learned": 1800.0, "given": 30.0}
_SLOWER = 1.5  # the interval grows by this with each inspection that shows movement
_FREE_SHARE = 0.5  # of the time that another rank is stuck: a rank with a newer step is not bound

_HELD = ("PAUSED", "TRACED", "STOPPED", "FROZEN", "UNREAD")
_SEEN_CHEAPLY = ("TRACED", "STOPPED")


@dataclass
class _InspectionRound:
    """One inspection of all ranks, in progress."""

    heard_at: float  # when it began, or a keeper last reported progress
    asked: set[int]
    then: Callable[[dict[int, dict[str, Any]], list[int]], None]
    looks: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass
class _Stuck:
    """A rank whose patience is over."""

    since: float  # its last progress
    patience: float
    how: str
    paused: str


class HangJudge:
    """One episode at a time: from the first stuck rank until all go on."""

    def __init__(self, hands: HangMonitor, clock: Callable[[], float] = time.monotonic) -> None:
        self._hands = hands
        self._clock = clock
        self._rounds: dict[int, _InspectionRound] = {}
        self._count = int(clock() * 1000)  # a judge before this one had smaller numbers
        self._stuck: dict[int, _Stuck] = {}
        self._is_asking = False
        self.record: dict[str, Any] | None = None  # of a hang
        self.held: dict[str, Any] | None = None  # by what, which rank, since when
        self._begin()
        self._next_at: float | None = None

    # -- reports of the ranks ---------------------------------------------------------

    def on_looking(self, rank: int, round: int) -> None:  # noqa: ARG002  of any
        if (found := self._rounds.get(round)) is not None:
            found.heard_at = self._clock()

    def on_looked(self, rank: int, round: int, look: dict[str, Any]) -> None:
        if (found := self._rounds.get(round)) is not None:
            found.looks[rank] = look
            self._conclude_if_all(round)

    def on_stuck(
        self, rank: int, stood: float, patience: float | None, how: str, paused: str, **_: Any
    ) -> None:
        is_new = not self._stuck
        self._stuck[rank] = _Stuck(self._clock() - stood, patience or 0.0, how, paused)
        if is_new:
            self._begin()
        if paused and self.record is None:
            self._hold(rank, "PAUSED", paused)

    def on_going(self, rank: int, *, moved: bool) -> None:
        was_stuck = self._stuck.pop(rank, None) is not None
        if self.held is not None and (self.held["rank"] == rank or not self._stuck):
            self._release()
        elif was_stuck and not self._stuck:
            self._end(moved=moved)

    def _begin(self) -> None:
        """The first rank is stuck: nothing is known of this episode yet."""
        self._next_at = 0.0
        self._idle_since: float | None = None
        self._slack = 1.0
        self._crowding = 1.0  # how many times longer work takes, because of other processes
        self._busy_before: dict[int, Any] = {}  # the stacks of the last inspection
        self._lines: dict[int, list[int]] = {}  # of the function that a rank has not left
        self._awaited_before: dict[int, frozenset[int]] = {}
        self._is_slow = False

    def _end(self, *, moved: bool) -> None:
        record, self.record = self.record, None
        self._next_at = None
        if record is not None and moved:
            record["ended"] = time.time()
            self._hands.file(record, is_over=True)
            self._hands.note("hang-over", seconds=round(record["ended"] - record["began"], 1))
            self._hands.say("hang-over")

    # -- by the clock ---------------------------------------------------------------------

    def tick(self) -> None:
        now = self._clock()
        for number, each in list(self._rounds.items()):
            if now - each.heard_at > ANSWER_SECONDS:
                self._conclude(number)
        is_due = self._next_at is not None and now >= self._next_at
        if is_due and not self._is_asking and self._stuck and self.record is None:
            self._is_asking, self._next_at = True, None
            self.ask(self._weigh)

    def ask(self, then: Callable[[dict[int, dict[str, Any]], list[int]], None]) -> None:
        """Inspect all ranks; `then` gets the results, and the ranks that did not answer."""
        self._count += 1
        ranks = self._hands.ranks()
        self._rounds[self._count] = _InspectionRound(self._clock(), set(ranks), then)
        for rank in ranks:
            self._hands.keeper(rank).look(round=self._count)
        self._conclude_if_all(self._count)

    def _conclude_if_all(self, number: int) -> None:
        found = self._rounds.get(number)
        if found is not None and found.asked <= set(found.looks):
            self._conclude(number)

    def _conclude(self, number: int) -> None:
        found = self._rounds.pop(number)
        found.then(found.looks, sorted(found.asked - set(found.looks)))

    # -- the results --------------------------------------------------------------------------

    def _weigh(self, looks: dict[int, dict[str, Any]], missing: list[int]) -> None:
        self._is_asking = False
        if not self._stuck or self.record is not None:
            return
        now = self._clock()
        if not looks:  # no keeper has answered
            self._next_at = now + _UNANSWERED_SECONDS
            return
        acts = {rank: activity(look) for rank, look in looks.items()}
        held = next((r for r, act in sorted(acts.items()) if act in _HELD), None)
        if held is not None:
            deaf = held == 0 and is_deaf(acts[held], looks[held])
            self._hold(held, acts[held], held_by(acts[held], looks[held]), deaf=deaf)
            return
        if self.held is not None:
            self._release()
            return
        for rank, stuck in self._stuck.items():
            # By its own patience, which excludes the time it waited for a processor.
            stood = looks.get(rank, {}).get("stood")
            stuck.since = stuck.since if stood is None else now - stood
        bound = {rank: look for rank, look in looks.items() if not self._is_free(look)}
        self._crowding = max([self._crowding, *map(crowding, bound.values())])
        if (wait := wait_for(bound)) is not None:
            self._next_at, self._idle_since = now + wait, None
            return
        self._act_on(self._most_active(bound, acts), now, looks, missing)

    def _act_on(
        self, act: str, now: float, looks: dict[int, dict[str, Any]], missing: list[int]
    ) -> None:
        stuck = max(self._stuck.values(), key=lambda each: now - each.since)
        if act == "MOVING":
            self._idle_since = None
            self._next_at = now + max(1.0, self._slack * stuck.patience)
            self._slack *= _SLOWER
            if not self._is_slow:
                self._is_slow = True
                self._hands.note("slow", stood=round(now - stuck.since, 1))
        elif act in AT_WORK:
            self._idle_since = None
            until = stuck.since + self._busy_seconds(stuck, is_loop=act == LOOPS)
            if now >= until:
                self._find(act, stuck, looks, missing)
            else:
                self._next_at = min(until, now + max(_AGAIN_SECONDS, stuck.patience / 4))
        elif self._idle_since is None:
            self._idle_since = now
            self._next_at = now + _AGAIN_SECONDS
        elif now - self._idle_since >= _AGAIN_SECONDS:
            self._find(act, stuck, looks, missing)
        else:
            self._next_at = self._idle_since + _AGAIN_SECONDS

    def _busy_seconds(self, stuck: _Stuck, *, is_loop: bool) -> float:
        how = stuck.how if stuck.how in _BUSY_TIMES else "learned"
        times, least = _BUSY_TIMES[how], _LEAST_BUSY_SECONDS[how]
        if is_loop:
            times, least = times * _LOOP_TIMES, _LEAST_LOOP_SECONDS[how]
        found = times * stuck.patience * self._crowding
        is_ended = self._hands.facts()["policy"] == "restart"
        return max(found, least) if is_ended else found

    def _most_active(self, bound: dict[int, dict[str, Any]], acts: dict[int, str]) -> str:
        """The activity of the most active rank: the others may wait for it."""
        found = {acts[rank] for rank in bound}
        stacks = {rank: by_cpu(look) for rank, look in bound.items()}
        before, self._busy_before = self._busy_before, stacks
        awaited = {rank: awaited_processes(look) for rank, look in bound.items()}
        former, self._awaited_before = self._awaited_before, awaited
        others_come = any(former.get(r) and awaited[r] and former[r] != awaited[r] for r in bound)
        seen = {r: lines for r in bound if (lines := loop_of(bound[r]))}
        if others_come or any(acts[r] == "MOVING" and r not in seen for r in bound):
            return "MOVING"
        busy = [rank for rank in bound if rank in seen or acts[rank] == "BUSY"]
        if not busy:
            return next((act for act in ("POLLS", "DISK") if act in found), "IDLE")
        if any(computes_on(bound[r], is_loop=r in seen) for r in busy):
            return "MOVING"
        for r in busy:
            # The same processes must compute at the same places; the trainer, in one function.
            pid, former_stacks = _trainer_pid(bound[r]), before.get(r)
            now = _by_function(stacks[r], pid)
            if former_stacks and _by_function(former_stacks, pid) != now:
                self._lines = {}
                return "MOVING"
        for r in busy:
            stack = stacks[r].get(_trainer_pid(bound[r]))
            line = [stack[0][1]] if stack else []
            self._lines.setdefault(r, []).extend(seen.get(r) or line)
        loops = [r for r in busy if len(set(self._lines[r])) > 1]
        if not all(comes_back(self._lines[r]) and computed_far(bound[r]) for r in loops):
            return "MOVING"
        return LOOPS if loops else "BUSY"

    def _is_free(self, look: dict[str, Any]) -> bool:
        """True if a rank goes on without the stuck one."""
        if look.get("rank") in self._stuck or look.get("boundary_age") is None:
            return False
        if look.get("stretch") not in (STEP, FRESH):
            return False
        now = self._clock()
        longest = max(now - each.since for each in self._stuck.values())
        return bool(look["boundary_age"] < _FREE_SHARE * longest)

    # -- held by a person ------------------------------------------------------------------------

    def _hold(self, rank: int, act: str, by: str, *, deaf: bool = False) -> None:
        """A person holds it: nothing is judged until it is released."""
        self._idle_since = None
        if self.held is None:
            self.held = {"by": by, "rank": rank, "since": round(time.time(), 1)}
            self._hands.note("paused", rank=rank, by=by)
            of = len(self._hands.ranks())
            self._hands.say("paused", by=by, rank=rank, of=of, is_deaf=deaf)
        for each in self._hands.ranks():
            is_seen = each == rank and act in _SEEN_CHEAPLY
            self._hands.keeper(each).guard(by=by, is_seen=is_seen)
        # Its own keeper reports the end of what it can observe.
        is_told = act in _SEEN_CHEAPLY or (rank in self._stuck and self._stuck[rank].paused)
        self._next_at = self._clock() + (4 if is_told else 1) * _HELD_SECONDS

    def _release(self) -> None:
        held, self.held = self.held, None
        assert held is not None
        self._hands.note("resumed", **held)
        self._stuck.clear()
        self._next_at = None
        for rank in self._hands.ranks():
            self._hands.keeper(rank).restart_clock()

    # -- a hang ------------------------------------------------------------------------------------

    def _find(
        self, act: str, stuck: _Stuck, looks: dict[int, dict[str, Any]], missing: list[int]
    ) -> None:
        ordered = [looks[rank] for rank in sorted(looks)]
        last = min(ordered, key=lambda look: (look.get("mark") or 0, -(look.get("stood") or 0.0)))
        age = last.get("boundary_age")
        stood = age if age is not None else self._clock() - stuck.since
        now = time.time()
        self.record = {
            "began": now - stood,
            "found": now,
            "ended": None,
            "patience": round(stuck.patience, 2),
            "how": stuck.how,
            "usual_step_seconds": last.get("usual_step_seconds"),
            "activity": act.lower(),
            "looks": ordered,
            "missing": missing,
            **self._hands.facts(),
        }
        self._hands.file(self.record)

    def explained(self, record: dict[str, Any], rank: int | None) -> None:
        """The record of a hang has a cause and a sentence now."""
        if record is not self.record:
            return  # it went on meanwhile
        if record["cause"] in NO_HANG:
            self.record = None
            self._act_on("MOVING", self._clock(), {}, [])
            return
        told = {"cause": record["cause"], "sentence": record["sentence"]}
        stood = round(record["found"] - record["began"], 1)
        self._hands.note("hang", rank=rank, stood=stood, policy=record["policy"], **told)
        self._hands.say("hang", policy=record["policy"], stood=stood, **told)
        self._hands.secure(rank, restart=record["policy"] == "restart")

    def beat(self) -> dict[str, Any]:
        found, hang = self.record, None
        if found is not None and "sentence" in found:
            since = round(found["began"], 1)
            hang = {"since": since, "cause": found["cause"], "sentence": found["sentence"]}
        return {"hang": hang, "held": self.held}
