"""What SLURM's controller says about a job, and the one thing that is asked of it.

Through `scontrol`, which is wherever jobs can be requeued from. It answers within
milliseconds, or not at all while the controller is down: every question has a bound.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from enum import Enum

from holdfast._environment import variables
from holdfast._environment.slurm.options import batch_options, parse_signal

ANSWER_SECONDS = 10.0
_FIELD = r"(?:^| ){name}=(\S*)"


@dataclass(frozen=True)
class JobFacts:
    """A job as the controller has it."""

    number: str
    state: str
    reason: str
    restarts: int
    end: float | None  # by the clock of the wall; None: no limit
    is_preempted: bool
    is_batch: bool  # only a batch job can be requeued
    may_requeue: bool


def can_ask() -> bool:
    """Whether there is a scontrol: containers often have none."""
    return shutil.which("scontrol") is not None


def show_job(job: str, seconds: float = ANSWER_SECONDS) -> JobFacts | None:
    """The facts, or None if nobody answers."""
    said = _scontrol("show", "job", "-o", job, seconds=seconds)
    if said is None or said.returncode != 0:
        return None
    return parse_job(said.stdout)


def describe_job(job: str, seconds: float = ANSWER_SECONDS) -> list[str]:
    """A line with all that is known of a job, for an array one of each task; nothing if unknown."""
    said = _scontrol("show", "job", "-o", job, seconds=seconds)
    return said.stdout.splitlines() if said is not None and said.returncode == 0 else []


def parse_job(line: str) -> JobFacts | None:
    """The facts in the line that `scontrol show job -o` prints, with times in seconds."""
    number = re.match(r"JobId=(\d+) ", line)
    line = line.partition(" UserId=")[2]  # before it is the job's name, which can be anything

    def field(name: str) -> str:
        match = re.search(_FIELD.format(name=name), line)
        return match[1] if match else ""

    if number is None or not field("JobState"):
        return None
    restarts, end = field("Restarts"), field("EndTime")
    return JobFacts(
        number=number[1],
        state=field("JobState"),
        reason=field("Reason"),
        restarts=int(restarts) if restarts.isdigit() else 0,
        end=float(end) if end.isdigit() else None,
        is_preempted=field("PreemptTime").isdigit(),
        is_batch=field("BatchFlag") != "0",
        may_requeue=field("Requeue") != "0",
    )


def requeue(job: str, seconds: float = ANSWER_SECONDS) -> str | None:
    """Have the job end and start again; returns why that could not be."""
    said = _scontrol("requeue", job, seconds=seconds)
    if said is None:
        return "scontrol does not answer"
    if said.returncode == 0:
        return None
    lines = (said.stderr or said.stdout).strip().splitlines()
    return lines[-1] if lines else f"scontrol left with status {said.returncode}"


def batch_script(job: str, seconds: float = ANSWER_SECONDS) -> str | None:
    """The script of a batch job, as it was submitted."""
    said = _scontrol("write", "batch_script", job, "-", seconds=seconds)
    return None if said is None or said.returncode != 0 else said.stdout


def warning_seconds(job: str, seconds: float = ANSWER_SECONDS) -> float | None:
    """How long before its end SLURM warns the job, if its script says so."""
    script = batch_script(job, seconds)
    wish = None if script is None else batch_options(script).get("signal")
    found = parse_signal(wish) if wish else None
    return None if found is None else float(found.seconds)


def kill_wait_seconds(seconds: float = ANSWER_SECONDS) -> float | None:
    """How long SLURM waits from SIGTERM to SIGKILL, by its configuration."""
    said = _scontrol("show", "config", seconds=seconds)
    match = re.search(r"^KillWait\s*=\s*(\d+)", said.stdout if said else "", re.MULTILINE)
    return float(match[1]) if match else None


def _scontrol(
    *words: str, seconds: float = ANSWER_SECONDS
) -> subprocess.CompletedProcess[str] | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ["scontrol", *words],
            # Else times come in the zone of whoever asks, and without its name.
            env={**variables.child_environment(), "SLURM_TIME_FORMAT": "%s"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
        )
    return None


# -- Why SLURM ends a job: from one answer of its controller ---------------------------------------


class EndingCause(Enum):
    """What a SIGTERM in a job may mean, in words for the person who reads the log."""

    TIME_LIMIT = "the job's time limit"
    PREEMPTED = "preempted by SLURM"
    REQUEUED = "requeued by SLURM"
    CANCELLED = "scancel"
    NOT_SLURM = "SIGTERM"  # the job goes on: somebody has sent it a signal
    UNKNOWN = "SIGTERM, and SLURM does not say why"

    @property
    def interrupts(self) -> bool:
        """Whether the run is to go on by itself: a job that was cancelled must stay so."""
        return self in (EndingCause.TIME_LIMIT, EndingCause.PREEMPTED, EndingCause.REQUEUED)


def why_terminated(restarts: int, facts: JobFacts | None) -> EndingCause:
    """The cause of a SIGTERM that has just come, in a life after so many restarts."""
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
    # scancel leaves no other trace than that the job is ending.
    return EndingCause.CANCELLED if "COMPLETING" in facts.state else EndingCause.NOT_SLURM
