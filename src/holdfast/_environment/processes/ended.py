"""How a process ended that is not our child, as far as the system tells."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import time
from dataclasses import dataclass
from typing import Any

from holdfast._environment.processes.proc import read_bytes
from holdfast._environment.processes.tree import Tree, parent

# struct pidfd_info of Linux 6.15 and later: what waitpid would have given its parent.
_INFO = struct.Struct("<QQ11Ii")
_WANTS_EXIT = 1 << 3
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11


def how_it_died(pidfd: int | None, pid: int) -> str | None:
    """In words; None if the system does not say, or does not say yet."""
    code = exit_code(pidfd, pid)
    if code is None:
        return None
    if code >= 0:
        return f"ended with status {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def exit_code(pidfd: int | None, pid: int) -> int | None:
    """As subprocess gives it: -9 for a kill. None where `how_it_died` gives None.

    The descriptor must have been opened while the process was there. It tells even after the
    parent has asked for the status, which the pid alone does not.
    """
    status = _exit_status(pidfd)
    if status is None:
        status = _zombie_status(pid)
    if status is None:
        # The parent may have asked between the two: only then does the descriptor tell.
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
    """Of a process whose parent has not asked for it yet."""
    status = _told_by_proc(pid)
    if status != 0:
        return status
    # Who may not know it is told 0 as well. Then this is not for us either; else there is none.
    try:
        os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115  its error is what is asked for
    except FileNotFoundError:
        return _told_by_proc(pid)
    except OSError:
        return None
    return None


def _told_by_proc(pid: int) -> int | None:
    fields = (read_bytes(f"/proc/{pid}/stat") or b"").rpartition(b")")[2].split()
    return int(fields[49]) if len(fields) > 49 and fields[0] == b"Z" else None


# -- The processes below one, and how each of them ended -------------------------------------------
# A death is noted in the order of the deaths, even if nobody looked between two of them: the
# kernel lists the descriptors in the order in which they became ready.


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
    """Those of one process. For one thread."""

    def __init__(self, pid: int, tree: Tree | None = None, most: int = 64) -> None:
        self._tree = Tree(pid) if tree is None else tree
        self._most = most
        self._there: dict[int, _Process] = {}
        self._ended: list[dict[str, Any]] = []
        self._buried: set[int] = set()  # those that their parent has not asked for yet
        # Where there is none, or no pidfd, a death is learned from who is no longer there.
        self._deaths = select.epoll() if hasattr(select, "epoll") else None

    def fileno(self) -> int:
        """Ready when somebody has ended, for a selector: then call `note`."""
        return -1 if self._deaths is None else self._deaths.fileno()

    def look(self, pids: list[int] | None = None) -> list[int]:
        """Note who is there, by the list of `Tree.look` if that was just made."""
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
                known.comm, known.rank = _comm(pid) or known.comm, _rank(pid)
        for pid in self._there.keys() - set(found):
            if self._deaths is None or self._there[pid].pidfd is None:
                self._bury(self._there.pop(pid))
        return found

    def note(self) -> None:
        """Note who has ended since."""
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

        Of more than can be kept, those that ended well are forgotten first, then the oldest.
        """
        self.note()
        return list(self._ended)

    def close(self) -> None:
        """Let go of all descriptors."""
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
        new = _Process(pid, parent(pid), pidfd, _comm(pid), _rank(pid), now)
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
        self._ended.append(
            {
                "pid": dead.pid,
                "ppid": dead.ppid,
                "comm": dead.comm,
                "rank": dead.rank,
                "status": status,
                "ended": time.time(),
            }
        )
        if len(self._ended) > self._most:
            well = next((each for each in self._ended if each["status"] == 0), self._ended[0])
            self._ended.remove(well)


def _comm(pid: int) -> str:
    return (read_bytes(f"/proc/{pid}/comm") or b"").decode(errors="replace").strip()


def _rank(pid: int) -> int | None:
    for each in (read_bytes(f"/proc/{pid}/environ") or b"").split(b"\0"):
        if each.startswith(b"RANK="):
            with contextlib.suppress(ValueError):
                return int(each[5:])
    return None


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        with contextlib.suppress(OSError):
            os.close(descriptor)
