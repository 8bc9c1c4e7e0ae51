"""What SLURM itself says of an end: the state of the job, and what it wrote into the log."""

from __future__ import annotations

import re

from holdfast import _text
from holdfast._diagnose import advice
from holdfast._diagnose.deaths.memory import oom_of_worker
from holdfast._diagnose.evidence.case import Case, Finding
from holdfast._diagnose.evidence.memory import last_use, tell_memory
from holdfast._diagnose.verdict import Cause, Sure

_LIVE = ("RUNNING", "PENDING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "RESIZING")
_STATES = (
    ("TIMEOUT", Cause.TIME_LIMIT, "SLURM ended the job at its time limit"),
    ("DEADLINE", Cause.TIME_LIMIT, "SLURM ended the job at its deadline"),
    ("PREEMPTED", Cause.PREEMPTED, "SLURM preempted the job"),
    (
        "OUT_OF_MEMORY",
        Cause.OOM_CGROUP,
        "The job used more memory than SLURM gave it, and was killed",
    ),
    ("NODE_FAIL", Cause.MACHINE_LOST, "SLURM lost a node of the job"),
    ("BOOT_FAIL", Cause.MACHINE_LOST, "A node of the job could not be started"),
    ("LAUNCH_FAILED", Cause.ENVIRONMENT, "SLURM could not start the job"),
    ("CANCELLED", Cause.ASKED, "The job was cancelled"),
    ("COMPLETED", Cause.FINISHED, "The job ended by itself, with status 0"),
)
_SIGNS = (
    ("slurm_time_limit", Cause.TIME_LIMIT, "SLURM ended the job at its time limit"),
    ("slurm_preempted", Cause.PREEMPTED, "SLURM preempted the job"),
    ("slurm_node_fail", Cause.MACHINE_LOST, "SLURM lost a node of the job"),
    ("slurm_oom", Cause.OOM_CGROUP, "A process of the job was killed by SLURM's memory limit"),
    ("slurm_cancelled", Cause.ASKED, "The job was cancelled"),
    ("slurm_refused", Cause.ENVIRONMENT, "SLURM could not start it"),
)


def judge_slurm(case: Case) -> Finding | None:
    """By the job's state, else by the lines in its log."""
    return _by_state(case) or _by_signs(case)


def _by_state(case: Case) -> Finding | None:
    job = _text.record(case.evidence.job)
    state = _text.text(job.get("state")).upper()
    evidence = [
        f"SLURM says: {name} {_text.one_line(str(job[key]), 120)}"
        for key, name in (
            ("state", "state"),
            ("exit_code", "exit code"),
            ("derived", "derived exit code"),
            ("reason", "reason"),
            ("node", "on"),
            ("end", "end"),
        )
        if job.get(key) not in (None, "", "None")
    ]
    if any(word in state for word in _LIVE) and "CANCELLED" not in state:
        return Finding(
            Cause.RUNNING, f"The job is not over: SLURM calls it {state}.", Sure.CERTAIN, evidence
        )
    for word, cause, sentence in _STATES:
        if word not in state:
            continue
        sure = Sure.LIKELY if cause is Cause.FINISHED else Sure.CERTAIN
        if cause is Cause.FINISHED and case.end.status not in (None, 0):
            continue
        if cause in (Cause.FINISHED, Cause.ASKED) and _says_more(case):
            continue  # the script hid its status, or scancel came after it
        return _finding(case, cause, sentence, sure, evidence)
    return None


def _says_more(case: Case) -> bool:
    """Whether the job's own log names a cause."""
    ends = ("slurm_time_limit", "slurm_preempted")
    return case.end.fault is not None or any(s.kind in ends for s in case.evidence.signs)


def _by_signs(case: Case) -> Finding | None:
    if case.end.status == 0 or case.evidence.exit.get("status") == 0:
        return None  # it was over before that
    for kind, cause, sentence in _SIGNS:
        sign = next((s for s in reversed(case.evidence.signs) if s.kind == kind), None)
        if sign is None:
            continue
        said = _text.one_line(sign.text)
        lost = next((s for s in case.evidence.signs if "Node failure on " in s.text), None)
        if cause is Cause.MACHINE_LOST and lost is not None:
            said, sentence = _text.one_line(lost.text), f"SLURM lost {lost.details['node']}"
        if cause is Cause.OOM_CGROUP and case.end.fault is not None:
            return oom_of_worker(case, [said, f"it raised {case.end.fault.sentence(160)}"])
        if cause is Cause.ASKED and case.end.fault is not None:
            continue  # it had failed, and scancel came after it
        if not re.search("(?i)slurm|srun|sbatch|salloc", said):
            sentence = re.sub("SLURM(?='|\\b)", "the scheduler", sentence)
            sentence = f"{sentence[:1].upper()}{sentence[1:]}"
        is_of_slurm = re.search("(?i)slurm|srun|sbatch|PBS|TERM_", said) is not None
        sure = Sure.CERTAIN if is_of_slurm else Sure.LIKELY
        return _finding(case, cause, sentence, sure, [said])
    return None


def _finding(case: Case, cause: Cause, sentence: str, sure: Sure, evidence: list[str]) -> Finding:
    said: list[str] = []
    if cause is Cause.OOM_CGROUP:
        evidence += tell_memory(case.end.memory, case.end.time)
        said = [
            "Ask SLURM for more: sbatch --mem=… (what it used: sacct -j JOBID "
            "--format=JobID,MaxRSS,ReqMem,State)",
            *advice.less_memory(case, last_use(case.end.memory)),
            *advice.go_on(case),
        ]
    elif cause is Cause.TIME_LIMIT:
        said = [
            "Ask for more time (sbatch --time=…), or let it go on by itself: holdfast submit, or "
            "--requeue with --signal=USR1@120; holdfast lint SCRIPT checks that.",
            *advice.go_on(case),
        ]
    elif cause is Cause.PREEMPTED:
        said = ["With sbatch --requeue it comes back by itself.", *advice.go_on(case)]
    elif cause is Cause.MACHINE_LOST:
        said = advice.lost(case)
    elif cause is Cause.ENVIRONMENT:
        said = ["Look at the node's slurmd log, or ask its administrators: scontrol show node NODE"]
    return Finding(cause, f"{sentence}.", sure, evidence, said)
