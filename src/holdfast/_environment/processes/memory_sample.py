"""Samples of the memory around a process, and the free space of file systems."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from holdfast._environment.processes.cgroup import MemoryCgroup, decode_mount
from holdfast._environment.processes.gpu import Gpus
from holdfast._environment.processes.proc import TICKS_PER_SECOND, field, read_bytes, stat_fields
from holdfast._environment.processes.tree import Tree, rss, swap


def room(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """{"path", "free", "total", "free_inodes"} of the file system of a path, for ordinary users.

    `free_inodes` is None where the number of files is not limited. On a dead NFS this blocks.
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


def mounted_rooms(seconds: float = 2.0) -> list[dict[str, Any]]:
    """`room` of each mounted file system that can be written, as far as they answer in time."""
    table = (read_bytes("/proc/self/mountinfo") or b"").decode(errors="replace")
    places: dict[str, str] = {}  # of each device the first: others are parts of it
    for words in filter(lambda words: len(words) > 5, map(str.split, table.splitlines())):
        if "rw" in words[5].split(","):
            places.setdefault(words[2], decode_mount(words[4]))
    found: list[dict[str, Any]] = []

    def look() -> None:
        for place in filter(os.path.isdir, dict.fromkeys(places.values())):
            found.extend(each for each in [room(place)] if each and each["total"])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(seconds)
    return list(found)


def shm_room() -> dict[str, int] | None:
    """{"free", "total"} of /dev/shm."""
    try:
        found = os.statvfs("/dev/shm")
    except (OSError, AttributeError):
        return None
    return {"free": found.f_bavail * found.f_frsize, "total": found.f_blocks * found.f_frsize}


_BUDGET = 0.003  # of one core
_PAUSE_SECONDS = 1.0
_HURRY_SECONDS = 0.1
_LONGEST_SECONDS = 30.0
_LIMITED_MOST = 8  # processes below the first whose limits are read
_MOVED_SECONDS = 10.0  # a process may be moved into another cgroup


class Sampler:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.cgroup = MemoryCgroup.find(pid)
        self._found_at = time.monotonic()
        self.tree = Tree(pid)
        self.pids: list[int] = []
        self.cost_seconds = 0.0  # processor time of a recent sample
        self._gpus = Gpus()
        self._of_full: dict[str, Any] = dict.fromkeys(("workers", "worker_count", "swap", "gpu"))

    def take(self, full: bool = True) -> dict[str, Any]:
        """A sample. Without `full`, the expensive values are those of the last full one."""
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
            "available": None,
            "total": None,
        }
        for key, name in (("available", b"MemAvailable:"), ("total", b"MemTotal:")):
            if (kilobytes := field(meminfo, name)) is not None:
                sample[key] = kilobytes * 1024
        if full:
            self._look_closely(meminfo)
        self.cost_seconds = 0.8 * self.cost_seconds + 0.2 * (time.thread_time() - before)
        return sample | self._of_full

    def pause_seconds(self, hurry: bool) -> float:
        """The time until the next sample, so long that all of them stay within the budget."""
        wanted = _HURRY_SECONDS if hurry else _PAUSE_SECONDS
        return min(_LONGEST_SECONDS, max(wanted, self.cost_seconds / _BUDGET))

    def close(self) -> None:
        self._gpus.close()

    def _look_closely(self, meminfo: bytes) -> None:
        now = time.monotonic()
        if now - self._found_at > _MOVED_SECONDS:
            self._found_at = now
            found = MemoryCgroup.find(self.pid)
            # For a process that has ended, the old one says more.
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
            return 0  # no swap is in use
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
            used = sum(map(int, stat_fields(pid)[11:13])) / TICKS_PER_SECOND
            found["cpu_seconds"] = max(used, found.get("cpu_seconds", 0.0))
    return found
