"""What the system lets a process have: files, processes, locked memory, sizes and times."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast._environment.processes.proc import field, read_bytes, read_number
from holdfast._text import duration, size
from holdfast._tools.doctor.finding import Check, State

_FEW_FILES, _TOO_FEW_FILES = 4096, 128
_FEW_PROCESSES, _TOO_FEW_PROCESSES = 256, 32
_LITTLE_LOCKED = 64 << 20
_MOST_VIRTUAL = 64 << 30  # CUDA and large arrays reserve addresses by the dozen of GB

Pair = tuple[int | None, int | None]  # what holds now, and up to what it may be raised; None: all


@dataclass(frozen=True)
class Limits:
    """As `ulimit` has them, in units of one."""

    files: Pair = (None, None)
    processes: Pair = (None, None)
    locked: Pair = (None, None)
    core: Pair = (None, None)
    file_size: Pair = (None, None)
    cpu_seconds: Pair = (None, None)
    virtual: Pair = (None, None)
    used_processes: int | None = None  # of this user, with threads
    tasks_left: int | None = None  # in the cgroup
    core_pattern: str = ""
    has_fast_network: bool = False  # that needs locked memory
    has_gpu: bool = False


def read_limits() -> Limits | None:
    """Those of this process, which whatever it starts inherits; None where there are none."""
    try:
        import resource
    except ImportError:  # Windows
        return None

    def pair(name: str) -> Pair:
        number = getattr(resource, name, None)
        if number is None:
            return None, None
        soft, hard = resource.getrlimit(number)
        none = resource.RLIM_INFINITY
        return (None if soft == none else soft), (None if hard == none else hard)

    # Root may start as many as it likes.
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    return Limits(
        files=pair("RLIMIT_NOFILE"),
        processes=(None, None) if is_root else pair("RLIMIT_NPROC"),
        locked=pair("RLIMIT_MEMLOCK"),
        core=pair("RLIMIT_CORE"),
        file_size=pair("RLIMIT_FSIZE"),
        cpu_seconds=pair("RLIMIT_CPU"),
        virtual=pair("RLIMIT_AS"),
        used_processes=_threads_of_user(),
        tasks_left=_tasks_left(),
        core_pattern=(read_bytes("/proc/sys/kernel/core_pattern") or b"").decode().strip(),
        has_fast_network=_has_entries("/sys/class/infiniband"),
        has_gpu=Path("/dev/nvidiactl").exists(),
    )


def judge_limits(limits: Limits, state: int | None) -> Iterator[Check]:
    """All of them; those that are seldom set are told only where they are."""
    yield _files(limits.files)
    yield _processes(limits)
    yield _locked(limits)
    yield _core(limits)
    yield from _seldom(limits, state)


def _files(pair: Pair) -> Check:
    soft, hard = pair
    data = {"soft": soft, "hard": hard}
    if soft is None or soft >= _FEW_FILES:
        return Check("open files", "ok", f"{_told(soft)} (ulimit -n)", "", data)
    found = f"{soft} (ulimit -n): data-loader workers and sockets of ranks use some hundreds each"
    state: State = "fail" if soft < _TOO_FEW_FILES else "warn"
    if hard is not None and hard < _FEW_FILES:
        remedy = "add to /etc/security/limits.conf, as root: * - nofile 65536"
    else:
        remedy = f"ulimit -n {min(hard or 65536, 65536)}"
    return Check("open files", state, found, remedy, data)


def _processes(limits: Limits) -> Check:
    soft, hard = limits.processes
    data = {
        "soft": soft,
        "hard": hard,
        "used": limits.used_processes,
        "cgroup_left": limits.tasks_left,
    }
    left = [
        *([] if soft is None else [soft - (limits.used_processes or 0)]),
        *([] if limits.tasks_left is None else [limits.tasks_left]),
    ]
    if not left or min(left) >= _FEW_PROCESSES:
        found = "as many as wanted" if not left else f"{min(left)} more can be started"
        return Check("processes", "ok", f"{found} (ulimit -u)", "", data)
    by_cgroup = limits.tasks_left is not None and limits.tasks_left == min(left)
    name = "the cgroup's pids.max" if by_cgroup else "ulimit -u"
    remedy = "docker run --pids-limit=-1 …   (or have pids.max of the job raised)"
    if not by_cgroup:
        can_raise = hard is None or (soft is not None and hard > soft)
        remedy = f"ulimit -u {_told(hard)}"
        remedy = remedy if can_raise else "have nproc raised in /etc/security/limits.conf (root)"
    return Check(
        "processes",
        "fail" if min(left) < _TOO_FEW_PROCESSES else "warn",
        f"{max(0, min(left))} more processes and threads can be started ({name}): workers, ranks "
        "and the threads of each count",
        remedy,
        data,
    )


def _locked(limits: Limits) -> Check:
    soft, hard = limits.locked
    data = {"soft": soft, "hard": hard, "fast_network": limits.has_fast_network}
    shown = "unlimited" if soft is None else size(soft)
    is_little = soft is not None and soft < _LITTLE_LOCKED
    if is_little and limits.has_fast_network:
        can_raise = hard is None
        remedy = "ulimit -l unlimited"
        if not can_raise:
            remedy = "add to /etc/security/limits.conf, as root: * - memlock unlimited"
        found = f"{shown} (ulimit -l), and InfiniBand needs far more: NCCL fails or goes by TCP"
        return Check("locked memory", "warn", found, remedy, data)
    return Check("locked memory", "ok", f"{shown} (ulimit -l)", "", data)


def _core(limits: Limits) -> Check:
    soft, hard = limits.core
    pattern = limits.core_pattern
    data = {"soft": soft, "hard": hard, "pattern": pattern}
    if soft == 0:
        found = "none are written (ulimit -c 0); `holdfast why` needs none"
        return Check("core dumps", "ok", found, "", data)
    limit = "of any size" if soft is None else f"of up to {size(soft)}"
    if pattern.startswith("|"):
        found = f"{limit}, to {Path(pattern[1:].split()[0]).name}" if pattern[1:].split() else limit
        return Check("core dumps", "ok", found, "", data)
    if soft is not None and soft < 1 << 30:
        return Check("core dumps", "ok", f"{limit} (ulimit -c)", "", data)
    return Check(
        "core dumps",
        "warn",
        f"{limit}, into the working folder: a crash writes all memory of the training there, which "
        "takes minutes and may fill the disk",
        "ulimit -c 0",
        data,
    )


def _seldom(limits: Limits, state: int | None) -> Iterator[Check]:
    most, hard = limits.file_size
    if most is not None:
        data = {"soft": most, "hard": hard, "state": state}
        is_short = state is not None and most < 3 * state
        # The arena is one file, as a checkpoint is.
        yield Check(
            "file size",
            "fail" if is_short else "warn",
            f"no file may be larger than {size(most)} (ulimit -f)"
            + (
                f", and the snapshots of {size(state)} are one of {size(3 * state)}"
                if state
                else ""
            ),
            "ulimit -f unlimited",
            data,
        )
    most, hard = limits.cpu_seconds
    if most is not None:
        yield Check(
            "cpu time",
            "warn",
            f"the system ends a process after {duration(most)} of CPU time (ulimit -t), as on a "
            "login node",
            "ulimit -t unlimited   (or train in a job: holdfast submit …)",
            {"soft": most, "hard": hard},
        )
    most, hard = limits.virtual
    if most is not None:
        is_short = limits.has_gpu and most < _MOST_VIRTUAL
        is_short = is_short or (state is not None and most < 6 * state)
        yield Check(
            "address space",
            "fail" if is_short else "warn",
            f"{size(most)} in all (ulimit -v): addresses are counted, not memory, and torch and "
            "CUDA reserve many",
            "ulimit -v unlimited",
            {"soft": most, "hard": hard},
        )


def _told(number: int | None) -> str:
    return "unlimited" if number is None else str(number)


def _threads_of_user() -> int | None:
    """What counts against `ulimit -u`."""
    try:
        mine, total = os.geteuid(), 0
        for entry in os.scandir("/proc"):
            status = read_bytes(f"{entry.path}/status") if entry.name.isdigit() else None
            if status is not None and field(status, b"Uid:") == mine:
                total += field(status, b"Threads:") or 0
    except (OSError, AttributeError):
        return None
    return total


def _tasks_left() -> int | None:
    """What the pids cgroup leaves, where the least is left."""
    told = (read_bytes("/proc/self/cgroup") or b"").decode(errors="replace")
    left: list[int] = []
    for line in told.splitlines():
        words = line.split(":", 2)
        if len(words) != 3 or words[1] not in ("", "pids"):
            continue
        root = Path("/sys/fs/cgroup" if words[1] == "" else "/sys/fs/cgroup/pids")
        folder = root / words[2].lstrip("/")
        for place in (folder, *folder.parents):
            most, used = (read_number(f"{place}/pids.{name}") for name in ("max", "current"))
            if most is not None and used is not None:
                left.append(most - used)
            if place == root:
                break
    return min(left, default=None)


def _has_entries(folder: str) -> bool:
    try:
        return any(True for _ in os.scandir(folder))
    except OSError:
        return False
