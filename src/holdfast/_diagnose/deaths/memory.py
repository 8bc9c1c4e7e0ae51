"""SIGKILL: by the OOM killer, for a cgroup or for the machine, or by somebody.

The kernel says nothing to the process. What tells are its counters, read just before and just
after: that of the cgroup counts kills of its own processes, so nobody else's can be mistaken
for ours.
"""

from __future__ import annotations

import re

from holdfast import _text
from holdfast._diagnose import advice
from holdfast._diagnose.evidence.case import Case, Finding, Trouble
from holdfast._diagnose.evidence.ends import End
from holdfast._diagnose.evidence.evidence import Record
from holdfast._diagnose.evidence.memory import Moved, Use, last_use, moved, tell_graphs, tell_memory
from holdfast._diagnose.verdict import Cause, Sure

_KILL = -9
_FAR = 0.5  # of the limit: so little does not call the OOM killer
_ROOM = 0.2  # of the machine's memory: with so much left it is not out of it
_FRESH_SECONDS = 2.0
_LOOKED_SECONDS = 1.5  # between two looks


def judge_kill(case: Case) -> Finding | None:
    """A process that died of SIGKILL."""
    end = case.end
    if end.status != _KILL or end.was_sent_away:
        return None
    use, counted = last_use(end.memory), moved(end.counters)
    found = (
        _by_limit(case, use, counted)
        or _by_counter(case, use, counted)
        or _by_kernel(case, use)
        or _by_slurm(case, use)
        or _by_use(case, use, counted)
    )
    if found is None and end.had_failed:
        return None  # what it raised comes first, whoever has then ended it
    return found or _killed(case, use, counted)


def _by_limit(case: Case, use: Use, counted: Moved) -> Finding | None:
    """The kernel kills at the hard limit of processor time."""
    if counted.kills or use.cpu_limit is None or use.cpu_seconds is None:
        return None
    since = (case.end.time or 0.0) - (use.time or 0.0) if use.time and case.end.time else 0.0
    if use.cpu_seconds + 2 * max(since, 0.0) + _LOOKED_SECONDS < use.cpu_limit:
        return None
    return Finding(
        Cause.TIME_LIMIT,
        f"The kernel ended {case.who} at its limit of processor time: "
        f"{_text.duration(use.cpu_limit)} (ulimit -t).",
        Sure.LIKELY,
        [
            f"{case.who} died of SIGKILL",
            f"it had used {_text.duration(use.cpu_seconds)} of {_text.duration(use.cpu_limit)} "
            "when it was last looked at",
        ],
        [
            "Raise it where it is set (ulimit -Ht shows it): ulimit -t unlimited",
            *advice.go_on(case),
        ],
    )


def _by_counter(case: Case, use: Use, counted: Moved) -> Finding | None:
    """The cgroup's own counter moved: that is the kernel's word."""
    if not counted.kills:
        return None
    end, limit = case.end, use.limit or counted.limit
    before, after = counted.values
    evidence = [
        f"{case.who} died of SIGKILL",
        f"the OOM kills of its cgroup went from {before} to {after} at that moment",
    ]
    victim = earlier_victim(end)
    if victim is not None and counted.kills == 1:
        return oom_of_worker(case, evidence, victim=victim)
    has_hit = counted.has_hit_limit
    if has_hit and not counted.hits and use.is_machine_full:
        has_hit = False  # page cache fills a cgroup to its limit as well, and harms nobody
    is_parent = has_hit is False and _is_of_a_parent(use)
    if has_hit is False and not is_parent:
        return _machine(case, use, evidence, Sure.CERTAIN)
    if counted.hits:
        evidence.append(f"the limit was hit {_text.count(counted.hits, 'time')} then")
    if counted.peak and limit:
        evidence.append(f"the most that the cgroup ever had was {_of(counted.peak, limit)}")
    sure = Sure.CERTAIN
    if is_parent:
        sure = Sure.LIKELY
        evidence.append("the limit that was hit must be that of a cgroup further up")
    elif _is_far_below(case, use, counted, limit):
        sure = Sure.LIKELY
        evidence.append(
            "but it had used far less than the limit when it was last looked at: another process "
            "of the cgroup may have been the OOM killer's, and somebody has killed this one"
        )
    return _cgroup(case, use, evidence, sure, limit, counted.peak)


