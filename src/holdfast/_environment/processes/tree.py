"""The processes below one, and their memory, from /proc.

A process that ends during a reading is left out. While one child ends, the kernel's list may lack
another one: code that must not miss a process reads twice.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os

from holdfast._environment.processes.proc import field, read_bytes, stat_fields

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_FORGET_AFTER_LOOKS = 60
# In the command line of every keeper: see `command` in identity.py, which starts them.
_KEEPER = b"holdfast._keeper"
_LOGGER = b"holdfast.loggers._child"
_GUARD = b"holdfast._store.memory.waiting"
_KEEPER_WORDS = 4  # the interpreter, its options, the program; data follows


def is_known() -> bool:
    return os.path.exists("/proc/self/stat")  # noqa: PTH110  quicker than a Path


def children(pid: int) -> list[int]:
    if not _has_lists():
        return [each for each in _all() if parent(each) == pid]
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.scandir(f"/proc/{pid}/task"):
            found += map(int, (read_bytes(f"{task.path}/children") or b"").split())
    return found


def descendants(pid: int) -> list[int]:
    """All processes below one, each after its parent."""
    if not _has_lists():
        return _below(pid, {each: parent(each) for each in _all()})
    found = children(pid)
    for each in found:  # grows during the loop
        found += children(each)
    return found


def parent(pid: int) -> int:
    """0 if there is none."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else 0


def rss(pid: int) -> int | None:
    """Bytes in memory; shared pages count for each process."""
    fields = (read_bytes(f"/proc/{pid}/statm") or b"").split(None, 2)
    return int(fields[1]) * _PAGE if len(fields) > 1 else None


def swap(pid: int) -> int | None:
    found = field(read_bytes(f"/proc/{pid}/status") or b"", b"VmSwap:")
    return None if found is None else found * 1024


def keepers_of(folder: str, attempt: int) -> list[int]:
    """The keepers of an attempt on this machine, by their command lines.

    For a keeper without a heartbeat. It reads all processes.
    """
    found = []
    for pid in filter(is_keeper, _all()):
        words = (read_bytes(f"/proc/{pid}/cmdline") or b"").rstrip(b"\0").split(b"\0")
        with contextlib.suppress(ValueError, TypeError, KeyError):
            plan = json.loads(words[-1])
            if plan["attempt"] == attempt and os.path.realpath(plan["folder"]) == folder:
                found.append(pid)
    return found


def is_keeper(pid: int) -> bool:
    return _runs(pid, _KEEPER)


def is_guard(pid: int) -> bool:
    """True if a process guards an arena that waits for the next attempt."""
    return _runs(pid, _GUARD)


def is_ours(pid: int) -> bool:
    """True for a keeper, a logger or a guard: they are no part of the training."""
    return _runs(pid, _KEEPER, _LOGGER, _GUARD)


def _runs(pid: int, *modules: bytes) -> bool:
    words = (read_bytes(f"/proc/{pid}/cmdline") or b"").split(b"\0", _KEEPER_WORDS)
    return any(module in word for word in words[:_KEEPER_WORDS] for module in modules)


class Tree:
    """The processes below one, polled again and again at a lower cost.

    A kernel without lists of children makes us read all processes of the machine. A process that
    was not below ours at the last poll is not below it now, so only new ones are read.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._strangers: set[int] = set()
        self._ours: set[int] = set()  # keepers, loggers and guards
        self._readings: dict[int, int] = {}  # of the command lines of all others
        self._looks = 0

    def look(self) -> list[int]:
        """All below it now, each after its parent; without this process and without keepers."""
        if not _has_lists():
            found = [each for each in self._read_all() if not self._is_ours(each)]
        else:
            found = self._others(children(self._pid))
            for each in found:  # grows during the loop
                found += self._others(children(each))
        self._readings = {each: self._readings[each] for each in found}
        return found

    def _others(self, pids: list[int]) -> list[int]:
        return [each for each in pids if each != os.getpid() and not self._is_ours(each)]

    def _is_ours(self, pid: int) -> bool:
        # Read twice: before exec, a process has the command line of its parent.
        readings = self._readings.get(pid, 0)
        if pid not in self._ours and readings < 2:
            self._readings[pid] = readings + 1
            if is_ours(pid):
                self._ours.add(pid)
        return pid in self._ours

    def _read_all(self) -> list[int]:
        self._looks += 1
        if self._looks % _FORGET_AFTER_LOOKS == 0:
            self._strangers.clear()  # the system may have given a pid to one of ours
        there = set(_all())
        self._strangers &= there
        # Ours are read each time: when one ends, its children get another parent.
        parents = {each: parent(each) for each in there - self._strangers - {os.getpid()}}
        found = _below(self._pid, parents)
        # If the parent is unknown, both may have just started: read the child again.
        known = {each for each, above in parents.items() if above in there or above == 0}
        self._strangers |= known - {self._pid, *found}
        return found


def _below(pid: int, parents: dict[int, int]) -> list[int]:
    of: dict[int, list[int]] = {}
    for each, above in parents.items():
        of.setdefault(above, []).append(each)
    found = sorted(of.get(pid, ()))
    for each in found:  # grows during the loop
        found += sorted(of.get(each, ()))
    return found


@functools.cache
def _has_lists() -> bool:
    # A kernel can be built without them. Reading all of /proc is slow on a large machine.
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")  # noqa: PTH110  as above


def _all() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    return []
