"""What the machine gives a process: memory for snapshots, cores, limits, GPUs, stacks.

The memory sums are those of `_run.saving.slot_memory`: two slots, or one if two do not fit, and a
third one while a checkpoint is written; in /dev/shm if two fit there, else in memory that is lost
with trainer and keeper; a reserve is left to the training.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from holdfast._environment.processes.cgroup import cpu_quota, find_folder
from holdfast._environment.processes.inspect import load, usable_cores
from holdfast._environment.processes.libc import libc
from holdfast._environment.processes.proc import FairDeadline, field, read_bytes, read_number
from holdfast._environment.processes.stacks import Dump, dump_stacks, find_pyspy
from holdfast._environment.processes.tree import children
from holdfast._text import count, duration, size
from holdfast._tools.doctor.check import Check, State, slow

_LITTLE_SHM = 128 << 20  # a container has 64 MB by default
_LITTLE_MEMORY = 1 << 30
_MORE_SHM = "docker run --shm-size=… (or --ipc=host); elsewhere: mount -o remount,size=… /dev/shm"


@dataclass(frozen=True)
class HostMemory:
    """In bytes, of this host."""

    state: int | None  # one snapshot of all ranks on this host; None: not known yet
    shm_free: int | None  # including what this run holds there; None: there is no /dev/shm
    shm_total: int | None
    available: int | None  # without pushing anything out
    limit: int | None = None  # of the cgroup
    reserve: int = 0  # left to the training


def judge_shm(memory: HostMemory) -> Check:
    free, state = memory.shm_free, memory.state
    data = {"free": free, "total": memory.shm_total, "state": state}
    check = partial(Check, "shared memory", data=data)
    if free is None:
        found = "there is no /dev/shm: snapshots are lost if trainer and keeper are both killed"
        return check("warn", found, "mount -t tmpfs tmpfs /dev/shm   (as root)")
    left = f"{size(free)} free in /dev/shm"
    if state is None and free < _LITTLE_SHM:
        found = f"{left}, as in a container that was given none: data loaders and snapshots need "
        return check("warn", found + "more", _MORE_SHM)
    if state is None:
        return check("ok", f"{left}: three snapshots of up to {size(free // 3)} fit")
    shown, two = size(state), size(2 * state)
    if free >= 3 * state:
        found = f"{left}: three snapshots of {shown} fit; a run takes {two}, and {size(3 * state)} "
        return check("ok", found + "while a checkpoint is being written")
    found = (
        f"{left}: two snapshots of {shown} fit, not three; while a checkpoint is being written, no "
        "newer snapshot is taken"
    )
    if free < 2 * state:
        found = (
            f"{left}, and two snapshots of {shown} need {two}: they live in memory that goes when "
            "trainer and keeper are both killed"
        )
    return check("warn", found, _MORE_SHM.replace("…", f"{-(-4 * state >> 30)}g"))


def judge_memory(memory: HostMemory) -> Check | None:
    available, state = memory.available, memory.state
    if available is None:
        return None
    data = {"available": available, "limit": memory.limit, "state": state}
    check = partial(Check, "memory", data=data)
    whose = "" if memory.limit is None else f" of the limit of {size(memory.limit)}"
    left = f"{size(available)} left{whose}"
    if state is None:
        if available >= _LITTLE_MEMORY:
            return check("ok", left)
        remedy = "ps -eo rss,pid,user,comm --sort=-rss | head   (shows who has it)"
        return check("warn", f"{left}: for a training that is little", remedy)
    room, shown = available - memory.reserve, size(state)
    gigabytes = -(-8 * state >> 30)
    more = f"ask for more memory: sbatch --mem={gigabytes}G …, docker run --memory={gigabytes}g …"
    if room >= 3 * state:
        # Weights, gradients and a step's own memory are about three times the state, too.
        if available >= 6 * state:
            return check("ok", f"{left}: three snapshots of {shown} fit beside the training")
        rest = size(available - 3 * state)
        found = f"three snapshots take {size(3 * state)}, which leaves {rest} for the training "
        return check("warn", f"{left}: {found}itself", more)
    if room >= 2 * state:
        return check("warn", f"{left}: only two snapshots of {shown} fit, not three", more)
    costs = "a kill{} costs all work since the last checkpoint"
    if room >= state:
        costs = costs.format(" while it is being replaced")
        return check("warn", f"{left}: only one snapshot of {shown} fits, not two; {costs}", more)
    found = f"{left}, and a snapshot needs {shown}: there will be none, and {costs.format('')}"
    return check("fail", found, more)


# Cores.
_PER_NODE = ("--nproc-per-node", "--nproc_per_node", "--ntasks-per-node")


@dataclass(frozen=True)
class Cores:
    """Of this host, for this process and its children."""

    usable: int  # by affinity, as torch and OpenMP count them
    quota: float | None  # the cgroup's mean share in cores; None: all
    load: float | None
    ranks: int = 1  # on this host
    launcher_sets_one: bool = False  # torchrun sets OMP_NUM_THREADS=1 for several ranks


def read_cores(ranks: int, *, launcher_sets_one: bool) -> Cores:
    quota = (cpu_quota(os.getpid()) or {}).get("cores")
    return Cores(usable_cores(os.getpid()), quota, load(), ranks, launcher_sets_one)


def ranks_here(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The ranks that start on this host, by the command and the variables; 1 if neither says so."""
    given = []
    for at, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in _PER_NODE:
            given.append(value if equals else "".join(command[at + 1 : at + 2]))
    given += [environment.get(name, "") for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")]
    return next((int(each) for each in given if each.isdigit() and int(each) > 0), 1)


def judge_cores(cores: Cores, environment: Mapping[str, str]) -> Check:
    really = cores.usable if cores.quota is None else min(float(cores.usable), cores.quota)
    setting = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    given = int(setting) if setting.isdigit() and int(setting) > 0 else None
    default = 1 if cores.launcher_sets_one and cores.ranks > 1 else cores.usable
    each = default if given is None else given
    threads = each * cores.ranks
    data = asdict(cores) | {"threads": threads, "omp_num_threads": given}
    check = partial(Check, "cores", data=data)
    shown = count(cores.usable, "core")
    if cores.quota is not None and cores.quota < cores.usable:
        shown = f"{cores.quota:.3g} of {shown} (by the cgroup's quota)"
    used = f"{shown} for {count(each, 'thread')}"
    if cores.ranks > 1:
        used = f"{shown} for {count(cores.ranks, 'rank')} with {count(each, 'thread')} each"
    if threads > really * 1.01 and threads > 1:
        how = f"OMP_NUM_THREADS={given}" if given is not None else "OMP_NUM_THREADS is not set"
        remedy = f"export OMP_NUM_THREADS={max(1, int(really // cores.ranks))}"
        return check("warn", f"{used} ({how}): they take turns, and wait for each other", remedy)
    if cores.load is not None and cores.load > 1.5 * cores.usable:
        found = f"{shown}, and a load of {cores.load:.1f}: others compute here too"
        return check("warn", found, "top   (shows who)")
    return check("ok", used)


# Resource limits.
_FEW_FILES, _TOO_FEW_FILES = 4096, 128
_FEW_PROCESSES, _TOO_FEW_PROCESSES = 256, 32
_LITTLE_LOCKED = 64 << 20

SoftHard = tuple[int | None, int | None]  # None: unlimited


@dataclass(frozen=True)
class Limits:
    """As in `ulimit`, in units of one."""

    files: SoftHard = (None, None)
    processes: SoftHard = (None, None)
    locked: SoftHard = (None, None)
    file_size: SoftHard = (None, None)
    cpu_seconds: SoftHard = (None, None)
    used_processes: int | None = None  # of this user, with threads
    tasks_left: int | None = None  # in the cgroup
    has_fast_network: bool = False  # which needs locked memory


def read_limits() -> Limits | None:
    """Those of this process, which its children inherit; None on Windows."""
    try:
        import resource
    except ImportError:
        return None

    def pair(name: str) -> SoftHard:
        soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        none = resource.RLIM_INFINITY
        return None if soft == none else soft, None if hard == none else hard

    is_root = hasattr(os, "geteuid") and os.geteuid() == 0  # RLIMIT_NPROC does not bind root
    return Limits(
        files=pair("NOFILE"),
        processes=(None, None) if is_root else pair("NPROC"),
        locked=pair("MEMLOCK"),
        file_size=pair("FSIZE"),
        cpu_seconds=pair("CPU"),
        used_processes=_threads_of_user(),
        tasks_left=_tasks_left(),
        has_fast_network=any(Path("/sys/class/infiniband").glob("*")),
    )


def judge_limits(limits: Limits, state: int | None) -> Iterator[Check]:
    """All of them; the last two only where they are set."""
    yield _files(*limits.files)
    yield _processes(limits)
    yield _locked(limits)
    most, hard = limits.file_size
    if most is not None:
        found = f"no file may be larger than {size(most)} (ulimit -f)"
        if state:  # the arena is one file
            found += f", and the snapshots of {size(state)} are one of {size(3 * state)}"
        level: State = "fail" if state is not None and most < 3 * state else "warn"
        data = {"soft": most, "hard": hard, "state": state}
        yield Check("file size", level, found, "ulimit -f unlimited", data)
    most, hard = limits.cpu_seconds
    if most is not None:
        found = f"the system ends a process after {duration(most)} of CPU time (ulimit -t), as on a"
        remedy = "ulimit -t unlimited   (or train in a job: holdfast submit …)"
        yield Check("cpu time", "warn", f"{found} login node", remedy, {"soft": most, "hard": hard})


def _files(soft: int | None, hard: int | None) -> Check:
    check = partial(Check, "open files", data={"soft": soft, "hard": hard})
    if soft is None or soft >= _FEW_FILES:
        return check("ok", f"{_shown(soft)} (ulimit -n)")
    remedy = f"ulimit -n {min(hard or 65536, 65536)}"
    if hard is not None and hard < _FEW_FILES:
        remedy = "add to /etc/security/limits.conf, as root: * - nofile 65536"
    found = f"{soft} (ulimit -n): data-loader workers and sockets of ranks use some hundreds each"
    return check("fail" if soft < _TOO_FEW_FILES else "warn", found, remedy)


def _processes(limits: Limits) -> Check:
    soft, hard = limits.processes
    used, tasks = limits.used_processes, limits.tasks_left
    data = {"soft": soft, "hard": hard, "used": used, "cgroup_left": tasks}
    check = partial(Check, "processes", data=data)
    left = [*([] if soft is None else [soft - (used or 0)]), *([] if tasks is None else [tasks])]
    if not left:
        return check("ok", "as many as wanted (ulimit -u)")
    if min(left) >= _FEW_PROCESSES:
        return check("ok", f"{min(left)} more can be started (ulimit -u)")
    if tasks == min(left):
        name = "the cgroup's pids.max"
        remedy = "docker run --pids-limit=-1 …   (or have pids.max of the job raised)"
    else:
        name, remedy = "ulimit -u", f"ulimit -u {_shown(hard)}"
        if hard is not None and (soft is None or hard <= soft):
            remedy = "have nproc raised in /etc/security/limits.conf (root)"
    found = (
        f"{max(0, min(left))} more processes and threads can be started ({name}): workers, ranks "
        "and the threads of each count"
    )
    return check("fail" if min(left) < _TOO_FEW_PROCESSES else "warn", found, remedy)


def _locked(limits: Limits) -> Check:
    soft, hard = limits.locked
    data = {"soft": soft, "hard": hard, "fast_network": limits.has_fast_network}
    check = partial(Check, "locked memory", data=data)
    shown = "unlimited" if soft is None else size(soft)
    if soft is None or soft >= _LITTLE_LOCKED or not limits.has_fast_network:
        return check("ok", f"{shown} (ulimit -l)")
    remedy = "ulimit -l unlimited"
    if hard is not None:
        remedy = "add to /etc/security/limits.conf, as root: * - memlock unlimited"
    found = f"{shown} (ulimit -l), and InfiniBand needs far more: NCCL fails or goes by TCP"
    return check("warn", found, remedy)


def _shown(number: int | None) -> str:
    return "unlimited" if number is None else str(number)


def _threads_of_user() -> int | None:
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
    left: list[int] = []
    for version, controller in ((2, ""), (1, "pids")):
        place = Path(find_folder(os.getpid(), version, controller) or "/")
        for folder in (place, *place.parents):
            most, used = (read_number(f"{folder}/pids.{name}") for name in ("max", "current"))
            if most is not None and used is not None:
                left.append(most - used)
    return min(left, default=None)


# -- GPUs ----------------------------------------------------------------------------------------
_BUSY_SHARE = 0.1  # of a GPU's memory


def judge_gpus(facts: Mapping[str, Any] | None) -> list[Check]:
    """What the driver says, as `machine_facts.py` has asked it; nothing where there is no GPU."""
    if facts is None:
        found = "the driver does not answer: a failed GPU blocks every process that asks it"
        remedy = "nvidia-smi   (if that hangs too, the machine has to be restarted)"
        return [Check("gpu", "fail", found, remedy)]
    check = partial(Check, "gpu", data={key: facts.get(key) for key in ("driver", "gpus")})
    if facts.get("error"):
        remedy = "nvidia-smi   (after an update of the driver, restart the machine)"
        return [check("fail", f"NVIDIA's driver says: {facts['error']}", remedy)]
    bad, gpus = list[Check](), facts.get("gpus") or ()
    for each in gpus:
        name, show = f"GPU {each.get('index')}", f"nvidia-smi -i {each.get('index')}"
        used, total = each.get("used"), each.get("total")
        if each.get("error"):
            remedy = f"{show} -q   (then leave it out, or restart)"
            bad.append(check("fail", f"{name}: {each['error']}", remedy))
        if each.get("ecc"):
            found = f"{name}: {each['ecc']} memory errors that could not be corrected"
            bad.append(check("warn", found, f"{show} -r   (as root, resets it)"))
        if used and total and used > _BUSY_SHARE * total:
            found = f"{name}: {size(used)} of {size(total)} are in use already"
            bad.append(check("warn", found, f"{show}   (shows by whom)"))
    if bad or not gpus:
        return bad
    names = ", ".join(sorted({str(each.get("name")) for each in gpus}))
    return [check("ok", f"{len(gpus)} × {names}, driver {facts.get('driver')}")]


# -- Whether py-spy can read the stacks of a process -----------------------------------------------
_STACKS_SECONDS, _STACKS_TRIES = 3.0, 3
_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)


