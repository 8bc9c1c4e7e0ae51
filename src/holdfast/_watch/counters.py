"""What the kernel counts of its OOM killer: a count that moved tells who did it."""

from __future__ import annotations

from typing import Any

from holdfast._watch.cgroup import MemoryCgroup
from holdfast._watch.proc import field, read_bytes


def read_counters(cgroup: MemoryCgroup | None) -> dict[str, Any]:
    """{"cgroup": those of the cgroup or None, "vmstat_oom_kill": of the whole machine or None}."""
    return {
        "cgroup": None if cgroup is None else cgroup.counters(),
        "vmstat_oom_kill": field(read_bytes("/proc/vmstat") or b"", b"oom_kill "),
    }
