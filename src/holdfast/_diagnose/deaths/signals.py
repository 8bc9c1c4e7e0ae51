"""Deaths by a signal: the OOM killer, another process's SIGKILL, lost workers, crashes.

The kernel tells the killed process nothing. Its counters tell, read just before and just after
the death. The counter of a cgroup counts kills of its own processes only.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from holdfast import _text
from holdfast._diagnose import advice
from holdfast._diagnose.evidence.case import Case, End, Finding, Trouble
from holdfast._diagnose.evidence.evidence import Record
from holdfast._diagnose.evidence.memory import Moved, Use, last_use, moved, tell_graphs, tell_memory
from holdfast._diagnose.texts.launchers import SIGNAL_WORDS
from holdfast._diagnose.texts.python import is_own_file
from holdfast._diagnose.verdict import Cause, Sure

if TYPE_CHECKING:
    from holdfast._diagnose.texts.sign import Sign

_KILL = -9
_FAR = 0.5  # of the limit: so little does not call the OOM killer
_ROOM = 0.2  # of the machine's memory: with so much left it is not out of memory
_NEARLY_ALL = 90.0  # per cent
_PRINTED_USE = re.compile(  # as DeepSpeed prints it, or a monitor
    r"(?i)(?:(?<!g)\b(?:cpu|host|system|node)(?: virtual)? (?:memory|ram)|\bram(?: usage)?)\b"
    r"(?=[^\n]{0,80}(?:us(?:ed|age)|percent|util))(?:(?!gpu)[^\n]){0,80}?\b(\d{1,3}(?:\.\d+)?) ?%"
)
_FRESH_SECONDS = 2.0
_SAMPLE_SECONDS = 1.5  # between two samples


def judge_kill(case: Case) -> Finding | None:
    """The process died of SIGKILL."""
    end = case.end
    if end.status != _KILL or end.was_sent_away:
        return None
    use, counted = last_use(end.memory), moved(end.counters)
    rules = (_by_limit, _by_counter, _by_kernel, _by_slurm, _by_use)
    for rule in rules:
        if (found := rule(case, use, counted)) is not None:
            return found
    # The exception that it had raised before is the cause.
    return None if end.had_failed else _killed(case, use, counted)


def _by_limit(case: Case, use: Use, counted: Moved) -> Finding | None:
    """The kernel kills at the hard limit of processor time."""
    if counted.kills or use.cpu_limit is None or use.cpu_seconds is None:
        return None
    since = (case.end.time or 0.0) - (use.time or 0.0) if use.time and case.end.time else 0.0
    if use.cpu_seconds + 2 * max(since, 0.0) + _SAMPLE_SECONDS < use.cpu_limit:
        return None
    used, limit = _text.duration(use.cpu_seconds), _text.duration(use.cpu_limit)
    sentence = f"The kernel ended {case.who} at its limit of processor time: {limit} (ulimit -t)."
    told = [f"{case.who} died of SIGKILL", f"it had used {used} of {limit} in the last sample"]
    lines = ["Raise it where it is set (ulimit -Ht shows it): ulimit -t unlimited"]
    return Finding(Cause.TIME_LIMIT, sentence, Sure.LIKELY, told, [*lines, *advice.go_on(case)])


def _by_counter(case: Case, use: Use, counted: Moved) -> Finding | None:
    if not counted.kills:
        return None
    limit = use.limit or counted.limit
    before, after = counted.values
    evidence = [
        f"{case.who} died of SIGKILL",
        f"the OOM kills of its cgroup went from {before} to {after} at that moment",
    ]
    victim = _earlier_victim(case.end)
    if victim is not None and counted.kills == 1:
        return oom_of_worker(case, evidence, victim)
    has_hit = counted.has_hit_limit
    if has_hit and not counted.hits and use.is_machine_full:
        has_hit = False  # page cache fills a cgroup to its limit as well, and does no harm
    # The limit of a parent cgroup may have been hit: its hits are counted there, the kill here.
    # In a container the parent may be invisible: then a machine with free memory shows it.
    has_room = use.available is not None and use.total and use.available > _ROOM * use.total
    is_parent = not use.is_machine_full and bool(use.is_near_limit or has_room)
    if has_hit is False and not is_parent:
        return _oom(case, use, evidence, Sure.CERTAIN, is_machine=True)
    if counted.hits:
        evidence.append(f"the limit was hit {_text.count(counted.hits, 'time')} then")
    if counted.peak and limit:
        evidence.append(f"the peak of the cgroup was {_of(counted.peak, limit)}")
    sure = Sure.CERTAIN
    if has_hit is False:
        sure = Sure.LIKELY
        evidence.append("the limit that was hit must be that of a parent cgroup")
    elif _is_far_below(case, use, counted, limit):
        sure = Sure.LIKELY
        evidence.append(
            "but it used far less than the limit in the last sample: the OOM killer may have "
            "ended another process of the cgroup, and another process has killed this one"
        )
    return _oom(case, use, evidence, sure, limit, counted.peak)


def _of(used: int, limit: int) -> str:
    return _text.size_of(min(used, limit), limit)


def _by_kernel(case: Case, use: Use, _: Moved) -> Finding | None:
    sign = case.sign("kernel_oom")
    if sign is None or case.end.pid not in (None, _text.whole(sign.details.get("pid"))):
        return None
    evidence = [f"the kernel's log has: {_text.one_line(sign.text)}"]
    is_it = case.end.pid or re.match("py|pt_|ray|torch|train", str(sign.details.get("comm")))
    # Older kernels tell it in a line of its own.
    line = f"Memory cgroup out of memory: Kill process {sign.details.get('pid')} "
    is_machine = not sign.details.get("of_cgroup") and line not in case.evidence.output
    sure = Sure.CERTAIN if is_it else Sure.LIKELY
    return _oom(case, use, evidence, sure, use.limit, is_machine=is_machine)


def _by_slurm(case: Case, use: Use, _: Moved) -> Finding | None:
    sign = case.end.has("slurm_oom") or case.sign("slurm_oom")
    state = _text.text(_text.record(case.evidence.job).get("state"))
    if sign is None and "OUT_OF_MEMORY" not in state:
        return None
    line = _text.one_line(sign.text) if sign else f"SLURM calls the job {state}"
    return _oom(case, use, [f"{case.who} died of SIGKILL", line], Sure.CERTAIN, use.limit)


def _by_use(case: Case, use: Use, counted: Moved) -> Finding | None:
    """Without a counter of the cgroup, only the memory in use tells."""
    if counted.is_known:
        return None
    printed = [*_PRINTED_USE.finditer(case.evidence.output)] if case.evidence.kind == "log" else []
    is_full = bool(printed) and float(printed[-1][1]) >= _NEARLY_ALL
    told = "no counter of OOM kills could be read, so this goes by the memory in use"
    if is_full:
        told = f"it had printed: {_text.one_line(printed[-1][0], 160)}"
    elif counted.machine_kills:
        kills = _text.count(counted.machine_kills, "OOM kill")
        told = f"the machine counted {kills} at that moment"
    is_of_cgroup = not is_full and bool(use.is_near_limit)
    if not (is_full or is_of_cgroup or use.is_machine_full or counted.machine_kills):
        return None
    evidence = [f"{case.who} died of SIGKILL", told]
    return _oom(case, use, evidence, Sure.LIKELY, use.limit, is_machine=not is_of_cgroup)


def _oom(
    case: Case,
    use: Use,
    evidence: list[str],
    sure: Sure,
    limit: int | None = None,
    peak: int | None = None,
    *,
    is_machine: bool = False,
) -> Finding:
    """The kernel's OOM killer: of the cgroup, or of the whole machine."""
    likely = "" if sure is Sure.CERTAIN else "most likely "
    ended = f"he kernel's OOM killer {likely}ended {case.who}"
    if is_machine:
        if sure is Sure.CERTAIN and case.end.counters:
            evidence.append(
                "its own limit was not hit, so the machine as a whole was out of memory"
            )
        left = ""
        if use.available is not None and use.total:
            left = f" ({_text.size_of(use.available, use.total)} were available)"
        sentence = f"The machine ran out of memory{left}, and t{ended}."
    elif use.used and limit:
        # Between the last sample and the end it may have grown by far.
        used = _of(max(use.used, peak or 0), limit)
        sentence = f"T{ended}: its cgroup had used {used}."
    else:
        sentence = f"T{ended}{f': its cgroup may use {_text.size(limit)}' if limit else ''}."
    cause = Cause.OOM_MACHINE if is_machine else Cause.OOM_CGROUP
    lines = advice.host_memory(case, use, is_machine=is_machine)
    return Finding(cause, sentence, sure, [*evidence, *_story(case)], lines)


