"""Where an arena's memory comes from, and whether there is enough of it.

A file in /dev/shm survives both processes. Where that is too small (64 MB in a container), a memfd
is used: it lives as long as trainer or keeper.

The file has the size of all slots that it may ever have, and memory for those that it has now
(pages.py). The memory is allocated before it is touched, since touching a page
that a full file system cannot provide is a SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast._environment.processes.cgroup import MemoryCgroup
from holdfast._environment.processes.proc import field, read_bytes

SHM = Path("/dev/shm")
_NAME = re.compile(r"holdfast-(\d+)-([0-9a-f]{32})-a(\d+)-g(\d+)(?:-r(\d+))?")
_RESERVE_BYTES = 256 << 20
_LEAST_RESERVE_BYTES = 32 << 20
_LARGE_BYTES = 256 << 20
_PATIENCE_SECONDS = 2.0
_UNLIMITED = 1 << 60
_LEAST_FREE_SHARE = 10  # short: less than a tenth is free …
_LEAST_FREE_BYTES = 4 << 30  # … and less than this
_LEAST_SHM_SHARE = 20
_LEAST_SHM_BYTES = 256 << 20
_SOME_STALL = re.compile(rb"(?m)^some .*\btotal=(\d+)")
_FULL = (errno.ENOSPC, errno.EDQUOT)
NO_ROOM = (*_FULL, errno.ENOMEM)


@dataclass(frozen=True)
class Backing:
    descriptor: int
    path: Path | None  # None: a memfd
    why_not_shm: str = ""

    def remove(self) -> None:
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


def reserve(
    run_id: str,
    attempt: int,
    generation: int,
    size_bytes: int,
    rank: int = 0,
    *,
    now_bytes: int | None = None,
    file_bytes: int | None = None,
) -> Backing | None:
    """Make the file of an arena, in /dev/shm if possible; None if there is not enough memory.

    `size_bytes` must be free. The first `now_bytes` are allocated now (default: all); the file
    is `file_bytes` long. OSError if the system refuses it for another reason.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not has_memory(size_bytes):
        # The system may still be freeing the memory of the last attempt.
        if size_bytes < _LARGE_BYTES or time.monotonic() > deadline:
            return None
        time.sleep(0.1)
    path = arena_path(run_id, attempt, generation, rank)
    now_bytes = size_bytes if now_bytes is None else now_bytes
    file_bytes = max(size_bytes, now_bytes, file_bytes or 0)
    why = f"{SHM} has no room for the snapshots"
    try:
        if (found := _reserve_shm(path, size_bytes, now_bytes, file_bytes)) is not None:
            return found
    except OSError as error:
        if error.errno not in _FULL:
            why = f"{path} cannot be made ({error.strerror})"
    try:
        return _reserve_memfd(path.name, now_bytes, file_bytes, why)
    except OSError as error:
        if error.errno in NO_ROOM:
            return None
        raise


def arena_path(run_id: str, attempt: int, generation: int, rank: int = 0) -> Path:
    name = f"holdfast-{os.geteuid()}-{run_id}-a{attempt}-g{generation}"
    return SHM / (f"{name}-r{rank}" if rank else name)


def has_memory(size_bytes: int) -> bool:
    """True if so much memory is free, in addition to a reserve in which the training can grow."""
    free = available_bytes()
    return free - size_bytes >= reserve_bytes(free)


def has_plenty(backing: Backing, size_bytes: int) -> bool:
    """True if so much memory is free twice: a third slot must not push anything out."""
    if not has_memory(2 * size_bytes):
        return False
    return backing.path is None or _room_in(backing.path.parent) >= 2 * size_bytes


