"""What `holdfast clean` finds: in run folders, and in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast._cli.litter import Litter, find_in_folder, runs_at_rest
from holdfast._cli.litter_in_memory import find_of_run, find_of_unknown_runs
from holdfast._errors import NotARun
from holdfast._record.attempts import find_run
from holdfast._record.layout import RunLayout
from holdfast._status.gather import find_runs


@dataclass(slots=True)
class Found:
    """Everything that is left behind below some folders."""

    items: list[Litter]
    runs: int
    busy: list[str]  # live, or with a keeper that still writes: left alone


def find_litter(folders: Sequence[Path], *, all_memory: bool, drop_memory: bool) -> Found:
    """Look, and change nothing. Without folders: the current one, and all memory."""
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
    return Found(items, len(runs), [str(folder) for folder in busy])


def _runs(folders: Sequence[Path]) -> list[Path]:
    if folders:
        found = [run for folder in folders for run in find_runs(folder)]
        return list(dict.fromkeys(found))
    try:
        return find_runs(Path())
    except NotARun:
        return []  # there may be memory to look at all the same
