"""What holds one process of a job, by an inspection of it and of the processes it started."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    "loader": Cause.HANG_LOADER,
    "pool": Cause.HANG_POOL,
    "debugger": Cause.DEBUGGER,
    "prompt": Cause.DEBUGGER,
    "input": Cause.DEBUGGER,
}
_OF_A_FILE_SYSTEM = ("fuse", "nfs", "netfs", "disk", "file")


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


def what_holds(look: Record) -> Held:
    """Why this process makes no progress; without its stack nothing is certain."""
    found = _what_holds(look)
    is_told = bool(look.get("paused")) or tracer_of(look) is not None
    is_seen = is_told or found.cause in _BY_THE_KERNEL or has_stack(look)
    if found.sure is Sure.CERTAIN and not is_seen:
        found.sure = Sure.LIKELY
    return found


_BY_THE_KERNEL = (Cause.STOPPED, Cause.FROZEN)


def has_stack(look: Record) -> bool:
    """Whether a stack of Python was read."""
    processes = words.records(look.get("processes"))
    threads = (each for process in processes for each in words.records(process.get("threads")))
    return any(words.records(each.get("frames")) for each in threads)


def _what_holds(look: Record) -> Held:
    standing = standing_of(look)
    for rule in (_not_running, _in_debugger, _swapping, _holding_gil):
        found = rule(look, standing)
        if found is not None:
            return found
    if unread_of(look):
        said = f"waits until its output is read{standing.at}"
        hint = "Read on there: leave the pager, or press Ctrl-Q after Ctrl-S"
        return Held(Cause.HANG_CALL, said, Sure.CERTAIN, standing, _state(look), hint)
    workers = workers_of(look, standing.kind)
    if standing.kind in ("loader", "pool"):
        return _of_workers(look, standing, workers)
    if _is_in_d(look) or standing.kind in _OF_A_FILE_SYSTEM:
        return _on_disk(look, standing)
    if is_computing(look) and _CAUSES.get(standing.kind) is not Cause.HANG_RANK:
        return _computing(look, standing)
    if standing.kind in ("lock", "queue", "event", "join"):
        return _at_lock(look, standing)
    if (dead := _in_vain(look, standing)) is not None:
        return dead
    if standing.kind == "child":
        return _on_child(look, standing)
    cause = _CAUSES.get(standing.kind, Cause.HANG_CALL)
    sure = Sure.LIKELY if standing.kind else Sure.UNKNOWN
    hint = _HINTS.get(standing.kind, "See what that line calls, and give it a timeout")
    return Held(cause, standing.tell(), sure, standing, _state(look), hint)


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


def _in_debugger(look: Record, standing: ThreadStanding) -> Held | None:
    by = debugger_of(look)
    if by is None and standing.kind == "input":
        by = "a prompt"
    if by is not None:
        who, where = "", standing
        found = held_thread(look)
        if found is not None and found[1] is not trainer_of(look):
            who, where = f"waits while {_pid(found[1])} ", read_thread(dict(found[2]))
        said = f"{who}is held by {by}{where.at}"
        hint = _HINTS.get(_BY_PERSON.get(by, ""), _HINTS["debugger"])
        return Held(Cause.DEBUGGER, said, Sure.CERTAIN, standing, _state(look), hint)
    process = tracer_of(look)
    if process is None:
        return None
    name = words.text(process.get("tracer_name")) or "a tracer"
    said = f"is traced by {name} (pid {process.get('tracer')})"
    if process is not trainer_of(look):
        said = f"waits while {_pid(process)} {said}"
    hint = f"Let it go on in {name}, or detach it: nothing is done to it until then"
    return Held(Cause.DEBUGGER, said, Sure.CERTAIN, standing, _state(look), hint)


def _not_running(look: Record, standing: ThreadStanding) -> Held | None:
    """Frozen or stopped: itself, or a process that it waits for."""
    processes = words.records(look.get("processes"))
    trainer = trainer_of(look)
    for process in processes:
        if process.get("frozen") is not True:
            continue
        said = "is frozen with its cgroup"
        if process is not trainer:
            said = f"waits while {_pid(process)} {said}"
        hint = "Thaw it: docker unpause, scontrol resume, or echo 0 > cgroup.freeze"
        return Held(Cause.FROZEN, said, Sure.CERTAIN, standing, _state(look), hint)
    for process in processes:
        if words.text(process.get("state")) != "T":
            continue
        pid = words.whole(process.get("pid"))
        said = "is stopped (SIGSTOP, or Ctrl-Z)"
        if process is not trainer:
            who = f"its worker (pid {pid})" if standing.kind in _LOOPS else _pid(process)
            said = f"{standing.tell()}, and {who} {said}"
        hint = f"Let it go on: kill -CONT {pid}, or fg in its shell"
        return Held(Cause.STOPPED, said, Sure.CERTAIN, standing, _state(look), hint)
    return None


def _swapping(look: Record, standing: ThreadStanding) -> Held | None:
    seconds = words.real(look.get("seconds")) or 0.5
    processes = words.records(look.get("processes"))
    faults = sum(words.whole(p.get("major_faults")) or 0 for p in processes) / seconds
    swap = sum(words.whole(p.get("swap")) or 0 for p in processes)
    if faults < _FAULTS_PER_SECOND or not swap:
        return None
    rss = sum(words.whole(p.get("rss")) or 0 for p in processes)
    said = f"is swapping: {words.size(swap)} of it are on disk, {faults:.0f} pages a second come"
    evidence = [f"{words.size(rss)} of it are in memory, {words.size(swap)} in swap", *_state(look)]
    hint = "Make it smaller (batch, workers), or give it a machine with more memory"
    return Held(Cause.SLOW, f"{said} back", Sure.LIKELY, standing, evidence, hint)


def _holding_gil(look: Record, standing: ThreadStanding) -> Held | None:
    """A call into C that keeps the interpreter lock: no other thread can run."""
    age = words.real(look.get("pulse_age"))
    if age is None or age < PULSE_SECONDS:
        return None
    threads = words.records(trainer_of(look).get("threads"))
    owner = next((t for t in threads if t.get("owns_gil") is True), None)
    if owner is None and any(t.get("owns_gil") is False for t in threads):
        return None  # all threads were asked, and none holds it
    if owner is not None and owner.get("moved") is True:
        return None
    where, who = standing, ""
    if owner is not None and owner is not main_thread(trainer_of(look)):
        where = read_thread(owner)
        who = f"waits for its thread {_name(owner)}, which "
    said = f"{who}is in a call that holds the interpreter{where.at}: no other thread of it can run"
    evidence = [f"its own thread has not beaten for {words.duration(age)}", *_state(look)]
    if owner is not None:
        evidence.append(f"thread {_name(owner)} holds the GIL")
    sure = Sure.CERTAIN if owner is not None else Sure.LIKELY
    hint = "Only SIGKILL ends such a call: holdfast run --hang-timeout does it"
    return Held(Cause.HANG_GIL, said, sure, where, evidence, hint)


def _of_workers(look: Record, standing: ThreadStanding, workers: Workers) -> Held:
    """In the data loader or a pool: the worker's line counts."""
    cause = _CAUSES[standing.kind]
    evidence = [*workers.lines(), *_state(look)]
    said = standing.tell()
    if workers.on_disk is not None:
        who, theirs = workers.on_disk
        said = f"{said}: {who} {theirs.tell()}"
        return Held(Cause.HANG_DISK, said, Sure.LIKELY, standing, evidence, _DISK_HINT)
    if workers.at_work:
        who, theirs = workers.at_work[0]
        more = f", and {len(workers.at_work) - 1} more likewise" if len(workers.at_work) > 1 else ""
        said = f"{said}: {who} {theirs.tell()}{more}"
        hint = "See that line in the worker"
        if theirs.kind == standing.kind == "pool":
            hint = "A task that waits for a pool of which it takes a place itself never ends"
        if theirs.kind == "lock":
            hint = (
                "A lock that is taken twice, or was held when the worker was forked, never comes "
                "free: try the context 'spawn', or num_workers=0"
            )
        if workers.moves:
            hint = "More workers, or less work for each sample, make it faster"
            return Held(Cause.SLOW, said, Sure.LIKELY, standing, evidence, hint)
        return Held(cause, said, Sure.CERTAIN, standing, evidence, hint)
    if workers.count:
        said = f"{said}, and none of its {words.count(workers.count, 'worker')} is at work"
        hint = "A worker that died takes its task along"
        if standing.kind == "pool":
            hint += ", and multiprocessing.Pool waits for ever: concurrent.futures says so instead"
        else:
            evidence += _tell_shm(look)
            hint = (
                "A batch is lost: its worker died, or could not send it and has printed why (a "
                f"full /dev/shm{_size_of_shm(look)}, something that cannot be pickled)"
            )
        sure = Sure.LIKELY
    else:
        said = f"{said}, and no worker of it is seen"
        hint, sure = "See what became of its workers: a dead one takes its task along", Sure.LIKELY
    return Held(cause, said, sure, standing, evidence, hint)


