"""What holds one process of a job, by an inspection of it and of the processes it started."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast import _text as words
from holdfast._diagnose.hangs.stacks import (
    Place,
    ThreadStanding,
    main_thread,
    places,
    read_thread,
    standing_of,
    trainer_of,
)
from holdfast._diagnose.verdict import Cause, Sure
from holdfast._environment.processes.activity import (
    CLIENT,
    computes,
    debugger_of,
    held_thread,
    loop_of,
    tracer_of,
    unread_of,
)

Record = dict[str, Any]

PULSE_SECONDS = 5.0  # without a beat of its own thread: no Python code of it runs
_FAULTS_PER_SECOND = 100.0  # pages that come back from swap
_MOST_THREADS = 6
_SMALL_SHM_BYTES = 2 << 30  # a container has 64 MB of it, a machine half of its memory

_CAUSES = {
    **dict.fromkeys(("lock", "queue", "event", "join", "filelock", "asyncio"), Cause.HANG_LOCK),
    **dict.fromkeys(("fuse", "nfs", "netfs", "disk", "file"), Cause.HANG_DISK),
    **dict.fromkeys(("collective", "rendezvous"), Cause.HANG_RANK),
    **dict.fromkeys(("debugger", "prompt", "input"), Cause.DEBUGGER),
    **{"loader": Cause.HANG_LOADER, "pool": Cause.HANG_POOL},
}
_HINTS = {
    "sleep": "See why it sleeps there so long",
    "network": "Give the call a timeout, and see whether the other end answers",
    "pipe": "See what the other process does, and give the wait a timeout",
    "stdin": "See what is to write into it (input(), sys.stdin), or start it with < /dev/null",
    "device": "See whether the GPU works: nvidia-smi, and sudo dmesg | grep -i xid",
    "rendezvous": "See whether all ranks have been started, and reach MASTER_ADDR:MASTER_PORT",
    "collective": "See what the other ranks do",
    "filelock": "See which process holds that lock: cat /proc/locks, or lslocks",
    "fifo": "Open its other end, or remove it",
    "asyncio": "Give what is awaited there a timeout: asyncio.wait_for",
    "compile": "See what it compiles: TORCH_LOGS=recompiles,dynamo",
    "import": "See whether the folder of that package answers, and whether a thread imports too",
    "prompt": "Answer it, and the training goes on",
    "input": "Answer it, and the training goes on",
    "debugger": "Let it go on there (c), and the training goes on",
    "client": "Attach an editor to it, or take debugpy.wait_for_client() out",
}
_BY_PERSON = {"a prompt": "prompt", CLIENT: "client"}
_DISK_HINT = (
    "See whether that file system answers: timeout 5 stat -f FOLDER, and df from another shell; a "
    "process in it may survive even SIGKILL until the server comes back"
)


@dataclass
class Held:
    """What holds a process: `words` continue after its name, `hint` is the remedy."""

    cause: Cause
    words: str
    sure: Sure
    standing: ThreadStanding
    evidence: list[str] = field(default_factory=list)
    hint: str = ""

    @property
    def advice(self) -> list[str]:
        return [f"{self.hint}."] if self.hint else []


class _Seen:
    """What one inspection shows of the training process and of those that it started."""

    def __init__(self, look: Record) -> None:
        self.look = look
        self.processes = words.records(look.get("processes"))
        self.children = self.processes[1:]
        self.trainer = trainer_of(look)
        self.main = main_thread(self.trainer)
        self.standing = standing_of(look)
        self.is_in_d = (words.text(self.main.get("state")) or self.trainer.get("state")) == "D"

    def held(
        self,
        cause: Cause,
        said: str,
        hint: str,
        sure: Sure = Sure.LIKELY,
        evidence: list[str] | None = None,
    ) -> Held:
        told = [*(evidence or []), *self._state()]
        return Held(cause, said, sure, self.standing, told, hint)

    def is_waiting_for(self, process: Mapping[str, Any]) -> str:
        """The beginning of a sentence on one of its processes."""
        return "" if process is self.trainer else f"waits while {_pid(process)} "

    def _state(self) -> list[str]:
        trainer = self.trainer
        if not trainer:
            return []
        wchan = words.text(self.main.get("wchan")) or words.text(trainer.get("wchan"))
        told = f"pid {trainer.get('pid')}: state {trainer.get('state')}"
        told += f", in {wchan}" if wchan and wchan != "0" else ""
        cores = words.real(trainer.get("cpu"))
        told += f", {cores * 100:.0f}% of a core" if cores is not None else ""
        found = [told] if trainer.get("pid") is not None else []  # printed stacks have none
        if error := words.text(self.look.get("stacks_error")):
            found.append(f"its stacks could not be read: {words.one_line(error, 160)}")
        return found


def what_holds(look: Record) -> Held:
    """Why this process makes no progress; without its stack nothing is certain."""
    seen = _Seen(look)
    found = next(held for rule in _RULES if (held := rule(seen)) is not None)
    is_told = bool(look.get("paused")) or tracer_of(look) is not None
    is_of_kernel = found.cause in (Cause.STOPPED, Cause.FROZEN)
    if found.sure is Sure.CERTAIN and not (is_told or is_of_kernel or has_stack(look)):
        found.sure = Sure.LIKELY
    return found


def has_stack(look: Record) -> bool:
    """Whether a stack of Python was read."""
    processes = words.records(look.get("processes"))
    threads = (each for process in processes for each in words.records(process.get("threads")))
    return any(words.records(each.get("frames")) for each in threads)


def is_computing(look: Record) -> bool:
    return computes(trainer_of(look))


def _not_running(seen: _Seen) -> Held | None:
    """Frozen or stopped: itself, or a process that it waits for."""
    for process in seen.processes:
        if process.get("frozen") is True:
            said = f"{seen.is_waiting_for(process)}is frozen with its cgroup"
            hint = "Thaw it: docker unpause, scontrol resume, or echo 0 > cgroup.freeze"
            return seen.held(Cause.FROZEN, said, hint, Sure.CERTAIN)
    for process in seen.processes:
        if words.text(process.get("state")) == "T":
            pid = words.whole(process.get("pid"))
            said = "is stopped (SIGSTOP, or Ctrl-Z)"
            if process is not seen.trainer:
                is_worker = seen.standing.kind in _LOOPS
                who = f"its worker (pid {pid})" if is_worker else _pid(process)
                said = f"{seen.standing.tell()}, and {who} {said}"
            hint = f"Let it go on: kill -CONT {pid}, or fg in its shell"
            return seen.held(Cause.STOPPED, said, hint, Sure.CERTAIN)
    return None


def _in_debugger(seen: _Seen) -> Held | None:
    by = debugger_of(seen.look) or ("a prompt" if seen.standing.kind == "input" else None)
    if by is not None:
        who, where = "", seen.standing
        found = held_thread(seen.look)
        if found is not None and found[1] is not seen.trainer:
            who, where = seen.is_waiting_for(found[1]), read_thread(dict(found[2]))
        hint = _HINTS.get(_BY_PERSON.get(by, ""), _HINTS["debugger"])
        return seen.held(Cause.DEBUGGER, f"{who}is held by {by}{where.at}", hint, Sure.CERTAIN)
    process = tracer_of(seen.look)
    if process is None:
        return None
    name = words.text(process.get("tracer_name")) or "a tracer"
    said = f"{seen.is_waiting_for(process)}is traced by {name} (pid {process.get('tracer')})"
    hint = f"Let it go on in {name}, or detach it: nothing is done to it until then"
    return seen.held(Cause.DEBUGGER, said, hint, Sure.CERTAIN)


def _swapping(seen: _Seen) -> Held | None:
    seconds = words.real(seen.look.get("seconds")) or 0.5
    faults, swap, rss = (
        sum(words.whole(each.get(name)) or 0 for each in seen.processes)
        for name in ("major_faults", "swap", "rss")
    )
    rate = faults / seconds
    if rate < _FAULTS_PER_SECOND or not swap:
        return None
    said = f"is swapping: {words.size(swap)} of it are on disk, {rate:.0f} pages a second come back"
    evidence = [f"{words.size(rss)} of it are in memory, {words.size(swap)} in swap"]
    hint = "Make it smaller (batch, workers), or give it a machine with more memory"
    return seen.held(Cause.SLOW, said, hint, evidence=evidence)


def _holding_gil(seen: _Seen) -> Held | None:
    """A call into C that keeps the interpreter lock: no other thread can run."""
    age = words.real(seen.look.get("pulse_age"))
    if age is None or age < PULSE_SECONDS:
        return None
    threads = words.records(seen.trainer.get("threads"))
    owner = next((t for t in threads if t.get("owns_gil") is True), None)
    if owner is None and any(t.get("owns_gil") is False for t in threads):
        return None  # all threads were asked, and none holds it
    if owner is not None and owner.get("moved") is True:
        return None
    where, who = seen.standing, ""
    if owner is not None and owner is not seen.main:
        where, who = read_thread(owner), f"waits for its thread {_name(owner)}, which "
    said = f"{who}is in a call that holds the interpreter{where.at}: no other thread of it can run"
    evidence = [f"its own thread has not beaten for {words.duration(age)}"]
    evidence += [f"thread {_name(owner)} holds the GIL"] if owner is not None else []
    sure = Sure.CERTAIN if owner is not None else Sure.LIKELY
    hint = "Only SIGKILL ends such a call: holdfast run --hang-timeout does it"
    return replace(seen.held(Cause.HANG_GIL, said, hint, sure, evidence), standing=where)


def _unread(seen: _Seen) -> Held | None:
    if not unread_of(seen.look):
        return None
    said = f"waits until its output is read{seen.standing.at}"
    hint = "Read on there: leave the pager, or press Ctrl-Q after Ctrl-S"
    return seen.held(Cause.HANG_CALL, said, hint, Sure.CERTAIN)


def _of_workers(seen: _Seen) -> Held | None:
    """In the data loader or a pool: the worker's line counts."""
    standing = seen.standing
    if standing.kind not in _LOOPS:
        return None
    workers = workers_of(seen)
    cause, sure, said, evidence = _CAUSES[standing.kind], Sure.LIKELY, standing.tell(), []
    if workers.on_disk is not None:
        who, theirs = workers.on_disk
        cause, said, hint = Cause.HANG_DISK, f"{said}: {who} {theirs.tell()}", _DISK_HINT
    elif workers.at_work:
        who, theirs = workers.at_work[0]
        more = f", and {len(workers.at_work) - 1} more likewise" if len(workers.at_work) > 1 else ""
        said = f"{said}: {who} {theirs.tell()}{more}"
        sure, hint = Sure.CERTAIN, "See that line in the worker"
        if workers.moves:
            cause, sure = Cause.SLOW, Sure.LIKELY
            hint = "More workers, or less work for each sample, make it faster"
        elif theirs.kind == "lock":
            hint = (
                "A lock that is taken twice, or was held when the worker was forked, never comes "
                "free: try the context 'spawn', or num_workers=0"
            )
        elif theirs.kind == standing.kind == "pool":
            hint = "A task that waits for a pool of which it takes a place itself never ends"
    elif not workers.count:
        said = f"{said}, and no worker of it is seen"
        hint = "See what became of its workers: a dead one takes its task along"
    else:
        said = f"{said}, and none of its {words.count(workers.count, 'worker')} is at work"
        hint = (
            "A worker that died takes its task along, and multiprocessing.Pool waits for ever: "
            "concurrent.futures says so instead"
        )
        if standing.kind == "loader":
            room = words.record(seen.look.get("shm"))
            free, total = words.whole(room.get("free")), words.whole(room.get("total"))
            is_small = total and total < _SMALL_SHM_BYTES  # as in a container: the likely reason
            size = f", which has only {words.size(total)}" if total and is_small else ""
            hint = (
                "A batch is lost: its worker died, or could not send it and has printed why (a "
                f"full /dev/shm{size}, something that cannot be pickled)"
            )
            if free is not None and total:
                told = f"/dev/shm has {words.size_of(free, total)} free"
                evidence = [f"{told}; it was full if a batch did not fit"]
    return seen.held(cause, said, hint, sure, [*workers.lines(), *evidence])


