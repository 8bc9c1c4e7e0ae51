"""The evidence of a job: from SLURM's controller and accounting, and from its output."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from pathlib import Path

from holdfast import _text
from holdfast._diagnose.evidence.evidence import LIVE_STATES, Evidence, Record
from holdfast._diagnose.texts.log_file import read_log
from holdfast._environment import variables
from holdfast._environment.slurm.controller import can_ask, describe_job

JOB = re.compile(r"\d+(?:_\d+|_\[[\d,%:-]+\]|\+\d+)?(?:\.\w+)?")
_ANSWER_SECONDS = 15.0
_FIELD = re.compile(r"(?:^|\s)([A-Z][A-Za-z:/_]*)=")
_ACCOUNTED = (
    *("JobID", "JobName", "State", "ExitCode", "DerivedExitCode", "Reason", "NodeList"),
    *("MaxRSS", "ReqMem", "End", "Comment"),
)
_ENDED = ("CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
          "DEADLINE", "BOOT_FAIL", "LAUNCH_FAILED")  # fmt: skip


def is_job(word: str) -> bool:
    """Whether a word could name a job: 12, 12_3 of an array, 12+1 of a heterogeneous one."""
    return JOB.fullmatch(word) is not None


def gather_slurm(job: str) -> Evidence:
    job = job.partition(".")[0]  # a step's end is told by its job
    evidence = Evidence(subject=f"job {job}", kind="slurm")
    if not is_job(job):
        evidence.notes.append(
            f"{job} is not a job of SLURM: jobs are numbers, as 12, 12_3 or 12+1."
        )
        return evidence
    controller = _of_controller(job)
    accounting = _of_accounting(job)
    if not controller and not accounting:
        evidence.notes.append(_unknown_job(job))
        return evidence
    evidence.job = facts = _merge(controller, accounting)
    state = str(facts.get("state", ""))
    evidence.is_live = any(word in state for word in LIVE_STATES) and not any(
        word in state for word in _ENDED
    )
    _add_outputs(evidence, controller)
    return evidence


def parse_job(line: str) -> Record:
    """All fields of what `scontrol show job -o` prints; values may have spaces in them."""
    found: Record = {}
    # The name comes second and can be anything, also something that looks like a field.
    number, _, rest = line.partition(" UserId=")
    for part in (number.partition(" ")[0], f"UserId={rest}"):
        marks = list(_FIELD.finditer(part))
        ends = [*(mark.start() for mark in marks[1:]), len(part)]
        for mark, end in zip(marks, ends, strict=False):
            found.setdefault(mark[1], part[mark.end() : end].strip())
    return found


def _of_controller(job: str) -> Record:
    """The job as the controller has it: the controller forgets it minutes after its end."""
    lines = describe_job(job) if can_ask() else []
    records = [parse_job(line) for line in lines]
    records = [record for record in records if record.get("JobState")]
    # Of an array: the task that tells most.
    return min(records, key=_rank_of_state, default={})


def _rank_of_state(record: Record) -> int:
    state = str(record.get("JobState"))
    order = ("OUT_OF_MEMORY", "FAILED", "NODE_FAIL", "TIMEOUT", "PREEMPTED", "CANCELLED", "RUNNING")
    return next((n for n, word in enumerate(order) if word in state), len(order))


def _of_accounting(job: str) -> list[dict[str, str]]:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            ["sacct", "-j", job, "-P", "-n", "-D", f"--format={','.join(_ACCOUNTED)}"],
            env={**variables.child_environment(), "SLURM_TIME_FORMAT": "%s"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_ANSWER_SECONDS,
        )
        if said.returncode == 0:
            return parse_accounting(said.stdout)
    return []


def parse_accounting(text: str) -> list[dict[str, str]]:
    """The lines of `sacct -P`; the name may hold the separator, so count from both ends."""
    found = []
    for line in text.splitlines():
        cells = line.split("|")
        behind = len(_ACCOUNTED) - 2
        if len(cells) < len(_ACCOUNTED):
            continue
        # A comment may hold a separator, too, but few jobs have one.
        name = "|".join(cells[1 : len(cells) - behind])
        found.append(dict(zip(_ACCOUNTED, [cells[0], name, *cells[-behind:]], strict=True)))
    return found


def _merge(controller: Record, accounting: list[dict[str, str]]) -> Record:
    wholes = [row for row in accounting if "." not in row["JobID"]]
    whole: dict[str, str] = wholes[-1] if wholes else {}  # the last attempt of a requeued job
    end = _moment(controller.get("EndTime") or whole.get("End"))
    facts: Record = {
        "state": controller.get("JobState") or whole.get("State"),
        "exit_code": controller.get("ExitCode") or whole.get("ExitCode"),
        "derived": controller.get("DerivedExitCode") or whole.get("DerivedExitCode"),
        "reason": _unless_none(controller.get("Reason") or whole.get("Reason")),
        "node": _unless_none(controller.get("NodeList") or whole.get("NodeList")),
        "end": _text.clock(end) if end is not None else None,
    }
    return {key: value for key, value in facts.items() if value not in (None, "", [])}


def _add_outputs(evidence: Evidence, controller: Record) -> None:
    named = [str(controller[key]) for key in ("StdErr", "StdOut") if controller.get(key)]
    for name in dict.fromkeys(named):
        path = Path(name)
        if not path.is_absolute() or name == "/dev/null":
            continue
        try:
            signs, tail = read_log(path)
        except OSError as error:
            evidence.notes.append(f"Its output {path} cannot be read: {error.strerror or error}.")
            continue
        evidence.signs += signs
        evidence.output = tail if not evidence.output.strip() else evidence.output
        evidence.files.append(path)
    if not named:
        evidence.notes.append(
            "Where its output is, only the controller knows, and it has forgotten the job: "
            "holdfast why LOGFILE says more."
        )


def _unknown_job(job: str) -> str:
    if not can_ask():
        return "There is no scontrol here: ask on a node of the cluster."
    return (
        f"SLURM does not know job {job} (the controller forgets a job minutes after its end, "
        "and accounting is not kept here or does not know it): holdfast why LOGFILE"
    )


def _moment(value: object) -> float | None:
    text = str(value or "")
    if text.isdigit():
        return float(text) or None
    with contextlib.suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    return None


def _unless_none(value: object) -> str | None:
    text = str(value or "")
    return text if text not in ("", "None", "(null)", "N/A", "None assigned") else None
