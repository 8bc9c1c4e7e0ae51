"""Takes one sample of the memory around a process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from holdfast._environment.processes.cgroup import MemoryCgroup
from holdfast._environment.processes.gpu import Gpus
from holdfast._environment.processes.proc import field, read_bytes
from holdfast._environment.processes.tree import Tree, rss, swap

# -- How much room there is on a disk and in shared memory -----------------------------------------


_SHM = "/dev/shm"


def room(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Of the file system that a path is on, or would be.

    {"path", "free", "total", "free_inodes"}: what is free for an ordinary user. An inode is what
    a new file needs; where they cannot run out, `free_inodes` is None. On a dead NFS this waits.
    """
    place = Path(path)
    for each in (place, *place.absolute().parents):
        try:
            found = os.statvfs(each)
        except (OSError, ValueError, AttributeError):
            continue
        return {
            "path": str(path),
            "free": found.f_bavail * found.f_frsize,
            "total": found.f_blocks * found.f_frsize,
            "free_inodes": found.f_favail if found.f_files else None,
        }
    return None


def shm_room(path: str = _SHM) -> dict[str, int] | None:
    """{"free", "total"} of /dev/shm."""
    try:
        found = os.statvfs(path)
    except (OSError, AttributeError):
        return None
    return {"free": found.f_bavail * found.f_frsize, "total": found.f_blocks * found.f_frsize}


_BUDGET = 0.003  # of one core
_PAUSE_SECONDS = 1.0
_HURRY_SECONDS = 0.1
_LONGEST_SECONDS = 30.0
_LIMITED_MOST = 8  # processes below the first: a shell is, and what it has started
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_MOVED_SECONDS = 10.0  # somebody may put a process into another cgroup


class Sampler:
    """Looks at one process and at those below it."""

    def __init__(self, pid: int, tree: Tree | None = None) -> None:
        self.pid = pid
        self.cgroup = MemoryCgroup.find(pid)
        self._found_at = time.monotonic()
        self.tree = Tree(pid) if tree is None else tree
        self.pids: list[int] = []
        self.cost_seconds = 0.0  # of processor time, for one look of late
        self._gpus = Gpus()
        self._of_full: dict[str, Any] = {
            "workers": None,
            "worker_count": None,
            "swap": None,
            "gpu": None,
        }

    def take(self, full: bool = True) -> dict[str, Any]:
        """A sample. Without `full` what is dear is as it was at the last full one."""
        before = time.thread_time()
        meminfo = read_bytes("/proc/meminfo") or b""
        usage = None if self.cgroup is None else self.cgroup.usage()
        shm = shm_room()
        sample: dict[str, Any] = {
            "t": time.time(),
            "rss": rss(self.pid),
            "shm": None if shm is None else shm["total"] - shm["free"],
            "shm_free": None if shm is None else shm["free"],
            "cgroup": None if usage is None else usage.used,
            "cache": None if usage is None else usage.cache,
            "limit": None if usage is None else usage.limit,
            "available": _kilobytes(meminfo, b"MemAvailable:"),
            "total": _kilobytes(meminfo, b"MemTotal:"),
        }
        if full:
            self._look_closely(meminfo)
        self.cost_seconds = 0.8 * self.cost_seconds + 0.2 * (time.thread_time() - before)
        return sample | self._of_full

    def pause_seconds(self, hurry: bool) -> float:
        """Until the next look: so long that all of them stay within the budget."""
        wanted = _HURRY_SECONDS if hurry else _PAUSE_SECONDS
        return min(_LONGEST_SECONDS, max(wanted, self.cost_seconds / _BUDGET))

    def close(self) -> None:
        """Nothing is left behind."""
        self._gpus.close()

    def _look_closely(self, meminfo: bytes) -> None:
        now = time.monotonic()
        if now - self._found_at > _MOVED_SECONDS:
            self._found_at = now
            found = MemoryCgroup.find(self.pid)
            # Of a process that has ended the old one tells more.
            if found is not None and (self.cgroup is None or found.path != self.cgroup.path):
                self.cgroup = found
        self.pids = self.tree.look()
        held = [rss(each) or 0 for each in self.pids]
        self._of_full = {
            "workers": sum(held),
            "worker_count": len(held),
            "swap": self._swap(meminfo),
            "gpu": self._gpus.memory([self.pid, *self.pids]),
            **read_limits([self.pid, *self.pids[:_LIMITED_MOST]]),
        }

    def _swap(self, meminfo: bytes) -> int:
        if field(meminfo, b"SwapTotal:") == field(meminfo, b"SwapFree:"):
            return 0  # nobody has any
        return sum(swap(each) or 0 for each in (self.pid, *self.pids))


def read_limits(pids: list[int]) -> dict[str, Any]:
    """`cpu_limit` and `space_limit` by ulimit -t and -v, if there are such limits; with the first
    `cpu_seconds`, the most processor time of one of these processes."""
    found: dict[str, Any] = {}
    for pid in pids:
        text = read_bytes(f"/proc/{pid}/limits") or b""
        for key, name in (("cpu_limit", b"Max cpu time"), ("space_limit", b"Max address space")):
            hard = text.partition(name)[2].split()[1:2]  # soft, hard
            if hard and hard[0].isdigit():
                found[key] = min(int(hard[0]), found.get(key, int(hard[0])))
        if "cpu_limit" in found:
            fields = (read_bytes(f"/proc/{pid}/stat") or b"").rpartition(b")")[2].split()
            used = sum(map(int, fields[11:13])) / _TICKS
            found["cpu_seconds"] = max(used, found.get("cpu_seconds", 0.0))
    return found


def _kilobytes(text: bytes, name: bytes) -> int | None:
    found = field(text, name)
    return None if found is None else found * 1024
