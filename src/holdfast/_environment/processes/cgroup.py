"""The memory cgroup of a process: what it uses, what it may use, whom the kernel has killed.

Both versions. What counts is the room at the level where it ends first: under SLURM the limit is
on the job, and its tasks share it. Page cache does not count as used. The kernel takes it back
before it kills anybody, whether it calls it active or not, so a training that reads its files
again and again fills the cgroup to the brim and is in no danger.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast._environment.processes.proc import field, is_leaving, read_bytes, read_number

_UNLIMITED = 1 << 60  # version 1 spells "none" as the largest number of whole pages
_LIMITS_SECONDS = 5.0  # somebody may change a limit, but not often


@dataclass(frozen=True)
class Usage:
    """In bytes."""

    used: int  # what cannot be taken back at once
    cache: int  # copies of files, without what is in /dev/shm
    limit: int | None


class MemoryCgroup:
    """Found once; each question reads it anew."""

    def __init__(self, version: int, path: str, folders: list[str]) -> None:
        self.version = version
        self.path = path
        # From its own up to the highest that is seen from here.
        self.folders = folders
        self._limited: list[tuple[str, int]] = []
        self._looked = float("-inf")

    @classmethod
    def find(cls, pid: int, root: str = "/") -> MemoryCgroup | None:
        """The one that a process is in, as seen from here; None where there is none.

        `root` is another folder for /proc and /sys than those of the system.
        """
        root = root.rstrip("/")
        told = read_bytes(f"{root}/proc/{pid}/cgroup") or b""
        if is_leaving(read_bytes(f"{root}/proc/{pid}/stat") or b""):  # afterwards: it may just die
            return None  # it has left its cgroup, and is shown at the top of the tree
        mounts = (read_bytes(f"{root}/proc/self/mountinfo") or b"").decode(errors="replace")
        lines = [line.split(":", 2) for line in told.decode(errors="replace").splitlines()]
        # On a machine with both, memory is in the first version or in the second, never in both.
        for version in (1, 2):
            for words in lines:
                if len(words) == 3 and _is_of_memory(version, words[1]):
                    path = words[2].removesuffix(" (deleted)")
                    folders = _folders(version, path, mounts, root)
                    if folders:
                        return cls(version, path, folders)
        return None

    def usage(self) -> Usage | None:
        """Where there is the least room, its own or one above; None if it is gone."""
        limited = self._limits()
        readings = [self._read(folder, limit) for folder, limit in limited]
        found = [each for each in readings if each is not None]
        if not found:
            return self._read(self.folders[0], None)
        return min(found, key=_room)

    def limit(self) -> int | None:
        """The smallest one, its own or of one above."""
        limited = self._limits()
        return min(limit for _, limit in limited) if limited else None

    def counters(self) -> dict[str, Any]:
        """{"version", "path", "limit", "peak", "oom", "oom_kill", "max"}.

        `oom_kill` counts the killed of this cgroup. The others are of the one with the smallest
        limit, which may stand further up: how often that was hit, and the most that was ever in
        use, with page cache. Killed while `oom` has not moved: the machine was full. Version 1
        has no `oom`, and its `max` moves on some kernels only (not on 6.18): there `peak` tells.
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
            # With a limit on memory and swap together, that one is hit first.
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
        # They are not counted at the same instant.
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
            # Counts what is above this one too, where a container shows no more.
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
        # A data set of many small files fills the second: names and inodes of files.
        (b"inactive_file ", b"active_file ", b"slab_reclaimable "),
        b"file ",
        b"shmem ",
    ),
}


def find_folder(pid: int, version: int, controller: str, root: str = "") -> str | None:
    """The folder of the cgroup in which a process is for one controller; "" for version 2."""
    told = (read_bytes(f"{root}/proc/{pid}/cgroup") or b"").decode(errors="replace")
    mounts = (read_bytes(f"{root}/proc/self/mountinfo") or b"").decode(errors="replace")
    for line in told.splitlines():
        words = line.split(":", 2)
        if len(words) == 3 and controller in words[1].split(","):
            path = words[2].removesuffix(" (deleted)")
            for top, mounted in _mounts(version, controller, mounts):
                names = _names_below(path, mounted)
                return root + top + "".join(f"/{name}" for name in names)
    return None


