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
from pathlib import Path

from holdfast import _env

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
            env=_env.child_environment(),
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
    words = _env.of_ranks()
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
