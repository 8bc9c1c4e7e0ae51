"""The job that this process is part of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One life of a job: SLURM keeps the number over requeues and counts them."""

    id: str  # as scontrol takes it: "12", and of an array "12_3"
    number: str
    restarts: int
    marker: str = ""  # a file by which the batch script's last lines are asked to requeue it
    started: int | None = None  # when this life began, by SLURM's clock


def find_job(environment: Mapping[str, str]) -> Job | None:
    """The job, by the variables that SLURM sets; None outside of one."""
    number = environment.get("SLURM_JOB_ID", "")
    if not number.isdigit():
        return None
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    restarts = environment.get("SLURM_RESTART_COUNT", "")
    marker = environment.get("HOLDFAST_MARKER", "")
    began = environment.get("SLURM_JOB_START_TIME", "")
    return Job(
        # The number of an array's last task is the array's own: by that name scontrol
        # would requeue all of them.
        id=f"{array}_{task}" if array and task else number,
        number=number,
        restarts=int(restarts) if restarts.isdigit() else 0,
        # A job that is submitted from within another one has the other one's variables.
        started=int(began) if began.isdigit() else None,
        marker=marker if marker.endswith(f"-{number}") else "",
    )


def is_lonely_task(environment: Mapping[str, str], pid: int, parent: int) -> bool:
    """Whether SLURM kills whatever a process has started as soon as that process is gone.

    So it is for a task's first process, and for one that a batch script waits for: the script
    ends when it does. `holdfast run` in between outlives the process, and torchrun a rank.
    """
    if environment.get("HOLDFAST_LEADER") or environment.get("TORCHELASTIC_RUN_ID"):
        return False
    return environment.get("SLURM_TASK_PID", "") in (str(pid), str(parent))
