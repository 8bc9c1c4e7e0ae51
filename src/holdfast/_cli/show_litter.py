"""What `holdfast clean` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from holdfast._cli.clean import Found
from holdfast._cli.litter import Litter, total
from holdfast._cli.show import Screen
from holdfast._status import words


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
        what = f"{len(found.busy)} of them are" if many else f"{words.name(found.busy[0])} is"
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
        name = Text(words.name(item.path))
        if yes and item.goes and not item.is_removed:
            name.append(" COULD NOT BE REMOVED", style="bold red")
        grid.add_row(f"  {words.size(item.size_bytes)}", name)
        grid.add_row("", Text(item.why, style="dim"))
    screen.table(grid)