def _size_of_shm(look: Record) -> str:
    """A small /dev/shm, as in a container, is the likely reason."""
    total = words.whole(words.record(look.get("shm")).get("total"))
    return f", which has only {words.size(total)}" if total and total < _SMALL_SHM_BYTES else ""


def _tell_shm(look: Record) -> list[str]:
    room = words.record(look.get("shm"))
    free, total = words.whole(room.get("free")), words.whole(room.get("total"))
    if free is None or not total:
        return []
    return [f"/dev/shm has {words.size_of(free, total)} free; it was full if a batch did not fit"]


_DISK_HINT = (
    "See whether that file system answers: timeout 5 stat -f FOLDER, and df from another shell; a "
    "process in it may survive even SIGKILL until the server comes back"
)


def _on_disk(look: Record, standing: ThreadStanding) -> Held:
    said = standing.words if standing.kind in _OF_A_FILE_SYSTEM else "waits for a file system"
    is_in_d = _is_in_d(look)
    evidence = _state(look)
    if is_in_d:
        evidence.append("its state is D: not even SIGKILL ends such a wait")
    sure = Sure.CERTAIN if is_in_d and standing.kind in ("fuse", "nfs", "netfs") else Sure.LIKELY
    return Held(Cause.HANG_DISK, f"{said}{standing.at}", sure, standing, evidence, _DISK_HINT)


