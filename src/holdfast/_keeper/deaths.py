"""How a process ended that is not our child, as far as the system tells."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
from pathlib import Path

# struct pidfd_info of Linux 6.15 and later: what waitpid would have given its parent.
_INFO = struct.Struct("<QQ11Ii")
_WANTS_EXIT = 1 << 3
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11


def how_it_died(pidfd: int | None, pid: int) -> str | None:
    """In words; None if the system does not say, or does not say yet."""
    status = _exit_status(pidfd) if pidfd is not None else None
    if status is None:
        status = _zombie_status(pid)
    if status is None:
        return None
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(number).name}"
        return f"was killed by signal {number}"
    return f"ended with status {os.WEXITSTATUS(status)}"


def _exit_status(pidfd: int) -> int | None:
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
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if fields[0] != "Z" or len(fields) < 50:
        return None
    status = int(fields[49])
    return status or None
