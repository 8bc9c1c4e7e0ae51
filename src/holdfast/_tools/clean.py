"""What dead runs have left behind: in their folders, and in shared memory.

The invariant: a good checkpoint, a live run, and anything that could be the newest state of a run
are never removed. In doubt a thing stays, with the reason. An arena may hold the newest state of
its run, which is on no disk: it goes only with --drop-memory.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import _text
from holdfast._environment.processes.identity import of_process
from holdfast._errors import NotARun
from holdfast._report.status.gather import find_runs, on_this_line, world_of
from holdfast._report.status.parts import keepers_of
from holdfast._store.folder.atomic import remove_folder
from holdfast._store.folder.attempts import find_run, is_live, lease_holder
from holdfast._store.folder.layout import RunLayout, foreign_in, writer_of
from holdfast._store.folder.lineage import is_on_line
from holdfast._store.memory.backing import (
    find_all,
    find_leftovers,
    open_leftover,
    rank_of,
    users_of,
)
from holdfast._store.read.verify import find_damage
from holdfast._tools.convert.export import own_lineage

if TYPE_CHECKING:
    from holdfast._store.memory.arena import Arena

_QUIET_SECONDS = 60.0  # a claim or a small file is written in a moment
_QUIET_ARENA_SECONDS = 600.0  # of an arena whose run may live where we cannot observe it
_THREADS = 16


@dataclass(frozen=True, slots=True)
class Litter:
    """One thing that could go, or that stays although it looks like litter."""

    path: str
    kind: str  # memory, set-aside, unfinished, half-removed, claim, temporary, link
    run: str | None  # None: of a run whose folder is not known
    size_bytes: int
    goes: bool
    why: str
    is_removed: bool = False


@dataclass(slots=True)
class LitterFound:
    items: list[Litter]
    runs: int
    busy: list[str]  # live, or with a keeper that still writes: left alone


def find_litter(folders: Sequence[Path], *, all_memory: bool, drop_memory: bool) -> LitterFound:
    """What is left behind; nothing is changed. Without folders: the current one, and all memory."""
    runs, items = [], []
    for folder in _runs(folders):
        if (link := RunLayout(folder).linked_folder()) is not None:
            why = "a symbolic link: holdfast touches nothing outside a run folder"
            items.append(Litter(str(link), "link", str(folder), 0, False, why))
        else:
            runs.append(folder)
    known = {find_run(folder)[1] for folder in runs}
    resting, busy = runs_at_rest(runs)
    for run in resting:
        items += find_of_run(run, drop=drop_memory)
        items += find_in_folder(run)
    if all_memory or not folders:
        items += find_of_unknown_runs(known, drop=drop_memory)
    return LitterFound(items, len(runs), [str(folder) for folder in busy])


def _runs(folders: Sequence[Path]) -> list[Path]:
    if folders:
        found = [run for folder in folders for run in find_runs(folder)]
        return list(dict.fromkeys(found))
    try:
        return find_runs(Path())
    except NotARun:
        return []  # there may be memory of unknown runs


@dataclass
class RunAtRest:
    """A run without a trainer, and without a keeper that still writes."""

    folder: Path
    layout: RunLayout
    run_id: str

    @cached_property
    def newest_whole(self) -> tuple[int, int, str] | None:
        """(attempt, step, name) of the newest checkpoint on its lineage with no damaged byte."""
        line = own_lineage(self.layout, self.run_id)
        for step, attempt, path in reversed(self.layout.checkpoint_folders()):
            if is_on_line(line, attempt, step) and not find_damage(path):
                return attempt, step, path.name
        return None

    def item(self, path: Path, kind: str, why: str, *, goes: bool = True) -> Litter:
        foreign = "" if kind == "memory" else foreign_in(path)
        goes = goes and not foreign
        return Litter(str(path), kind, str(self.folder), size_of(path), goes, foreign or why)


def runs_at_rest(folders: Sequence[Path]) -> tuple[list[RunAtRest], list[Path]]:
    # All at once: a run of another machine is observed for some seconds.
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(_at_rest, folders))
    resting = [run for run in found if run is not None]
    busy = [folder for folder, run in zip(folders, found, strict=True) if run is None]
    return resting, busy


def _at_rest(folder: Path) -> RunAtRest | None:
    layout, run_id = find_run(folder)
    numbers = layout.attempt_numbers()
    if numbers and is_live(layout, numbers[-1]):
        return None
    for number in numbers:
        # An older attempt may run on without knowing it, and a keeper outlives its trainer.
        holder = lease_holder(layout, number)
        processes = [*keepers_of(layout, number), *([] if holder is None else [holder])]
        if any(process.is_here() and process.is_alive() for process in processes):
            return None
    if any(_is_here(writer_of(claim)) for claim in layout.claims()):
        return None  # a start that has not got its number yet
    # With the path as the user wrote it: find_run makes it absolute.
    return RunAtRest(folder, RunLayout(folder), run_id)


def _is_here(pid: int | None) -> bool:
    return pid is not None and bool(of_process(pid).started)


def find_in_folder(run: RunAtRest) -> Iterator[Litter]:
    layout = run.layout
    for path in sorted(layout.set_aside.iterdir()) if layout.set_aside.is_dir() else ():
        yield _judge_set_aside(run, path)
    unfinished = (
        (layout.partial_folders(), "unfinished", "a checkpoint that was begun and never finished"),
        (layout.half_removed_folders(), "half-removed", "an old checkpoint, removed in part"),
        (layout.fetching_folders(), "unfinished", "a checkpoint that was never fetched to the end"),
        (layout.claims(), "claim", "a start that was cut short"),
        (layout.temporary_files(), "temporary", "a file that was begun and never finished"),
    )
    for paths, kind, why in unfinished:
        yield from (_judge_unfinished(run, path, kind, why) for path in paths)


def _judge_set_aside(run: RunAtRest, path: Path) -> Litter:
    if not path.name.startswith("step-"):
        return run.item(path, "set-aside", "an unfinished checkpoint, never loaded")
    if run.newest_whole is None:
        # Without these the next start would begin from nothing instead of refusing to.
        why = "damaged, but this run has no whole checkpoint: it is all that is left"
        return run.item(path, "set-aside", why, goes=False)
    step = run.newest_whole[1]
    return run.item(path, "set-aside", f"damaged, never loaded; step {step} is whole")


def _judge_unfinished(run: RunAtRest, path: Path, kind: str, why: str) -> Litter:
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime < _QUIET_SECONDS:
            return run.item(path, kind, "just written, so perhaps still wanted", goes=False)
    if _is_here(pid := writer_of(path)):
        return run.item(path, kind, f"process {pid} may be writing it", goes=False)
    return run.item(path, kind, why)


def size_of(path: Path) -> int:
    with contextlib.suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            found = path.lstat()
            # An arena has room for slots that have no memory.
            is_in_memory = path.parent == Path("/dev/shm")
            return 512 * found.st_blocks if is_in_memory else found.st_size
        return sum(size_of(entry) for entry in path.iterdir())
    return 0


def remove(items: Sequence[Litter]) -> list[Litter]:
    """Remove what may go; returns all items, with `is_removed` set."""
    return [replace(item, is_removed=item.goes and _remove(Path(item.path))) for item in items]


def _remove(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        remove_folder(path)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
    if path.parent.name == "set-aside":
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # only if it is empty
    return not os.path.lexists(path)


def find_of_run(run: RunAtRest, *, drop: bool) -> Iterator[Litter]:
    if not (paths := find_leftovers(run.run_id)):
        return
    line = own_lineage(run.layout, run.run_id)
    in_use = users_of()
    for path in paths:
        if path in in_use:
            yield run.item(path, "memory", "a process has it open", goes=False)
            continue
        # (attempt, step, name of its checkpoint) of each snapshot that a start would use, and
        # whether other ranks have parts of it.
        found, left = [], 0.0
        for arena in _opened(path):
            left = (arena.waits_until or 0.0) - time.time()
            for record in on_this_line(arena, line):
                if record.is_hashed:
                    at_end = bool(record.mark % 2)
                    name = run.layout.checkpoint(record.step, arena.attempt, at_end).name
                    is_part = world_of(arena, record) > 1
                    found.append(((arena.attempt, record.step, name), is_part))
        if not found:
            yield run.item(path, "memory", "holds no snapshot that a start would use")
            continue
        newest, is_part = max(found)
        whole, step = run.newest_whole, newest[1]
        if whole is not None and newest <= whole:
            why = f"its step {step} is on disk, or a later one"
            if left > 0:
                why = f"kept for the next attempt, for {_text.duration(left)} more; "
                why += f"step {step} is on disk too"
            yield run.item(path, "memory", why)
        else:
            on_disk = "nothing is on disk" if whole is None else f"on disk is step {whole[1]}"
            what = f"rank {rank_of(path)}'s part of step {step}," if is_part else f"step {step} is"
            why = f"{what} the newest state of this run ({on_disk})"
            yield run.item(path, "memory", _dropped_or_kept(why, drop), goes=drop)


def find_of_unknown_runs(known: Collection[str], *, drop: bool) -> Iterator[Litter]:
    """The arenas of this user whose runs were not found on disk."""
    unknown = sorted(path for run_id, path in find_all() if run_id not in known)
    in_use = users_of() if unknown else {}
    for path in unknown:
        if path not in in_use:
            yield _judge_unknown(path, drop)


def _judge_unknown(path: Path, drop: bool) -> Litter:
    step, last_write, place = None, 0.0, ""
    with contextlib.suppress(OSError):
        last_write = path.stat().st_mtime
    for arena in _opened(path):
        whole, place = arena.whole(), arena.folder
        last_write = max([last_write, *(record.captured_at for record in whole)])
        step = max((record.step for record in whole if record.is_hashed), default=None)
    quiet = time.time() - last_write
    whose = f"that was in {_text.name(place)}" if place else "whose folder is not below here"
    goes, why = drop, _dropped_or_kept(f"step {step} of a run {whose}", drop)
    if quiet < _QUIET_ARENA_SECONDS:
        why = f"written {_text.duration(quiet)} ago, perhaps by a run in another container"
        goes = False
    elif step is None:
        goes, why = True, "holds no snapshot that a start would use"
    return Litter(str(path), "memory", None, size_of(path), goes, why)


def _dropped_or_kept(why: str, drop: bool) -> str:
    return f"{why}; --drop-memory {'was given' if drop else 'would remove it'}"


def _opened(path: Path) -> Iterator[Arena]:
    """The arena in a file, if it is one; closed afterwards."""
    from holdfast._store.memory.arena import Arena, NotAnArena  # only on Linux

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
