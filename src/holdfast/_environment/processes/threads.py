"""One sample of a process and its threads, from small files that never block the reader.

Only `command_of` reads the memory of a process. A process can hold the lock on that memory while it
waits for a dead file system, and then the reader waits too.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field

from holdfast._environment.processes.proc import (
    PAGE_BYTES,
    TICKS_PER_SECOND,
    read_bytes,
    read_schedstat,
    read_stat,
)
from holdfast._environment.processes.proc import field as number_after

_MOST_THREADS = 1024
_MOST_LETTERS = 200  # of a command line
# A process writes its stacks into a file with this name, followed by the number of the signal.
STACKS_FILE = "holdfast-stacks-"
# Where a task waits in the kernel until its cgroup is thawed.
FREEZERS = frozenset({"__refrigerator", "do_freezer_trap"})


@dataclass(frozen=True)
class ThreadSample:
    tid: int
    name: str
    state: str
    cpu_seconds: float
    wakes: int | None  # voluntary context switches
    wchan: str | None
    waited_seconds: float | None = None  # for a processor


@dataclass(frozen=True)
class ProcessSample:
    pid: int
    parent: int
    started: int  # in ticks since the boot: the system may give the pid to another process
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
    ended: int | None = None  # of a zombie: the status as of waitpid; None: not known

    @property
    def main(self) -> ThreadSample | None:
        return self.threads.get(self.pid)

    @property
    def wakes(self) -> int | None:
        known = [each.wakes for each in self.threads.values() if each.wakes is not None]
        return sum(known) if known else None


def sample_process(pid: int) -> ProcessSample | None:
    """None if it is gone."""
    name, fields = read_stat(f"/proc/{pid}/stat")
    if not fields:
        return None
    status = read_bytes(f"/proc/{pid}/status") or b""
    swapped = number_after(status, b"VmSwap:")
    return ProcessSample(
        pid=pid,
        parent=int(fields[1]),
        started=int(fields[19]),
        name=name,
        state=fields[0].decode(errors="replace"),
        at=time.monotonic(),
        cpu_seconds=_cpu_seconds(fields),
        major_faults=int(fields[9]),
        rss=int(fields[21]) * PAGE_BYTES,
        swap=None if swapped is None else swapped * 1024,
        tracer=number_after(status, b"TracerPid:") or 0,
        io=_io(pid),
        threads={} if fields[0] == b"Z" else sample_threads(pid),
        ended=int(fields[49]) if fields[0] == b"Z" and len(fields) > 49 else None,
    )


def sample_threads(pid: int) -> dict[int, ThreadSample]:
    """By their numbers, the main one first."""
    tids: list[int] = []
    with contextlib.suppress(OSError):
        tids = [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208  quicker
    found: dict[int, ThreadSample] = {}
    for tid in sorted(tids, key=lambda tid: (tid != pid, tid))[:_MOST_THREADS]:
        folder = f"/proc/{pid}/task/{tid}"
        name, fields = read_stat(f"{folder}/stat")
        if not fields:
            continue  # it has just ended
        status = read_bytes(f"{folder}/status") or b""
        counted = read_schedstat(folder)  # to the nanosecond; else by ticks of the kernel's clock
        found[tid] = ThreadSample(
            tid=tid,
            name=name,
            state=fields[0].decode(errors="replace"),
            cpu_seconds=_cpu_seconds(fields) if counted is None else counted[0],
            wakes=number_after(status, b"voluntary_ctxt_switches:"),
            wchan=_wchan(folder),
            waited_seconds=None if counted is None else counted[1],
        )
    return found


def catches(pid: int, number: int) -> bool:
    """True if a process has a handler for a signal: without one it would die of it."""
    words = (read_bytes(f"/proc/{pid}/status") or b"").partition(b"\nSigCgt:")[2].split(None, 1)
    with contextlib.suppress(ValueError, IndexError):
        return bool(int(words[0], 16) >> (number - 1) & 1)
    return False


def name_of(pid: int) -> str | None:
    """The kernel's name of it, up to fifteen letters."""
    return (read_bytes(f"/proc/{pid}/comm") or b"").decode(errors="replace").strip() or None


