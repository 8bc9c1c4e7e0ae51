"""What the kernel counts of its OOM killer: a count that moved tells who did it."""

from __future__ import annotations

from typing import Any

from holdfast._watch.cgroup import MemoryCgroup
from holdfast._watch.proc import field, read_bytes

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
