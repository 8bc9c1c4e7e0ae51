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
from holdfast._record.identity import host_name, of_process


@dataclass(frozen=True)
class World:
    """The job, as one of its ranks sees it."""

    rank: int = 0
    size: int = 1

    @property
    def is_alone(self) -> bool:
        return self.size == 1


def find_world() -> World:
    """From torch's process group if there is one, else from what the launcher has set."""
    if "torch.distributed" in sys.modules:
        from holdfast.torch import group

        found = group.rank_and_size()
        if found is not None:
            return World(*found)
    return World(*(_env.rank_and_size() or (0, 1)))


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
    found: list[str] = []
    for name in (_env.chosen_address(), _env.master_address(), host_name()):
        if not name:
            continue
        try:
            infos = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            continue
        found += [str(info[4][0]) for info in infos]
    return [a for a in dict.fromkeys(found) if _is_ours(a)] or list(dict.fromkeys(found))


def _is_ours(address: str) -> bool:
    """Whether this host has the address: only then it can be bound."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