def _story(case: Case, *, peak: bool = True) -> list[str]:
    """How memory grew, and what filled it when the trainer was warned."""
    most = _text.whole(_text.record(case.evidence.led).get("maxrss")) if peak else None
    told = [f"the peak of its largest process was {_text.size(most)}"] if most else []
    return [*told, *tell_memory(case.end.memory, case.end.time), *tell_graphs(case.end.graphs)]


def oom_of_worker(case: Case, evidence: list[str], victim: Record | None = None) -> Finding:
    """The OOM killer ended a worker, and the trainer ended because of that."""
    if victim is None:
        victim = next((p for p in case.end.children if _status(p) == _KILL), {})
    of = f" (of {case.who})" if case.end.rank is not None else ""
    sentence = f"The kernel's OOM killer ended {_name(victim)}{of}, and the training with it."
    evidence = [*evidence, *_story(case, peak=False)]
    return Finding(Cause.OOM_WORKER, sentence, Sure.LIKELY, evidence, advice.worker_memory(case))


def _name(process: Record) -> str:
    """A child of the trainer, within a sentence."""
    pid, comm = _text.whole(process.get("pid")), _text.text(process.get("comm"))
    what = f"its child `{comm}`" if comm else "a process that it had started"
    what = "a data-loader worker" if "comm" not in process or "pt_data" in comm else what
    return f"{what} (pid {pid})" if pid else what


