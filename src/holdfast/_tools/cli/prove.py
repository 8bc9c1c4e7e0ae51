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
    make_request,
    parse_ranks,
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
    numbers = [None] if ranks is None else parse_ranks(ranks)
    found = [make_request(command, **options, ranks=number) for number in numbers]
    if len(found) > 1:
        # Each has its own folder, or the second would find that of the first.
        keeps = [each.keep and each.keep / f"ranks-{each.ranks}" for each in found]
        pairs = zip(found, keeps, strict=True)
        return [dataclasses.replace(request, keep=keep) for request, keep in pairs]
    return found


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
    names, *rows = report.table(proof)
    titles = [f">{name}" if name in ("no.", "at step") else name for name in names]
    broken = None if proof.difference is None else str(proof.difference.after)
    styled = ([Text(cell, "bold red" if row[0] == broken else "") for cell in row] for row in rows)
    screen.table(titles, styled)
    numbers = [each.number for each in proof.interruptions]
    if numbers != sorted(numbers):
        screen.print("In the order in which they came; the numbers are those of --only.")


@contextmanager
def follow() -> Iterator[Watcher]:
    console = Console(file=sys.stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield ProgressWatcher(None)
        return
    with console.status("starting") as status:
        yield ProgressWatcher(status)


class ProgressWatcher(Watcher):
    """A line for each stage and interruption; on a terminal one that changes, with the step."""

    def __init__(self, status: Status | None) -> None:
        self._status = status
        self._parts = {"stage": "starting", "step": "", "count": ""}
        self._total = 0
        self._said = ""
        self._drawn = 0.0

    def stage(self, text: str, done: int, total: int) -> None:
        self._total = total
        count = f"{done} of {total} interruptions" if done else ""
        self._show(stage=text, step="", count=count)
        line = f"{text} ({count} are behind it)" if count else text
        if line != self._said:
            self._say(line)

    def interruption(self, interruption: Interruption) -> None:
        number = str(interruption.number)
        if self._total >= interruption.number:  # with --only it is one alone
            number += f" of {self._total}"
        line = f"interruption {number}: {report.describe(interruption)}"
        self._show(count=line)
        self._say(line)

    def step(self, step: int, total: int | None) -> None:
        # Drawing hundreds of steps a second would slow down the script.
        is_due = time.monotonic() - self._drawn > _DRAW_SECONDS
        text = f"step {step}" if total is None else f"step {step} of {total}"
        self._show(is_due=is_due, step=text)

    def _say(self, line: str) -> None:
        self._said = line
        if self._status is None:
            click.echo(f"holdfast: {_text.name(line)}", err=True)

    def _show(self, *, is_due: bool = True, **parts: str) -> None:
        self._parts |= parts
        if self._status is not None and is_due:
            self._drawn = time.monotonic()
            line = _text.name("  ".join(filter(None, self._parts.values())))
            self._status.update(Text(line, no_wrap=True, overflow="ellipsis"))