def _room_in(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def _reserve_shm(path: Path, size_bytes: int, now_bytes: int, file_bytes: int) -> Backing | None:
    """None if it does not fit; OSError if the system refuses it."""
    if _room_in(path.parent) < size_bytes:
        return None
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return _allocate(Backing(os.open(path, flags, 0o600), path), now_bytes, file_bytes)


def _reserve_memfd(name: str, now_bytes: int, file_bytes: int, why_not_shm: str) -> Backing:
    backing = Backing(os.memfd_create(name, os.MFD_CLOEXEC), None, why_not_shm)
    os.fchmod(backing.descriptor, 0o600)
    return _allocate(backing, now_bytes, file_bytes)


def _allocate(backing: Backing, now_bytes: int, file_bytes: int) -> Backing:
    """Allocate the first bytes now; after an error there is no file."""
    try:
        os.ftruncate(backing.descriptor, file_bytes)
        os.posix_fallocate(backing.descriptor, 0, now_bytes)
    except OSError:
        backing.remove()
        os.close(backing.descriptor)
        raise
    return backing


def find_leftovers(run_id: str) -> list[Path]:
    """Arena files that earlier attempts of this run left in memory."""
    return sorted(path for found, path in find_all() if found == run_id)


def find_all() -> Iterator[tuple[str, Path]]:
    """The arena files of this user, each with the id of its run; only Linux has any."""
    if not SHM.is_dir():
        return
    prefix = f"holdfast-{os.geteuid()}-"
    with contextlib.suppress(OSError):
        for name in os.listdir(SHM):  # noqa: PTH208  thousands of files, few of them ours
            if name.startswith(prefix) and (match := _NAME.fullmatch(name)):
                yield match[2], SHM / name


def is_arena(path: Path) -> bool:
    return path.parent == SHM and _NAME.fullmatch(path.name) is not None


def users_of(processes: str = "[0-9]*") -> dict[Path, set[int]]:
    """The files in shared memory that processes have open, as far as we may see, with their pids.

    Of this machine, or with "self" of this process.
    """
    found: dict[Path, set[int]] = {}
    for process in Path("/proc").glob(processes):
        with contextlib.suppress(OSError):
            pid = int(process.resolve().name)
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = link.readlink()
                    if target.parent == SHM:
                        found.setdefault(target, set()).add(pid)
    return found


def attempt_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[3])


def rank_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[5] or 0)


def open_leftover(path: Path) -> int | None:
    """Open an arena file if it is a private, plain file of this user."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(descriptor)
    private = stat.S_ISREG(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
    if not private or status.st_uid != os.geteuid():
        os.close(descriptor)
        return None
    return descriptor


def available_bytes() -> int:
    """Free memory of the machine and the cgroup."""
    cgroup = MemoryCgroup.find(os.getpid())
    usage = None if cgroup is None else cgroup.usage()
    if usage is None or usage.limit is None:
        return _machine_bytes("MemAvailable")
    return min(_machine_bytes("MemAvailable"), usage.limit - usage.used)


def shortage(shm: Path = SHM) -> str:
    """Why memory is short now; empty if it is not.

    For those whose memory is only a convenience: they give it up first.
    """
    free, total = _machine_bytes("MemAvailable"), _machine_bytes("MemTotal")
    places = [("the machine's memory", free, total)]
    cgroup = MemoryCgroup.find(os.getpid())
    usage = None if cgroup is None else cgroup.usage()
    if usage is not None and usage.limit is not None:
        places.append(("the cgroup", usage.limit - usage.used, usage.limit))
    for what, free, total in places:
        if free < min(total // _LEAST_FREE_SHARE, _LEAST_FREE_BYTES):
            return f"{what} is nearly full"
    with contextlib.suppress(OSError):
        total = os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize
        if _room_in(shm) < min(total // _LEAST_SHM_SHARE, _LEAST_SHM_BYTES):
            return f"{shm} is nearly full"
    return ""


def stalls() -> dict[str, float]:
    """By place, the seconds in which a process has waited for memory, as the kernel counts (PSI).

    Of a machine with much free memory they do not count: those processes wait within limits of
    their own.
    """
    cgroup = MemoryCgroup.find(os.getpid())
    places = [] if cgroup is None else [f"{cgroup.folders[0]}/memory.pressure"]
    if _machine_bytes("MemAvailable") <= _machine_bytes("MemTotal") // 2:
        places.append("/proc/pressure/memory")
    found = {place: _SOME_STALL.search(read_bytes(place) or b"") for place in places}
    return {place: int(match[1]) / 1e6 for place, match in found.items() if match is not None}


def reserve_bytes(available: int) -> int:
    """The free memory that is left to the training; less if the job has little in all."""
    return min(_RESERVE_BYTES, max(_LEAST_RESERVE_BYTES, available // 8))


def total_bytes() -> int:
    """All memory of the machine, or the limit of the cgroup if that is less."""
    cgroup = MemoryCgroup.find(os.getpid())
    limit = None if cgroup is None else cgroup.limit()
    return min(_machine_bytes("MemTotal"), _UNLIMITED if limit is None else limit)


def _machine_bytes(name: str) -> int:
    kilobytes = field(read_bytes("/proc/meminfo") or b"", f"{name}:".encode())
    return _UNLIMITED if kilobytes is None else kilobytes * 1024