def _name_in_ray(details: Record) -> str:
    """A worker or an actor of Ray; empty if it is another one."""
    if "exit type" not in details:
        return ""
    actor = _text.text(details.get("name")) or _text.text(details.get("actor"))
    where = [f"pid {pid}"] if (pid := _text.whole(details.get("pid"))) else []
    where += [f"on {ip}"] if (ip := _text.text(details.get("ip"))) else []
    of = f"Ray's worker {actor}".strip()
    return f"{of} ({' '.join(where)})" if where else of


def judge_lost_child(case: Case) -> Finding | None:
    """The OOM killer ended a child, and its parent failed because of that."""
    end = case.end
    counted = moved(end.counters)
    kills = counted.kills or counted.kills_in_life
    if end.status == _KILL or not kills or (end.fault is None and not end.status):
        return None
    if end.fault is not None and end.fault.kind not in ("plain", "exit", "worker"):
        return None
    victims = [p for p in end.children if _status(p) == _KILL and p.get("pid") != end.pid]
    if not victims and not counted.kills:
        return None  # it was long before, and of no process that is known
    evidence = [f"{_name(each)} died of SIGKILL" for each in victims[:1]]
    evidence.append(f"its cgroup counted {_text.count(kills, 'OOM kill')} in that time")
    if counted.peak and counted.limit:
        evidence.append(f"the peak of the cgroup was {_of(counted.peak, counted.limit)}")
    if end.fault is not None:
        evidence.append(f"{case.who} then raised {end.fault.sentence(240)}")
    return oom_of_worker(case, evidence, victims[0] if victims else {"comm": ""})


def _earlier_victim(end: End) -> Record | None:
    """A child that was killed well before its parent: then the kernel's one kill was its."""
    for process in end.children:
        ended = _text.real(process.get("ended"))
        if _text.whole(process.get("pid")) == end.pid or _status(process) != _KILL:
            continue
        if ended is not None and end.time is not None and 0.5 < end.time - ended < 60:
            return process
    return None


def _status(process: Record) -> int | None:
    status = _text.whole(process.get("status"))
    return status if status is not None else _text.whole(process.get("exitcode"))


def _is_far_below(case: Case, use: Use, counted: Moved, limit: int | None) -> bool:
    if not limit or use.is_near_limit:
        return False
    most = counted.peak
    if most is None:
        most = _text.whole(_text.record(case.evidence.led).get("maxrss")) or None
    if most is None and use.time is not None and case.end.time is not None:
        is_fresh = abs(case.end.time - use.time) < _FRESH_SECONDS
        most = (max(use.tree or 0, use.used or 0) or None) if is_fresh else None
    return most is not None and most < _FAR * limit


_OUTLIVE = (
    "systemd ends what is left of a session when its user logs out: loginctl enable-linger, or "
    "start it with systemd-run --user"
)


