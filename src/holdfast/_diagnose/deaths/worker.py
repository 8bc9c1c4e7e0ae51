"""A data-loader worker that died, in whichever of its four disguises."""

from __future__ import annotations

import re

from holdfast import _text
from holdfast._diagnose import advice
from holdfast._diagnose.deaths.memory import oom_of_worker, worker_name
from holdfast._diagnose.evidence.case import Case, Finding, Trouble
from holdfast._diagnose.evidence.ends import End
from holdfast._diagnose.evidence.evidence import Record
from holdfast._diagnose.evidence.memory import last_use, moved, tell_memory
from holdfast._diagnose.verdict import Cause, Sure

_KILLED_BY = re.compile(r"killed by signal: ([A-Za-z ]+?)[.\n]|killed by signal: (.+)")
_EXIT_CODE = re.compile(r"exited unexpectedly with exit code (\d{1,3})\b")
_OF_A_LOADER = re.compile(r"DataLoader|torch/utils/data|torch/multiprocessing|shared memory")
_PIDS = re.compile(r"worker \(pid(?:\(s\))? ([\d, ]+)\)")
_SIGNALS = {
    "killed": -9,
    "segmentation fault": -11,
    "aborted": -6,
    "bus error": -7,
    "terminated": -15,
    "illegal instruction": -4,
}


def judge_worker(case: Case, trouble: Trouble) -> Finding:
    """What killed the worker is the cause, if that can be told."""
    dead = _dead_worker(case.end, trouble)
    status = _status(dead)
    if status is None:
        status = _told_status(trouble.message)
    sure = Sure.CERTAIN if status is not None else Sure.LIKELY
    stack = case.end.has("faulthandler")  # the trainer itself lived on
    if status is None and stack is not None:
        status = -(_text.whole(stack.details.get("signal")) or 0) or None
    evidence = trouble.evidence(case)
    name = worker_name(dead)
    if not _OF_A_LOADER.search(trouble.message + str(trouble.record.get("frames"))):
        name = name.replace("a data-loader worker", "a worker process")
    if status is not None:
        how = f"died of {_text.signal_name(status)}" if status < 0 else f"left with {status}"
        evidence.append(f"{name} {how}")
    use, counted = last_use(case.end.memory), moved(case.end.counters)
    if status in (-9, None):
        kills = counted.kills or (counted.kills_in_life if not counted.kills else 0)
        slurm = next((s for s in case.evidence.signs if s.kind == "slurm_oom"), None)
        if kills:
            evidence.append(f"its cgroup counted {_text.count(kills, 'OOM kill')} in that time")
            return oom_of_worker(case, evidence, Sure.LIKELY, dead)
        if slurm is not None:
            return oom_of_worker(case, [*evidence, _text.one_line(slurm.text)], Sure.LIKELY, dead)
        full = use.is_near_limit or use.is_machine_full
        if full and not counted.is_known:
            evidence.append("nearly all memory was in use")
            return oom_of_worker(case, evidence, Sure.LIKELY, dead)
    if status == -7:
        return _bus_error(case, evidence, name)
    sentence = f"{name[:1].upper()}{name[1:]} {_how(status)}, and the training with it."
    if case.end.rank is not None:
        sentence = (
            f"{name[:1].upper()}{name[1:]} of {case.who} {_how(status)}, and the training with it."
        )
    if status == -9 and counted.is_known:
        evidence.append("not the OOM killer: its cgroup counted no OOM kill")
    evidence += tell_memory(case.end.memory, case.end.time)
    return Finding(Cause.WORKER_DIED, sentence, sure, evidence, advice.worker_died(case))


def _how(status: int | None) -> str:
    if status is None:
        return "died"
    if status == -9:
        return "was killed with SIGKILL"
    name = _text.signal_name(status)
    return f"left with status {status}" if name is None else f"died of {name}"


def _bus_error(case: Case, evidence: list[str], name: str) -> Finding:
    use = last_use(case.end.memory)
    free = _text.whole(_text.record(_error(case).get("shm")).get("free"))
    left = use.shm_free if free is None else min(free, use.shm_free or free)
    if left is not None:
        evidence.append(f"/dev/shm had {_text.size(left)} free")
    return Finding(
        Cause.SHM_FULL,
        f"{name[:1].upper()}{name[1:]} died of a bus error, as it does when /dev/shm is full.",
        Sure.LIKELY,
        evidence,
        advice.shm_full(case),
    )


def _error(case: Case) -> Record:
    return case.end.fault.record if case.end.fault is not None else {}


def _dead_worker(end: End, trouble: Trouble) -> Record:
    """The worker that died first, by what the system or the trainer saw of it."""
    told = _PIDS.search(trouble.message)
    pids = {int(pid) for pid in re.findall(r"\d{1,9}", told[1])} if told else set()
    known = [*end.children, *_text.records(trouble.record.get("workers"))]
    known = [p for p in known if _text.whole(p.get("pid")) != end.pid and not p.get("alive")]
    named = [p for p in known if _text.whole(p.get("pid")) in pids and _status(p) is not None]
    abnormal = [p for p in known if _status(p) not in (None, 0)]
    # Those that were ended because of it got a SIGTERM.
    first = [p for p in abnormal if _status(p) != -15] or abnormal
    if named or first:
        return (named or first)[0]
    return {"pid": min(pids)} if pids else {}


def _status(process: Record) -> int | None:
    for key in ("status", "exitcode"):
        if (found := _text.whole(process.get(key))) is not None:
            return found
    return None


def _told_status(message: str) -> int | None:
    match = _KILLED_BY.search(message)
    if match is None:
        left = _EXIT_CODE.search(message)
        return int(left[1]) if left is not None else None
    said = (match[1] or match[2] or "").strip().lower()
    return next((number for word, number in _SIGNALS.items() if said.startswith(word)), None)
