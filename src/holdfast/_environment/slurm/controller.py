"""Questions to SLURM's controller through `scontrol`, and the request to requeue a job.

scontrol answers within milliseconds, or not at all while the controller is down. So every question
has a time limit.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from holdfast._environment import variables
from holdfast._environment.slurm.options import batch_options, parse_signal

ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class JobFacts:
    number: str
    state: str
    reason: str
    restarts: int
    end: float | None  # wall-clock time; None: no limit
    is_preempted: bool
    is_batch: bool  # only a batch job can be requeued
    may_requeue: bool


def can_ask() -> bool:
    """True if there is a scontrol: containers often have none."""
    return shutil.which("scontrol") is not None


def show_job(job: str, seconds: float = ANSWER_SECONDS) -> JobFacts | None:
    """The facts; None without an answer."""
    return parse_job(_answer("show", "job", "-o", job, seconds=seconds) or "")


def describe_job(job: str) -> list[str]:
    """One line of facts, or one for each task of an array; empty if the job is unknown."""
    return (_answer("show", "job", "-o", job) or "").splitlines()


def field_of(line: str, name: str) -> str:
    """One word of the line that `scontrol show job -o` prints; empty if there is none.

    The job's name comes before the other fields, and may look like any of them.
    """
    match = re.search(rf" {re.escape(name)}=(\S*)", f" {line.partition(' UserId=')[2]}")
    return match[1] if match else ""


def output_file(line: str) -> str:
    """Where the job of such a line prints to: a whole path, or empty."""
    return _long_field(line.partition(" UserId=")[2], "StdOut", _ANY_FIELD)


def parse_job(line: str) -> JobFacts | None:
    """The facts in the line that `scontrol show job -o` prints, with times in seconds."""
    number = re.match(r"JobId=(\d+) ", line)
    if number is None or not field_of(line, "JobState"):
        return None
    restarts, end = field_of(line, "Restarts"), field_of(line, "EndTime")
    return JobFacts(
        number=number[1],
        state=field_of(line, "JobState"),
        reason=field_of(line, "Reason"),
        restarts=int(restarts) if restarts.isdigit() else 0,
        end=float(end) if end.isdigit() else None,
        is_preempted=field_of(line, "PreemptTime").isdigit(),
        is_batch=field_of(line, "BatchFlag") != "0",
        may_requeue=field_of(line, "Requeue") != "0",
    )


def requeue(job: str, seconds: float = ANSWER_SECONDS) -> str | None:
    """Have the job end and start again; returns why that failed, or None."""
    return _request("scontrol", "requeue", job, seconds=seconds)


def scancel(*words: str) -> str | None:
    """End a job or step, or send it a signal; returns why that failed, or None."""
    return _request("scancel", *words, seconds=ANSWER_SECONDS)


def batch_script(job: str, seconds: float = ANSWER_SECONDS) -> str | None:
    return _answer("write", "batch_script", job, "-", seconds=seconds)


def warning_seconds(job: str, seconds: float = ANSWER_SECONDS) -> float | None:
    """How long before its end SLURM warns the job, if its script says so."""
    option = batch_options(batch_script(job, seconds) or "").get("signal")
    found = parse_signal(option) if option else None
    return None if found is None else float(found.seconds)


def kill_wait_seconds(seconds: float = ANSWER_SECONDS) -> float | None:
    """SLURM's configured time from SIGTERM to SIGKILL."""
    config = _answer("show", "config", seconds=seconds) or ""
    match = re.search(r"^KillWait\s*=\s*(\d+)", config, re.MULTILINE)
    return float(match[1]) if match else None


def _answer(*words: str, seconds: float = ANSWER_SECONDS) -> str | None:
    done = _run("scontrol", *words, seconds=seconds)
    return None if done is None or done.returncode != 0 else done.stdout


def _request(program: str, *words: str, seconds: float) -> str | None:
    done = _run(program, *words, seconds=seconds)
    if done is None:
        return f"{program} does not answer"
    if done.returncode == 0:
        return None
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"{program} left with status {done.returncode}"


def _run(program: str, *words: str, seconds: float) -> subprocess.CompletedProcess[str] | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            [program, *words],
            # Otherwise times are in the local zone, without its name.
            env={**variables.child_environment(), "SLURM_TIME_FORMAT": "%s"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
        )
    return None


# -- Why SLURM ends a job --------------------------------------------------------------------------


class EndingCause(Enum):
    """The meaning of a SIGTERM in a job, in words for the user's log."""

    TIME_LIMIT = "the job's time limit"
    PREEMPTED = "preempted by SLURM"
    REQUEUED = "requeued by SLURM"
    CANCELLED = "scancel"
    NOT_SLURM = "SIGTERM"  # the job goes on: the signal came from another process
    UNKNOWN = "SIGTERM, and SLURM does not say why"

    @property
    def interrupts(self) -> bool:
        """True if the run should go on by itself: a cancelled job must not."""
        return self in (EndingCause.TIME_LIMIT, EndingCause.PREEMPTED, EndingCause.REQUEUED)


