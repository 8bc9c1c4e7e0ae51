"""The memory cgroup of a process: usage, limit, and the kills of the OOM killer. Both versions.

The level with the least free memory counts: under SLURM the job has the limit, and its tasks share
it. Page cache does not count as used: the kernel frees it before it kills a process, active or not.
So a training that reads its files again and again may fill the cgroup without danger.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast._environment.processes.proc import field, is_leaving, read_bytes, read_number

_UNLIMITED = 1 << 60  # version 1 writes the largest number of whole pages for "none"
_LIMITS_SECONDS = 5.0  # limits change rarely


@dataclass(frozen=True)
class Usage:
    """In bytes."""

    used: int  # without memory that the kernel can free at once
    cache: int  # copies of files, without /dev/shm
    limit: int | None


class MemoryCgroup:
    """Found once; each method reads the current values."""

    def __init__(self, version: int, path: str, folders: list[str]) -> None:
        self.version = version
        self.path = path
        # From its own up to the highest that is visible.
        self.folders = folders
        self._limited: list[tuple[str, int]] = []
        self._looked = float("-inf")

    @classmethod
    def find(cls, pid: int, root: str = "/") -> MemoryCgroup | None:
        """The cgroup of a process, or None. `root` is the parent of /proc and /sys."""
        root = root.rstrip("/")
        paths = _paths(pid, root)
        if is_leaving(read_bytes(f"{root}/proc/{pid}/stat") or b""):  # after the cgroup was read
            return None  # it has left its cgroup, and is shown at the top of the tree
        # On a machine with both versions, memory belongs to one of them.
        for version, controller in ((1, "memory"), (2, "")):
            for path, top, names in _places(paths, version, controller, root):
                levels = range(len(names), -1, -1)
                folders = [top + "".join(f"/{name}" for name in names[:n]) for n in levels]
                # Version 2 counts only where it is enabled, and never at the top.
                counting = [each for each in folders if Path(each, _NAMES[version].used).exists()]
                if counting:
                    return cls(version, path, counting)
        return None

    def usage(self) -> Usage | None:
        """At the level with the least free memory; None if the cgroup is gone."""
        limited = self._limits()
        readings = [self._read(folder, limit) for folder, limit in limited]
        found = [each for each in readings if each is not None]
        if not found:
            return self._read(self.folders[0], None)
        return min(found, key=lambda usage: (usage.limit or 0) - usage.used)

    def limit(self) -> int | None:
        limited = self._limits()
        return min(limit for _, limit in limited) if limited else None

    def counters(self) -> dict[str, Any]:
        """{"version", "path", "limit", "peak", "oom", "oom_kill", "max"}.

        `oom_kill` counts the kills in this cgroup. The others belong to the level with the smallest
        limit: how often the limit was hit, and the highest usage, with page cache. A kill without a
        change of `oom` means that the machine was full. Version 1 has no `oom`, and its `max` does
        not change on all kernels (not on 6.18): there `peak` shows it.
        """
        limited = self._limits()
        where = min(limited, key=lambda each: each[1])[0] if limited else self.folders[0]
        found: dict[str, Any] = {
            "version": self.version,
            "path": self.path,
            "limit": self.limit(),
            "peak": read_number(f"{where}/{_NAMES[self.version].peak}"),
        }
        if self.version == 1:
            control = read_bytes(f"{self.folders[0]}/memory.oom_control") or b""
            # A limit on memory and swap together is hit first.
            hits = [read_number(f"{where}/memory.{name}") for name in ("failcnt", "memsw.failcnt")]
            told = [each for each in hits if each is not None]
            return found | {
                "oom": None,
                "oom_kill": field(control, b"oom_kill "),
                "max": sum(told) if told else None,
            }
        own = read_bytes(f"{self.folders[0]}/memory.events") or b""
        above = read_bytes(f"{where}/memory.events") or b""
        return found | {
            "oom": field(above, b"oom "),
            "oom_kill": field(own, b"oom_kill "),
            "max": field(above, b"max "),
        }

    def _read(self, folder: str, limit: int | None) -> Usage | None:
        names = _NAMES[self.version]
        held = read_number(f"{folder}/{names.used}")
        if held is None:
            return None
        stat = read_bytes(f"{folder}/memory.stat") or b""
        freed = sum(field(stat, name) or 0 for name in names.freed)
        cache = (field(stat, names.cache) or 0) - (field(stat, names.shm) or 0)
        # The kernel does not count both at the same instant.
        return Usage(max(0, held - freed), max(0, cache), limit)

    def _limits(self) -> list[tuple[str, int]]:
        now = time.monotonic()
        if now - self._looked >= _LIMITS_SECONDS:
            self._looked = now
            self._limited = [
                (folder, limit)
                for folder in self.folders
                if (limit := self._limit_of(folder)) is not None
            ]
        return self._limited

    def _limit_of(self, folder: str) -> int | None:
        found = read_number(f"{folder}/{_NAMES[self.version].limit}")
        if self.version == 1 and folder == self.folders[-1]:
            # It includes the levels above, which a container does not show.
            stat = read_bytes(f"{folder}/memory.stat") or b""
            above = field(stat, b"hierarchical_memory_limit ")
            found = min((each for each in (found, above) if each is not None), default=None)
        return found if found is not None and found < _UNLIMITED else None


@dataclass(frozen=True)
class _Names:
    used: str
    limit: str
    peak: str
    freed: tuple[bytes, ...]
    cache: bytes
    shm: bytes


_NAMES = {
    1: _Names(
        "memory.usage_in_bytes",
        "memory.limit_in_bytes",
        "memory.max_usage_in_bytes",
        (b"total_inactive_file ", b"total_active_file "),
        b"total_cache ",
        b"total_shmem ",
    ),
    2: _Names(
        "memory.current",
        "memory.max",
        "memory.peak",
        # slab: names and inodes of files, many for a data set of small files.
        (b"inactive_file ", b"active_file ", b"slab_reclaimable "),
        b"file ",
        b"shmem ",
    ),
}


def find_folder(pid: int, version: int, controller: str, root: str = "") -> str | None:
    """The folder of a process's cgroup for one controller ("" for version 2)."""
    for _, top, names in _places(_paths(pid, root), version, controller, root):
        return top + "".join(f"/{name}" for name in names)
    return None


