"""Processes of a chain: how they are looked at, signalled, and taken in when they are orphans."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast._environment import variables
from holdfast._tools.doctor.signals.probe import what_it_runs
from holdfast._tools.lint.wrappers import RUNNERS, SHELLS, WAITING, is_python

_SCANCEL_SECONDS = 10.0
_EXEC_SECONDS = 0.002
_SET_ADOPTS_ORPHANS, _GET_ADOPTS_ORPHANS = 36, 37  # PR_*_CHILD_SUBREAPER

# What the first process does before it becomes the command. Not between fork and exec of ours,
# where threads of the doctor's other checks may hold any lock.
_FIRST = """
import ctypes, fcntl, os, signal, sys, termios
if sys.argv[1] == "terminal":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
# Python ignores two of them; and whoever starts us in the background has made Ctrl-C ignored.
for name in ("SIGPIPE", "SIGXFSZ", "SIGINT", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
# Should the doctor be killed, a script must not go on with what comes behind the training.
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"{sys.argv[2]}: cannot be started: {error.strerror}", flush=True)
    os._exit(127)
"""


def as_first(command: Sequence[str], *, has_terminal: bool) -> list[str]:
    """The words by which a command becomes the first process of a chain."""
    where = "terminal" if has_terminal else "nowhere"
    return [sys.executable, "-I", "-S", "-c", _FIRST, where, *command]


def send_through_slurm(step: str, number: signal.Signals) -> str:
    """As SLURM's warning goes, to the first process of each task; returns why it could not."""
    return scancel("--signal", number.name.removeprefix("SIG"), step)


def scancel(*words: str) -> str:
    """Returns why it could not; nothing if it could."""
    try:
        done = subprocess.run(
            ["scancel", *words],
            env=variables.child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SCANCEL_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"status {done.returncode}")


def own_step() -> str:
    """The job step that this process itself is in; empty outside of one."""
    words = variables.of_ranks()
    job, step = words.get("SLURM_JOB_ID", ""), words.get("SLURM_STEP_ID", "")
    return f"{job}.{step}" if job and step else ""


def adopt_orphans(wish: bool) -> bool:
    """Whether processes that lose their parent become ours; returns what it was before."""
    with contextlib.suppress(OSError, AttributeError):
        library, before = ctypes.CDLL(None), ctypes.c_int(0)
        library.prctl(_GET_ADOPTS_ORPHANS, ctypes.byref(before), 0, 0, 0)
        library.prctl(_SET_ADOPTS_ORPHANS, int(wish), 0, 0, 0)
        return bool(before.value)
    return False


def read(path: str) -> bytes:
    """A small file of /proc; nothing if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def environment(pid: int) -> bytes | None:
    """Its variables; nothing where it has none, None where they cannot be read."""
    path = Path(f"/proc/{pid}/environ")
    try:
        found = path.read_bytes()
        if not found:
            time.sleep(_EXEC_SECONDS)  # it may be about to become another program
            found = path.read_bytes()
    except OSError:
        return None
    return found


def words(pid: int) -> list[str]:
    """Its command."""
    return read(f"/proc/{pid}/cmdline").decode(errors="replace").split("\0")[:-1]


def options(words: Sequence[str]) -> list[str]:
    """The letters of the interpreter's own options."""
    found = []
    for word in words[1:]:
        if not word.startswith("-") or word.startswith("--"):
            break
        found.append(word[1:].partition("m")[0].partition("c")[0])
    return found


def name(pid: int) -> str:
    """Its short name."""
    return read(f"/proc/{pid}/comm").decode(errors="replace").strip()


def started(pid: int) -> int | None:
    """When it began, in the clock's ticks; None for one that is gone."""
    # The name comes first, in brackets, and may hold anything.
    fields = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in (b"Z", b"X") else None


