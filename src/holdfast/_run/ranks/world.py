"""Which process of its job this is, and who started it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name, of_process
from holdfast._environment.slurm.job import rank_environment

# -- The tasks of a TensorFlow cluster, and which of them are the ranks of a run -------------------
# Those that train together are: the chief, if there is one, and the workers. An evaluator goes
# its own way, and so does a parameter server.


_TRAINING = ("chief", "worker")  # in the order in which TensorFlow counts them


def rank_in(tasks: Mapping[str, Sequence[int]], job: str, index: int) -> tuple[int, int] | None:
    """The rank of a task and how many there are; None if it is none of those that train."""
    ranks = [(name, each) for name in _TRAINING for each in tasks.get(name, ())]
    return (ranks.index((job, index)), len(ranks)) if (job, index) in ranks else None


def rank_by_config(text: str) -> tuple[int, int] | None:
    """The same by what TF_CONFIG says."""
    cluster, job, index = _read(text)
    return rank_in({name: range(len(found)) for name, found in cluster.items()}, job, index)


def address_by_config(text: str) -> str:
    """The host under which the others know this task; empty if TF_CONFIG does not say."""
    cluster, job, index = _read(text)
    found = cluster.get(job, [])
    return found[index].rpartition(":")[0].strip("[]") if index < len(found) else ""


def cluster_by_config(text: str) -> str:
    """What TF_CONFIG says alike to all tasks of a cluster."""
    cluster, _, _ = _read(text)
    return json.dumps(cluster, sort_keys=True) if cluster else ""


def _read(text: str) -> tuple[dict[str, list[str]], str, int]:
    """The addresses by job, and the job and number of this task; nothing where it makes no sense.

    TensorFlow reads the variable before us, and says what is wrong with it.
    """
    try:
        config: Any = json.loads(text) if text else {}
        jobs, task = config["cluster"], config["task"]
        cluster = {str(job): list(map(str, found)) for job, found in jobs.items()}
        index = int(task["index"])
        return (cluster, str(task["type"]), index) if index >= 0 else ({}, "", 0)
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}, "", 0


@dataclass(frozen=True)
class World:
    """The job, as one of its ranks sees it."""

    rank: int = 0
    size: int = 1

    @property
    def is_alone(self) -> bool:
        return self.size == 1


def find_world() -> World:
    """From what a framework has connected if there is any, else from what the launcher has set."""
    found = _connected() or variables.rank_and_size() or _task_of_cluster() or _task_of_srun()
    return World(*(found or (0, 1)))


def _connected() -> tuple[int, int] | None:
    """Of torch's process group, JAX's processes or TensorFlow's workers."""
    if "torch.distributed" in sys.modules:
        from holdfast.torch import group

        if (found := group.rank_and_size()) is not None:
            return found
    if _is_loaded("jax"):
        from holdfast.jax import group as processes

        if (found := processes.rank_and_size()) is not None:
            return found
    if _is_loaded("tensorflow"):
        from holdfast.tensorflow import distribute

        if (cluster := distribute.cluster()) is not None:
            return rank_in(*cluster)
    return None


def _is_loaded(framework: str) -> bool:
    # One that is just being imported has no version yet.
    return hasattr(sys.modules.get(framework), "__version__")


def _task_of_cluster() -> tuple[int, int] | None:
    """By TF_CONFIG, which means nothing to a script that does not use TensorFlow."""
    return rank_by_config(variables.text("TF_CONFIG")) if _is_loaded("tensorflow") else None


def _task_of_srun() -> tuple[int, int] | None:
    """The tasks of a job step are the ranks, unless somebody has said otherwise."""
    if multiprocessing.parent_process() is not None:
        return None  # of its parent, which is the task
    found = rank_environment(variables.of_ranks())
    return (int(found["RANK"]), int(found["WORLD_SIZE"])) if found else None


@dataclass(frozen=True)
class Launcher:
    """The process that started the ranks."""

    name: str
    process: dict[str, Any]
    restarts: bool  # whether it would start them again


def find_launcher() -> Launcher | None:
    """Whoever would have to end this rank; None if nobody in particular does."""
    parent = os.getppid()
    if variables.text("TORCHELASTIC_RUN_ID"):
        return Launcher("torchrun", asdict(of_process(parent)), variables.restarts_left())
    started_by = multiprocessing.parent_process()
    if started_by is not None and started_by.pid == parent:
        return Launcher("the process that started it", asdict(of_process(parent)), False)
    return None


def host_key() -> str:
    """Equal for two processes that share memory, pids and network."""
    parts = [host_name()]
    for name in ("pid", "net", "ipc"):
        try:
            parts.append(str(Path(f"/proc/self/ns/{name}").readlink()))
        except OSError:
            continue
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return " ".join(parts)


def addresses() -> list[str]:
    """By which other hosts may reach this one, the likeliest first."""
    # Whoever has chosen one knows best: behind a translation of addresses it is not our own.
    chosen = _resolve(variables.text("HOLDFAST_ADDRESS"))
    known_as = address_by_config(variables.text("TF_CONFIG"))
    found = [*_resolve(variables.text("MASTER_ADDR")), *_resolve(known_as), *_resolve(host_name())]
    ours = [address for address in found if _is_ours(address)] or found
    # Many systems have their own name at 127.0.1.1.
    outside = [each for each in ours if not each.startswith("127.") and each != "::1"]
    return list(dict.fromkeys([*chosen, *(outside or ours)]))


def _resolve(name: str) -> list[str]:
    """The addresses of a name, but for those that mean something on one cable only."""
    if not name:
        return []
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    found = [str(info[4][0]) for info in infos]
    return [address for address in found if "%" not in address]


def _is_ours(address: str) -> bool:
    """Whether this host has the address: only then it can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False
