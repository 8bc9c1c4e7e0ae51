"""Ends all that belongs to one cluster, and nothing else.

As a script it waits until its standard input closes. So a cluster leaves nothing behind however
the tests end: by themselves, by Ctrl-C, by the timeout that leaves without a word, by kill -9.
It uses the standard library only, to be there quickly.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path


def members(folder: Path) -> list[int]:
    """The processes of a cluster: its daemons, their jobs, and whatever those have left.

    Each daemon lives in a mount namespace of its own, into which its cluster's folder is mounted.
    A descendant may change its environment, its session and its name, but stays in there.
    """
    ours = _namespace("self")
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or _namespace(entry.name) == ours:
                continue
            # The folder's name is random: no other cluster has a line with it.
            if f"/{folder.name}/" in (entry / "mountinfo").read_text():
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def sweep(folder: Path, prefix: str, seconds: float = 30.0) -> None:
    """Kill the processes of this cluster, then remove its cgroups and its folder."""
    deadline = time.monotonic() + seconds
    while (left := members(folder)) and time.monotonic() < deadline:
        for pid in left:
            kill(pid)
        # SLURM freezes what it kills. Frozen, a process does not die of our signal.
        for frozen in Path("/sys/fs/cgroup/freezer").glob(f"slurm_{prefix}[0-9]/**/freezer.state"):
            _write(frozen, "THAWED")
        time.sleep(0.02)
    for top in Path("/sys/fs/cgroup").glob(f"*/slurm_{prefix}[0-9]"):
        for inner in sorted(top.rglob("*/"), reverse=True):
            _remove_empty(inner)
        _remove_empty(top)
    shutil.rmtree(folder, ignore_errors=True)


def _namespace(pid: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/mnt")  # noqa: PTH115 (a link to no path)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _write(file: Path, text: str) -> None:
    with contextlib.suppress(OSError):  # the cgroup may be gone already
        file.write_text(text)


def _remove_empty(folder: Path) -> None:
    # The kernel takes a moment to let go of a cgroup whose last process was killed.
    for _ in range(50):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)


if __name__ == "__main__":
    sys.stdin.read()
    sweep(Path(sys.argv[1]), sys.argv[2])
