"""The processes below this one, and what they do with signals. A process that ends meanwhile is
treated as if it were not there."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Collection

from holdfast._environment.processes.proc import TICKS_PER_SECOND, field, read_bytes, stat_fields
from holdfast._environment.processes.tree import children, descendants, is_guard
from holdfast._environment.processes.tree import is_keeper as is_keeper
from holdfast._environment.processes.tree import is_known as is_known

_WRAPPERS = ("pixi", "uv", "uvx")
# Their work is done by processes that are not below them, mostly on other machines.
_CLIENTS = ("srun", "ssh", "docker", "podman", "kubectl", "flux", "jsrun")
_GUARD_SECONDS = 5.0


def send(pid: int, number: int) -> None:
    """A signal, if the process is still there."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def catches(pid: int, number: int) -> bool:
    return _has_bit(pid, b"SigCgt:", number)


def ignores(pid: int, number: int) -> bool:
    return _has_bit(pid, b"SigIgn:", number)


def catchers(top: int, number: int, passed_over: Collection[int] = ()) -> list[int]:
    """Those below `top` that catch the signal, but none below one that does.

    A process that catches it answers for those below: torchrun passes it on, and a worker that
    was forked from a rank has the rank's handler only by chance. A wrapper that passes on every
    signal does not count: it would pass a warning to a trainer that still imports torch.
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
    return [pid for pid in descendants(top) if is_keeper(pid)]


def end_guards(top: int) -> None:
    """Have the guards of waiting arenas remove them now, and wait until they have."""
    deadline = time.monotonic() + _GUARD_SECONDS
    for pid in filter(is_guard, descendants(top)):
        send(pid, signal.SIGTERM)
        while is_guard(pid) and time.monotonic() < deadline:
            time.sleep(0.005)


def left_behind(top: int, session: int, apart: Collection[int] = ()) -> list[int]:
    """The processes that a killed command leaves running.

    These are all in its session, and the ranks of a launcher, which have sessions of their own.
    Other processes with their own session are daemons, and stay; so do those that are `apart`.
    """
    found: list[int] = []
    for pid in descendants(top):
        if pid in apart:
            continue
        with contextlib.suppress(OSError):
            if (os.getsid(pid) == session or _variables(pid, b"RANK=")) and not is_keeper(pid):
                found.append(pid)
    return found


def has_ranks(top: int) -> bool:
    """Whether some below `top` are ranks of a job of several."""
    sizes = (each for pid in descendants(top) for each in _variables(pid, b"WORLD_SIZE="))
    return any(size not in (b"", b"0", b"1") for size in sizes)


def works_elsewhere(top: int) -> str | None:
    """The name of a program below `top` whose work cannot be observed from here."""
    return next((name for pid in descendants(top) if (name := name_of(pid)) in _CLIENTS), None)


def name_of(pid: int) -> str:
    """The short name of a process; empty if it is gone."""
    return (read_bytes(f"/proc/{pid}/comm") or b"").decode(errors="replace").strip()


def is_there(pid: int) -> bool:
    return stat_fields(pid)[:1] not in ([], [b"Z"], [b"X"])


def used_seconds(pid: int) -> float:
    """The processor time of a process and of its children that have ended."""
    return sum(map(int, stat_fields(pid)[11:15])) / TICKS_PER_SECOND


def work_of(pid: int) -> tuple[bytes, ...]:
    """Its state, and numbers that change when it does anything."""
    fields, done = stat_fields(pid), read_bytes(f"/proc/{pid}/io")
    return (fields[0], *fields[11:13], done) if fields and done is not None else (b"",)


def is_doomed(pid: int) -> bool:
    """Whether a killed process is still there: it waits for a disk, or is frozen."""
    pending = (_has_bit(pid, name, signal.SIGKILL) for name in (b"SigPnd:", b"ShdPnd:"))
    return any(pending) and is_there(pid)


def is_traced(pid: int) -> bool:
    return bool(field(read_bytes(f"/proc/{pid}/status") or b"", b"TracerPid:"))


def age_seconds(pid: int) -> float:
    """For how long a process has been there; 0 for one that has ended."""
    fields = stat_fields(pid)
    began = int(fields[19]) / TICKS_PER_SECOND if fields else math.inf
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)


def _has_bit(pid: int, name: bytes, number: int) -> bool:
    """Whether a signal is in one of the sets of /proc/PID/status."""
    for line in (read_bytes(f"/proc/{pid}/status") or b"").splitlines():
        if line.startswith(name):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _variables(pid: int, name: bytes) -> list[bytes]:
    """The values of an environment variable (`NAME=`) of a process."""
    words = (read_bytes(f"/proc/{pid}/environ") or b"").split(b"\0")
    return [word[len(name) :] for word in words if word.startswith(name)]


def _is_wrapper(pid: int) -> bool:
    # Programs in Go, apptainer among them, catch all signals; no other has a use for this one.
    return catches(pid, signal.SIGURG) or name_of(pid) in _WRAPPERS