def _of(used: int, limit: int) -> str:
    return _text.size_of(min(used, limit), limit)


def _is_of_a_parent(use: Use) -> bool:
    """Whether a limit further up was hit: its hits are counted up there, the kill down here.

    In a container that one may not even be seen: then a machine with room tells it.
    """
    if use.is_machine_full:
        return False
    has_room = use.available is not None and use.total and use.available > _ROOM * use.total
    return bool(use.is_near_limit or has_room)


def _by_kernel(case: Case, use: Use) -> Finding | None:
    """The kernel's log, for those who may read it."""
    sign = next((s for s in case.evidence.signs if s.kind == "kernel_oom"), None)
    if sign is None or case.end.pid not in (None, _text.whole(sign.details.get("pid"))):
        return None
    evidence = [f"the kernel's log has: {_text.one_line(sign.text)}"]
    if sign.details.get("of_cgroup"):
        return _cgroup(case, use, evidence, Sure.CERTAIN, use.limit)
    return _machine(case, use, evidence, Sure.CERTAIN)


def _by_slurm(case: Case, use: Use) -> Finding | None:
    """SLURM's own word, where no counter could be read."""
    sign = case.end.has("slurm_oom") or next(
        (s for s in case.evidence.signs if s.kind == "slurm_oom"), None
    )
    state = _text.text(_text.record(case.evidence.job).get("state"))
    if sign is None and "OUT_OF_MEMORY" not in state:
        return None
    said = _text.one_line(sign.text) if sign else f"SLURM calls the job {state}"
    return _cgroup(case, use, [f"{case.who} died of SIGKILL", said], Sure.CERTAIN, use.limit)


def _by_use(case: Case, use: Use, counted: Moved) -> Finding | None:
    """No counter of the cgroup: how much memory was left is all there is to go by."""
    if counted.is_known:
        return None
    evidence = [f"{case.who} died of SIGKILL"]
    if counted.machine_kills:
        evidence.append(
            f"the machine counted {_text.count(counted.machine_kills, 'OOM kill')} at that moment"
        )
    else:
        evidence.append("no counter of OOM kills could be read, so this goes by the memory in use")
    if use.is_near_limit:
        return _cgroup(case, use, evidence, Sure.LIKELY, use.limit)
    if use.is_machine_full or counted.machine_kills:
        return _machine(case, use, evidence, Sure.LIKELY)
    return None


def _cgroup(
    case: Case,
    use: Use,
    evidence: list[str],
    sure: Sure,
    limit: int | None,
    peak: int | None = None,
) -> Finding:
    used = ""
    if use.used and limit:
        # Between the last look and the end it may have grown by far.
        used = f": its cgroup had used {_of(max(use.used, peak or 0), limit)}"
    elif limit:
        used = f": its cgroup may use {_text.size(limit)}"
    sentence = f"The kernel's OOM killer ended {case.who}{used}."
    if sure is not Sure.CERTAIN:
        sentence = f"The kernel's OOM killer most likely ended {case.who}{used}."
    evidence += _maxrss(case.evidence.led) + _story(case)
    return Finding(Cause.OOM_CGROUP, sentence, sure, evidence, advice.host_memory(case, use))


def _machine(case: Case, use: Use, evidence: list[str], sure: Sure) -> Finding:
    if sure is Sure.CERTAIN and case.end.counters:
        evidence.append("its own limit was not hit, so the machine as a whole was out of memory")
    left = ""
    if use.available is not None and use.total:
        left = f" ({_text.size_of(use.available, use.total)} were available)"
    likely = "" if sure is Sure.CERTAIN else "most likely "
    sentence = (
        f"The machine ran out of memory{left}, and the kernel's OOM killer {likely}ended "
        f"{case.who}."
    )
    evidence += _maxrss(case.evidence.led) + _story(case)
    said = advice.host_memory(case, use, is_machine=True)
    return Finding(Cause.OOM_MACHINE, sentence, sure, evidence, said)


def _story(case: Case) -> list[str]:
    """What memory did, and what was seen to fill it when the trainer was warned."""
    return [*tell_memory(case.end.memory, case.end.time), *tell_graphs(case.end.graphs)]


