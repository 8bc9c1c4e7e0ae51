"""The processes below this one, and what they do with signals.

Whoever ends while it is looked at is simply not there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from holdfast._watch.tree import children, descendants, is_keeper
from holdfast._watch.tree import is_known as is_known

_PROC = Path("/proc")
_WRAPPERS = ("pixi", "uv", "uvx")
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for this signal."""
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_bytes().splitlines():
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def catchers(top: int, number: int, passed_over: Collection[int] = ()) -> list[int]:
    """Those below `top` that catch the signal, but none below one that does.

    Whoever catches it answers for what is below: torchrun passes it on, and a worker that was
    forked from a rank has the rank's handler only by chance. A wrapper that hands on whatever
    comes does not count: it would hand a warning to a trainer that still imports torch.
    """
    found: list[int] = []
    waiting = children(top)
    for pid in waiting:  # grows as it goes
        if pid in passed_over:
            continue
        if catches(pid, number) and not _is_wrapper(pid):
            found.append(pid)
        else:
            waiting += children(pid)
    return found


def keepers(top: int) -> list[int]:
    """The keepers below `top`."""
    return [pid for pid in descendants(top) if is_keeper(pid)]


def left_behind(top: int, session: int) -> list[int]:
    """What a command that was killed leaves running: all in its session, and the ranks of a
    launcher, which have sessions of their own. Whoever has made itself a daemon wants to stay."""
    found: list[int] = []
    for pid in descendants(top):
        with contextlib.suppress(OSError):
            if (os.getsid(pid) == session or _is_rank(pid)) and not is_keeper(pid):
                found.append(pid)
    return found


def age_seconds(pid: int) -> float:
    """For how long a process has been there; 0 for one that has ended."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        # The name comes first, in brackets, and may hold anything.
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / _TICKS
    return 0.0


def _is_rank(pid: int) -> bool:
    words = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    return any(word.startswith(b"RANK=") for word in words)


def _is_wrapper(pid: int) -> bool:
    # Go's programs, apptainer among them, catch all signals; this one nobody else has a use for.
    if catches(pid, signal.SIGURG):
        return True
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / "comm").read_text().strip() in _WRAPPERS
    return False
