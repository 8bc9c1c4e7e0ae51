"""Whether memory is short: of the machine, of a cgroup, or in /dev/shm.

Used by processes whose memory is only a convenience: they give it up first. Only /proc, /sys and
/dev/shm are read.
"""

from __future__ import annotations

import os
import time

from holdfast._environment.processes.cgroup import MemoryCgroup
from holdfast._environment.processes.proc import field, read_bytes

_STALL_SHARE = 0.1  # of the time since the last poll, in which a process waited for memory
_LEAST_ROOM_SHARE = 10  # short: less than a tenth is free …
_LEAST_ROOM_BYTES = 4 << 30  # … and less than this
_LEAST_SHM_SHARE = 20
_LEAST_SHM_BYTES = 256 << 20


class MemoryPressure:
    """Polled at intervals; `root` is the parent of /proc and /sys."""

    def __init__(self, shm: str = "/dev/shm", root: str = "/") -> None:
        self._shm = shm
        self._root = root.rstrip("/")
        self._cgroup = MemoryCgroup.find(os.getpid(), root)
        self._stalled: dict[str, int] = {}
        self._looked = time.monotonic()
        self._share_stalled(1.0)  # earlier stalls do not count: a process has just died of them

    def reason(self) -> str:
        """Why memory is short now; empty if it is not."""
        now = time.monotonic()
        seconds, self._looked = max(now - self._looked, 0.001), now
        if self._share_stalled(seconds) >= _STALL_SHARE:
            return "processes wait for memory"
        usage = None if self._cgroup is None else self._cgroup.usage()
        limit = None if usage is None else usage.limit
        if usage is not None and limit is not None and _is_short(limit - usage.used, limit):
            return "the cgroup is nearly full"
        if _is_short(*self._machine_bytes()):
            return "the machine's memory is nearly full"
        if self._is_shm_full():
            return f"{self._shm} is nearly full"
        return ""

    def _share_stalled(self, seconds: float) -> float:
        """The kernel's count (PSI) of the machine or the cgroup, the larger one."""
        whole = f"{self._root}/proc/pressure/memory"
        places = [whole]
        if self._cgroup is not None:
            places.append(f"{self._cgroup.folders[0]}/memory.pressure")
        shares = {}
        for place in places:
            total = _stalled_us(read_bytes(place) or b"")
            if total is not None:
                shares[place] = (total - self._stalled.get(place, total)) / 1e6 / seconds
                self._stalled[place] = total
        free, total = self._machine_bytes()
        if free > total // 2:
            # Other processes wait within their own limits: our memory would not help them.
            shares.pop(whole, None)
        return max(shares.values(), default=0.0)

    def _machine_bytes(self) -> tuple[int, int]:
        text = read_bytes(f"{self._root}/proc/meminfo") or b""
        free, total = field(text, b"MemAvailable:"), field(text, b"MemTotal:")
        return (0, 0) if free is None or total is None else (free * 1024, total * 1024)

    def _is_shm_full(self) -> bool:
        try:
            room = os.statvfs(self._shm)
        except OSError:
            return False
        total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
        return total > 0 and free < min(total // _LEAST_SHM_SHARE, _LEAST_SHM_BYTES)


def _is_short(free: int, total: int) -> bool:
    return free < min(total // _LEAST_ROOM_SHARE, _LEAST_ROOM_BYTES)


def _stalled_us(text: bytes) -> int | None:
    """The time since the boot in which at least one process waited for memory."""
    line = next((line for line in text.splitlines() if line.startswith(b"some ")), b"")
    _, _, total = line.partition(b"total=")
    return int(total) if total.isdigit() else None
