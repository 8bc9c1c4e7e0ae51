"""How a proof is watched and told.

While it goes on, it is told on standard error: one line that changes on a terminal, plain
lines in a log. Standard output has the outcome only, so that it can be kept in a file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from holdfast._cli.show import Screen
from holdfast._prove import report
from holdfast._prove.proof import (
    DIFFERS,
    EQUAL,
    UNREPEATABLE,
    UNTRIED,
    Interruption,
    Proof,
    Watcher,
)
from holdfast._status import words

_STYLES = {EQUAL: "bold green", DIFFERS: "bold red", UNREPEATABLE: "bold yellow"}
_DRAW_SECONDS = 0.1


def show_proof(proof: Proof, *, with_ranks: bool = False) -> None:
    """All interruptions, then the verdict, since that is what should stand last."""
    if proof.verdict == UNTRIED:
        for line in report.plain_text(proof).splitlines():
            click.echo(words.name(line), err=True)
        return
    screen = Screen()
    if with_ranks:
        screen.write(f"{proof.ranks} {'rank' if proof.ranks == 1 else 'ranks'}:", style="bold")
    if proof.interruptions:
        _show_interruptions(screen, proof)
        screen.write()
    screen.write(words.name(report.headline(proof)), style=_STYLES[proof.verdict])
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    replay = None
    for label, text in report.details(proof):
        if label == "to replay":
            replay = text
        else:
            grid.add_row(f"  {label}", Text(words.name(text)))
    screen.table(grid)
    if replay is not None:
        # A line that the terminal breaks can be pasted; one that we break cannot.
        screen.print(Text(f"To replay: {words.name(replay)}"), soft_wrap=True)


def _show_interruptions(screen: Screen, proof: Proof) -> None:
    table = screen.columns()
    for heading in report.headings(proof):
        right = heading in ("no.", "at step")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    broken = None if proof.difference is None else proof.difference.after
    for row in report.interruption_rows(proof):
        table.add_row(*map(Text, row), style="bold red" if row[0] == str(broken) else "")
    screen.table(table)


@contextmanager
def follow() -> Iterator[Watcher]:
    """Someone who tells how it goes on, as fits where it is told."""
    console = Console(file=sys.stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield PlainWatcher()
        return
    with console.status("starting") as status:
        yield LiveWatcher(status)


class PlainWatcher(Watcher):
    """A line for each stage and each interruption, and none for steps."""

    def __init__(self) -> None:
        self._said = ""
        self._total = 0

    def stage(self, text: str, done: int, total: int) -> None:
        self._total = total
        behind = f" ({done} of {total} interruptions are behind it)" if done else ""
        if (line := f"{text}{behind}") != self._said:
            self._say(line)

    def interruption(self, interruption: Interruption) -> None:
        self._say(_describe(interruption, self._total))

    def _say(self, line: str) -> None:
        self._said = line
        click.echo(f"holdfast: {words.name(line)}", err=True)


class LiveWatcher(Watcher):
    """One line that changes: the stage, the interruptions so far, the step."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._stage = "starting"
        self._count = ""
        self._step = ""
        self._done = self._total = 0
        self._drawn = 0.0

    def stage(self, text: str, done: int, total: int) -> None:
        self._stage, self._done, self._total = text, done, total
        self._count = f"{done} of {total} interruptions" if done else ""
        self._step = ""
        self._draw()

    def interruption(self, interruption: Interruption) -> None:
        self._count = _describe(interruption, self._total)
        self._draw()

    def step(self, step: int, total: int | None) -> None:
        self._step = f"step {step}" if total is None else f"step {step} of {total}"
        # Drawing each of hundreds of steps a second would slow down what it watches.
        if time.monotonic() - self._drawn > _DRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        line = "  ".join(part for part in (self._stage, self._step, self._count) if part)
        self._status.update(Text(words.name(line), no_wrap=True, overflow="ellipsis"))


def _describe(interruption: Interruption, total: int) -> str:
    where = "" if interruption.step is None else f", at step {interruption.step}"
    number = f"{interruption.number} of {total}" if total else str(interruption.number)
    whom = "" if interruption.target is None else f" to {interruption.target}"
    moment = report.moment(interruption)
    return f"interruption {number}: {interruption.signal}{whom}, {moment}{where}"
