"""What is known about the job that a run is part of, for `holdfast status`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from holdfast._record.attempts import read_json
from holdfast._record.layout import RunLayout
from holdfast._status import told, words


@dataclass(frozen=True, slots=True)
class JobSummary:
    """One job of SLURM, at one moment."""

    id: str
    restarts: int
    seconds_left: float | None  # None: it is over, has no limit, or SLURM did not say
    warning_seconds: float | None  # None: its script asks for none
    step_seconds: float | None  # measured: the slowest of late
    save_seconds: float | None
    requeue: str | None  # what became of it when the last attempt was interrupted


def read_job(
    layout: RunLayout, attempt: int, beat: dict[str, Any], live: bool
) -> JobSummary | None:
    """From the keeper's heartbeat, and from what it noted at the end."""
    found = beat.get("slurm")
    if not isinstance(found, dict) or not isinstance(found.get("job"), str):
        return None
    end = told.real(found.get("end"))
    said = read_json(layout.requeue(attempt)).get("said")
    return JobSummary(
        id=found["job"],
        restarts=int(told.real(found.get("restarts")) or 0),
        seconds_left=max(0.0, end - time.time()) if live and end is not None else None,
        warning_seconds=told.real(found.get("warning_seconds")),
        step_seconds=told.real(beat.get("step_seconds")),
        save_seconds=told.real(beat.get("save_seconds")),
        requeue=said if isinstance(said, str) and not live else None,
    )


def describe_job(job: JobSummary | None, *, is_live: bool) -> str:
    """In one line."""
    if job is None:
        return ""
    text = f"job {job.id}"
    if job.restarts:
        text += f", restarted {job.restarts} {'time' if job.restarts == 1 else 'times'}"
    if not is_live:
        return text
    if job.seconds_left is not None:
        text += f", {words.duration(job.seconds_left)} left"
    return f"{text}; {_describe_warning(job)}"


def _describe_warning(job: JobSummary) -> str:
    needed = (job.step_seconds or 0.0) + (job.save_seconds or 0.0)
    takes = "no save has been measured yet"
    if job.save_seconds is not None:
        takes = f"a step and its save take {words.duration(needed)}"
    if job.warning_seconds is None:
        return f"its script has no line with --signal; {takes}"
    text = f"SLURM warns {words.duration(job.warning_seconds)} before the end; {takes}"
    if job.save_seconds is not None and needed > job.warning_seconds:
        return f"{text}: ask for --signal=USR2@{2 * needed + 30:.0f}"
    return text
