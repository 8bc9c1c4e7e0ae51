"""How many cores there are for how many threads, and whether the clock can be believed."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast._environment.processes.proc import read_bytes, read_number
from holdfast._text import count, duration
from holdfast._tools.doctor.finding import Check

_PER_NODE = ("--nproc-per-node", "--nproc_per_node", "--ntasks-per-node")
_SKEW_SECONDS = 2.0
_UNSYNCHRONISED = 0x40
_EARLIEST = 1_735_689_600.0  # 2025-01-01: holdfast was written later


@dataclass(frozen=True)
class Cores:
    """Of this host, for this process and what it starts."""

    usable: int  # by affinity: what torch and OpenMP count
    quota: float | None  # cores that the cgroup grants in the mean; None: all
    load: float | None
    ranks: int = 1  # on this host
    launcher_sets_one: bool = False  # torchrun sets OMP_NUM_THREADS=1 for several ranks


def read_cores(ranks: int, *, launcher_sets_one: bool) -> Cores:
    """As they are now."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        load = os.getloadavg()[0]
    except (OSError, AttributeError):
        load = None
    return Cores(usable or 1, _quota(), load, ranks, launcher_sets_one)


def ranks_here(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """How many ranks start on this host, as far as words and variables say; 1 if they do not."""
    for at, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in _PER_NODE:
            value = value if equals else "".join(command[at + 1 : at + 2])
            if value.isdigit() and int(value) > 0:
                return int(value)
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        value = environment.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    return 1


def judge_cores(cores: Cores, environment: Mapping[str, str]) -> Check:
    """Threads that compute against cores that there are."""
    really = cores.usable if cores.quota is None else min(float(cores.usable), cores.quota)
    wish = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    given = int(wish) if wish.isdigit() and int(wish) > 0 else None
    by_itself = 1 if cores.launcher_sets_one and cores.ranks > 1 else cores.usable
    threads = (by_itself if given is None else given) * cores.ranks
    data = {
        "usable": cores.usable,
        "quota": cores.quota,
        "load": cores.load,
        "ranks": cores.ranks,
        "threads": threads,
        "omp_num_threads": given,
    }
    shown = count(cores.usable, "core")
    if cores.quota is not None and cores.quota < cores.usable:
        shown = f"{cores.quota:.3g} of {shown} (by the cgroup's quota)"
    whose = f"{count(cores.ranks, 'rank')} with " if cores.ranks > 1 else ""
    each = threads // cores.ranks
    if threads > really * 1.01 and threads > 1:
        how = f"OMP_NUM_THREADS={given}" if given is not None else "OMP_NUM_THREADS is not set"
        return Check(
            "cores",
            "warn",
            f"{shown} for {whose}{count(each, 'thread')}{' each' if whose else ''} ({how}): they "
            "take turns, and wait for each other",
            f"export OMP_NUM_THREADS={max(1, int(really // cores.ranks))}",
            data,
        )
    if cores.load is not None and cores.load > 1.5 * cores.usable:
        return Check(
            "cores",
            "warn",
            f"{shown}, and a load of {cores.load:.1f}: others compute here too",
            "top   (shows who)",
            data,
        )
    return Check(
        "cores",
        "ok",
        f"{shown} for {whose}{count(each, 'thread')}{' each' if whose else ''}",
        "",
        data,
    )


def is_clock_kept() -> bool | None:
    """Whether the kernel's clock is kept right by somebody; None where it does not say."""
    # Of the kernel's record only the flags are wanted, which stand behind five words.
    record = (ctypes.c_long * 64)()
    try:
        if ctypes.CDLL(None).adjtimex(ctypes.byref(record)) < 0:
            return None
    except (OSError, AttributeError, TypeError):
        return None
    return not record[5] & _UNSYNCHRONISED


def judge_clock(
    is_kept: bool | None, skew: float | None, is_remote: bool, now: float | None = None
) -> Check:
    """The clock against itself and against that of the file system."""
    now = time.time() if now is None else now
    data = {"synchronised": is_kept, "skew_seconds": skew, "time": now}
    sync = "timedatectl set-ntp true   (as root; a container has its host's clock)"
    if now < _EARLIEST:
        shown = time.strftime("%Y-%m-%d", time.gmtime(now))
        found = f"it shows {shown}: certificates are refused, and ages of checkpoints are wrong"
        return Check("clock", "fail", found, sync, data)
    if skew is not None and abs(skew) > _SKEW_SECONDS:
        side = "ahead of" if skew > 0 else "behind"
        return Check(
            "clock",
            "warn",
            f"the file system's is {duration(abs(skew))} {side} this machine's: ages of files and "
            "of checkpoints are wrong by that",
            sync,
            data,
        )
    if is_kept is False:
        return Check(
            "clock",
            "warn",
            "nobody keeps it right (the kernel calls it unsynchronised): logs of several machines "
            "do not fit together",
            sync,
            data,
        )
    with_disk = "" if skew is None or not is_remote else ", and the file server's is the same"
    kept = "synchronised" if is_kept else "plausible"
    return Check("clock", "ok", f"{kept}{with_disk}", "", data)


def _quota() -> float | None:
    """Cores by the cgroup's quota: the smallest on the way up."""
    told = (read_bytes("/proc/self/cgroup") or b"").decode(errors="replace")
    found: list[float] = []
    for line in told.splitlines():
        words = line.split(":", 2)
        if len(words) != 3:
            continue
        controllers = words[1].split(",")
        if controllers == [""]:
            root = Path("/sys/fs/cgroup")
        elif "cpu" in controllers:
            root = Path("/sys/fs/cgroup/cpu")
        else:
            continue
        folder = root / words[2].lstrip("/")
        for place in (folder, *folder.parents):
            found += _quota_of(place)
            if place == root:
                break
    return min(found, default=None)


def _quota_of(place: Path) -> list[float]:
    words = (read_bytes(f"{place}/cpu.max") or b"").split()
    if len(words) == 2 and words[0].isdigit() and int(words[1]):
        return [int(words[0]) / int(words[1])]
    quota, period = (read_number(f"{place}/cpu.cfs_{name}_us") for name in ("quota", "period"))
    return [quota / period] if quota and quota > 0 and period else []