def _killed(case: Case, use: Use, counted: Moved) -> Finding:
    """No evidence for the OOM killer: by exclusion, another process's `kill -9`."""
    evidence = [f"{case.who} died of SIGKILL, which no process can handle", *tell_report(case)]
    before, after = counted.values
    if counted.is_known:
        evidence.append(
            f"not the OOM killer: its cgroup's OOM kills stayed at {after}"
            + (f" ({before} before)" if before != after else "")
        )
    if counted.machine_kills == 0:
        evidence.append("the machine's OOM kills did not move either")
    elif counted.machine_kills and counted.is_known:
        evidence.append("the machine did count an OOM kill, but of a process of another cgroup")
    if use.used and use.limit:
        evidence.append(f"memory was below its limit: {_text.size_of(use.used, use.limit)}")
    elif use.available is not None and use.total:
        evidence.append(f"the machine had {_text.size_of(use.available, use.total)} available")
    lines = advice.killed(case, knows_counters=counted.is_known)
    if sender := _sender(case, "SIGKILL"):
        sentence = f"Another process killed {case.who} with SIGKILL: {sender}."
        if "session-" in sender:
            lines = [_OUTLIVE]
        return Finding(Cause.KILLED, sentence, Sure.LIKELY, evidence, lines)
    if counted.is_known or counted.machine_kills == 0:
        evidence.append("no stop was requested, and its keeper did not end it")
        sentence = f"Another process killed {case.who} with SIGKILL (kill -9)."
        return Finding(Cause.KILLED, sentence, Sure.BY_EXCLUSION, evidence, lines)
    evidence.append("no counter of OOM kills could be read")
    by = "by another process (kill -9) or by the OOM killer. Nothing that was recorded tells which"
    sentence = f"{case.opening} was killed with SIGKILL: {by}."
    return Finding(Cause.KILLED, sentence, Sure.UNKNOWN, evidence, lines)


# -- A data-loader worker that died: it shows as four different exceptions -------------------------

_KILLED_BY = re.compile(r"killed by signal: ([A-Za-z ]+?)[.\n]|killed by signal: (.+)")
_EXIT_CODE = re.compile(
    r"exited unexpectedly with exit code (\d{1,3})\b"
    r"|of the workers are \{SIG\w+\((-\d{1,2})\)(?:, SIG\w+\(\2\))*\}"
)
# Not a lost connection or a missing file: torch and Python ask the system whether it is alive.
_DIED = re.compile(r"DataLoader worker \(pid|process pool was terminated abruptly")
_STOPS = (-15, -2, -1)
_OF_A_STOP = ("slurm_cancelled", "slurm_step_cancelled", "terminated_line")
_OF_A_LOADER = re.compile(r"DataLoader|torch/utils/data|torch/multiprocessing|shared memory")
_PIDS = re.compile(r"worker \(pid(?:\(s\))? ([\d, ]+)\)")


def judge_worker(case: Case, trouble: Trouble) -> Finding:
    """The cause is what killed the worker, if that is known."""
    dead = _dead_worker(case.end, trouble)
    tail = trouble.fault.tail if trouble.fault is not None else ""
    status = _status(dead)
    status = _told_status(f"{trouble.message}\n{tail}") if status is None else status
    is_told = status is not None or _DIED.search(trouble.message) is not None
    told_itself = case.sign("worker_killed")  # its own handler of the signal
    if status is None and told_itself is not None and told_itself is not trouble.sign:
        status = _told_status(f"killed by signal: {told_itself.details.get('signal_name')}")
    stack = case.end.has("faulthandler")  # of the worker: the trainer itself lived on
    if status is None and stack is not None:
        status = -(_text.whole(stack.details.get("signal")) or 0) or None
    evidence = trouble.evidence(case)
    name = _name_in_ray(trouble.details) or _name(dead)
    is_of_a_loader = _OF_A_LOADER.search(trouble.message + str(trouble.record.get("frames")))
    if not is_of_a_loader:
        name = name.replace("a data-loader worker", "a worker process")
    signal = _text.signal_name(status)
    if status is not None:
        evidence.append(f"{name} died of {signal}" if status < 0 else f"{name} left with {status}")
    crashed = case.sign("cxx_exception") if status == -6 else None
    if crashed is not None and (what := _text.text(crashed.details.get("what"))):
        evidence.append(f"a process had printed: {_text.one_line(what, 240)}")
    use, counted = last_use(case.end.memory), moved(case.end.counters)
    if status in (-9, None):
        kills = counted.kills or counted.kills_in_life
        slurm = case.sign("slurm_oom", "kernel_oom")
        is_full = (use.is_near_limit or use.is_machine_full) and not counted.is_known
        told = _text.one_line(slurm.text) if slurm is not None else ""
        told = told or ("nearly all memory was in use" if is_full else "")
        if kills:
            told = f"its cgroup counted {_text.count(kills, 'OOM kill')} in that time"
        if told:
            return oom_of_worker(case, [*evidence, told], dead)
    opening = f"{name[:1].upper()}{name[1:]}"
    if status == -7:
        noted = case.end.fault.record if case.end.fault is not None else {}
        free = _text.whole(_text.record(noted.get("shm")).get("free"))
        left = use.shm_free if free is None else min(free, use.shm_free or free)
        if left is not None:
            evidence.append(f"/dev/shm had {_text.size(left)} free")
        sentence = f"{opening} died of a bus error, as it does when /dev/shm is full."
        lines = advice.advise(case, "shm_full")
        return Finding(Cause.SHM_FULL, sentence, Sure.LIKELY, evidence, lines)
    stop = case.sign(*_OF_A_STOP)
    is_earlier = trouble.sign is not None and stop is not None and stop.line < trouble.sign.line
    if stop is not None and (status in _STOPS or (status is None and is_earlier)):
        # What ends a job, ends its workers, too.
        said = _text.one_line(stop.text, 200)
        sentence = f"{case.opening} was ended, and its workers with it: {said}."
        is_signal = stop.kind == "terminated_line" and stop.details.get("signal") != 2
        cause = Cause.TERMINATED if is_signal else Cause.ASKED
        return Finding(cause, sentence, Sure.LIKELY, evidence, advice.go_on(case))
    is_by_itself = stop is None and status not in _STOPS
    sure = Sure.CERTAIN if is_told and is_by_itself else Sure.LIKELY
    of = f" of {case.who}" if case.end.rank is not None else ""
    how = f"left with status {status}" if signal is None else f"died of {signal}"
    how = {None: "died", -9: "was killed with SIGKILL"}.get(status, how)
    sentence = f"{opening}{of} {how}, and the training with it."
    if status == -9 and counted.is_known:
        evidence.append("not the OOM killer: its cgroup counted no OOM kill")
    evidence += tell_memory(case.end.memory, case.end.time)
    lines = advice.advise(case, "worker_died" if is_of_a_loader else "pool_worker_died")
    if status == -9 and not counted.is_known:
        lines = [*advice.lines_of(case, "worker_killed"), *lines]
    return Finding(Cause.WORKER_DIED, sentence, sure, evidence, lines)