def _paths(pid: int, root: str) -> list[tuple[str, str]]:
    """(controller, path) of each cgroup of a process; version 2 has the controller ""."""
    text = (read_bytes(f"{root}/proc/{pid}/cgroup") or b"").decode(errors="replace")
    lines = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
    return [
        (controller, path.removesuffix(" (deleted)"))
        for _, controllers, path in lines
        for controller in controllers.split(",")
    ]


def cpu_quota(pid: int, root: str = "") -> dict[str, Any] | None:
    """{"cores": how many it may use, "throttled": the share of periods in which it was throttled}.

    Of its own cgroup or of one above; None without a limit.
    """
    for version, controller in ((2, ""), (1, "cpu")):
        folder = find_folder(pid, version, controller, root) or ""
        while folder.count("/") > 2:
            limits = (read_bytes(f"{folder}/cpu.max") or b"").split()
            if not limits:
                known = (read_number(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period"))
                limits = [str(each).encode() for each in known if each is not None]
            if len(limits) == 2 and all(each.isdigit() for each in limits):
                counts = read_bytes(f"{folder}/cpu.stat") or b""
                periods = field(counts, b"nr_periods ") or 0
                share = (field(counts, b"nr_throttled ") or 0) / periods if periods else 0.0
                cores = int(limits[0]) / int(limits[1])
                return {"cores": round(cores, 2), "throttled": round(share, 3)}
            folder = folder.rpartition("/")[0]
    return None


def _places(
    paths: list[tuple[str, str]], version: int, controller: str, root: str
) -> Iterator[tuple[str, str, list[str]]]:
    """A cgroup's path, where it may be mounted, and the names from there down to it."""
    wanted = [path for name, path in paths if name == controller]
    mounts = read_bytes(f"{root}/proc/self/mountinfo") or b""
    for line in mounts.decode(errors="replace").splitlines():
        before, _, behind = line.partition(" - ")
        place, kind = before.split(), behind.split()
        if len(place) < 5 or len(kind) < 3:
            continue
        if version == 1 and (kind[0] != "cgroup" or controller not in kind[2].split(",")):
            continue
        if version == 2 and kind[0] != "cgroup2":
            continue
        for path in wanted:
            yield path, root + decode_mount(place[4]), _names_below(path, decode_mount(place[3]))


def _names_below(path: str, mounted: str) -> list[str]:
    """The names from the mounted cgroup down to this one.

    A container may see a part of the tree: `mounted` is the top of that part. A path that is not
    below it is the container's own cgroup, which is the top.
    """
    below = [name for name in path.split("/") if name]
    above = [name for name in mounted.split("/") if name]
    if below[: len(above)] != above or ".." in below:
        return []
    return below[len(above) :]


def decode_mount(text: str) -> str:
    """A path in mountinfo without escapes: a space is \\040 there."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


# -- The kernel's counters of its OOM killer: a changed count shows where memory was short ---------


_DYING_SECONDS = 10.0  # for the killed process, and for those that depended on it


def read_counters(cgroup: MemoryCgroup | None) -> dict[str, Any]:
    """{"cgroup": its counters or None, "vmstat_oom_kill": of the whole machine or None}."""
    return {
        "cgroup": None if cgroup is None else cgroup.counters(),
        "vmstat_oom_kill": field(read_bytes("/proc/vmstat") or b"", b"oom_kill "),
    }


def first_counters(at_start: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """The counters at the start, unless they belong to another cgroup."""
    if at_start is None:
        return now
    paths = [(each["cgroup"] or {}).get("path") for each in (at_start, now)]
    return at_start if paths[0] == paths[1] else now


class Counted:
    """The counters of an attempt: at its start, and before the events of the last seconds."""

    def __init__(self, first: dict[str, Any]) -> None:
        self.start = self.before = self._newest = first
        self._moved_at = float("-inf")  # when the kernel killed a process

    def add(self, newest: dict[str, Any], now: float) -> None:
        if _kills(newest) != _kills(self._newest):
            # A killed process needs time to die, and so does its parent. Keep the earlier counts
            # for that time, although there are polls in between.
            self.before, self._moved_at = self._newest, now
        elif now - self._moved_at > _DYING_SECONDS:
            self.before = newest
        self._newest = newest


def _kills(counters: dict[str, Any]) -> tuple[Any, Any]:
    cgroup = counters["cgroup"] or {}
    return cgroup.get("oom_kill"), counters["vmstat_oom_kill"]
