"""The processes below one, and their memory, from /proc.

A process that ends during a reading is left out. While one child ends, the kernel's list may lack
another one: code that must not miss a process reads twice.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable

from holdfast._environment.processes.proc import PAGE_BYTES, field, read_bytes, stat_fields

# In the command line of every keeper: see `command` in identity.py, which starts them.
_KEEPER = b"holdfast._keeper"
_LOGGER = b"holdfast.loggers._child"
_GUARD = b"holdfast._store.memory.waiting"
_KEEPER_WORDS = 4  # the interpreter, its options, the program; data follows


def is_known() -> bool:
    return os.path.exists("/proc/self/stat")  # noqa: PTH110  quicker than a Path


def children(pid: int) -> list[int]:
    return [*_children_of()(pid)]


def descendants(
    pid: int, chosen: Callable[[list[int]], list[int]] = lambda pids: [*pids]
) -> list[int]:
    """All processes below one, each after its parent; of each one's children those chosen."""
    children_of = _children_of()
    found = chosen(children_of(pid))
    for each in found:  # grows during the loop
        found += chosen(children_of(each))
    return found


def rank_of(pid: int) -> int | None:
    """The number that a launcher gave it, or the process that has forked it."""
    for each in (read_bytes(f"/proc/{pid}/environ") or b"").split(b"\0"):
        if each.startswith(b"RANK="):
            with contextlib.suppress(ValueError):
                return int(each[5:])
    return None


def ranks_below(pid: int) -> dict[int, int]:
    """The ranks that a launcher has started, by number. A single one must be its only child."""
    if rank_of(pid) is not None:
        return {}
    children_of, found = _children_of(), {}
    others = [*children_of(pid)]
    for each in others:  # grows during the loop
        rank = rank_of(each)
        if rank is None:
            others += children_of(each)
        elif not is_ours(each):
            found[rank] = each
    is_clear = len(found) > 1 or [*found.values()] == children_of(pid)
    return dict(sorted(found.items())) if is_clear else {}


def _children_of() -> Callable[[int], list[int]]:
    """What gives the children of a process; without the kernel's lists, by one pass over /proc."""
    if _has_lists():
        return _listed
    found: dict[int, list[int]] = {}
    for each in sorted(_all()):
        found.setdefault(parent(each), []).append(each)
    return lambda pid: found.get(pid, [])


def _listed(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.scandir(f"/proc/{pid}/task"):
            found += map(int, (read_bytes(f"{task.path}/children") or b"").split())
    return found


def parent(pid: int) -> int:
    """0 if there is none."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else 0


def rss(pid: int) -> int | None:
    """Bytes in memory; shared pages count for each process."""
    fields = (read_bytes(f"/proc/{pid}/statm") or b"").split(None, 2)
    return int(fields[1]) * PAGE_BYTES if len(fields) > 1 else None


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
    """The processes below one, polled again and again."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ours: set[int] = set()  # keepers, loggers and guards
        self._readings: dict[int, int] = {}  # of the command lines of all others

    def look(self) -> list[int]:
        """All below it now, each after its parent; without this process and without keepers."""
        found = descendants(self._pid, self._others)
        self._readings = {each: self._readings[each] for each in found}
        return found

    def _others(self, pids: list[int]) -> list[int]:
        return [each for each in pids if each != os.getpid() and not self._is_ours(each)]

    def _is_ours(self, pid: int) -> bool:
        # Read twice: before exec, a process has the command line of its parent. Within it, none.
        readings = self._readings.setdefault(pid, 0)
        if pid not in self._ours and readings < 2:
            if is_ours(pid):
                self._ours.add(pid)
            elif read_bytes(f"/proc/{pid}/cmdline"):
                self._readings[pid] = readings + 1
        return pid in self._ours


@functools.cache
def _has_lists() -> bool:
    # A kernel can be built without them. Reading all of /proc is slow on a large machine.
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")  # noqa: PTH110  as above


def _all() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    return []