def why_terminated(restarts: int, facts: JobFacts | None) -> EndingCause:
    """The cause of a SIGTERM that has just come, in a job with so many restarts."""
    if facts is None:
        return EndingCause.UNKNOWN
    if facts.restarts > restarts:
        return EndingCause.REQUEUED
    if "CANCELLED" in facts.state:
        return EndingCause.CANCELLED
    if facts.reason == "TimeLimit" or "TIMEOUT" in facts.state:
        return EndingCause.TIME_LIMIT
    if facts.is_preempted or "PREEMPTED" in facts.state:
        return EndingCause.PREEMPTED
    # After scancel, the job is only seen to be completing.
    return EndingCause.CANCELLED if "COMPLETING" in facts.state else EndingCause.NOT_SLURM


# -- A batch job as it was submitted, so that it can be submitted again ----------------------------
# SLURM keeps the script, but not the command line of sbatch. The options that are not in the script
# are read from the controller.


_MOST_SCRIPT_BYTES = 256 << 10
_OPTION_OF = {
    "JobName": "job-name",
    "Account": "account",
    "QOS": "qos",
    "Partition": "partition",
    "TimeLimit": "time",
    "NumNodes": "nodes",
    "NumTasks": "ntasks",
    "CPUs/Task": "cpus-per-task",
    "MinMemoryNode": "mem",
    "MinMemoryCPU": "mem-per-cpu",
    "Features": "constraint",
    "Reservation": "reservation",
    "TresPerNode": "gres",
    "TresPerJob": "gpus",
    "TresPerTask": "gpus-per-task",
}
_NOTHING = ("", "(null)", "N/A", "None", "UNLIMITED", "0")
_ANY_FIELD = "[A-Z][A-Za-z:/_]*"
# If the script has one of these, SLURM has computed the option from it.
_FOLLOWS = {
    "ntasks": ("ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket", "ntasks-per-core"),
    "cpus-per-task": ("cpus-per-gpu",),
    "mem": ("mem-per-cpu", "mem-per-gpu"),
    "mem-per-cpu": ("mem", "mem-per-gpu"),
    "gres": ("gpus-per-node", "gpus"),
    "gpus": ("gres", "gpus-per-node", "gpus-per-task"),
}


def read_batch(job: str) -> dict[str, Any] | None:
    """The record of a batch job in start.json; None without a batch job or an answer.

    The `folder` of sbatch, the `path` and `arguments` of the script, its text without secrets
    (`script`, None if it is long), the `digest` of the whole text, `options` not in the text, and
    the file of its `output`.
    """
    from holdfast._environment.secrets import redact_text, redact_words  # slow to import

    lines = describe_job(job)
    script = batch_script(job)
    if not lines or script is None:
        return None
    options = submitted_options(lines[0], batch_options(script))
    if "_" in job:
        options.append(f"--array={job.partition('_')[2]}")
    command = _long_field(lines[0], "Command", "WorkDir")
    path, *arguments = command.split(" ") if command not in _NOTHING else [""]
    shown = redact_text(script)
    words = redact_words(arguments)
    return {
        "folder": _long_field(lines[0], "WorkDir", "StdErr"),
        "path": path,
        "arguments": words.words,
        "options": options,
        "output": output_file(lines[0]),
        "digest": digest_of(script),
        "script": shown if len(shown) <= _MOST_SCRIPT_BYTES else None,
        "has_left_out": shown != script or bool(words.left_out),
    }


def digest_of(script: str) -> str:
    import hashlib  # slow to import, and rarely needed

    return hashlib.sha256(script.encode(errors="surrogateescape")).hexdigest()


def submitted_options(line: str, given: Mapping[str, str]) -> list[str]:
    """The options in a job's line of `scontrol show job -o` that its script does not have.

    >>> submitted_options("JobId=1 JobName=a UserId=x(0) TimeLimit=00:03:00 NumNodes=1", {})
    ['--job-name=a', '--time=00:03:00', '--nodes=1']
    """
    found: list[str] = []
    for field, option in _OPTION_OF.items():
        if field == "JobName":
            value = _long_field(line, field, "UserId")
        else:
            value = field_of(line, field)
        is_given = any(name in given for name in (option, *_FOLLOWS.get(option, ())))
        if is_given or value in _NOTHING:
            continue
        if field.startswith("Tres"):
            value = re.sub(r"gres[:/]", "", value)
            if option != "gres":
                value = value.removeprefix("gpu").lstrip(":=") or "1"
        if option == "nodes":
            value = value.partition("-")[0]
        found.append(f"--{option}={value}")
    number, out = line.partition(" ")[0].partition("=")[2], output_file(line)
    # The numbers of the array and of the task come before the job's name.
    array = re.match(r"JobId=\d+ ArrayJobId=(\d+) ArrayTaskId=(\d+) ", line)
    own = f"{array[1]}_{array[2]}" if array else number
    if "output" not in given and out not in _NOTHING and not out.endswith(f"/slurm-{own}.out"):
        folder, slash, name = out.rpartition("/")
        # The number of a task stays the same, and may mean something else in a name.
        patterns = ([(array[1], "%A")] if array else []) + [(number, "%j")]
        for old, pattern in patterns:
            name = re.sub(rf"(?<!\d){re.escape(old)}(?!\d)", pattern, name)
        found.append(f"--output={folder}{slash}{name}")
    return found


def _long_field(line: str, name: str, following: str) -> str:
    """A value that may contain spaces: it ends at the next field, or with the line."""
    match = re.search(rf" {name}=(.*?) (?:{following}=|$)", f"{line} ")
    return match[1].strip() if match else ""
