"""Opens the files of a run folder; nothing else does.

Others may write into a shared folder, and a folder may come from anywhere. A FIFO blocks its reader
for ever, a device never ends, a symbolic link leads out of the folder, and a file of gigabytes
fills the memory. Each of them is an OSError here, at once.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

MOST_RECORD_BYTES = 64 << 20  # a JSON file: hundreds of times the largest one measured
_SMALL_BYTES = 1 << 16
MOST_LINES_BYTES = 1 << 30  # a file that only grows, such as the journal
# Against FIFOs that block, symbolic links, and terminals that would become controlling.
_CAREFUL = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NOCTTY", 0)
_ALWAYS = _CAREFUL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)  # how the system refuses what is not a file


class NotPlain(OSError):
    """Not a regular file, or too large."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EINVAL, why, str(path))


def open_plain(
    path: Path, flags: int = os.O_RDONLY, mode: int = 0o644, *, most_bytes: int | None = None
) -> int:
    """The descriptor of a regular file; NotPlain if it is anything else, or too large.

    With O_CREAT a missing one is made.
    """
    truncates = flags & os.O_TRUNC
    try:
        descriptor = os.open(path, (flags & ~truncates) | _ALWAYS, mode)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotPlain(path, _kind(path)) from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotPlain(path, _kind(path))
        if most_bytes is not None and status.st_size > most_bytes:
            raise NotPlain(path, f"too large to be read: {status.st_size} bytes")
        if truncates:
            os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_file(path: Path, *, most_bytes: int | None = None) -> io.BufferedReader:
    """The same as a file to read."""
    return io.BufferedReader(io.FileIO(open_plain(path, most_bytes=most_bytes)))


def open_log(path: Path) -> io.FileIO:
    """The same as a file that is appended to."""
    return io.FileIO(open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def read_plain(path: Path, most_bytes: int = MOST_RECORD_BYTES) -> bytes:
    descriptor = open_plain(path, most_bytes=most_bytes)
    try:
        # By the descriptor: a file object makes twice as many system calls, for thousands of files.
        data = os.read(descriptor, _SMALL_BYTES)
        if len(data) == _SMALL_BYTES:
            with io.FileIO(descriptor, closefd=False) as file:
                data += file.read(most_bytes + 1)  # it may be growing
    finally:
        os.close(descriptor)
    if len(data) > most_bytes:
        raise NotPlain(path, f"too large to be read: it grew past {most_bytes} bytes")
    return data


def read_end(path: Path, most_bytes: int) -> bytes:
    """The end of a file, from the beginning of a line; empty if it cannot be read."""
    try:
        with open_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            end = file.read(most_bytes)
    except OSError:
        return b""
    return end if size <= most_bytes else end.partition(b"\n")[2]


def _kind(path: Path) -> str:
    try:
        found = os.lstat(path).st_mode
    except OSError:
        return "not a file"
    for is_kind, name in (
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if is_kind(found):
            return f"{name} and not a file"
    return "a device and not a file"
