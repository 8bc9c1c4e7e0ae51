"""Why SLURM ends a job: from one answer of its controller."""

from __future__ import annotations

from enum import Enum

from holdfast._slurm.ask import JobFacts


class Cause(Enum):
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
        return self in (Cause.TIME_LIMIT, Cause.PREEMPTED, Cause.REQUEUED)


def why_terminated(restarts: int, facts: JobFacts | None) -> Cause:
    """The cause of a SIGTERM that has just come, in a life after so many restarts."""
    if facts is None:
        return Cause.UNKNOWN
    if facts.restarts > restarts:
        return Cause.REQUEUED
    if "CANCELLED" in facts.state:
        return Cause.CANCELLED
    if facts.reason == "TimeLimit" or "TIMEOUT" in facts.state:
        return Cause.TIME_LIMIT
    if facts.is_preempted or "PREEMPTED" in facts.state:
        return Cause.PREEMPTED
    # scancel leaves no other trace than that the job is ending.
    return Cause.CANCELLED if "COMPLETING" in facts.state else Cause.NOT_SLURM