def _dead_worker(end: End, trouble: Trouble) -> Record:
    """The worker that died first, by the records of the system or of the trainer."""
    told = _PIDS.search(trouble.message)
    pids = {int(pid) for pid in re.findall(r"\d{1,9}", told[1])} if told else set()
    known = [*end.children, *_text.records(trouble.record.get("workers"))]
    known = [p for p in known if _text.whole(p.get("pid")) != end.pid and not p.get("alive")]
    named = [p for p in known if _text.whole(p.get("pid")) in pids and _status(p) is not None]
    abnormal = [p for p in known if _status(p) not in (None, 0)]
    # Workers that were ended because of it got a SIGTERM.
    first = [p for p in abnormal if _status(p) != -15] or abnormal
    if named or first:
        return (named or first)[0]
    return {"pid": min(pids)} if pids else {}


def _told_status(message: str) -> int | None:
    match, left = _KILLED_BY.search(message), _EXIT_CODE.search(message)
    if match is None:
        return int(left[1] or left[2]) if left is not None else None
    told = (match[1] or match[2] or "").strip().lower().replace("-", " ")
    return next((-n for word, (_, n) in SIGNAL_WORDS.items() if told.startswith(word)), None)


# -- Crashes outside Python, and signals that nothing answered -------------------------------------

