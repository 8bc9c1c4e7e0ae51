"""One look at a process and its threads, by the small files that never make the reader wait.

What lies in the memory of a process (its command line, its maps) is not read here: a process
that holds its own lock over it in a dead file system would hold the reader too.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field

from holdfast._environment.processes.proc import field as number_behind
from holdfast._environment.processes.proc import read_bytes, read_schedstat

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_MOST_THREADS = 1024
# The name, before the number of the signal, of the file that a process writes its stacks into.
STACKS_FILE = "holdfast-stacks-"
# What the kernel calls the place where a task waits until its cgroup is thawed.
FREEZERS = frozenset({"__refrigerator", "do_freezer_trap"})


@dataclass(frozen=True)
class ThreadSample:
    """One thread, at one moment."""

    tid: int
    name: str
    state: str
    cpu_seconds: float
    wakes: int | None  # how often it has gone to sleep of its own will
    wchan: str | None
    waited_seconds: float | None = None  # for a processor


@dataclass(frozen=True)
class ProcessSample:
    """One process, at one moment."""

    pid: int
    parent: int
    started: int  # in ticks since the machine's start: a number can pass on to another process
    name: str
    state: str
    at: float
    cpu_seconds: float
    major_faults: int
    rss: int
    swap: int | None
    tracer: int
    io: int | None
    threads: dict[int, ThreadSample] = field(default_factory=dict)

    @property
    def main(self) -> ThreadSample | None:
        return self.threads.get(self.pid)

    @property
    def wakes(self) -> int | None:
        told = [each.wakes for each in self.threads.values() if each.wakes is not None]
        return sum(told) if told else None


def sample_process(pid: int) -> ProcessSample | None:
    """How it stands now; None if it is gone."""
    told = _stat(f"/proc/{pid}/stat")
    if told is None:
        return None
    name, fields = told
    status = read_bytes(f"/proc/{pid}/status") or b""
    swapped = number_behind(status, b"VmSwap:")
    return ProcessSample(
        pid=pid,
        parent=int(fields[1]),
        started=int(fields[19]),
        name=name,
        state=fields[0].decode(errors="replace"),
        at=time.monotonic(),
        cpu_seconds=_cpu_seconds(fields),
        major_faults=int(fields[9]),
        rss=int(fields[21]) * _PAGE,
        swap=None if swapped is None else swapped * 1024,
        tracer=number_behind(status, b"TracerPid:") or 0,
        io=_io(pid),
        threads={} if fields[0] == b"Z" else sample_threads(pid),
    )


def sample_threads(pid: int) -> dict[int, ThreadSample]:
    """By their numbers, the main one first."""
    tids: list[int] = []
    with contextlib.suppress(OSError):
        # Quicker than a Path, and done at each look.
        tids = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
    if pid in tids:
        tids.remove(pid)
        tids.insert(0, pid)
    found: dict[int, ThreadSample] = {}
    for tid in tids[:_MOST_THREADS]:
        folder = f"/proc/{pid}/task/{tid}"
        told = _stat(f"{folder}/stat")
        if told is None:
            continue  # it has ended meanwhile
        name, fields = told
        status = read_bytes(f"{folder}/status") or b""
        counted = read_schedstat(folder)  # to the nanosecond; else by ticks of the kernel's clock
        found[tid] = ThreadSample(
            tid=tid,
            name=name,
            state=fields[0].decode(errors="replace"),
            cpu_seconds=_cpu_seconds(fields) if counted is None else counted[0],
            wakes=number_behind(status, b"voluntary_ctxt_switches:"),
            wchan=_wchan(folder),
            waited_seconds=None if counted is None else counted[1],
        )
    return found


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: it would die of it without one."""
    status = read_bytes(f"/proc/{pid}/status") or b""
    _, found, behind = status.partition(b"\nSigCgt:")
    words = behind.split(None, 1)
    if not found or not words:
        return False
    with contextlib.suppress(ValueError):
        return bool(int(words[0], 16) >> (number - 1) & 1)
    return False


def name_of(pid: int) -> str | None:
    """What the kernel calls it, up to fifteen letters."""
    return (read_bytes(f"/proc/{pid}/comm") or b"").decode(errors="replace").strip() or None


def program_of(pid: int) -> str | None:
    """The file that it runs."""
    with contextlib.suppress(OSError):
        # Quicker than a Path.
        return os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")  # noqa: PTH115
    return None


def command_of(pid: int, most: int = 200) -> str | None:
    """Its words without secrets, shortened. Reads its memory, and can wait for it."""
    from holdfast._environment.secrets import redact_words  # slow to import, and rarely needed

    words = (read_bytes(f"/proc/{pid}/cmdline") or b"").decode(errors="replace")
    text = " ".join(" ".join(redact_words(words.split("\0")).words).split())
    return (text if len(text) <= most else f"{text[: most - 1]}…") or None


def _stat(path: str) -> tuple[str, list[bytes]] | None:
    # The name comes second, in brackets, and may hold anything.
    before, found, behind = (read_bytes(path) or b"").rpartition(b")")
    fields = behind.split()
    if not found or len(fields) < 22:
        return None
    return before.partition(b"(")[2].decode(errors="replace"), fields


def _cpu_seconds(fields: list[bytes]) -> float:
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _io(pid: int) -> int | None:
    """Bytes read and written, by calls or by mapped files, whichever is more."""
    text = read_bytes(f"/proc/{pid}/io")
    if not text:
        return None
    by_call = (number_behind(text, b"rchar:") or 0) + (number_behind(text, b"wchar:") or 0)
    by_disk = (number_behind(text, b"read_bytes:") or 0) + (
        number_behind(text, b"write_bytes:") or 0
    )
    return max(by_call, by_disk)


def _wchan(folder: str) -> str | None:
    text = (read_bytes(f"{folder}/wchan") or b"").decode(errors="replace").strip()
    return None if text in ("", "0") else text.partition(".")[0]  # the compiler's own ending