def _computing(look: Record, standing: ThreadStanding) -> Held:
    cores = words.real(trainer_of(look).get("cpu")) or 0.0
    at = standing.at
    inside = f" in {standing.call}" if standing.call else ""
    if lines := loop_of(look):
        said = f"computes{inside}{_at_lines(standing, lines)} with {cores:.1f} cores"
        said = f"{said} and does not leave that {'call' if standing.call else 'function'}"
        hint = "See whether that loop can end, and what its condition depends on"
        return Held(Cause.HANG_COMPUTING, said, Sure.LIKELY, standing, _state(look), hint)
    if main_thread(trainer_of(look)).get("moved") is True:
        said = f"is at work{inside}{at} ({cores:.1f} cores)"
        hint = f"See where it spends its time: py-spy top --pid {trainer_of(look).get('pid')}"
        return Held(Cause.SLOW, said, Sure.LIKELY, standing, _state(look), hint)
    if standing.kind == "device":
        said = f"waits for the GPU{at} ({cores:.1f} cores spin)"
        hint = _HINTS["device"]
        return Held(Cause.HANG_CALL, said, Sure.LIKELY, standing, _state(look), hint)
    said = f"computes{inside}{at} with {cores:.1f} cores and does not leave that line"
    hint = "See whether that call can end: a loop without an end, a size that exploded"
    return Held(Cause.HANG_COMPUTING, said, Sure.LIKELY, standing, _state(look), hint)