CRASHES = {
    "SIGSEGV": (Cause.SEGFAULT, "crashed with a segmentation fault (SIGSEGV)"),
    "SIGABRT": (Cause.ABORT, "aborted itself (SIGABRT)"),
    "SIGBUS": (Cause.BUS_ERROR, "crashed with a bus error (SIGBUS)"),
    "SIGILL": (Cause.ILLEGAL_INSTRUCTION, "crashed on an illegal instruction (SIGILL)"),
    "SIGFPE": (Cause.ABORT, "crashed in integer arithmetic (SIGFPE)"),
    "SIGSYS": (Cause.ABORT, "made a system call that is not allowed (SIGSYS)"),
    "SIGTRAP": (Cause.ABORT, "stopped at a trap (SIGTRAP)"),
}
_CRASH_ADVICE = {
    Cause.BUS_ERROR: "A bus error is mostly memory behind a file that is gone: a full /dev/shm or "
    "disk, a mapped file that was cut short. See df -h /dev/shm, and docker run --shm-size=8g",
    Cause.ILLEGAL_INSTRUCTION: "The program was built for another processor: compare lscpu with "
    "where it runs.",
}
_MEANINGS = {
    "SIGHUP": "the terminal or the connection was closed; tmux outlives that",
    "SIGINT": "that is Ctrl-C, or what a launcher passes on of it",
    "SIGQUIT": "that is Ctrl-\\",
    "SIGTERM": "that is what kill, docker stop, a scheduler or a shutdown send",
    "SIGPIPE": "it wrote into a pipe whose reader is gone",
    "SIGXCPU": "it used more processor time than it may: ulimit -t",
    "SIGXFSZ": "it wrote a larger file than it may: ulimit -f",
    "SIGUSR1": "a scheduler's warning, and nothing in the script answered it",
    "SIGUSR2": "a scheduler's warning, and nothing in the script answered it",
    "SIGALRM": "a timer of its own ran out",
}
_SHELL_STATUSES = {129: "SIGHUP", 130: "SIGINT", 131: "SIGQUIT", 143: "SIGTERM"}
_TERMINATE = "terminate called"
_REPORTS = ("launcher_exit", "srun_exit", "killed_line", "segfault_line", "bus_error", "abort_line")
# What a library says before it aborts its process.
_FATAL = re.compile(
    r"(?m)^.*(?:\bF\d{4} |(?:: |^)F \S+\] |^Status: |Check failed: |FATAL|\[Fatal|[Aa]ssert).*$"
)
_OF_KERNEL = re.compile(
    r"(?im)^.*\bkernel: .*(?:lockup|panic|\bBUG\b|Oops|NVRM|\bXid\b|hardware (?:error|memory)|EDAC"
    r"|I/O error|thermal|temperature|hung_task|blocked for more|out of memory|nvme|AER:|amdgpu).*$"
)
_OF_PROCESSOR = re.compile(r"(?im)^.*(?:\bcpu features|\b(?:avx|sse|fma|bmi|amx)\d*\b).*$")
_WARNED_CHARACTERS = 8000
_DEEP = 8  # frames of one line: the function calls itself
# What libraries abort for.
_OF_THE_DEVICE = ("cuda_error", "cuda_assert", "cuda_oom", "memory_refused", "environment")
_FULL_SHM_BYTES = 16 << 20  # a /dev/shm with less free room is full


def judge_crash(case: Case) -> Finding | None:
    """A crash outside Python: segfault, abort, bus error, illegal instruction, C++."""
    end = case.end
    told = _printed(case, "faulthandler")
    if told not in end.signs and told and told.details.get("signal") != -(end.status or 0):
        told = None  # of another rank
    is_of_a_worker = end.status == 1 and end.has("worker_conn_reset") is not None
    name = end.signal or ""
    if not name and told is not None and end.fault is None and not is_of_a_worker:
        name = _text.signal_name(-(_text.whole(told.details.get("signal")) or 0)) or ""
    if not name and _ends_with_abort(case):
        name = "SIGABRT"
    if name not in CRASHES or end.had_failed:
        return None  # many libraries crash while they unload: the exception before is the cause
    cause, how = CRASHES[name]
    if cause is Cause.ABORT and end.has(*_OF_THE_DEVICE) is not None:
        return None
    if cause is Cause.BUS_ERROR and end.has("disk_full") is not None:
        return None
    if (lacks := end.has("environment")) and "threads" in lacks.details:  # OpenBLAS and others
        return None
    stack = case.stacks_lines() or _stack(told)
    damage = _printed(case, "heap_damage")
    evidence = [f"{case.who} died of {name}"] if end.signal else []
    if (reported := end.has("launcher_exit")) and reported.details.get("exitcode") == end.status:
        evidence.append(f"it printed: {_text.one_line(reported.text, 240)}")
    if cause is Cause.BUS_ERROR and (full := _full_shm(case)):
        sentence = f"{case.opening} died of a bus error because /dev/shm was full."
        lines = advice.advise(case, "shm_full")
        return Finding(Cause.SHM_FULL, sentence, Sure.LIKELY, [*evidence, full], lines)
    if cause is Cause.ABORT and (what := _printed(case, "cxx_exception")):
        cause = Cause.CXX_EXCEPTION
        said = _text.text(what.details.get("what")) or what.text
        how = f"was ended by an uncaught C++ exception: {_text.one_line(said, 160)}"
        evidence.append(f"it printed: {_text.one_line(what.text)}")
    elif cause is Cause.ABORT and _TERMINATE in case.evidence.output:
        cause = Cause.CXX_EXCEPTION
        how = "was ended by the C++ runtime (terminate called), mostly by an exception"
        lines = [line for line in case.evidence.output.splitlines() if _TERMINATE in line]
        evidence.append(f"it printed: {_text.one_line(lines[-1])}")
    elif cause is Cause.ABORT and damage is not None:
        how += f": its memory was damaged ({_text.one_line(damage.text, 120)})"
    elif cause is Cause.ABORT and told is not None and told.details.get("signal") is None:
        how += f", and said: {_text.one_line(told.text, 160)}"
    elif cause is Cause.ABORT and (last := _FATAL.findall(case.evidence.output[-4000:])):
        how += f", and said: {_text.one_line(last[-1], 160)}"
    if stack:
        evidence.append("the stack of its thread, the innermost first: " + "; ".join(stack))
        if len(stack) >= _DEEP and len(set(stack)) <= 2:
            how += ", in a function that calls itself without end"
            evidence.append("the same line is on the stack again and again: endless recursion")
        if cause is not Cause.CXX_EXCEPTION:
            how += f", in {next(filter(is_own_file, stack), stack[0]).removeprefix('File ')}"
    else:
        evidence += tell_report(case) if cause is not Cause.CXX_EXCEPTION else []
        evidence.append("there is no stack of it")
    if sender := _sender(case, name):
        sentence = f"Another process ended {case.who} with {name}: {sender}."
        evidence.append(sender)
        sure = Sure.LIKELY if case.evidence.kind == "log" else Sure.CERTAIN
        return Finding(Cause.TERMINATED, sentence, sure, evidence, advice.go_on(case))
    if not stack and cause is not Cause.CXX_EXCEPTION and damage is None:
        evidence.append(f"a {name} sent by another process (kill -{name[3:]}) looks the same")
    if cause is Cause.ILLEGAL_INSTRUCTION:  # libraries warn before it
        warned = _OF_PROCESSOR.findall(case.evidence.output[-_WARNED_CHARACTERS:])
        evidence += [f"it had printed: {_text.one_line(each)}" for each in warned[-2:]]
    lines = [_CRASH_ADVICE[cause]] if cause in _CRASH_ADVICE else []
    evidence += (ills := of_kernel(case.evidence.output))
    if cause is Cause.BUS_ERROR and any("hardware memory" in ill for ill in ills):
        how += ", on memory of the machine that is broken"
        lines = ["Take another node, and tell its administrators: a memory module has failed."]
    if not stack:
        lines.append("For the Python stack of the next one: PYTHONFAULTHANDLER=1")
    lines += advice.advise(case, "crashed")
    who = case.opening
    if end.signal is None and end.status:  # its status is that of a process that lived on
        who = f"A process that {case.who} had started"
        evidence.append(f"{case.who} then left with status {end.status}")
    return Finding(cause, f"{who} {how}.", Sure.LIKELY, evidence, lines)


