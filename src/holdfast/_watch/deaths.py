"""How a process ended that is not our child, as far as the system tells."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct

from holdfast._watch.proc import read_bytes

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