def _on_disk(seen: _Seen) -> Held | None:
    standing = seen.standing
    is_of_file_system = _CAUSES.get(standing.kind) is Cause.HANG_DISK
    if not seen.is_in_d and not is_of_file_system:
        return None
    said = standing.words if is_of_file_system else "waits for a file system"
    evidence = ["its state is D: not even SIGKILL ends such a wait"] if seen.is_in_d else []
    is_certain = seen.is_in_d and standing.kind in ("fuse", "nfs", "netfs")
    sure = Sure.CERTAIN if is_certain else Sure.LIKELY
    return seen.held(Cause.HANG_DISK, f"{said}{standing.at}", _DISK_HINT, sure, evidence)


def _computing(seen: _Seen) -> Held | None:
    standing = seen.standing
    if not computes(seen.trainer) or _CAUSES.get(standing.kind) is Cause.HANG_RANK:
        return None
    cores = f"{words.real(seen.trainer.get('cpu')) or 0.0:.1f} cores"
    inside = f" in {standing.call}" if standing.call else ""
    cause = Cause.HANG_COMPUTING
    if lines := loop_of(seen.look):
        what = "call" if standing.call else "function"
        said = f"computes{inside}{_at_lines(standing, lines)} with {cores}"
        said = f"{said} and does not leave that {what}"
        hint = "See whether that loop can end, and what its condition depends on"
    elif seen.main.get("moved") is True:
        cause, said = Cause.SLOW, f"is at work{inside}{standing.at} ({cores})"
        hint = f"See where it spends its time: py-spy top --pid {seen.trainer.get('pid')}"
    elif standing.kind == "device":
        cause, hint = Cause.HANG_CALL, _HINTS["device"]
        said = f"waits for the GPU{standing.at} ({cores} spin)"
    else:
        said = f"computes{inside}{standing.at} with {cores} and does not leave that line"
        hint = "See whether that call can end: a loop without an end, a size that exploded"
    return seen.held(cause, said, hint)