def of_kernel(output: str) -> list[str]:
    """What the kernel printed of the machine in the last lines."""
    ills = _OF_KERNEL.findall(output[-_WARNED_CHARACTERS:])[-2:]
    return [f"the kernel had printed: {_text.one_line(ill, 200)}" for ill in ills]


def tell_report(case: Case) -> list[str]:
    """The line of a log in which a shell, a launcher or a service reports the end."""
    last = case.end.has(*_REPORTS) if case.evidence.kind == "log" else None
    return [] if last is None else [f"the log reports: {_text.one_line(last.text, 240)}"]


def _printed(case: Case, kind: str) -> Sign | None:
    """What a process prints when it crashes; one of several ranks prints it without its number."""
    unlabelled = [sign for sign in case.evidence.signs if sign.rank is None and sign.kind == kind]
    return case.end.has(kind) or next(iter(unlabelled[-1:]), None)


def _ends_with_abort(case: Case) -> bool:
    """Whether a log without a status ends with what a program prints before it aborts itself."""
    end = case.end
    is_alone = case.evidence.kind == "log" and end.status is None and end.fault is None
    last = end.signs[-1].kind if end.signs and is_alone else ""
    return last in ("cxx_exception", "heap_damage")


def _sender(case: Case, name: str) -> str:
    sent = [each for each in led_signals(case) if each.get("name") == name]
    said = [sign for sign in case.end.signs if sign.kind == "sent_line"]  # of systemd
    if any(_text.signal_name(-sign.details.get("signal", 0)) == name for sign in said):
        return "; ".join(_text.one_line(sign.text, 120) for sign in said[-2:])
    return tell_sender(sent[-1]) if sent else ""


def _stack(told: Sign | None) -> list[str]:
    frames = told.details["stack"] if told is not None else []
    return [f"{file}:{line} in {function}" for file, line, function in frames[:8]]


def _full_shm(case: Case) -> str:
    """The evidence that /dev/shm had no room; empty if there is none."""
    use, sign = last_use(case.end.memory), case.end.has("shm_full")
    if sign is not None:
        return f"it printed: {_text.one_line(sign.text)}"
    if use.shm_free is not None and use.shm_free < _FULL_SHM_BYTES:
        used = "" if use.shm is None else f", {_text.size(use.shm)} were used"
        return f"/dev/shm had {_text.size(use.shm_free)} free in the last sample{used}"
    return ""


