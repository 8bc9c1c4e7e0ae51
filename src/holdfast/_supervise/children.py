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

from holdfast._environment.processes.tree import children, descendants
from holdfast._environment.processes.tree import is_keeper as is_keeper
from holdfast._environment.processes.tree import is_known as is_known

_PROC = Path("/proc")
_WRAPPERS = ("pixi", "uv", "uvx")
# Their work is done by processes that are not below them, mostly on other machines.
_CLIENTS = ("srun", "ssh", "docker", "podman", "kubectl", "flux", "jsrun")
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for this signal."""
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_bytes().splitlines():
            if line.startswith(b"SigCgt:"):
                return _has(line, number)
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


def has_ranks(top: int) -> bool:
    """Whether some below `top` are of a job of several."""
    for pid in descendants(top):
        with contextlib.suppress(OSError):
            words = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
            sizes = [word[11:] for word in words if word.startswith(b"WORLD_SIZE=")]
            if any(size not in (b"", b"0", b"1") for size in sizes):
                return True
    return False


def works_elsewhere(top: int) -> str | None:
    """The program below `top` whose work is not to be seen from here, if there is one."""
    for pid in descendants(top):
        with contextlib.suppress(OSError):
            name = (_PROC / str(pid) / "comm").read_text(errors="replace").strip()
            if name in _CLIENTS:
                return name
    return None


def is_there(pid: int) -> bool:
    """Whether a process has not ended yet."""
    with contextlib.suppress(OSError, IndexError):
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split(None, 1)
        return fields[0] not in (b"Z", b"X")
    return False


def work_of(pid: int) -> tuple[bytes, ...]:
    """Its state, and numbers that change when it does anything."""
    with contextlib.suppress(OSError):
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        done = (_PROC / str(pid) / "io").read_bytes()
        return (fields[0], *fields[11:13], done)
    return (b"",)


def is_doomed(pid: int) -> bool:
    """Whether a process has been killed, and is still there: it waits for a disk that does not
    answer, or is frozen."""
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / str(pid) / "status").read_bytes().splitlines():
            if line.startswith((b"SigPnd:", b"ShdPnd:")) and _has(line, signal.SIGKILL):
                return is_there(pid)
    return False


def is_traced(pid: int) -> bool:
    """Whether a debugger holds it."""
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / str(pid) / "status").read_bytes().splitlines():
            if line.startswith(b"TracerPid:"):
                return int(line.split()[1]) != 0
    return False


def age_seconds(pid: int) -> float:
    """For how long a process has been there; 0 for one that has ended."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        # The name comes first, in brackets, and may hold anything.
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / _TICKS
    return 0.0


def _has(line: bytes, number: int) -> bool:
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


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
