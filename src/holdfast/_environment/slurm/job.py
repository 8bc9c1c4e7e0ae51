"""The SLURM job of this process: its number, its tasks and their ranks, and a torchrun in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_FIRST_PORT = 20000  # below the range from which systems choose ports
_PORTS = 10000
_BRACKETS = re.compile(r"\[([0-9]+)[^\]]*\]")


@dataclass(frozen=True)
class Job:
    """One start of a job: a requeued job keeps its number, and SLURM counts the restarts."""

    id: str  # as scontrol takes it: "12", and for an array "12_3"
    number: str
    restarts: int
    marker: str = ""  # a file that asks the last lines of the batch script to requeue the job
    started: int | None = None  # the time of this start, by SLURM's clock


def find_job(environment: Mapping[str, str]) -> Job | None:
    """The job by the variables that SLURM sets; None outside of one."""
    number = environment.get("SLURM_JOB_ID", "")
    if not number.isdigit():
        return None
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    restarts = environment.get("SLURM_RESTART_COUNT", "")
    marker = environment.get("HOLDFAST_MARKER", "")
    began = environment.get("SLURM_JOB_START_TIME", "")
    return Job(
        # The last task of an array has the array's own number: with it, scontrol would requeue
        # the whole array.
        id=f"{array}_{task}" if array and task else number,
        number=number,
        restarts=int(restarts) if restarts.isdigit() else 0,
        started=int(began) if began.isdigit() else None,
        # A job that is submitted from another job inherits its variables.
        marker=marker if marker.endswith(f"-{number}") else "",
    )


def is_lonely_task(environment: Mapping[str, str], pid: int, parent: int) -> bool:
    """True if SLURM kills the children of this process when it ends.

    That holds for the first process of a task, and for a process that a batch script waits for.
    Below `holdfast run` or torchrun it does not hold: they live on.
    """
    if environment.get("HOLDFAST_LEADER") or environment.get("TORCHELASTIC_RUN_ID"):
        return False
    return environment.get("SLURM_TASK_PID", "") in (str(pid), str(parent))


# -- Tasks of a job step ---------------------------------------------------------------------------


def is_in_step(environment: Mapping[str, str]) -> bool:
    """True if srun has started this process or one above it.

    A batch script has SLURM_PROCID and SLURM_NTASKS too, but no step.
    """
    return environment.get("SLURM_STEP_ID", "").isdigit()


def first_host(hosts: str) -> str:
    """The first name in a host list of SLURM.

    >>> first_host("gpu[007-009,12],login1")
    'gpu007'
    """
    # A comma in brackets separates numbers of one name.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return _BRACKETS.sub(r"\1", first[0] if first else "")


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE and so on for a task of srun; empty elsewhere.

    Variables that are already set were chosen by the user, and stay.
    """
    rank, size = environment.get("SLURM_PROCID", ""), environment.get("SLURM_STEP_NUM_TASKS", "")
    if not is_in_step(environment) or not rank.isdigit() or not size.isdigit():
        return {}
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return {}
    found = {"RANK": rank, "WORLD_SIZE": size}
    if "SLURM_LOCALID" in environment:
        found["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    here = _tasks_here(environment)
    if here is not None:
        found["LOCAL_WORLD_SIZE"] = str(here)
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    if nodes and int(size) > 1:
        found["MASTER_ADDR"] = first_host(nodes)
        found["MASTER_PORT"] = str(_port(environment))
    return {name: value for name, value in found.items() if name not in environment}


def _tasks_here(environment: Mapping[str, str]) -> int | None:
    """The tasks on this node: "4(x2),3" means four on each of two nodes and three on a third."""
    node = environment.get("SLURM_NODEID", "")
    if not node.isdigit():
        return None
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[int(node)] if int(node) < len(counts) else None


def _port(environment: Mapping[str, str]) -> int:
    """Equal for all tasks of a step, and different for another step of the job."""
    job, step = environment.get("SLURM_JOB_ID", "0"), environment["SLURM_STEP_ID"]
    number = int(job) if job.isdigit() else 0
    return _FIRST_PORT + (number + 997 * int(step)) % _PORTS


# -- Commands that start torchrun, which numbers its ranks itself ----------------------------------


# Also in a word that is a whole command, as in: bash -c "torchrun train.py"
_LAUNCHER = re.compile(
    r"(?:^|[\s/;&|])(?:torchrun|-m[\s=]*torch\.distributed\.(?:run|launch))(?=$|[\s;&|])"
)
_MEETING = re.compile(
    r"(?:^|\s)--?(?:standalone|rdzv[-_](?:endpoint|backend)|master[-_](?:addr|port))(?=$|[\s=])"
)


def starts_torchrun(command: Sequence[str]) -> bool:
    """True if the command starts torchrun, directly or in a container or shell.

    >>> starts_torchrun(["apptainer", "exec", "image.sif", "torchrun", "train.py"])
    True
    >>> starts_torchrun(["python", "train.py"])
    False
    """
    return _LAUNCHER.search(" ".join(command)) is not None


def says_where_to_meet(command: Sequence[str]) -> bool:
    """True if the user has chosen the rendezvous of several nodes.

    >>> says_where_to_meet(["torchrun", "--nnodes=2", "--rdzv-backend=c10d", "train.py"])
    True
    """
    return any(_MEETING.search(word) for word in command)