def oom_of_worker(
    case: Case,
    evidence: list[str],
    sure: Sure = Sure.LIKELY,
    victim: Record | None = None,
) -> Finding:
    """The OOM killer took a worker, and the trainer ended because of that."""
    if victim is None:
        victim = next((p for p in case.end.children if _status(p) == _KILL), {})
    name = worker_name(victim)
    of = f" (of {case.who})" if case.end.rank is not None else ""
    sentence = f"The kernel's OOM killer ended {name}{of}, and the training with it."
    evidence = [*evidence, *_story(case)]
    return Finding(Cause.OOM_WORKER, sentence, sure, evidence, advice.worker_memory(case))


def worker_name(process: Record) -> str:
    """A child of the trainer, as it begins no sentence."""
    pid, comm = _text.whole(process.get("pid")), _text.text(process.get("comm"))
    what = "a data-loader worker" if not comm or "pt_data" in comm else f"its child `{comm}`"
    if "comm" in process and not comm:
        what = "a process that it had started"
    return f"{what} (pid {pid})" if pid else what


def judge_lost_child(case: Case) -> Finding | None:
    """A child was the OOM killer's, and its parent failed without it, whatever it then said."""
    end = case.end
    counted = moved(end.counters)
    kills = counted.kills or counted.kills_in_life
    if end.status == _KILL or not kills or (end.fault is None and not end.status):
        return None
    if end.fault is not None and end.fault.kind not in ("plain", "exit", "worker"):
        return None
    victims = [p for p in end.children if _status(p) == _KILL and p.get("pid") != end.pid]
    if not victims and not counted.kills:
        return None  # it was long before, and of nobody that is known
    evidence = [f"{worker_name(each)} died of SIGKILL" for each in victims[:1]]
    evidence.append(f"its cgroup counted {_text.count(kills, 'OOM kill')} in that time")
    if counted.peak and counted.limit:
        evidence.append(f"the most that the cgroup ever had was {_of(counted.peak, counted.limit)}")
    if end.fault is not None:
        evidence.append(f"{case.who} then raised {end.fault.sentence(240)}")
    victim = victims[0] if victims else {"comm": ""}
    return oom_of_worker(case, evidence, Sure.LIKELY, victim)


def earlier_victim(end: End) -> Record | None:
    """A child that was killed well before its parent: then the kernel's one kill was its."""
    for process in end.children:
        ended = _text.real(process.get("ended"))
        if _text.whole(process.get("pid")) == end.pid or _status(process) != _KILL:
            continue
        if ended is not None and end.time is not None and 0.5 < end.time - ended < 60:
            return process
    return None


def _status(process: Record) -> int | None:
    for key in ("status", "exitcode"):
        if (found := _text.whole(process.get(key))) is not None:
            return found
    return None


def _is_far_below(case: Case, use: Use, counted: Moved, limit: int | None) -> bool:
    if not limit or use.is_near_limit:
        return False
    if counted.peak is not None:
        return counted.peak < _FAR * limit
    if most := _text.whole(_text.record(case.evidence.led).get("maxrss")):
        return most < _FAR * limit
    if use.time is None or case.end.time is None:
        return False
    used = max(use.tree or 0, use.used or 0)
    is_fresh = abs(case.end.time - use.time) < _FRESH_SECONDS
    return bool(used) and is_fresh and used < _FAR * limit


def _maxrss(led: Record | None) -> list[str]:
    most = _text.whole(_text.record(led).get("maxrss"))
    return [f"the most that a process of it ever had was {_text.size(most)}"] if most else []


def _killed(case: Case, use: Use, counted: Moved) -> Finding:
    """Nothing speaks for the OOM killer: by exclusion, somebody's `kill -9`."""
    evidence = [f"{case.who} died of SIGKILL, which no process can handle"]
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
    if counted.kills_in_life:
        evidence.append(
            "earlier in this attempt its cgroup had "
            f"{_text.count(counted.kills_in_life, 'OOM kill')}"
        )
    if use.used and use.limit:
        evidence.append(f"memory was below its limit: {_text.size_of(use.used, use.limit)}")
    elif use.available is not None and use.total:
        evidence.append(f"the machine had {_text.size_of(use.available, use.total)} available")
    evidence.append("no stop was requested, and its keeper did not end it")
    if counted.is_known:
        sentence = f"Another process killed {case.who} with SIGKILL (kill -9)."
        sure = Sure.BY_EXCLUSION
    else:
        sentence = (
            f"{case.opening} was killed with SIGKILL: by another process (kill -9) or by the "
            "OOM killer. Nothing that was recorded tells which."
        )
        sure = Sure.BY_EXCLUSION if counted.machine_kills == 0 else Sure.UNKNOWN
        if sure is Sure.UNKNOWN:
            evidence[-1:] = ["no counter of OOM kills could be read"]
        else:
            sentence = f"Another process killed {case.who} with SIGKILL (kill -9)."
    said = advice.killed(case, knows_counters=counted.is_known)
    return Finding(Cause.KILLED, sentence, sure, evidence, said)


