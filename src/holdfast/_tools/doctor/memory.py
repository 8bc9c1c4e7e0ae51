"""Whether the snapshots of a run find room: in /dev/shm, and in the memory that is left.

The same sums as `_save.backing` does: three slots if they fit, else two; in /dev/shm if they fit
there, else in memory that goes with trainer and keeper; some memory is left to the training.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast._text import size
from holdfast._tools.doctor.finding import Check

_LITTLE_SHM = 128 << 20  # a container is given 64 MB unless somebody asks
_LITTLE_MEMORY = 1 << 30
_MORE_SHM = "docker run --shm-size=… (or --ipc=host); elsewhere: mount -o remount,size=… /dev/shm"


@dataclass(frozen=True)
class Memory:
    """In bytes, of this host."""

    state: int | None  # of one snapshot of all ranks here; None: not known yet
    shm_free: int | None  # with what this run holds there already; None: there is no /dev/shm
    shm_total: int | None
    available: int | None  # that can be taken without pushing anything out
    limit: int | None = None  # of the cgroup
    reserve: int = 0  # left to the training


def judge_shm(memory: Memory) -> Check:
    """/dev/shm against the slots."""
    free, state = memory.shm_free, memory.state
    data = {"free": free, "total": memory.shm_total, "state": state}
    if free is None:
        return Check(
            "shared memory",
            "warn",
            "there is no /dev/shm: snapshots are lost if trainer and keeper are both killed",
            "mount -t tmpfs tmpfs /dev/shm   (as root)",
            data,
        )
    if state is None:
        if free < _LITTLE_SHM:
            return Check(
                "shared memory",
                "warn",
                f"{size(free)} free in /dev/shm, as in a container that was given none: data "
                "loaders and snapshots need more",
                _MORE_SHM,
                data,
            )
        found = f"{size(free)} free in /dev/shm: three snapshots of up to {size(free // 3)} fit"
        return Check("shared memory", "ok", found, "", data)
    fits = free // state if state else 3
    if fits >= 3:
        found = f"{size(free)} free in /dev/shm: three snapshots of {size(state)} fit"
        return Check("shared memory", "ok", found, "", data)
    wanted = _MORE_SHM.replace("…", f"{-(-4 * state >> 30)}g")
    if fits == 2:
        return Check(
            "shared memory",
            "warn",
            f"{size(free)} free in /dev/shm: two snapshots of {size(state)} fit, not three; while "
            "a checkpoint is being written, no newer snapshot is taken",
            wanted,
            data,
        )
    return Check(
        "shared memory",
        "warn",
        f"{size(free)} free in /dev/shm, and two snapshots of {size(state)} need "
        f"{size(2 * state)}: they live in memory that goes when trainer and keeper are both killed",
        wanted,
        data,
    )


def judge_memory(memory: Memory) -> Check | None:
    """The memory that is left, of machine and cgroup, against the slots."""
    available, state = memory.available, memory.state
    if available is None:
        return None
    data = {"available": available, "limit": memory.limit, "state": state}
    whose = "" if memory.limit is None else f" of the limit of {size(memory.limit)}"
    left = f"{size(available)} left{whose}"
    if state is None:
        if available < _LITTLE_MEMORY:
            return Check(
                "memory",
                "warn",
                f"{left}: for a training that is little",
                "ps -eo rss,pid,user,comm --sort=-rss | head   (shows who has it)",
                data,
            )
        return Check("memory", "ok", left, "", data)
    room = available - memory.reserve
    gigabytes = -(-8 * state >> 30)
    more = f"ask for more memory: sbatch --mem={gigabytes}G …, docker run --memory={gigabytes}g …"
    if room >= 3 * state:
        found = f"{left}: three snapshots of {size(state)} fit beside the training"
        if available < 6 * state:
            # Weights, gradients and what a step needs are about as much again.
            return Check(
                "memory",
                "warn",
                f"{left}: three snapshots take {size(3 * state)}, which leaves "
                f"{size(available - 3 * state)} for the training itself",
                more,
                data,
            )
        return Check("memory", "ok", found, "", data)
    if room >= 2 * state:
        found = f"{left}: only two snapshots of {size(state)} fit, not three"
        return Check("memory", "warn", found, more, data)
    return Check(
        "memory",
        "fail",
        f"{left}, and two snapshots of {size(state)} need {size(2 * state)}: there will be none, "
        "and a kill costs all work since the last checkpoint",
        more,
        data,
    )