def _at_lines(standing: ThreadStanding, lines: list[int]) -> str:
    """As ` at train.py:9 and 10 in project()`; of many lines the first and the last."""
    place, seen = standing.place, sorted(set(lines))
    if place is None or standing.call or len(seen) < 2:
        return standing.at
    shown = f" and {seen[1]}" if len(seen) == 2 else f" to {seen[-1]}"
    first = replace(place, line=seen[0])
    return f" at {first.short}{shown}" + (f" in {place.function}" if place.function else "")


def _in_vain(seen: _Seen) -> Held | None:
    """A wait for another process, of which a child has died."""
    dead = [each for each in seen.children if each.get("state") == "Z"]
    if not dead or not _is_between_processes(seen.standing):
        return None
    # A child that has left with status 0 had no more to send: then any other one counts first.
    dead.sort(key=lambda each: words.whole(each.get("ended")) == 0)
    told = [f"{_pid(each)} {_tell_end(words.whole(each.get('ended')))}" for each in dead]
    hint = "See why that process ended: if it was to send what is awaited, the wait has no end"
    said = f"{seen.standing.tell()}, and {told[0]}"
    return seen.held(Cause.HANG_LOCK, said, hint, evidence=told[:_MOST_WORKERS])


def _at_lock(seen: _Seen) -> Held | None:
    """A lock, an event or a queue: where the other threads stand."""
    standing = seen.standing
    if standing.kind not in ("lock", "queue", "event", "join"):
        return None
    others = [*_other_threads(seen)] or [*_children_at_work(seen)]
    locked = [each for each in others if each[1].kind == "lock"] if standing.kind == "lock" else []
    doing = next((f"while {name} {theirs.tell()}" for name, theirs in locked or others), None)
    said = f"{standing.tell()}, {doing or 'and no other thread of it works'}"
    party = "process" if _is_between_processes(standing) else "thread"
    hint = f"The {party} that was to end that wait has ended or never began: give it a timeout"
    if locked:
        hint = "They may wait for each other: take locks in the same order everywhere"
    elif others:
        hint = "See which thread is to end that wait, and give it a timeout"
    elif standing.kind == "lock":
        hint = (
            "The lock was taken twice, or by a thread that ended without releasing it: "
            "use `with lock:`"
        )
    sure = Sure.LIKELY if standing.words.endswith("another thread") else Sure.CERTAIN
    evidence = [f"{name} {theirs.tell()}" for name, theirs in others[:_MOST_THREADS]]
    return seen.held(Cause.HANG_LOCK, said, hint, sure, evidence)