def send(pid: int, number: int) -> None:
    """A signal, if it is still there."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)


# -- The processes that a signal has to pass, from the first of a command to the training ----------


SHELL = "shell"
TORCHRUN = "torchrun"
LAUNCHER = "launcher"
LEADER = "holdfast run"
RUNNER = "runner"
WAITER = "waiter"
CLIENT = "client"  # its program runs elsewhere: srun
OTHER = "other"
_LAUNCHERS = {"accelerate": "accelerate launch", "deepspeed": "deepspeed"}
_RUNNERS = (*RUNNERS, "conda", "mamba", "micromamba", "poetry", "pipenv")
# Their processes are elsewhere: killed, they would leave them there.
CLIENTS = ("srun", "salloc")
# Above the first process of a task: not the user's, and nobody signals it.
_HOSTS = ("slurmstepd",)


@dataclass(frozen=True)
class Hop:
    """One process on the way."""

    pid: int
    started: int
    label: str
    kind: str
    caught: int = 0  # as the masks of /proc: bit n-1 for signal n
    ignored: int = 0

    def catches(self, number: int) -> bool:
        return bool(self.caught >> (number - 1) & 1)

    def ignores(self, number: int) -> bool:
        return bool(self.ignored >> (number - 1) & 1)


def name_hop(words: Sequence[str], name: str = "") -> tuple[str, str]:
    """What to call a process, and what kind it is.

    >>> name_hop(["/bin/bash", "-e", "job.sh"])
    ('bash job.sh', 'shell')
    >>> name_hop(["python3", "/opt/env/bin/torchrun", "train.py"])
    ('torchrun', 'torchrun')
    >>> name_hop(["python", "-m", "holdfast", "run", "--", "true"])
    ('holdfast run', 'holdfast run')
    """
    if not words:
        return name or "?", OTHER
    program = words[0].rpartition("/")[2].removeprefix("-")
    if is_python(program):
        what = what_it_runs(words)[1]
        if what.startswith("torch.distributed."):
            return "torchrun", TORCHRUN
        first = what.partition(".")[0] if what.startswith(tuple(_LAUNCHERS)) else what
        program = first.rpartition("/")[2] or f"{program} -c"
    if program == "torchrun":
        return "torchrun", TORCHRUN
    if program in _LAUNCHERS:
        return _LAUNCHERS[program], LAUNCHER
    if program == "holdfast":
        return "holdfast run", LEADER
    if program in SHELLS:
        return _name_shell(program, words), SHELL
    if program in _RUNNERS:
        return f"{program} run", RUNNER
    if program in WAITING:
        return program, WAITER
    return program, CLIENT if program in CLIENTS else OTHER


def _name_shell(program: str, words: Sequence[str]) -> str:
    for word in words[1:]:
        if word.startswith("-") and not word.startswith("--") and word.endswith("c"):
            return f"{program} -c"
        if not word.startswith(("-", "+")):
            return f"{program} {word.rpartition('/')[2]}"
    return program


def hop_of(process: dict[str, Any]) -> Hop:
    """A process as the probe has told of it."""
    label, kind = name_hop(process["words"], process["name"])
    return Hop(
        int(process["pid"]),
        int(process["started"]),
        label,
        kind,
        int(process["caught"]),
        int(process["ignored"]),
    )


def find_hops(
    above: Sequence[dict[str, Any]], first: int, beside: Sequence[dict[str, Any]]
) -> tuple[list[Hop], list[Hop]]:
    """The hops of this host before a client, and those from the first process of the task on.

    `above` is the probe and all above it, the lowest first; `beside` the same of a client such as
    srun, where the probe is not below the command at all.
    """
    pids = [each["pid"] for each in above]
    if first in pids:
        return [], [hop_of(each) for each in reversed(above[: pids.index(first) + 1])]
    below = list(above)
    for at, each in enumerate(above):
        if each["name"].startswith(_HOSTS) or each["pid"] == 1:
            below = list(above[: at or 1])
            break
    pids = [each["pid"] for each in beside]
    before = beside[: pids.index(first) + 1] if first in pids else []
    return [hop_of(each) for each in reversed(before)], [hop_of(each) for each in reversed(below)]


def find_culprit(
    hops: Sequence[Hop], gone: Sequence[int], number: int, *, first_died_of_it: bool
) -> Hop | None:
    """Who of those above the training keeps the signal, by who has died and who catches it.

    `gone` are the pids of those that have ended since it was sent, in their order.
    """
    above = list(hops[:-1])
    if not above:
        return None
    if first_died_of_it:
        return above[0]
    for pid in gone:
        for hop in above:
            if hop.pid == pid:
                return hop
    got = above[0]
    for hop in above:
        if hop.ignores(number):
            return hop
        if not hop.catches(number):
            break  # it would have died: it did not get it
        got = hop
        if hop.kind == SHELL:
            break  # runs its trap only after what it waits for
    return got


def signal_name(number: int) -> str:
    return signal.Signals(number).name
