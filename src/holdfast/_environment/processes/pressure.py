"""Whether memory is short: of the machine, of a cgroup, or in /dev/shm.

Asked by a process that holds memory only for convenience, and gives it up first. Only /proc, /sys
and /dev/shm are read.
"""

from __future__ import annotations

import os
import time

from holdfast._environment.processes.cgroup import MemoryCgroup
from holdfast._environment.processes.proc import field, read_bytes

_STALL_SHARE = 0.1  # of the time since the last look, in which some process waited for memory
_LEAST_ROOM_SHARE = 10  # short: less than a tenth is free …
_LEAST_ROOM_BYTES = 4 << 30  # … and less than this
_LEAST_SHM_SHARE = 20
_LEAST_SHM_BYTES = 256 << 20


class MemoryPressure:
    """Looks again and again; `root` is another folder for /proc and /sys."""

    def __init__(self, shm: str = "/dev/shm", root: str = "/") -> None:
        self._shm = shm
        self._root = root.rstrip("/")
        self._cgroup = MemoryCgroup.find(os.getpid(), root)
        self._stalled: dict[str, int] = {}
        self._looked = time.monotonic()
        self._share_stalled(1.0)  # what was before does not count: a process has just died of it

    def reason(self) -> str:
        """Why memory is short now; empty if it is not."""
        now = time.monotonic()
        seconds, self._looked = max(now - self._looked, 0.001), now
        if self._share_stalled(seconds) >= _STALL_SHARE:
            return "processes wait for memory"
        if self._is_cgroup_full():
            return "the cgroup is nearly full"
        if self._is_machine_full():
            return "the machine's memory is nearly full"
        if self._is_shm_full():
            return f"{self._shm} is nearly full"
        return ""

    def _share_stalled(self, seconds: float) -> float:
        """The kernel's own count (PSI), of the machine or the cgroup, whichever stalled longer."""
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
            # Others wait for memory within limits of their own: ours would not help them.
            shares.pop(whole, None)
        return max(shares.values(), default=0.0)

    def _is_cgroup_full(self) -> bool:
        usage = None if self._cgroup is None else self._cgroup.usage()
        if usage is None or usage.limit is None:
            return False
        return _is_short(usage.limit - usage.used, usage.limit)

    def _is_machine_full(self) -> bool:
        return _is_short(*self._machine_bytes())

    def _machine_bytes(self) -> tuple[int, int]:
        """What is free, and all; both 0 if the kernel does not say."""
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
    """The time in which at least one process waited for memory, since the start."""
    line = next((line for line in text.splitlines() if line.startswith(b"some ")), b"")
    _, _, total = line.partition(b"total=")
    return int(total) if total.isdigit() else None