def program_of(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")  # noqa: PTH115  quicker
    return None


def command_of(pid: int) -> str | None:
    """Its command line without secrets, shortened. This reads its memory, and can block."""
    from holdfast._environment.secrets import redact_words  # slow to import, and rarely needed

    words = (read_bytes(f"/proc/{pid}/cmdline") or b"").decode(errors="replace")
    text = " ".join(" ".join(redact_words(words.split("\0")).words).split())
    return (text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…") or None


def _cpu_seconds(fields: list[bytes]) -> float:
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def _io(pid: int) -> int | None:
    """Bytes read and written: by calls or through mapped files, the larger of the two."""
    text = read_bytes(f"/proc/{pid}/io")
    if not text:
        return None
    pairs = ((b"rchar:", b"wchar:"), (b"read_bytes:", b"write_bytes:"))
    return max(sum(number_after(text, name) or 0 for name in pair) for pair in pairs)


def _wchan(folder: str) -> str | None:
    text = (read_bytes(f"{folder}/wchan") or b"").decode(errors="replace").strip()
    return None if text in ("", "0") else text.partition(".")[0]  # without the compiler's suffix


# -- The system call that a thread stands in, and its file -----------------------------------------


_X86 = {
    **{0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 6: "lstat"},
    **{7: "poll", 8: "lseek", 16: "ioctl", 17: "pread64", 18: "pwrite64", 19: "readv"},
    **{20: "writev", 21: "access", 23: "select", 34: "pause", 35: "nanosleep", 40: "sendfile"},
    **{42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg"},
    **{61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 76: "truncate"},
    **{77: "ftruncate", 78: "getdents", 82: "rename", 83: "mkdir", 84: "rmdir", 87: "unlink"},
    **{89: "readlink", 137: "statfs", 162: "sync", 202: "futex", 217: "getdents64"},
    **{230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat", 262: "newfstatat"},
    **{263: "unlinkat", 264: "renameat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait"},
    **{288: "accept4", 295: "preadv", 296: "pwritev", 306: "syncfs", 316: "renameat2"},
    **{326: "copy_file_range", 332: "statx", 441: "epoll_pwait2", 449: "futex_waitv"},
}
_ARM = {
    **{22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 35: "unlinkat", 38: "renameat"},
    **{43: "statfs", 46: "ftruncate", 56: "openat", 57: "close", 61: "getdents64", 62: "lseek"},
    **{63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64"},
    **{71: "sendfile", 72: "pselect6", 73: "ppoll", 79: "newfstatat", 80: "fstat", 81: "sync"},
    **{82: "fsync", 83: "fdatasync", 95: "waitid", 98: "futex", 101: "nanosleep"},
    **{115: "clock_nanosleep", 202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom"},
    **{211: "sendmsg", 212: "recvmsg", 260: "wait4", 267: "syncfs", 276: "renameat2"},
    **{285: "copy_file_range", 291: "statx", 441: "epoll_pwait2", 449: "futex_waitv"},
}
_NAMES = {"x86_64": _X86, "aarch64": _ARM, "arm64": _ARM}
# Their first argument is the descriptor of a file.
_ON_A_FILE = frozenset(
    (
        *("read", "write", "close", "fstat", "lseek", "ioctl", "pread64", "pwrite64", "readv"),
        *("writev", "fcntl", "flock", "fsync", "fdatasync", "ftruncate", "getdents", "getdents64"),
        *("preadv", "pwritev", "syncfs", "sendto", "recvfrom", "sendmsg", "recvmsg", "accept"),
        *("connect", "accept4"),
    )
)
_WAITS_FOR_FIRST = ("select", "pselect6")  # as readline: for all descriptors below a number
_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")
STDIN_PIPE = "pipe: standard input"
_READ_BY_OTHERS = ("pipe:", "socket:", *_TERMINALS)


def find_call(pid: int, tid: int) -> tuple[str | None, str | None]:
    """The name of the call and the path of its descriptor; None where they are not known."""
    words = (read_bytes(f"/proc/{pid}/task/{tid}/syscall") or b"").split()
    try:
        number, first = int(words[0]), int(words[1], 16)
    except (IndexError, ValueError):
        return None, None  # it runs, or we may not read it
    name = _NAMES.get(os.uname().machine, {}).get(number)
    if name in _ON_A_FILE:
        path = _path_of(pid, first)
        is_input = name == "read" and first == 0 and (path or "").startswith("pipe:")
        return name, STDIN_PIPE if is_input else path
    if name in _WAITS_FOR_FIRST and first == 1:
        return name, _path_of(pid, 0)
    return name, None


def is_terminal(path: str | None) -> bool:
    return path is not None and path.startswith(_TERMINALS)


def unread_outputs(pid: int, call: str | None, path: str | None) -> list[int]:
    """The descriptors, 1 or 2 or both, whose output waits for a reader."""
    if call not in ("write", "writev") or path is None or not path.startswith(_READ_BY_OTHERS):
        return []
    return [number for number in (1, 2) if _path_of(pid, number) == path]


def _path_of(pid: int, descriptor: int) -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")  # noqa: PTH115  does not touch the file
    return None