def try_stacks() -> Check | None:
    """Read our own stack; None outside Linux."""
    if sys.platform != "linux":
        return None
    check, program, pid = judge_stacks(None, 0.0), find_pyspy(), os.getpid()
    if program is None:
        return check
    libc().prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)  # as a run allows it to its keeper
    deadline = FairDeadline(_STACKS_SECONDS, lambda: [pid, *children(pid)])
    left = _STACKS_TRIES  # a reading fails if it meets a change of the stack: nothing is stopped
    while left and check.state != "ok":
        began = time.monotonic()
        dump = dump_stacks([pid], _STACKS_SECONDS, program)[pid]
        check = judge_stacks(dump, time.monotonic() - began)
        left = 0 if dump.is_late else left - 1
    libc().prctl(_PR_SET_PTRACER, ctypes.c_ulong(0), 0, 0, 0)
    if check.state == "ok":
        return check
    return slow("stacks", f"py-spy has read none ({check.data['error']})", deadline) or check


def judge_stacks(dump: Dump | None, seconds: float) -> Check:
    """What py-spy has read; None: there is no py-spy."""
    scope = read_number("/proc/sys/kernel/yama/ptrace_scope")
    data = {"ptrace_scope": scope, "seconds": round(seconds, 3), "error": None}
    where = "" if scope is None else f" (ptrace scope {scope})"
    if dump is None:
        found = (
            "py-spy is missing: the stacks of a hang come from Python alone, and not of processes "
            "that it has not prepared"
        )
        return Check("stacks", "warn", found, "pip install py-spy", data | {"error": "missing"})
    names = [frame.get("name") for thread in dump.threads for frame in thread.frames]
    if try_stacks.__name__ in names:
        found = f"py-spy reads those of a process in {duration(seconds)}{where}"
        return Check("stacks", "ok", found, "", data)
    remedy = "pip install --upgrade py-spy"
    if scope:
        remedy = "sysctl kernel.yama.ptrace_scope=1   (as root; 0 if that does not help)"
    elif b"\nSeccomp:\t2" in (read_bytes("/proc/self/status") or b""):
        remedy = "docker run --cap-add SYS_PTRACE …"
    said = (dump.error or "it saw no frames").replace("\n", " ")
    found = f"{said}{where}: those of a hang come from Python alone"
    return Check("stacks", "warn", found, remedy, data | {"error": said})