def judge_timed_out(case: Case) -> Finding | None:
    """`timeout`, which leaves with 124, or with 137 if it had to kill."""
    command = _text.record(case.evidence.led).get("command")
    words = list(map(str, command)) if isinstance(command, list) else []
    is_named = bool(words) and words[0].rpartition("/")[2] in ("timeout", "gtimeout")
    told = case.end.has("timed_out_line")
    is_so = case.end.status == 124 or (is_named and case.end.status == -9) or told is not None
    if not is_so or case.end.fault is not None or moved(case.end.counters).kills:
        return None
    evidence = [f"{case.who} left with status 124, as `timeout` does when the time is over"]
    if told is not None:
        evidence = [f"it printed: {_text.one_line(told.text)}"]
    elif case.end.status == -9:
        evidence = [f"{case.who} died of SIGKILL, as `timeout -k` ends what does not leave"]
    if is_named:
        evidence.append(f"the command is: {_text.one_line(' '.join(words), 160)}")
    sure = Sure.CERTAIN if is_named and case.end.status == 124 else Sure.LIKELY
    lines = ["Give it more time there, or leave `timeout` out.", *advice.go_on(case)]
    sentence = "Its time was over: `timeout` ended it."
    return Finding(Cause.TIME_LIMIT, sentence, sure, evidence, lines)


def judge_terminated(case: Case) -> Finding | None:
    """A signal that no handler answered, or one whose status a shell has passed on."""
    name, sure, fault = case.end.signal, Sure.CERTAIN, case.end.fault
    evidence = [f"{case.who} died of {name}, which nothing in it answered"]
    if case.evidence.kind == "log":
        sure = Sure.LIKELY  # a line of a log may be about anything
    if name is None and fault is None and case.end.status in _SHELL_STATUSES:
        name, sure = _SHELL_STATUSES[case.end.status], Sure.LIKELY
    if name is None and fault is not None and fault.kind == "interrupt":
        name, sure = "SIGINT", Sure.LIKELY
    if name is None or name in CRASHES or name == "SIGKILL":
        return None
    if fault is not None:
        evidence = [f"{case.who} raised {fault.sentence()}, which is SIGINT"]
        evidence += [f"its handler then raised {fault.then}"] if fault.then else []
    elif sure is Sure.LIKELY and case.end.signal is None:
        evidence = [f"{case.who} left with status {case.end.status}, which stands for {name}"]
    words = [sign for sign in case.end.signs if sign.kind == "terminated_line"]
    if fault is None and words:  # more than the shell's
        told = max(words, key=lambda each: len(each.text))
        evidence = [
            *evidence[: case.end.signal is None],
            f"it printed: {_text.one_line(told.text)}",
        ]
    elif fault is None:
        evidence += tell_report(case)
    hint = "; holdfast run -- … records the sender" if case.evidence.led is None else ""
    sender = _sender(case, name)
    evidence.append(sender or f"the sender is not recorded{hint}")
    evidence += [_MEANINGS[name]] if name in _MEANINGS else []
    lines = advice.go_on(case)
    if case.evidence.kind != "run" and name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"):
        lines.append("With holdfast.Run the script would have saved its state and left.")
    if name == "SIGXCPU":
        sentence = f"The kernel ended {case.who} at its limit of processor time (ulimit -t)."
        return Finding(Cause.TIME_LIMIT, sentence, sure, evidence, lines)
    sentence = f"A signal ended {case.who}: {sender or name}."
    if name == "SIGINT":
        by = sender or "Ctrl-C or kill -INT"
        return Finding(Cause.ASKED, f"{case.opening} was interrupted: {by}.", sure, evidence, lines)
    return Finding(Cause.TERMINATED, sentence, sure, evidence, lines)


def led_signals(case: Case) -> list[Record]:
    """The signals that `holdfast run` received, oldest first."""
    sent = _text.records(_text.record(case.evidence.led).get("signals"))
    return [each for each in sent if each.get("name")]


def tell_sender(signal: Record) -> str:
    name, pid = _text.text(signal.get("name")), _text.whole(signal.get("pid"))
    uid, by = _text.whole(signal.get("uid")), _text.text(signal.get("by"))
    if not pid:
        return f"{name} came from the terminal or the kernel"
    whose = "" if uid is None else " of root" if uid == 0 else f" of uid {uid}"
    return f"{name} came from {f'`{by}` ' if by else ''}(pid {pid}{whose})"
