"""`holdfast prove`: its options, its progress and its output.

The progress goes to standard error: one changing line on a terminal, plain lines in a log.
Standard output has the outcome only, so that it can be kept in a file.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.status import Status
from rich.text import Text

from holdfast import _text
from holdfast._tools.cli import group
from holdfast._tools.cli.show import Screen
from holdfast._tools.prove import report
from holdfast._tools.prove.options import make_request, parse_ranks
from holdfast._tools.prove.proof import (
    DIFFERS,
    EQUAL,
    SIGNALS,
    UNREPEATABLE,
    UNTRIED,
    Interruption,
    Proof,
    ProofRequest,
    Watcher,
)
from holdfast._tools.workplace import ended_by_signals

_LEAST_SECONDS = 1.0  # of a budget that is used up: enough to say so


@click.command(context_settings=group.COMMAND_SETTINGS)
@group.COMMAND
@click.option("--kills", metavar="N", default="20", help="How many interruptions (20).")
@click.option(
    "--signals",
    metavar="NAMES",
    default=",".join(SIGNALS),
    help=f"The signals that interrupt ({','.join(SIGNALS)}).",
)
@click.option("--seed", metavar="N", default="7", help="Seed of the random instants (7).")
@click.option("--only", metavar="N", help="Only the Nth interruption, to replay a failure.")
@click.option(
    "--budget", metavar="TIME", help="Make as many interruptions as fit: 2min, 90s, 1h or seconds."
)
@click.option("--ranks", metavar="N,...", help="Prove for 1,2,4 ranks; stops at the first fault.")
@click.option(
    "--resume-cmd", metavar="TEXT", help="How to start it again, where that is another command."
)
@click.option(
    "--compare",
    metavar="FILE",
    multiple=True,
    help="Compare this file, too: .pt, .safetensors or any; may be repeated.",
)
@click.option(
    "--reference",
    metavar="RUN",
    type=group.FOLDER,
    shell_complete=group.complete_runs,
    help="A finished run to compare with.",
)
@click.option("--keep", metavar="DIR", type=group.FOLDER, help="Keep all runs there, to look at.")
@group.AS_JSON
def prove(command: tuple[str, ...], ranks: str | None, as_json: bool, **options: Any) -> int:
    """Show that your script can be interrupted anywhere, or where it cannot.

    It runs COMMAND twice undisturbed, then once with interruptions at random instants, starting it
    again after each. It compares weights, optimizer, schedulers, generators, order of the data,
    metrics and number of steps. They are equal to the bit, or it names the first difference, the
    likely cause and the remedy. COMMAND need not use holdfast.

    Each run has a copy of the current folder; nothing is changed in it. {dir} in COMMAND stands for
    a folder of the run's own, {ranks} for the number of ranks.

    The exit status is 0 if equal, 1 if not, 3 if two undisturbed runs differ already, 2 if it could
    not be tried.

    \b
    Example:
      holdfast prove -- python train.py
      holdfast prove --kills 50 --budget 2min -- python train.py --epochs 1
      holdfast prove --ranks 1,2,4 -- torchrun --nproc-per-node={ranks} train.py
      holdfast prove --resume-cmd "python train.py --resume" -- python train.py
    """
    wanted = _list_requests(command, ranks, options)
    from holdfast._tools.prove.prove import prove as make_proof

    proofs: list[Proof] = []
    began = time.monotonic()
    try:
        with ended_by_signals():
            for index, request in enumerate(wanted):
                if request.budget_seconds is not None:  # shared by all proofs
                    left = request.budget_seconds - (time.monotonic() - began)
                    share = max(_LEAST_SECONDS, left / (len(wanted) - index))
                    request = dataclasses.replace(request, budget_seconds=share)
                with follow() as watcher:
                    proofs.append(make_proof(request, watcher))
                if not as_json:
                    show_proof(proofs[-1], with_ranks=len(wanted) > 1)
                if proofs[-1].verdict != EQUAL:
                    break
    except KeyboardInterrupt:
        kept = options["keep"]
        rest = "nothing of it is left" if kept is None else f"what there is, is in {kept}"
        click.echo(f"Interrupted: the proof is given up, and {_text.name(rest)}.", err=True)
        return 130
    if as_json:
        trees = [proof.to_json() for proof in proofs]
        group.print_json(trees[0] if ranks is None else {"proofs": trees})
    return proofs[-1].exit_status


def _list_requests(
    command: tuple[str, ...], ranks: str | None, options: dict[str, Any]
) -> list[ProofRequest]:
    """One for each number of ranks, all checked before the first is tried."""
    if ranks is None:
        return [make_request(command, **options)]
    numbers = parse_ranks(ranks)
    found = [make_request(command, **options, ranks=number) for number in numbers]
    if len(found) == 1:
        return found
    # Each has its own folder, or the second would find that of the first.
    return [
        dataclasses.replace(request, keep=request.keep and request.keep / f"ranks-{request.ranks}")
        for request in found
    ]


_STYLES = {EQUAL: "bold green", DIFFERS: "bold red", UNREPEATABLE: "bold yellow"}
_DRAW_SECONDS = 0.1


def show_proof(proof: Proof, *, with_ranks: bool = False) -> None:
    if proof.verdict == UNTRIED:
        for line in report.plain_text(proof).splitlines():
            click.echo(_text.name(line), err=True)
        return
    screen = Screen()
    if with_ranks:
        screen.write(f"{_text.count(proof.ranks, 'rank')}:", style="bold")
    if proof.interruptions:
        _show_interruptions(screen, proof)
        screen.write()
    screen.write(_text.name(report.headline(proof)), style=_STYLES[proof.verdict])
    rows = [(label, _text.name(text)) for label, text in report.details(proof)]
    screen.labelled(row for row in rows if row[0] != "to replay")
    if proof.replay is not None:
        # A line that the terminal wraps can be pasted; one that we wrap cannot.
        screen.print(Text(f"To replay: {_text.name(proof.replay)}"), soft_wrap=True)


def _show_interruptions(screen: Screen, proof: Proof) -> None:
    titles = [f">{name}" if name in ("no.", "at step") else name for name in report.headings(proof)]
    broken = None if proof.difference is None else str(proof.difference.after)
    rows = report.interruption_rows(proof)
    styled = ([Text(cell, "bold red" if row[0] == broken else "") for cell in row] for row in rows)
    screen.table(titles, styled)


@contextmanager
def follow() -> Iterator[Watcher]:
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
        click.echo(f"holdfast: {_text.name(line)}", err=True)


class LiveWatcher(Watcher):
    """One line that changes: the stage, the interruptions so far, the step."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._stage = "starting"
        self._count = ""
        self._step = ""
        self._total = 0
        self._drawn = 0.0

    def stage(self, text: str, done: int, total: int) -> None:
        self._stage, self._total = text, total
        self._count = f"{done} of {total} interruptions" if done else ""
        self._step = ""
        self._draw()

    def interruption(self, interruption: Interruption) -> None:
        self._count = _describe(interruption, self._total)
        self._draw()

    def step(self, step: int, total: int | None) -> None:
        self._step = f"step {step}" if total is None else f"step {step} of {total}"
        # Drawing hundreds of steps a second would slow down the script.
        if time.monotonic() - self._drawn > _DRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        line = "  ".join(part for part in (self._stage, self._step, self._count) if part)
        self._status.update(Text(_text.name(line), no_wrap=True, overflow="ellipsis"))


def _describe(interruption: Interruption, total: int) -> str:
    number = f"{interruption.number} of {total}" if total else str(interruption.number)
    return f"interruption {number}: {report.describe(interruption)}"
