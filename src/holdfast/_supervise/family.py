"""The processes below this one, by what /proc tells of them.

Whoever ends while it is looked at is simply not there. A list of children can miss one
while another of them ends: what must not be missed is looked at twice.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path

_PROC = Path("/proc")
# In the words of every keeper: see `_program` in _custody/launch.py, which starts them.
_KEEPER = b"holdfast._keeper"
_KEEPER_WORDS = 4  # the interpreter, its options, the program: what comes behind is data
_WRAPPERS = ("pixi", "uv", "uvx")
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def is_known() -> bool:
    """Whether there is a /proc at all."""
    return (_PROC / "self/status").exists()


def children(pid: int) -> list[int]:
    """The processes that this one has started or adopted."""
    if not _has_lists():
        return [each for each in _all() if _parent(each) == pid]
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_bytes().split())
    return found


def descendants(pid: int) -> list[int]:
    """All below it."""
    found = children(pid)
    for each in found:  # grows as it goes
        found += children(each)
    return found


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
    return [pid for pid in descendants(top) if _is_keeper(pid)]


def age_seconds(pid: int) -> float:
    """For how long a process has been there; 0 for one that has ended."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        # The name comes first, in brackets, and may hold anything.
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / _TICKS
    return 0.0


def _is_wrapper(pid: int) -> bool:
    # Go's programs, apptainer among them, catch all signals; this one nobody else has a use for.
    if catches(pid, signal.SIGURG):
        return True
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / "comm").read_text().strip() in _WRAPPERS
    return False


def _is_keeper(pid: int) -> bool:
    with contextlib.suppress(OSError):
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        return any(_KEEPER in word for word in words[:_KEEPER_WORDS])
    return False


@functools.cache
def _has_lists() -> bool:
    # A kernel can be built without them. All of /proc takes long to read on a large machine.
    return (_PROC / f"self/task/{os.getpid()}/children").exists()


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int((_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])
    return 0


def _all() -> Iterator[int]:
    with contextlib.suppress(OSError):
        for entry in _PROC.iterdir():
            if entry.name.isdigit():
                yield int(entry.name)
