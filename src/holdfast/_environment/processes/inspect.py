"""One inspection of a process and all below it: the kernel's facts, and the stacks of their code.

The stacks are taken twice, to see whether they move. It never raises and never blocks: a reading of
a process in a dead file system can hang forever, so it runs in its own thread. We wait for that
thread while it makes progress. Without progress for some seconds, the facts so far are the result.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast._environment.processes.activity import (
    is_frozen,
    is_same_function,
    rate,
    state_between,
    waits_between,
)
from holdfast._environment.processes.cgroup import cpu_quota
from holdfast._environment.processes.identity import host_name
from holdfast._environment.processes.memory_sample import shm_room
from holdfast._environment.processes.stacks import (
    Dump,
    FaultStacks,
    PythonThread,
    dump_stacks,
    find_pyspy,
)
from holdfast._environment.processes.threads import (
    FREEZERS,
    ProcessSample,
    ThreadSample,
    command_of,
    find_call,
    name_of,
    program_of,
    sample_process,
    unread_outputs,
)
from holdfast._environment.processes.tree import Tree

Frames = list[dict[str, Any]]

MOST_PROCESSES = 64
_SILENT_SECONDS = 6.0  # without progress: it waits for the system
_JOIN_SECONDS = 0.1
_APART_SECONDS = 0.3  # less is too short to see whether a stack moves
_DUMP_SECONDS = 1.8
_FAULT_SECONDS = 0.7
_MOVES_SECONDS = 1.2
_MOVES_PAUSE_SECONDS = 0.07
_MOST_AWAKE = 4
_AWAKE_CORES = 0.02
_AWAKE_WAKES = 3.0  # per second
_MOST_SILENT_THREADS = 32  # those of libraries, which have no Python stack
_MOST_FRAMES = 5000  # of all threads together
_FEW_FRAMES = 8
_PYTHONS = ("python", "pypy")
_TELLING = {"T": 0, "t": 0, "D": 1, "R": 2, "S": 3, "Z": 4}


def by_rank(look: dict[str, Any], ranks: dict[int, int]) -> list[dict[str, Any]]:
    """The inspection of a launcher, divided among its ranks: only their stacks tell why."""
    rank_of: dict[int, int | None] = {pid: rank for rank, pid in ranks.items()}
    for each in look["processes"]:  # each after its parent
        rank_of.setdefault(each["pid"], rank_of.get(each["parent"]))
    found = []
    for rank, pid in ranks.items():
        if theirs := [each for each in look["processes"] if rank_of[each["pid"]] == rank]:
            found.append({**look, "rank": rank, "pid": pid, "processes": theirs})
    return found or [look]


class Looker:
    def __init__(self, pid: int, fault_file: int | None = None) -> None:
        self._pid = pid
        self._tree = Tree(pid)
        self._faults = None if fault_file is None else FaultStacks(fault_file)
        self._stuck: threading.Thread | None = None
        self.alive_at = 0.0  # the last progress of the current inspection

    def look(self, seconds: float = 0.5) -> dict[str, Any]:
        """The record of an inspection, which takes about that long; some seconds if it must wait.

        {"time", "host", "pid", "seconds" of the window, "by": "py-spy", "faulthandler" or "none",
        "stacks_error": why there are no stacks, "cores", "load", "processes": the process itself,
        then those below it, each with its activity in the window and its "threads"}. The frames of
        a thread are {"file", "line", "name"}, the innermost first. py-spy has names as
        Class.method; faulthandler has only the last part, and only the main thread's "tid". A
        value that is not known is None.
        """
        window = max(seconds, _APART_SECONDS)
        look = _Look(self._pid, self._tree, self._faults, window, self._get_on)
        self._get_on()
        if self._stuck is not None and self._stuck.is_alive():
            return look.without_stacks("an earlier look still waits for the system")
        thread = threading.Thread(target=look.take, name="holdfast-look", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return look.without_stacks("no thread could be started")
        while thread.is_alive() and time.monotonic() - self.alive_at < _SILENT_SECONDS + seconds:
            thread.join(_JOIN_SECONDS)
        if thread.is_alive():
            self._stuck = thread
            with contextlib.suppress(Exception):  # the facts so far must suffice
                look.sample_again()
        return look.record()

    def _get_on(self) -> None:
        self.alive_at = time.monotonic()


@dataclass(eq=False)
class _Look:
    _pid: int
    _tree: Tree
    _faults: FaultStacks | None
    _seconds: float
    _get_on: Callable[[], None]  # reports progress

    def __post_init__(self) -> None:
        self._before: dict[int, ProcessSample] = {}
        self._after: dict[int, ProcessSample] = {}
        self._dumps: tuple[dict[int, Dump], dict[int, Dump]] = ({}, {})
        self._stands: dict[int, list[Frames]] = {}  # of main threads, after the first dump
        self._pids = [self._pid]
        self._by = "none"
        self._error: str | None = "the look did not come to an end"
        self._calls: dict[int, tuple[str | None, str | None]] = {}
        self._frozen: set[int] = set()
        self._commands: dict[int, str | None] = {}

    def take(self) -> None:
        """Read everything, the most reliable facts first."""
        try:
            self._take()
        except Exception as error:  # noqa: BLE001  it must never end the keeper
            self._error = f"the look failed: {error!r}"

    def without_stacks(self, why: str) -> dict[str, Any]:
        """Two samples only."""
        self._error = why
        with contextlib.suppress(Exception):  # then the reason is the whole record
            self._sample(self._before)
            time.sleep(self._seconds)
            self.sample_again()
        return self.record()

    def sample_again(self) -> None:
        """Without a second sample a process that computes would look idle."""
        if not self._after:
            self._sample(self._after)

    def _take(self) -> None:
        began = time.monotonic()
        self._sample(self._before)
        self._calls = {pid: find_call(pid, pid) for pid in self._before}
        self._frozen = {pid for pid in self._before if is_frozen(pid)}
        program = find_pyspy()
        readable = self._readable()
        first, second = self._dumps
        first.update(dump_stacks(readable, _DUMP_SECONDS, program, self._get_on))
        self._note_how()
        time.sleep(max(_APART_SECONDS, self._seconds - (time.monotonic() - began)))
        if program is not None:
            # A process without an answer would not answer now either.
            again = [pid for pid in readable if not first[pid].is_late]
            second.update(dump_stacks(again, _DUMP_SECONDS, program, self._get_on))
        self._sample(self._after)
        self._get_on()
        self._look_for_moves(program)
        for pid in [pid for pid in second if first[pid].error]:
            first[pid] = second.pop(pid)  # without stopping the process, some readings fail
        self._note_how()
        self._ask_for_stacks()
        for pid in self._pids:
            self._commands[pid] = command_of(pid)

    def _look_for_moves(self, program: str | None) -> None:
        """Read again the awake processes that stood twice in one function: that can be chance.

        An evaluation whose batches all wait at one line is elsewhere only for a moment. A loop
        without an end is at several lines, and never elsewhere.
        """
        second = self._dumps[1]
        self._note_stands(second)
        awake = [pid for pid in second if self._is_awake(pid) and not self._has_left(pid)]
        until = time.monotonic() + _MOVES_SECONDS
        while awake and program is not None and time.monotonic() < until:
            time.sleep(_MOVES_PAUSE_SECONDS)
            left = until - time.monotonic()
            again = dump_stacks(awake[:_MOST_AWAKE], left, program, self._get_on)
            found = {pid: each for pid, each in again.items() if not each.error}
            self._note_stands(found)
            second.update(found)
            awake = [pid for pid in awake if not self._has_left(pid)]

    def _note_stands(self, dumps: dict[int, Dump]) -> None:
        for pid, dump in dumps.items():
            main = [each.frames for each in dump.threads if each.tid == pid]
            self._stands.setdefault(pid, []).extend(main)

    def _is_awake(self, pid: int) -> bool:
        before, after = self._before.get(pid), self._after.get(pid)
        if before is None or after is None or before.main is None or after.main is None:
            return False
        window = max(after.at - before.at, 0.001)
        wakes = (after.main.wakes or 0) - (before.main.wakes or 0)
        cpu = after.main.cpu_seconds - before.main.cpu_seconds
        return cpu / window > _AWAKE_CORES or wakes / window > _AWAKE_WAKES

    def _has_left(self, pid: int) -> bool:
        """True if its main thread has left the function that it was in, or that is not known."""
        first = [each for each in self._dumps[0][pid].threads if each.tid == pid]
        later = self._stands.get(pid)
        return not later or not first or not _stays(first[0], later)

    def _note_how(self) -> None:
        self._error = self._dumps[0].get(self._pid, Dump(error="there is nothing to read")).error
        self._by = "none" if self._error else "py-spy"

    def _sample(self, into: dict[int, ProcessSample]) -> None:
        if not self._before:
            self._pids = [self._pid, *self._tree.look()]
        for pid in self._pids:
            found = sample_process(pid)
            if found is not None:
                into[pid] = found
        if into is self._before and len(into) > MOST_PROCESSES:
            self._keep_telling()

    def _keep_telling(self) -> None:
        """Keep the trainer and the processes whose states say most."""
        order = sorted(
            self._before,
            key=lambda pid: (pid != self._pid, _TELLING.get(self._before[pid].state, 3)),
        )
        kept = set(order[:MOST_PROCESSES])
        self._before = {pid: each for pid, each in self._before.items() if pid in kept}
        self._pids = [pid for pid in self._pids if pid in kept]

    def _readable(self) -> list[int]:
        """The processes that run Python, as far as is known without reading their memory."""
        program = program_of(self._pid)
        found = []
        for pid, sample in self._before.items():
            if _is_over(sample):
                continue
            theirs = program_of(pid)
            name = os.path.basename(theirs or sample.name).lower()  # noqa: PTH119  quicker
            if pid == self._pid or theirs == program is not None or name.startswith(_PYTHONS):
                found.append(pid)
        return found

    def _ask_for_stacks(self) -> None:
        """For processes that could not be read: by a signal, which can interrupt a system call."""
        self._get_on()
        first, second = self._dumps
        if self._faults is None:
            return
        silent = [
            (pid, each.state)
            for pid, each in self._before.items()
            if pid not in self._frozen and (pid not in first or first[pid].error)
        ]
        found = self._faults.dump(silent, _FAULT_SECONDS, self._get_on)
        told = {pid: each for pid, each in found.items() if not each.error}
        if not told:
            return
        first.update(told)
        if self._pid in told:
            self._by = "faulthandler"
        time.sleep(_APART_SECONDS)
        states = [(pid, self._before[pid].state) for pid in told]
        second.update(self._faults.dump(states, _FAULT_SECONDS, self._get_on))

    # -- the record ---------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        processes = [self._process(pid) for pid in list(self._before)]
        _shorten(processes)
        before, after = self._before.get(self._pid), self._after.get(self._pid)
        return {
            "time": time.time(),
            "host": host_name(),
            "pid": self._pid,
            "seconds": round(after.at - before.at, 3) if before and after else 0.0,
            "by": self._by,
            "stacks_error": "the process has ended" if _is_over(before) else self._error,
            "cores": usable_cores(self._pid),
            "load": load(),
            "cpu_quota": cpu_quota(self._pid),
            "shm": shm_room(),
            "processes": processes,
        }

    def _process(self, pid: int) -> dict[str, Any]:
        before = self._before[pid]
        after = self._after.get(pid, before)
        if after.started != before.started:
            after = before
        window = after.at - before.at
        main = after.main
        dump = self._dumps[0].get(pid, Dump())
        wakes = None
        if before.wakes is not None and after.wakes is not None:
            wakes = rate(after.wakes - before.wakes, window)
        same = ("pid", "parent", "name", "tracer", "rss", "swap", "ended")
        return {name: getattr(after, name) for name in same} | {
            "command": self._commands.get(pid),
            "state": state_between(before.state, after.state),
            "frozen": pid in self._frozen or (main is not None and main.wchan in FREEZERS),
            "tracer_name": name_of(after.tracer) if after.tracer else None,
            "wchan": None if main is None else main.wchan,
            "cpu": rate(after.cpu_seconds - before.cpu_seconds, window),
            "io": None if after.io is None else max(0, after.io - (before.io or 0)),
            "wakes": wakes,
            "major_faults": after.major_faults - before.major_faults,
            "threads_count": len(after.threads),
            "stacks_error": dump.error,
            "threads": self._threads(before, after, window),
        }

    def _threads(
        self, before: ProcessSample, after: ProcessSample, window: float
    ) -> list[dict[str, Any]]:
        pid = after.pid
        first = self._dumps[0].get(pid, Dump()).threads
        later = {each.ident: each for each in self._dumps[1].get(pid, Dump()).threads}
        python = {each.tid: each for each in first if each.tid is not None}
        found, silent = list[dict[str, Any]](), list[dict[str, Any]]()
        for tid, sample in after.threads.items():
            record = self._thread(pid, before.threads.get(tid, sample), sample, window)
            known = python.get(tid)
            if known is not None:
                again = later.get(known.ident)
                record |= _python_part(known, later, known.name or sample.name)
                if tid == pid:
                    record |= self._main_part(known, record["moved"])
                # Both times: a thread that works in Python has it sometimes, and gives it back.
                record["owns_gil"] = known.owns_gil and (again is None or again.owns_gil)
            (found if known is not None or tid == pid else silent).append(record)
        silent.sort(key=lambda each: (each["state"] == "S", -each["cpu"]))
        # faulthandler does not write the tids of these threads.
        nameless = [each for each in first if each.tid is None]
        return [
            *found,
            *(
                {"tid": None, "is_main": False, **_python_part(each, later, each.name)}
                for each in nameless
            ),
            *silent[:_MOST_SILENT_THREADS],
        ]

    def _main_part(self, main: PythonThread, moved: bool | None) -> dict[str, Any]:
        """Whether it moved in any dump; `lines`: if only inside of one function, in their order."""
        stands = self._stands.get(main.tid or 0, [])
        moved = moved or (moved if not stands else any(each != main.frames for each in stands))
        if not moved or not stands or not _stays(main, stands):
            return {"moved": moved}
        return {"moved": moved, "lines": [each[0]["line"] for each in (main.frames, *stands)]}

    def _thread(
        self, pid: int, before: ThreadSample, after: ThreadSample, window: float
    ) -> dict[str, Any]:
        is_known = after.wakes is not None and before.wakes is not None
        record: dict[str, Any] = {
            "tid": after.tid,
            "name": after.name,
            "is_main": after.tid == pid,
            "state": state_between(before.state, after.state),
            "cpu": rate(after.cpu_seconds - before.cpu_seconds, window),
            "wakes": rate((after.wakes or 0) - (before.wakes or 0), window) if is_known else None,
            "wchan": after.wchan,
            "waits": waits_between(before, after, window),
            "owns_gil": None,
            "frames": [],
            "moved": None,
        }
        if after.tid == pid:
            call, path = self._calls.get(pid, (None, None))
            # A process that prints into a pipe of its parent waits for it, not for a person.
            unread = unread_outputs(self._pid, call, path)
            record |= {"call": call, "call_path": path, "unread": unread}
        return record


def usable_cores(pid: int) -> int:
    with contextlib.suppress(OSError, AttributeError):
        return len(os.sched_getaffinity(pid))
    return os.cpu_count() or 1


def load() -> float | None:
    """The mean number of ready threads in the last minute."""
    with contextlib.suppress(OSError, AttributeError):
        return round(os.getloadavg()[0], 2)
    return None


def _stays(thread: PythonThread, later: list[Frames]) -> bool:
    return all(thread.frames == each or is_same_function(thread.frames, each) for each in later)


def _is_over(sample: ProcessSample | None) -> bool:
    return sample is None or sample.state in "ZX"


def _python_part(
    thread: PythonThread, later: dict[int, PythonThread], name: str | None
) -> dict[str, Any]:
    again = later.get(thread.ident)  # if nothing was read later, that is not known
    moved = (again is None or again.frames != thread.frames) if later else None
    return {"name": name, "owns_gil": thread.owns_gil, "frames": thread.frames, "moved": moved}


def _shorten(processes: list[dict[str, Any]]) -> None:
    """A record must fit into a message: of too many stacks, those of main threads stay whole."""
    threads = [thread for process in processes for thread in process["threads"]]
    if sum(len(thread["frames"]) for thread in threads) > _MOST_FRAMES:
        for thread in threads:
            if not thread["is_main"]:
                thread["frames"] = thread["frames"][:_FEW_FRAMES]
