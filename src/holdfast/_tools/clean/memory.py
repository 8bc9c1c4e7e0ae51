"""Arenas that dead runs have left in shared memory.

An arena may hold the newest state of its run, which is on no disk. Such a one goes
only if somebody says so in so many words.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import _text
from holdfast._report.status.gather import on_this_line, world_of
from holdfast._tools.clean.folders import Litter, RunAtRest, size_of
from holdfast._tools.convert.export.chosen import own_line

if TYPE_CHECKING:
    from holdfast._store.memory.arena import Arena

_QUIET_SECONDS = 600.0  # of an arena whose run may live where we cannot see it


def find_of_run(run: RunAtRest, *, drop: bool) -> Iterator[Litter]:
    """The arenas of a run that nobody works on."""
    if sys.platform != "linux":
        return
    from holdfast._store.memory.backing import find_leftovers, rank_of, users_of

    paths = find_leftovers(run.run_id)
    if not paths:
        return
    line = own_line(run.layout, run.run_id)
    in_use = users_of()
    for path in paths:
        if path in in_use:
            yield run.item(path, "memory", "a process has it open", goes=False)
            continue
        newest, is_part = _newest_state(run, path, line)
        whole = run.newest_whole
        if newest is None:
            yield run.item(path, "memory", "holds no snapshot that a start would use")
        elif whole is not None and newest <= whole:
            yield run.item(path, "memory", f"its step {newest[1]} is on disk, or a later one")
        else:
            on_disk = "nothing is on disk" if whole is None else f"on disk is step {whole[1]}"
            what = (
                f"rank {rank_of(path)}'s part of step {newest[1]},"
                if is_part
                else (f"step {newest[1]} is")
            )
            why = f"{what} the newest state of this run ({on_disk})"
            yield run.item(path, "memory", _dropped_or_kept(why, drop), goes=drop)


def find_of_unknown_runs(known: Collection[str], *, drop: bool) -> Iterator[Litter]:
    """The arenas of this user whose runs are not among those that were found on disk."""
    if sys.platform != "linux":
        return
    from holdfast._store.memory.backing import SHM, find_leftovers, users_of

    prefix = f"holdfast-{os.geteuid()}-"
    with contextlib.suppress(OSError):
        names = [path.name.removeprefix(prefix) for path in SHM.glob(f"{prefix}*")]
        run_ids = {name.partition("-")[0] for name in names} - set(known)
        in_use = users_of()
        for run_id in sorted(run_ids):
            for path in find_leftovers(run_id):
                if path not in in_use:
                    yield _judge_unknown(path, drop)


def _judge_unknown(path: Path, drop: bool) -> Litter:
    step, last_write, place = None, 0.0, ""
    with contextlib.suppress(OSError):
        last_write = path.stat().st_mtime
    for arena in _opened(path):
        whole = arena.whole()
        last_write = max([last_write, *(record.captured_at for record in whole)])
        step = max((record.step for record in whole if record.is_hashed), default=None)
        place = arena.folder
    quiet = time.time() - last_write
    if quiet < _QUIET_SECONDS:
        why = f"written {_text.duration(quiet)} ago, perhaps by a run in another container"
        return _of_no_folder(path, why, goes=False)
    if step is None:
        return _of_no_folder(path, "holds no snapshot that a start would use", goes=True)
    whose = f"that was in {_text.name(place)}" if place else "whose folder is not below here"
    why = f"step {step} of a run {whose}"
    return _of_no_folder(path, _dropped_or_kept(why, drop), goes=drop)


def _of_no_folder(path: Path, why: str, *, goes: bool) -> Litter:
    return Litter(str(path), "memory", None, size_of(path), goes, why)


def _dropped_or_kept(why: str, drop: bool) -> str:
    return f"{why}; --drop-memory {'was given' if drop else 'would remove it'}"


def _newest_state(
    run: RunAtRest, path: Path, line: dict[int, int | None]
) -> tuple[tuple[int, int, str] | None, bool]:
    """(attempt, step, name of its checkpoint) of the newest snapshot that a start would use.

    And whether other ranks have parts of it.
    """
    found = []
    for arena in _opened(path):
        for record in on_this_line(arena, line):
            if record.is_hashed:
                at_turn = bool(record.mark % 2)
                folder = run.layout.checkpoint(record.step, arena.attempt, at_turn)
                is_part = world_of(arena, record) > 1
                found.append(((arena.attempt, record.step, folder.name), is_part))
    return max(found, default=(None, False))


def _opened(path: Path) -> Iterator[Arena]:
    """The arena in a file, if it is one; closed afterwards."""
    from holdfast._store.memory.arena import Arena, NotAnArena
    from holdfast._store.memory.backing import open_leftover

    descriptor = open_leftover(path)
    if descriptor is None:
        return
    try:
        arena = Arena(descriptor)
    except (NotAnArena, ValueError, OSError):
        os.close(descriptor)
        return
    yield arena
    arena.close()
