"""How a process ended that is not our child, as far as the system knows."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import time
from dataclasses import dataclass
from typing import Any

from holdfast._environment.processes.proc import stat_fields
from holdfast._environment.processes.threads import name_of
from holdfast._environment.processes.tree import Tree, parent, rank_of
from holdfast._text import signal_name

# struct pidfd_info of Linux 6.15 and later: the status that waitpid gives the parent.
_INFO = struct.Struct("<QQ11Ii")
_WANTS_EXIT = 1 << 3
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11


def how_it_died(pidfd: int | None, pid: int) -> str | None:
    """In words; None if the system does not know, or does not know yet."""
    code = exit_code(pidfd, pid)
    if code is None:
        return None
    if code >= 0:
        return f"ended with status {code}"
    return f"was killed by {signal_name(code)}"


def exit_code(pidfd: int | None, pid: int) -> int | None:
    """As in subprocess: -9 for a kill. None if the system does not know.

    The descriptor must have been opened while the process lived. It has the status even after the
    parent has reaped the process.
    """
    status = _exit_status(pidfd)
    if status is None:
        status = _zombie_status(pid)
    if status is None:
        # The parent may have reaped it between the two. Only then the descriptor has the status.
        status = _exit_status(pidfd)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _exit_status(pidfd: int | None) -> int | None:
    if pidfd is None:
        return None
    buffer = bytearray(_INFO.size)
    _INFO.pack_into(buffer, 0, _WANTS_EXIT, *([0] * 13))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, buffer)
    except OSError:
        return None
    fields = _INFO.unpack_from(buffer)
    return int(fields[-1]) if fields[0] & _WANTS_EXIT else None


def _zombie_status(pid: int) -> int | None:
    """Of a process that its parent has not reaped."""
    status = _shown_status(pid)
    if status != 0:
        return status
    # The kernel also shows 0 to a process without permission. That process may not read the link
    # either; with permission, a zombie has no such link.
    try:
        os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115  only its error counts
    except FileNotFoundError:
        return _shown_status(pid)
    except OSError:
        pass
    return None


def _shown_status(pid: int) -> int | None:
    fields = stat_fields(pid)
    return int(fields[49]) if len(fields) > 49 and fields[0] == b"Z" else None


# -- The processes below one, and how each of them ended -------------------------------------------
# Deaths are recorded in their order, even without a poll between two of them: the kernel lists the
# descriptors in the order in which they became ready.


_RENAMED_SECONDS = 15.0  # a worker takes its name, and a child its program, a moment later


@dataclass
class _Process:
    pid: int
    ppid: int
    pidfd: int | None
    comm: str
    rank: int | None
    seen: float


class Descendants:
    """The descendants of one process. Not thread-safe."""

    def __init__(self, pid: int, tree: Tree | None = None, most: int = 64) -> None:
        self._tree = Tree(pid) if tree is None else tree
        self._most = most
        self._there: dict[int, _Process] = {}
        self._ended: list[dict[str, Any]] = []
        self._buried: set[int] = set()  # not reaped by their parents yet
        # Without epoll or a pidfd, a process has died when it is no longer listed.
        self._deaths = select.epoll() if hasattr(select, "epoll") else None

    def fileno(self) -> int:
        """For a selector: ready when a process has ended. Then call `note`."""
        return -1 if self._deaths is None else self._deaths.fileno()

    def look(self, pids: list[int] | None = None) -> list[int]:
        """Record the living processes; `pids` is the newest list of `Tree.look`."""
        self.note()
        found = self._tree.look() if pids is None else pids
        now = time.time()
        self._buried &= set(found)
        for pid in found:
            known = self._there.get(pid)
            if known is None:
                if pid not in self._buried and len(self._there) < self._most:
                    self._meet(pid, now)
            elif now - known.seen < _RENAMED_SECONDS:
                known.comm, known.rank = name_of(pid) or known.comm, rank_of(pid)
        for pid in self._there.keys() - set(found):
            if self._deaths is None or self._there[pid].pidfd is None:
                self._bury(self._there.pop(pid))
        return found

    def note(self) -> None:
        """Record the processes that have ended since."""
        if self._deaths is None:
            return
        by_descriptor = {each.pidfd: each for each in self._there.values()}
        with contextlib.suppress(OSError, ValueError):
            while events := self._deaths.poll(0, self._most):
                for descriptor, _ in events:
                    dead = by_descriptor.get(descriptor)
                    if dead is not None and self._there.pop(dead.pid, None) is not None:
                        self._bury(dead)

    def ended(self) -> list[dict[str, Any]]:
        """{"pid", "ppid", "comm", "rank", "status", "ended"} of each, in the order of their ends.

        If there are too many, those with status 0 are dropped first, then the oldest.
        """
        self.note()
        return list(self._ended)

    def close(self) -> None:
        for each in self._there.values():
            _close(each.pidfd)
        self._there.clear()
        if self._deaths is not None:
            self._deaths.close()
            self._deaths = None

    def _meet(self, pid: int, now: float) -> None:
        pidfd: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            pidfd = os.pidfd_open(pid)
        new = _Process(pid, parent(pid), pidfd, name_of(pid) or "", rank_of(pid), now)
        if pidfd is not None and self._deaths is not None:
            try:
                self._deaths.register(pidfd, select.EPOLLIN)
            except OSError:
                _close(pidfd)
                return
        self._there[pid] = new

    def _bury(self, dead: _Process) -> None:
        status = exit_code(dead.pidfd, dead.pid)
        _close(dead.pidfd)
        self._buried.add(dead.pid)
        known = {name: getattr(dead, name) for name in ("pid", "ppid", "comm", "rank")}
        self._ended.append({**known, "status": status, "ended": time.time()})
        if len(self._ended) > self._most:
            well = next((each for each in self._ended if each["status"] == 0), self._ended[0])
            self._ended.remove(well)


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        with contextlib.suppress(OSError):
            os.close(descriptor)