def _at_lines(standing: ThreadStanding, lines: list[int]) -> str:
    """As ` at train.py:9 and 10 in project()`; of many lines the first and the last."""
    place, seen = standing.place, sorted(set(lines))
    if place is None or standing.call or len(seen) < 2:
        return standing.at
    shown = f" and {seen[1]}" if len(seen) == 2 else f" to {seen[-1]}"
    first = replace(place, line=seen[0])
    return f" at {first.short}{shown}" + (f" in {place.function}" if place.function else "")


def _at_lock(look: Record, standing: ThreadStanding) -> Held:
    """A lock, an event or a queue: where the other threads stand."""
    if (dead := _in_vain(look, standing)) is not None:
        return dead
    others = other_threads(look)
    said, evidence = standing.tell(), _state(look)
    sure = Sure.LIKELY if standing.words.endswith("another thread") else Sure.CERTAIN
    if not others:
        others = children_at_work(look)
    evidence += [f"{name} {theirs.tell()}" for name, theirs in others[:_MOST_THREADS]]
    locked = [each for each in others if each[1].kind == "lock"]
    hint = "See which thread is to end that wait, and give it a timeout"
    if standing.kind == "lock" and locked:
        name, theirs = locked[0]
        said = f"{said}, while {name} {theirs.tell()}"
        hint = "They may wait for each other: take locks in the same order everywhere"
    elif others:
        name, theirs = others[0]
        said = f"{said}, while {name} {theirs.tell()}"
    elif standing.kind == "lock":
        said = f"{said}, and no other thread of it works"
        hint = (
            "The lock was taken twice, or by a thread that ended without releasing it: "
            "use `with lock:`"
        )
    else:
        said = f"{said}, and no other thread of it works"
        party = "process" if _is_between_processes(standing) else "thread"
        hint = f"The {party} that was to end that wait has ended or never began: give it a timeout"
    return Held(Cause.HANG_LOCK, said, sure, standing, evidence, hint)


def _is_between_processes(standing: ThreadStanding) -> bool:
    return standing.kind == "pipe" or standing.words.endswith("between processes")


def _in_vain(look: Record, standing: ThreadStanding) -> Held | None:
    """A wait for another process, of which a child has died."""
    if not _is_between_processes(standing):
        return None
    dead = [each for each in words.records(look.get("processes"))[1:] if each.get("state") == "Z"]
    # A child that has left with status 0 had no more to send: then any other one counts first.
    dead.sort(key=lambda each: words.whole(each.get("ended")) == 0)
    if not dead:
        return None
    told = [f"{_pid(each)} {_tell_end(words.whole(each.get('ended')))}" for each in dead]
    said = f"{standing.tell()}, and {told[0]}"
    hint = "See why that process ended: if it was to send what is awaited, the wait has no end"
    evidence = [*told[:_MOST_WORKERS], *_state(look)]
    return Held(Cause.HANG_LOCK, said, Sure.LIKELY, standing, evidence, hint)


def _tell_end(status: int | None) -> str:
    if not status:  # 0 is also shown to a process that may not know
        return "has ended"
    if number := status & 0x7F:
        return f"was killed by {words.signal_name(-number) or f'signal {number}'}"
    return f"has ended with status {status >> 8}"


def _on_child(look: Record, standing: ThreadStanding) -> Held:
    said, evidence = standing.tell(), _state(look)
    for process in words.records(look.get("processes"))[1:]:
        theirs = read_thread(main_thread(process))
        name = words.one_line(words.text(process.get("command")), 60)
        doing = theirs.tell() if theirs.place else f"is in state {process.get('state')}"
        said = f"{said}: {_pid(process)} ({name}) {doing}"
        break
    hint = "See why that process does not end, and give the wait a timeout"
    return Held(Cause.HANG_CALL, said, Sure.LIKELY, standing, evidence, hint)


