"""Who is below a process, and what they hold in memory, by what /proc tells.

Whoever ends while it is looked at is simply not there. A list of children can miss one
while another of them ends: what must not be missed is looked at twice.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os

from holdfast._environment.processes.proc import field, read_bytes

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_FORGET_AFTER_LOOKS = 60
# In the words of every keeper: see `_program` in _run/saving/launch.py, which starts them.
_KEEPER = b"holdfast._keeper"
_LOGGER = b"holdfast.loggers._child"
_GUARD = b"holdfast._store.memory.waiting"
_KEEPER_WORDS = 4  # the interpreter, its options, the program: what comes behind is data


def is_known() -> bool:
    """Whether there is a /proc at all."""
    return os.path.exists("/proc/self/stat")  # noqa: PTH110  quicker than a Path


def children(pid: int) -> list[int]:
    """The processes that this one has started or adopted."""
    if not _has_lists():
        return [each for each in _all() if parent(each) == pid]
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.scandir(f"/proc/{pid}/task"):
            found += map(int, (read_bytes(f"{task.path}/children") or b"").split())
    return found


def descendants(pid: int) -> list[int]:
    """All below it, each behind the one that started it."""
    if not _has_lists():
        return _below(pid, {each: parent(each) for each in _all()})
    found = children(pid)
    for each in found:  # grows as it goes
        found += children(each)
    return found


def parent(pid: int) -> int:
    """0 where there is none."""
    # The name comes first, in brackets, and may hold anything.
    fields = (read_bytes(f"/proc/{pid}/stat") or b"").rpartition(b")")[2].split(None, 2)
    return int(fields[1]) if len(fields) > 1 else 0


def rss(pid: int) -> int | None:
    """Bytes that are in memory; what processes share is counted in each."""
    fields = (read_bytes(f"/proc/{pid}/statm") or b"").split(None, 2)
    return int(fields[1]) * _PAGE if len(fields) > 1 else None


def swap(pid: int) -> int | None:
    """Bytes that have been moved out to a disk."""
    found = field(read_bytes(f"/proc/{pid}/status") or b"", b"VmSwap:")
    return None if found is None else found * 1024


def is_keeper(pid: int) -> bool:
    """Whether a process is a keeper."""
    return any(_KEEPER in word for word in _first_words(pid))


def keepers_of(folder: str, attempt: int) -> list[int]:
    """The keepers on this machine that work for an attempt, by the plan that each is started with.

    For one that has not beaten yet; all processes are gone through.
    """
    found = []
    for pid in filter(is_keeper, _all()):
        words = (read_bytes(f"/proc/{pid}/cmdline") or b"").rstrip(b"\0").split(b"\0")
        with contextlib.suppress(ValueError, TypeError, KeyError):
            plan = json.loads(words[-1])
            if plan["attempt"] == attempt and os.path.realpath(plan["folder"]) == folder:
                found.append(pid)
    return found


def is_ours(pid: int) -> bool:
    """Whether a process is a keeper, a logger or a guard, and no part of the training."""
    ours = (_KEEPER, _LOGGER, _GUARD)
    return any(each in word for word in _first_words(pid) for each in ours)


def is_guard(pid: int) -> bool:
    """Whether a process guards an arena that waits for the next attempt."""
    return any(_GUARD in word for word in _first_words(pid))


def _first_words(pid: int) -> list[bytes]:
    words = (read_bytes(f"/proc/{pid}/cmdline") or b"").split(b"\0", _KEEPER_WORDS)
    return words[:_KEEPER_WORDS]


class Tree:
    """The same of one process again and again, for less.

    Where the kernel keeps no lists of children, all processes of the machine must be gone
    through. Whoever was a stranger at the last look still is one, so only the new are read.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._strangers: set[int] = set()
        self._keepers: set[int] = set()
        self._readings: dict[int, int] = {}  # of the words of those that are none
        self._looks = 0

    def look(self) -> list[int]:
        """All below it now, each behind the one that started it; not who looks, and no keeper."""
        if not _has_lists():
            found = [each for each in self._go_through() if not self._is_keeper(each)]
        else:
            found = self._others(children(self._pid))
            for each in found:  # grows as it goes
                found += self._others(children(each))
        self._readings = {each: self._readings[each] for each in found}
        return found

    def _others(self, pids: list[int]) -> list[int]:
        return [each for each in pids if each != os.getpid() and not self._is_keeper(each)]

    def _is_keeper(self, pid: int) -> bool:
        # Read twice: until it runs its own program it has its parent's words.
        readings = self._readings.get(pid, 0)
        if pid not in self._keepers and readings < 2:
            self._readings[pid] = readings + 1
            if is_ours(pid):
                self._keepers.add(pid)
        return pid in self._keepers

    def _go_through(self) -> list[int]:
        self._looks += 1
        if self._looks % _FORGET_AFTER_LOOKS == 0:
            self._strangers.clear()  # a number may have passed on to one of ours
        there = set(_all())
        self._strangers &= there
        # Ours are read each time: when one ends, its children get another parent.
        parents = {each: parent(each) for each in there - self._strangers - {os.getpid()}}
        found = _below(self._pid, parents)
        # Not so one whose parent was not there: they may both have come this very moment.
        known = {each for each, above in parents.items() if above in there or above == 0}
        self._strangers |= known - {self._pid, *found}
        return found


def _below(pid: int, parents: dict[int, int]) -> list[int]:
    of: dict[int, list[int]] = {}
    for each, above in parents.items():
        of.setdefault(above, []).append(each)
    found = sorted(of.get(pid, ()))
    for each in found:  # grows as it goes
        found += sorted(of.get(each, ()))
    return found


@functools.cache
def _has_lists() -> bool:
    # A kernel can be built without them. All of /proc takes long to read on a large machine.
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")  # noqa: PTH110  as above


def _all() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    return []
