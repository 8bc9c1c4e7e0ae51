"""The processes of a job, found by what all of them have inherited from the first.

A launcher gives each rank a session of its own, and may die before them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_ERRAND = "HOLDFAST_ERRAND"
_END_SECONDS = 10.0


def find_job(socket: Path, leader: int, known: Iterable[int] = ()) -> list[psutil.Process]:
    """All processes that live and have this proof's errand, or belong to the leader's session."""
    wanted = set(known)
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_ours = process.pid in wanted or os.getsid(process.pid) == leader
            if not is_ours and process.pid != os.getpid():
                is_ours = str(socket) in process.environ().get(_ERRAND, "")
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def find_ranks(job: Iterable[psutil.Process]) -> dict[int, int]:
    """The pids of the ranks by the number that their launcher gave them, without their children."""
    numbers: dict[int, int] = {}
    parents: dict[int, int] = {}
    for process in job:
        with contextlib.suppress(psutil.Error, OSError):
            text = process.environ().get("RANK", "")
            if text.isdigit():
                numbers[process.pid], parents[process.pid] = int(text), process.ppid()
    return {number: pid for pid, number in numbers.items() if parents[pid] not in numbers}


def end_job(job: Iterable[psutil.Process]) -> None:
    """Kill what is left of it, and wait until it is gone."""
    left = list(job)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + _END_SECONDS
    while any(map(_lives, left)) and time.monotonic() < deadline:
        time.sleep(0.005)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
