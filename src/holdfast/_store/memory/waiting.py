"""A waiting arena: kept in /dev/shm for the next attempt of its run, for a bounded time.

The trainer is dead and the newest slot is durable, so the arena may go at any instant. A small
process of its own, the guard, removes it when its time is over, when memory is short, and when the
guard is told to end. It writes the reason into the keeper's log. Waiting for the keeper does not
wait for the guard.

The next attempt takes the arena over by renaming its file, under a lock: only one process can. The
guard sees that the name is gone, and ends. It deletes by name, so it cannot delete an arena that
was renamed by the next attempt.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from holdfast._environment import variables
from holdfast._environment.processes.identity import command
from holdfast._store.folder.plain_file import open_log
from holdfast._store.memory.backing import shortage, stalls

_LOOK_SECONDS = 1.0
_STALL_SHARE = 0.1  # of the time since the last poll
_TAKEN = "it was taken"
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def start_guard(path: Path, seconds: float, log: Path) -> bool:
    """Have a process remove this arena in `seconds`; False if none could be started."""
    import subprocess  # the keeper starts faster without it

    plan = {"path": str(path), "seconds": seconds, "log": str(log)}
    # The guard inherits this: a signal that comes before its first look waits for it.
    former = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        subprocess.Popen(
            command(__name__, plan, is_deaf=False),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            # It is no rank and no part of the training, and must not be ended as one.
            env=variables.of_interpreter(),
        )
    except OSError:
        return False
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
    return True


def claim(descriptor: int, path: Path, taken: Path, prepare: Callable[[], None]) -> bool:
    """Take a waiting arena under its new name; False if it is gone, or another takes it.

    `prepare` makes it the claimant's before it has that name. Meanwhile a lock keeps others off,
    and the guard still guards it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    try:
        if not os.path.samestat(path.stat(), os.fstat(descriptor)):
            return False
        prepare()
        path.rename(taken)
    except OSError:
        return False
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def main(plan_text: str) -> None:
    plan = json.loads(plan_text)
    for number in _ENDS:
        signal.signal(number, signal.SIG_DFL)  # the keeper ignores them, and they stay blocked
    why = guard(Path(plan["path"]), plan["seconds"])
    if why != _TAKEN:
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError), open_log(Path(plan["log"])) as log:
            log.write(f"{at} the arena that waited was removed: {why}\n".encode())


def guard(path: Path, seconds: float) -> str:
    """Wait, then remove the arena; returns why it ended."""
    polled = time.monotonic()
    deadline = polled + seconds
    stalled = stalls()  # earlier stalls do not count: the trainer may have died of them
    while path.exists():
        before, polled = polled, time.monotonic()
        former, stalled = stalled, stalls()
        waited = max(
            (stalled[each] - former.get(each, stalled[each]) for each in stalled), default=0
        )
        why = "its time is over" if polled >= deadline else shortage(path.parent)
        if not why and waited > _STALL_SHARE * max(polled - before, 0.001):
            why = "processes wait for memory"
        left = deadline - polled
        if not why and signal.sigtimedwait(_ENDS, min(left, _LOOK_SECONDS)) is not None:
            why = "asked to end"
        if why:
            with contextlib.suppress(OSError):
                path.unlink()
            return why
    return _TAKEN
