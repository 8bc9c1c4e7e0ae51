"""What `holdfast clean` finds: in run folders, and in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from holdfast import _text
from holdfast._errors import NotARun
from holdfast._report.status.gather import find_runs
from holdfast._store.folder.attempts import find_run
from holdfast._store.folder.layout import RunLayout
from holdfast._tools.clean.folders import Litter, find_in_folder, runs_at_rest, total
from holdfast._tools.clean.memory import find_of_run, find_of_unknown_runs
from holdfast._tools.cli.show import Screen


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


# -- What `holdfast clean` prints ------------------------------------------------------------------


def show_litter(found: Found, yes: bool, command: str) -> None:
    """What goes, what stays and why, and what it comes to."""
    screen = Screen()
    going = [item for item in found.items if item.goes]
    staying = [item for item in found.items if not item.goes]
    if going:
        screen.write("Removed:" if yes else "Could go:", style="bold")
        _list(screen, going, yes)
    if staying:
        screen.write("Left alone:", style="bold")
        _list(screen, staying, yes)
    if found.busy:
        many = len(found.busy) > 1
        what = f"{len(found.busy)} of them are" if many else f"{_text.name(found.busy[0])} is"
        screen.write(f"{found.runs} {'runs' if found.runs > 1 else 'run'}; {what} live: untouched.")
    if yes and going:
        gone = [item for item in going if item.is_removed]
        screen.write(f"{total(gone)} removed.")
        if len(gone) < len(going):
            kept = [item for item in going if not item.is_removed]
            screen.write(f"{total(kept)} could not be removed: see above.", style="bold red")
    elif going:
        screen.write(f"{total(going)}. Nothing was removed yet. To do it: {command} --yes")
    else:
        screen.write("There is nothing else to clean." if staying else "There is nothing to clean.")


def _list(screen: Screen, items: Sequence[Litter], yes: bool) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    for item in items:
        name = Text(_text.name(item.path))
        if yes and item.goes and not item.is_removed:
            name.append(" COULD NOT BE REMOVED", style="bold red")
        grid.add_row(f"  {_text.size(item.size_bytes)}", name)
        grid.add_row("", Text(item.why, style="dim"))
    screen.table(grid)