def _on_child(seen: _Seen) -> Held | None:
    if seen.standing.kind != "child":
        return None
    said = seen.standing.tell()
    for process in seen.children[:1]:
        theirs = read_thread(main_thread(process))
        name = words.one_line(words.text(process.get("command")), 60)
        doing = theirs.tell() if theirs.place else f"is in state {process.get('state')}"
        said = f"{said}: {_pid(process)} ({name}) {doing}"
    hint = "See why that process does not end, and give the wait a timeout"
    return seen.held(Cause.HANG_CALL, said, hint)


def _in_a_call(seen: _Seen) -> Held:
    kind = seen.standing.kind
    hint = _HINTS.get(kind, "See what that line calls, and give it a timeout")
    sure = Sure.LIKELY if kind else Sure.UNKNOWN
    return seen.held(_CAUSES.get(kind, Cause.HANG_CALL), seen.standing.tell(), hint, sure)


# The first that has an answer gives it.
_RULES = (
    *(_not_running, _in_debugger, _swapping, _holding_gil, _unread, _of_workers, _on_disk),
    *(_computing, _in_vain, _at_lock, _on_child, _in_a_call),
)


def _is_between_processes(standing: ThreadStanding) -> bool:
    return standing.kind == "pipe" or standing.words.endswith("between processes")


