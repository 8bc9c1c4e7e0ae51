"""The system call that a thread stands in, and the file it is about."""

from __future__ import annotations

import contextlib
import os

from holdfast._environment.processes.proc import read_bytes

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
# Those whose first word is the descriptor of the file they are about.
_ON_A_FILE = frozenset(
    (
        *("read", "write", "close", "fstat", "lseek", "ioctl", "pread64", "pwrite64", "readv"),
        *("writev", "fcntl", "flock", "fsync", "fdatasync", "ftruncate", "getdents", "getdents64"),
        *("preadv", "pwritev", "syncfs", "sendto", "recvfrom", "sendmsg", "recvmsg", "accept"),
        *("connect", "accept4"),
    )
)
_WAITS_FOR_FIRST = ("select", "pselect6")  # readline asks so: for the descriptors below a number
_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")
_READ_BY_OTHERS = ("pipe:", "socket:", *_TERMINALS)


def find_call(pid: int, tid: int) -> tuple[str | None, str | None]:
    """Its name, and what lies behind the descriptor it was given; where the system tells them."""
    words = (read_bytes(f"/proc/{pid}/task/{tid}/syscall") or b"").split()
    try:
        number, first = int(words[0]), int(words[1], 16)
    except (IndexError, ValueError):
        return None, None  # it runs, or this is not for us
    name = _NAMES.get(os.uname().machine, {}).get(number)
    if name in _ON_A_FILE:
        return name, _behind(pid, first)
    if name in _WAITS_FOR_FIRST and first == 1:
        return name, _behind(pid, 0)
    return name, None


def is_terminal(path: str | None) -> bool:
    """Whether a person sits at the other end."""
    return path is not None and path.startswith(_TERMINALS)


def unread_outputs(pid: int, call: str | None, path: str | None) -> list[int]:
    """Of one that waits for a reader of what it prints: by which descriptors, 1 or 2 or both."""
    if call not in ("write", "writev") or path is None or not path.startswith(_READ_BY_OTHERS):
        return []
    return [number for number in (1, 2) if _behind(pid, number) == path]


def _behind(pid: int, descriptor: int) -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")  # noqa: PTH115  does not touch the file
    return None