def other_threads(look: Record) -> list[tuple[str, ThreadStanding]]:
    trainer = trainer_of(look)
    main = main_thread(trainer)
    found = []
    for thread in words.records(trainer.get("threads")):
        theirs = read_thread(thread)
        if thread is not main and theirs.place is not None:
            found.append((f"thread {_name(thread)}", theirs))
    return found


def children_at_work(look: Record) -> list[tuple[str, ThreadStanding]]:
    found = []
    for process in words.records(look.get("processes"))[1:]:
        theirs = read_thread(main_thread(process))
        if theirs.place is not None:
            found.append((_pid(process), theirs))
    return found


def is_computing(look: Record) -> bool:
    return computes(trainer_of(look))


def _is_in_d(look: Record) -> bool:
    trainer = trainer_of(look)
    thread = main_thread(trainer)
    return (words.text(thread.get("state")) or words.text(trainer.get("state"))) == "D"


def _state(look: Record) -> list[str]:
    trainer = trainer_of(look)
    if not trainer:
        return []
    wchan = words.text(main_thread(trainer).get("wchan")) or words.text(trainer.get("wchan"))
    told = f"pid {trainer.get('pid')}: state {trainer.get('state')}"
    told += f", in {wchan}" if wchan and wchan != "0" else ""
    cores = words.real(trainer.get("cpu"))
    told += f", {cores * 100:.0f}% of a core" if cores is not None else ""
    found = [told] if trainer.get("pid") is not None else []  # printed stacks have none
    if error := words.text(look.get("stacks_error")):
        found.append(f"its stacks could not be read: {words.one_line(error, 160)}")
    return found


def _name(thread: Record) -> str:
    name = words.text(thread.get("name")) or str(thread.get("tid"))
    return words.one_line(name, 60)


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


def workers_of(look: Record, kind: str) -> Workers:
    workers = Workers()
    if kind not in _LOOPS:
        return workers
    found: list[tuple[bool, str, ThreadStanding]] = []
    for process in words.records(look.get("processes"))[1:]:
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
            found.append((_moves(process, thread), who, standing))
            if standing.kind in _DISK:
                workers.on_disk = workers.on_disk or (who, standing)
    if kind == "pool":
        found += _pool_threads(look, workers)
    found.sort(key=lambda each: (each[0], each[2].place is None))
    workers.at_work = [(who, standing) for _, who, standing in found]
    workers.moves = any(moves for moves, _, _ in found) and not workers.on_disk
    return workers


def _pool_threads(look: Record, workers: Workers) -> list[tuple[bool, str, ThreadStanding]]:
    trainer, found = trainer_of(look), []
    main = main_thread(trainer)
    for thread in words.records(trainer.get("threads")):
        stack = places(thread.get("frames"))
        at = _loop_at(stack, "pool")
        if thread is main or at is None:
            continue
        workers.count += 1
        # A thread that waits for work is in a call into C, which leaves no frame.
        if at > 0 and not _is_idle(stack, at):
            name = words.one_line(words.text(thread.get("name")) or str(thread.get("tid")), 60)
            moves = thread.get("moved") is True
            found.append((moves, f"its thread {name}", read_thread(thread)))
    return found


def _loop_at(stack: list[Place], kind: str) -> int | None:
    file, names = _LOOPS[kind]
    for index, each in enumerate(stack):
        last = each.name.rsplit(".", 1)[-1]
        if file.search(each.file) and re.fullmatch(names, last):
            return index
    return None


def _is_idle(stack: list[Place], at: int) -> bool:
    """Whether a worker waits for the next task: its loop has called a queue."""
    return at > 0 and _WAITS.search(stack[at - 1].file) is not None


def _moves(process: Record, thread: Record) -> bool:
    """Whether it makes progress: by its stack, or, without one, by its use of a processor."""
    moved = thread.get("moved")
    if isinstance(moved, bool):
        return moved
    return (words.real(process.get("cpu")) or 0.0) > _BUSY_CORES