# -- No room: in /dev/shm, or on a disk, which `torch.save` never says -----------------------------


_FULL_BYTES = 64 << 20
_FULL_SHARE = 0.01
_PATH = re.compile(r"'([^'\n]{1,400})'")


def judge_shm(case: Case, trouble: Trouble) -> Finding:
    """/dev/shm has no room for another batch."""
    use = last_use(case.end.memory)
    noted = _text.record(trouble.record.get("shm"))
    free, total = _text.whole(noted.get("free")), _text.whole(noted.get("total"))
    evidence = trouble.evidence(case)
    size = ""
    if total:
        size = f" (it has {_text.size(total)})"
    if free is not None and total:
        evidence.append(f"/dev/shm had {_text.size_of(free, total)} free then")
    if use.shm_free is not None:
        evidence.append(
            f"at the last look it had {_text.size(use.shm_free)} free"
            + (f", {_text.size(use.shm)} were in use" if use.shm is not None else "")
        )
    evidence.append("the room is free again once the process is gone, so df shows nothing now")
    return Finding(
        Cause.SHM_FULL,
        f"/dev/shm was full{size}, and {case.who} could not hand over a batch.",
        Sure.LIKELY,
        evidence,
        advice.shm_full(case),
    )


def judge_disk(case: Case, trouble: Trouble) -> Finding:
    """A disk, a quota or the inodes are used up."""
    said = trouble.message
    disks = _text.records(trouble.record.get("disks"))
    full = [disk for disk in disks if _is_full(disk)]
    evidence = trouble.evidence(case)
    for disk in full or disks[:3]:
        evidence.append(_tell(disk))
    told = re.search(r"No space left|quota exceeded|Errno (?:28|122)\b", said, re.IGNORECASE)
    is_quota = "quota" in said.lower() or "Errno 122" in said
    named = _PATH.search(said)
    path = _text.text(full[0].get("path")) if full else (named[1] if named else "")
    where = f" ({path})" if path else ""
    what = "A quota" if is_quota else "A disk"
    if told:
        sentence, sure = f"{what} was full{where}, and {case.who} could not write.", Sure.CERTAIN
        if trouble.fault is None and case.end.status is None:
            sure = Sure.LIKELY  # a line in a log may be about anything
    elif full:
        sentence = f"A disk was full{where}: what {case.who} wrote was cut short."
        sure = Sure.LIKELY
    else:
        sentence = (
            f"A file that {case.who} wrote was cut short, as on a full disk or beyond a quota."
        )
        sure = Sure.LIKELY
        evidence.append(
            "torch.save never says that a disk is full; that room was short could not be seen"
            if not disks
            else "there is room on the disks now: it may have been freed, or be another one"
        )
    return Finding(Cause.DISK_FULL, sentence, sure, evidence, advice.disk_full(case, path))


def _is_full(disk: Record) -> bool:
    free, total = _text.whole(disk.get("free")), _text.whole(disk.get("total"))
    if _text.whole(disk.get("free_inodes")) == 0:
        return bool(total)
    if free is None:
        return False
    return free < min(_FULL_BYTES, _FULL_SHARE * total if total else _FULL_BYTES) or free == 0


def _tell(disk: Record) -> str:
    free, total = _text.whole(disk.get("free")), _text.whole(disk.get("total"))
    path = _text.one_line(str(disk.get("path")), 120)
    room = f"{_text.size_of(free, total)} free" if free is not None and total else "room unknown"
    inodes = _text.whole(disk.get("free_inodes"))
    return f"{path} had {room}" + (", and no inode left" if inodes == 0 and total else "")
