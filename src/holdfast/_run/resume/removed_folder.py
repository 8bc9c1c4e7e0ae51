"""A run folder that was removed while its run trained: the state is in memory alone.

The id of the run went with the folder, so no start finds the arenas by itself. An arena knows the
folder of its run. A new run in that folder says what is in memory and how to get it, and begins
from nothing: people also remove a folder to begin again.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_KEPT_SECONDS = 86_400.0  # it takes memory: the next new run in this folder removes it then
_KEEPER_SECONDS = 10.0  # for a keeper whose trainer has just died
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class _Left:
    """An arena of a run that trained in this folder."""

    path: Path
    step: int | None  # of its newest snapshot that has checksums
    captured_at: float


def tell_of_removed(folder: Path, run_id: str, say: Callable[[str], None]) -> None:
    """Say what earlier runs in this folder, which have other ids, left in memory."""
    if sys.platform != "linux":
        return
    paths = {each.path for each in _find(folder, run_id)}
    if not paths:
        return
    if trainers := _wait_for_keepers(paths):
        pids = " ".join(map(str, sorted(trainers)))
        say(
            f"{folder}: the folder was removed or moved, and the run that trained here goes on "
            f"without it (pid {pids}). This is a new run.\nTo stop the other one: kill {pids}"
        )
        return
    # The keepers have added the checksums meanwhile.
    left = [each for each in _find(folder, run_id) if each.step is not None]
    for each in [each for each in left if time.time() - each.captured_at > _KEPT_SECONDS]:
        left.remove(each)
        with contextlib.suppress(OSError):
            each.path.unlink()
    if left:
        newest = max(left, key=lambda each: each.captured_at)
        into = shlex.quote(f"{folder}-step-{newest.step}")
        say(
            f"{folder}: the folder was removed or moved while a run trained here. Step "
            f"{newest.step} of that run is in the memory of this machine. This is a new run.\n"
            f"To go on there, within a day: holdfast adopt {into} --from {newest.path}"
        )


def _find(folder: Path, run_id: str) -> list[_Left]:
    from holdfast._store.memory.arena import Arena, NotAnArena
    from holdfast._store.memory.backing import find_all, open_leftover, users_of

    place, found = os.path.realpath(folder), []
    others = [path for other, path in find_all() if other != run_id]
    # To close a file that another run of this process has open would end its locks.
    ours = users_of("self") if others else {}
    for path in others:
        if path in ours or (descriptor := open_leftover(path)) is None:
            continue
        try:
            arena = Arena(descriptor)
        except (NotAnArena, ValueError, OSError):
            os.close(descriptor)
            continue
        whole = arena.whole()
        # One that waits for its next attempt was durable, and goes by itself.
        if arena.folder == place and whole and arena.waits_until is None:
            step = max((record.step for record in whole if record.is_hashed), default=None)
            found.append(_Left(path, step, max(record.captured_at for record in whole)))
        arena.close()
    return found


def _wait_for_keepers(paths: set[Path]) -> set[int]:
    """Let the keepers of dead trainers finish; returns the trainers that live."""
    from holdfast._store.memory.backing import users_of

    deadline = time.monotonic() + _KEEPER_SECONDS
    while True:
        users = {pid for path, pids in users_of().items() if path in paths for pid in pids}
        trainers = {pid for pid in users if not _is_keeper(pid)}
        if trainers or not users or time.monotonic() > deadline:
            return trainers
        time.sleep(_LOOK_SECONDS)


def _is_keeper(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"holdfast._keeper" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return True  # it has just ended
