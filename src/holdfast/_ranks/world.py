"""Which process of its job this is, and who started it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast import _env
from holdfast._ranks.cluster import address_by_config, rank_by_config, rank_in
from holdfast._record.identity import host_name, of_process
from holdfast._slurm.places import rank_environment


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
    found = _connected() or _env.rank_and_size() or _task_of_cluster() or _task_of_srun()
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
    return rank_by_config(_env.tf_config()) if _is_loaded("tensorflow") else None


def _task_of_srun() -> tuple[int, int] | None:
    """The tasks of a job step are the ranks, unless somebody has said otherwise."""
    if multiprocessing.parent_process() is not None:
        return None  # of its parent, which is the task
    found = rank_environment(_env.of_ranks())
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
    if _env.is_torchrun():
        return Launcher("torchrun", asdict(of_process(parent)), _env.restarts_left())
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
    chosen = _resolve(_env.chosen_address())
    known_as = address_by_config(_env.tf_config())
    found = [*_resolve(_env.master_address()), *_resolve(known_as), *_resolve(host_name())]
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