def _tell_end(status: int | None) -> str:
    if not status:  # 0 is also shown to a process that may not know
        return "has ended"
    if number := status & 0x7F:
        return f"was killed by {words.signal_name(-number) or f'signal {number}'}"
    return f"has ended with status {status >> 8}"


def _other_threads(seen: _Seen) -> Iterator[tuple[str, ThreadStanding]]:
    for thread in words.records(seen.trainer.get("threads")):
        theirs = read_thread(thread)
        if thread is not seen.main and theirs.place is not None:
            yield f"thread {_name(thread)}", theirs


def _children_at_work(seen: _Seen) -> Iterator[tuple[str, ThreadStanding]]:
    for process in seen.children:
        theirs = read_thread(main_thread(process))
        if theirs.place is not None:
            yield _pid(process), theirs


def _name(thread: Record) -> str:
    return words.one_line(words.text(thread.get("name")) or str(thread.get("tid")), 60)


def _pid(process: Mapping[str, Any]) -> str:
    return f"its process (pid {words.whole(process.get('pid')) or '?'})"


# -- The workers of a data loader or of a pool: which of them are at work, and on which line -------

_LOOPS = {
    "loader": (re.compile(r"/torch/utils/data/_utils/worker\.py$"), "_worker_loop"),
    "pool": (
        re.compile(
            r"/(?:multiprocessing/pool|concurrent/futures/(?:process|thread)"
            r"|loky/process_executor)\.py$"
        ),
        "worker|_worker|_process_worker",
    ),
}
_WAITS = re.compile(r"/(?:multiprocessing/(?:queues|connection|synchronize)|queue)\.py$")
_BUSY_CORES = 0.2
_DISK = ("fuse", "nfs", "netfs", "disk")
_MOST_WORKERS = 8


@dataclass
class Workers:
    count: int = 0
    at_work: list[tuple[str, ThreadStanding]] = field(default_factory=list)  # stuck ones first
    on_disk: tuple[str, ThreadStanding] | None = None
    moves: bool = False  # one of those at work makes progress

    def lines(self) -> list[str]:
        told = [f"{who} {standing.tell()}" for who, standing in self.at_work[:_MOST_WORKERS]]
        idle = self.count - len(self.at_work)
        if idle > 0:
            told.append(f"{words.count(idle, 'worker')} of {self.count} had nothing to do")
        return told


def workers_of(seen: _Seen) -> Workers:
    workers, kind = Workers(), seen.standing.kind
    found: list[tuple[bool, str, ThreadStanding]] = []
    for process in seen.children:
        thread = main_thread(process)
        stack = places(thread.get("frames"))
        at = _loop_at(stack, kind)
        is_named = kind == "loader" and "pt_data_worker" in words.text(process.get("name"))
        if at is None and not (is_named and not stack):
            continue
        workers.count += 1
        standing = read_thread(thread)
        who = f"worker (pid {words.whole(process.get('pid')) or '?'})"
        if (words.text(thread.get("state")) or process.get("state")) == "D":
            workers.on_disk = (who, standing)
        if at is not None and not _is_idle(stack, at):
            moved = thread.get("moved")
            # Without a stack, by its use of a processor.
            is_busy = (words.real(process.get("cpu")) or 0.0) > _BUSY_CORES
            found.append((moved if isinstance(moved, bool) else is_busy, who, standing))
            if standing.kind in _DISK:
                workers.on_disk = workers.on_disk or (who, standing)
    for thread in words.records(seen.trainer.get("threads")) if kind == "pool" else []:
        stack = places(thread.get("frames"))
        at = _loop_at(stack, kind)
        if thread is seen.main or at is None:
            continue
        workers.count += 1
        # A thread that waits for work is in a call into C, which leaves no frame.
        if at > 0 and not _is_idle(stack, at):
            who = f"its thread {_name(thread)}"
            found.append((thread.get("moved") is True, who, read_thread(thread)))
    found.sort(key=lambda each: (each[0], each[2].place is None))
    workers.at_work = [(who, standing) for _, who, standing in found]
    workers.moves = any(moves for moves, _, _ in found) and not workers.on_disk
    return workers


def _loop_at(stack: list[Place], kind: str) -> int | None:
    file, names = _LOOPS[kind]
    for index, each in enumerate(stack):
        if file.search(each.file) and re.fullmatch(names, each.name.rsplit(".", 1)[-1]):
            return index
    return None


def _is_idle(stack: list[Place], at: int) -> bool:
    """Whether a worker waits for the next task: its loop has called a queue."""
    return at > 0 and _WAITS.search(stack[at - 1].file) is not None