def cpu_quota(pid: int, root: str = "") -> dict[str, Any] | None:
    """{"cores": how many it may use, "throttled": share of periods in which it had used them up}.

    Of its own cgroup or of one above; None where nothing bounds it.
    """
    for version, controller in ((2, ""), (1, "cpu")):
        folder = find_folder(pid, version, controller, root) or ""
        while folder.count("/") > 2:
            limits = (read_bytes(f"{folder}/cpu.max") or b"").split()
            if not limits:
                known = (read_number(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period"))
                limits = [str(each).encode() for each in known if each is not None]
            if len(limits) == 2 and all(each.isdigit() for each in limits):
                told = read_bytes(f"{folder}/cpu.stat") or b""
                periods = field(told, b"nr_periods ") or 0
                share = (field(told, b"nr_throttled ") or 0) / periods if periods else 0.0
                cores = int(limits[0]) / int(limits[1])
                return {"cores": round(cores, 2), "throttled": round(share, 3)}
            folder = folder.rpartition("/")[0]
    return None


def _room(usage: Usage) -> int:
    return (usage.limit or 0) - usage.used


def _is_of_memory(version: int, controllers: str) -> bool:
    return "memory" in controllers.split(",") if version == 1 else controllers == ""


def _folders(version: int, path: str, mounts: str, root: str) -> list[str]:
    """The folder of the cgroup and those above it, as far as they tell of memory."""
    for place, mounted in _mounts(version, "memory", mounts):
        top, names = root + place, _names_below(path, mounted)
        found = [top + "".join(f"/{name}" for name in names[:n]) for n in range(len(names), -1, -1)]
        # The second version tells only where it was told to, and nothing at its very top.
        told = [each for each in found if Path(each, _NAMES[version].used).exists()]
        if told:
            return told
    return []


def _mounts(version: int, controller: str, mounts: str) -> Iterator[tuple[str, str]]:
    """Where cgroups with this controller are to be seen, and from which one of them on."""
    for line in mounts.splitlines():
        before, _, behind = line.partition(" - ")
        place, kind = before.split(), behind.split()
        if len(place) < 5 or len(kind) < 3:
            continue
        if version == 1 and (kind[0] != "cgroup" or controller not in kind[2].split(",")):
            continue
        if version == 2 and kind[0] != "cgroup2":
            continue
        yield _plain(place[4]), _plain(place[3])


def _names_below(path: str, mounted: str) -> list[str]:
    """From the cgroup that is mounted down to this one.

    A container may see a part of the tree only: `mounted` is then the part's top. One that is
    not below it, as seen from within, is the container's own, and that is the top.
    """
    below = [name for name in path.split("/") if name]
    above = [name for name in mounted.split("/") if name]
    if below[: len(above)] != above or ".." in below:
        return []
    return below[len(above) :]


def _plain(text: str) -> str:
    """Of a path in mountinfo, where a space is \\040."""
    parts = text.split("\\")
    return parts[0] + "".join(
        chr(int(each[:3], 8)) + each[3:] if each[:3].isdigit() else "\\" + each
        for each in parts[1:]
    )


# -- What the kernel counts of its OOM killer: a count that moved tells who did it -----------------


_DYING_SECONDS = 10.0  # of what was killed, and of who depended on it


def read_counters(cgroup: MemoryCgroup | None) -> dict[str, Any]:
    """{"cgroup": those of the cgroup or None, "vmstat_oom_kill": of the whole machine or None}."""
    return {
        "cgroup": None if cgroup is None else cgroup.counters(),
        "vmstat_oom_kill": field(read_bytes("/proc/vmstat") or b"", b"oom_kill "),
    }


def first_counters(told: dict[str, Any] | None, seen: dict[str, Any]) -> dict[str, Any]:
    """Those of the start as they were told, unless they are of another cgroup."""
    if told is None:
        return seen
    paths = [(each["cgroup"] or {}).get("path") for each in (told, seen)]
    return told if paths[0] == paths[1] else seen


class Counted:
    """The counters over a life: at its start, and before whatever happened in the last seconds."""

    def __init__(self, first: dict[str, Any]) -> None:
        self.start = self.before = self._newest = first
        self._moved_at = float("-inf")  # when the kernel has killed somebody

    def add(self, newest: dict[str, Any], now: float) -> None:
        if _kills(newest) != _kills(self._newest):
            # A process that is killed needs time to die, and so does its parent without it: what
            # was counted before is kept for then, though somebody looks in between.
            self.before, self._moved_at = self._newest, now
        elif now - self._moved_at > _DYING_SECONDS:
            self.before = newest
        self._newest = newest


def _kills(counters: dict[str, Any]) -> tuple[Any, Any]:
    cgroup = counters["cgroup"] or {}
    return cgroup.get("oom_kill"), counters["vmstat_oom_kill"]
