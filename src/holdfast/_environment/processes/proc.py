"""Small files of the kernel, and deadlines that do not count the wait for a processor."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_ENOUGH = 1 << 16
_EXITING = 4  # PF_EXITING, in the flags of a process


def read_bytes(path: str) -> bytes | None:
    """The whole file; None if it is missing or closed to us.

    Several times cheaper than a Python file object, and called ten times a second.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        found = os.read(descriptor, _ENOUGH)
        while found and (more := os.read(descriptor, _ENOUGH)):
            found += more
        return found
    except OSError:
        return None
    finally:
        os.close(descriptor)


def read_number(path: str) -> int | None:
    """The number in a file that has nothing else."""
    try:
        return int(read_bytes(path) or b"")
    except ValueError:
        return None


def field(text: bytes, name: bytes) -> int | None:
    """The number after a name at the beginning of a line."""
    at = 0 if text.startswith(name) else text.find(b"\n" + name) + 1
    if at == 0 and not text.startswith(name):
        return None
    words = text[at + len(name) : at + len(name) + 40].split(None, 1)
    try:
        return int(words[0])
    except (IndexError, ValueError):
        return None


def stat_fields(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on; empty if there is no such process."""
    return read_stat(f"/proc/{pid}/stat")[1]


def read_stat(path: str) -> tuple[str, list[bytes]]:
    """The name of a process or thread, and the fields from the state on; none if it is gone."""
    # The name is in brackets, and may contain any character.
    before, _, after = (read_bytes(path) or b"").rpartition(b")")
    fields = after.split()
    name = before.partition(b"(")[2].decode(errors="replace")
    return name, fields if len(fields) >= 22 else []


def is_leaving(stat: bytes) -> bool:
    """True if a process ends or has ended, by its file `stat`.

    It leaves its cgroup and closes its files a moment before its parent learns of the end.
    """
    words = stat.rpartition(b")")[2].split()
    if words[:1] in ([b"Z"], [b"X"]):
        return True
    return len(words) > 6 and words[6].isdigit() and bool(int(words[6]) & _EXITING)


# -- The time that threads wait for a processor ----------------------------------------------------
# On a crowded machine a thread can be ready to run and still stand. That time is neither a hang nor
# a missed deadline. The kernel counts it for each thread, in the second field of schedstat.


# A deadline moves by the longest wait of one thread, and of many threads one may always wait.
_MOST_TIMES = 12.0
# Of the time that has passed. Beside forty that compute, a poller waits for a fifth of it.
_STARVED_SHARE = 1 / 3


def read_schedstat(folder: str) -> tuple[float, float] | None:
    """The seconds that a thread has computed and waited; None if the kernel does not count."""
    words = (read_bytes(f"{folder}/schedstat") or b"").split(None, 2)
    with contextlib.suppress(ValueError, IndexError):
        return int(words[0]) / 1e9, int(words[1]) / 1e9
    return None


def waited_seconds(pid: int, tid: int) -> float | None:
    """How long a thread has waited for a processor since its start; None: not known."""
    found = read_schedstat(f"/proc/{pid}/task/{tid}")
    return None if found is None else found[1]


def waits_of(pids: Iterable[int]) -> dict[int, float]:
    found: dict[int, float] = {}
    for pid in pids:
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208  quicker than a Path
        for tid in map(int, names):
            waited = waited_seconds(pid, tid)
            if waited is not None:
                found[tid] = waited
    return found


class FairDeadline:
    """A deadline for processes, plus the time that one of them waits for a processor.

    `pids` may return other processes at each call. The time is at most `times` as long.
    """

    def __init__(
        self,
        seconds: float,
        pids: Callable[[], Iterable[int]],
        clock: Callable[[], float] = time.monotonic,
        waits: Callable[[Iterable[int]], dict[int, float]] = waits_of,
        *,
        times: float = _MOST_TIMES,
    ) -> None:
        self._seconds = seconds
        self._pids = pids
        self._clock = clock
        self._waits = waits
        self._times = times
        self._began = self._measured_at = clock()
        self._before = waits(pids()) if seconds > 0 else {}
        self._waited = 0.0  # by the thread that waited longest; it may have ended since
        self.at = self._began + seconds  # when to ask again

    def is_over(self) -> bool:
        now = self._clock()
        if now < self.at or self._seconds <= 0:
            return now >= self.at
        self._measure(now)
        more = min(self._waited, (self._times - 1) * self._seconds)
        self.at = max(self.at, self._began + self._seconds + more)
        return now >= self.at

    def is_starved(self) -> bool:
        """True if a process has spent much of its time waiting for a processor."""
        self._measure(self._clock())
        return self._waited > _STARVED_SHARE * (self._measured_at - self._began)

    def _measure(self, now: float) -> None:
        if found := self._waits(self._pids()):  # else all of them have ended
            self._measured_at = now
        for tid, waited in found.items():
            self._waited = max(self._waited, waited - self._before.get(tid, 0.0))
