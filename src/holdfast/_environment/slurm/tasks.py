"""Where the tasks of a job step are: hosts, ranks, and the address of the first."""

from __future__ import annotations

import re
from collections.abc import Mapping

_FIRST_PORT = 20000  # below the range from which systems give out ports by themselves
_PORTS = 10000
_BRACKETS = re.compile(r"\[([0-9]+)[^\]]*\]")


def is_in_step(environment: Mapping[str, str]) -> bool:
    """Whether srun has started this process, or one above it.

    A batch script has SLURM_PROCID and SLURM_NTASKS too; only what srun starts has a step.
    """
    return environment.get("SLURM_STEP_ID", "").isdigit()


def first_host(hosts: str) -> str:
    """The first name of a list as SLURM writes it.

    >>> first_host("gpu[007-009,12],login1")
    'gpu007'
    """
    depth = end = 0
    for end, letter in enumerate(hosts):  # noqa: B007  it is needed after the loop
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and not depth:
            break
    else:
        end = len(hosts)
    return _BRACKETS.sub(r"\1", hosts[:end])


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE and the rest, as torch wants them, for a task of srun; none elsewhere.

    What is set already is somebody's wish, and stays as it is.
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
    """The tasks on this node: "4(x2),3" are four on each of two nodes and three on a third."""
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
    """The same for all tasks of a step, and another one for a step beside it."""
    job, step = environment.get("SLURM_JOB_ID", "0"), environment["SLURM_STEP_ID"]
    number = int(job) if job.isdigit() else 0
    return _FIRST_PORT + (number + 997 * int(step)) % _PORTS
