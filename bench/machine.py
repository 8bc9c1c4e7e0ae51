"""The machine in words, and how it is brought to rest between two turns."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from pathlib import Path

import psutil


def cores() -> int:
    return len(os.sched_getaffinity(0))


def machine() -> str:
    """What the figures were measured on."""
    import torch

    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{cores()} cores {platform.machine()} ({_processor()}), {memory:.0f} GiB, "
        f"Linux {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}"
    )


def slug() -> str:
    """The machine's name for a file."""
    return f"{cores()}-cores-{platform.machine()}"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU implementer")):
                return line.split(":", 1)[1].strip()
    return "unknown processor"


def disk(folder: Path) -> str:
    """The file system under a folder."""
    found = max(
        (part for part in psutil.disk_partitions(all=True) if _is_below(folder, part.mountpoint)),
        key=lambda part: len(part.mountpoint),
        default=None,
    )
    return f"{found.fstype} on {found.device}" if found else "an unknown file system"


def _is_below(folder: Path, mountpoint: str) -> bool:
    return folder.resolve().is_relative_to(mountpoint)


def cool(*folders: Path) -> str:
    """Take files out of the page cache; returns how."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return "drop_caches"
    except OSError:
        for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        return "posix_fadvise"


def warm(folder: Path) -> None:
    """Bring all files of a folder into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def memory_in_use() -> int:
    """Bytes of all processes' own memory and of shared memory; no page cache."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("AnonPages", "Shmem"))


def room() -> int:
    return int(psutil.virtual_memory().available)


def rest(pid: int, patience_seconds: float = 10.0) -> None:
    """Wait until a process uses no processor, so that it does not disturb what comes next."""
    until, before = time.monotonic() + patience_seconds, -1.0
    process = psutil.Process(pid)
    while (used := sum(process.cpu_times()[:2])) != before and time.monotonic() < until:
        before = used
        time.sleep(0.05)  # the clock of a process's processor time ticks every 10 ms
