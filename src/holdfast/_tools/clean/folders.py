"""What a run has left behind and nobody needs any more.

The invariant: a good checkpoint, a live run, and whatever might be the newest state
of a run never go. What cannot be told for sure stays, and says why.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from holdfast import _text
from holdfast._environment.processes.identity import of_process
from holdfast._report.status.ranks import keepers_of
from holdfast._store.folder.atomic import remove_folder
from holdfast._store.folder.attempts import find_run, is_live, lease_holder
from holdfast._store.folder.layout import RunLayout, foreign_in, writer_of
from holdfast._store.folder.lineage import is_on_line
from holdfast._store.read.damage import find_damage
from holdfast._tools.convert.export.chosen import own_line

_QUIET_SECONDS = 60.0  # a claim or a small file is written in a moment
_THREADS = 16


@dataclass(frozen=True, slots=True)
class Litter:
    """One thing that could go, or that stays although it looks as if it could."""

    path: str
    kind: str  # memory, set-aside, unfinished, half-removed, claim, temporary, link
    run: str | None  # None: of a run whose folder is not known
    size_bytes: int
    goes: bool
    why: str
    is_removed: bool = False


class RunAtRest:
    """A run that nobody works on: no trainer, and no keeper that still writes."""

    def __init__(self, folder: Path, layout: RunLayout, run_id: str) -> None:
        self.folder = folder
        self.layout = layout
        self.run_id = run_id

    @cached_property
    def newest_whole(self) -> tuple[int, int, str] | None:
        """(attempt, step, name) of the newest checkpoint on its line, after reading every byte."""
        line = own_line(self.layout, self.run_id)
        for step, attempt, path in reversed(self.layout.checkpoint_folders()):
            if is_on_line(line, attempt, step) and not find_damage(path):
                return attempt, step, path.name
        return None

    def item(self, path: Path, kind: str, why: str, *, goes: bool = True) -> Litter:
        foreign = "" if kind == "memory" else foreign_in(path)
        goes = goes and not foreign
        return Litter(str(path), kind, str(self.folder), size_of(path), goes, foreign or why)


def runs_at_rest(folders: Sequence[Path]) -> tuple[list[RunAtRest], list[Path]]:
    """The runs that nobody works on, and the folders of the others."""
    # All at once: a run of another machine is watched for some seconds.
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
    # Written as the absolute path by layout, and shown as the person wrote it.
    return RunAtRest(folder, RunLayout(folder), run_id)


def _is_here(pid: int | None) -> bool:
    return pid is not None and bool(of_process(pid).started)


def find_in_folder(run: RunAtRest) -> Iterator[Litter]:
    """What is left in a run folder."""
    layout = run.layout
    for path in sorted(layout.set_aside.iterdir()) if layout.set_aside.is_dir() else ():
        yield _judge_set_aside(run, path)
    for path in layout.partial_folders():
        pid = writer_of(path)
        if _is_here(pid):
            yield run.item(path, "unfinished", f"process {pid} may be writing it", goes=False)
        else:
            yield run.item(path, "unfinished", "a checkpoint that was begun and never finished")
    for path in layout.half_removed_folders():
        yield run.item(path, "half-removed", "an old checkpoint whose removal was cut short")
    for path in layout.fetching_folders():
        yield _judge_small(
            run, path, "unfinished", "a checkpoint that was never fetched to the end"
        )
    for path in layout.claims():
        yield _judge_small(run, path, "claim", "a start that was cut short")
    for path in layout.temporary_files():
        yield _judge_small(run, path, "temporary", "a file that was begun and never finished")


def _judge_set_aside(run: RunAtRest, path: Path) -> Litter:
    if not path.name.startswith("step-"):
        return run.item(path, "set-aside", "an unfinished checkpoint, never loaded")
    if run.newest_whole is None:
        # Without these the next start would begin anew, and not refuse to.
        why = "damaged, but this run has no whole checkpoint: it is all that is left"
        return run.item(path, "set-aside", why, goes=False)
    step = run.newest_whole[1]
    return run.item(path, "set-aside", f"damaged, never loaded; step {step} is whole")


def _judge_small(run: RunAtRest, path: Path, kind: str, why: str) -> Litter:
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime < _QUIET_SECONDS:
            return run.item(path, kind, "just written, so perhaps still wanted", goes=False)
    if _is_here(pid := writer_of(path)):
        return run.item(path, kind, f"process {pid} may be writing it", goes=False)
    return run.item(path, kind, why)


def size_of(path: Path) -> int:
    """The bytes of a file, or of all files in a folder."""
    with contextlib.suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        return sum(size_of(entry) for entry in path.iterdir())
    return 0


def remove(items: Sequence[Litter]) -> list[Litter]:
    """Remove what may go; returns all, each with whether it is gone."""
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


def total(items: Sequence[Litter]) -> str:
    """So many things, and how much they are."""
    noun = "thing" if len(items) == 1 else "things"
    return f"{len(items)} {noun}, {_text.size(sum(item.size_bytes for item in items))}"
