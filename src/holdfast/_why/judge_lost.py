"""Ends that nobody has seen: the records simply stop."""

from __future__ import annotations

from holdfast._why import advice, words
from holdfast._why.case import Case, Finding
from holdfast._why.memory import read_use, tell_memory
from holdfast._why.verdict import Cause, Sure


def judge_lost(case: Case) -> Finding | None:
    """Trainer and keeper are both gone without a word: power, node, container, or one kill."""
    evidence, end = case.evidence, case.end
    if end.is_unreachable:
        return Finding(
            Cause.MACHINE_LOST,
            f"{case.opening} could not be reached any more: its machine or its network is gone.",
            Sure.LIKELY,
            ["its keeper was not heard of for a minute, on no connection and in no file"],
            advice.lost(case),
        )
    led = words.record(evidence.led)
    if led and not end.is_recorded and not evidence.exit and led.get("ended") is None:
        return Finding(
            Cause.KILLED,
            "`holdfast run` and its command ended together: a power cut, a container or a job step "
            "that was ended, or a kill of both.",
            Sure.BY_EXCLUSION,
            ["the record of `holdfast run` has a beginning and no end"],
            advice.lost(case),
        )
    if evidence.kind != "run" or evidence.exit or end.is_recorded or end.fault is not None:
        return None
    if not evidence.lease and not evidence.beat:
        return None
    told = []
    last = words.real(evidence.beat.get("time"))
    if last is not None:
        told.append(f"its last heartbeat is of {words.clock(last)}, and nothing was noted after it")
    sample = words.record(evidence.beat.get("memory"))
    told += tell_memory([sample], last) if sample else []
    said = advice.lost(case)
    if evidence.has_rebooted:
        told.append("the machine has been started again since")
        return Finding(
            Cause.MACHINE_LOST,
            "The machine went down with the run: a power cut, a crash or a restart.",
            Sure.CERTAIN,
            told,
            said,
        )
    if not evidence.beat:
        told.append("it had no keeper yet: it ended while it was being opened")
    else:
        told.append("trainer and keeper ended at the same time, so nobody was left to note it")
    use = read_use(sample)
    if evidence.beat and (use.is_near_limit or use.is_machine_full):
        cause = Cause.OOM_CGROUP if use.is_near_limit else Cause.OOM_MACHINE
        return Finding(
            cause,
            "Trainer and keeper were killed together, with nearly no memory left: most likely "
            "by the kernel's OOM killer (memory.oom.group, or a container's limit).",
            Sure.LIKELY,
            told,
            advice.host_memory(case, use, is_machine=cause is Cause.OOM_MACHINE),
        )
    if not evidence.beat:
        return Finding(
            Cause.UNKNOWN,
            f"{case.opening} ended while the run was being opened, and nothing says why.",
            Sure.UNKNOWN,
            told,
            advice.killed(case, knows_counters=False),
        )
    if evidence.is_here:
        told.append("the machine has not been started again since: it was not a power cut")
        sentence = (
            "Trainer and keeper were killed together: a container or a job step that was ended, "
            "or a kill of both."
        )
        return Finding(Cause.KILLED, sentence, Sure.BY_EXCLUSION, told, said)
    sentence = (
        "Everything of it ended at once: a power cut, a lost node, or a container or job step that "
        "was killed."
    )
    return Finding(Cause.MACHINE_LOST, sentence, Sure.BY_EXCLUSION, told, said)
