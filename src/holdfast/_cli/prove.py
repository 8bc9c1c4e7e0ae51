"""`holdfast prove`: what it takes, and how several proofs follow each other."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click

from holdfast._cli.group import AS_JSON, FOLDER, complete_runs, print_json
from holdfast._prove.proof import EQUAL, SIGNALS, Proof, Watcher, Wishes
from holdfast._status import words

_LEAST_SECONDS = 1.0  # of a budget that others have used up: enough to be told so


@click.command(
    short_help="Show that your script can be interrupted anywhere.",
    # What stands behind the first word of the command is the script's own.
    context_settings={"allow_interspersed_args": False},
)
@click.argument("command", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--kills", metavar="N", default="20", help="How many interruptions (20).")
@click.option(
    "--signals",
    metavar="NAMES",
    default=",".join(SIGNALS),
    help=f"What to interrupt with ({','.join(SIGNALS)}).",
)
@click.option("--seed", metavar="N", default="7", help="Draws the instants (7).")
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
    type=FOLDER,
    shell_complete=complete_runs,
    help="A finished run to compare with.",
)
@click.option("--keep", metavar="DIR", type=FOLDER, help="Keep all runs there, to look at.")
@AS_JSON
def prove(command: tuple[str, ...], ranks: str | None, as_json: bool, **options: Any) -> int:
    """Show that your script can be interrupted anywhere, or where it cannot.

    Runs COMMAND undisturbed, twice, then once more with interruptions at random instants, starting
    it again after each, and compares: weights, optimizer, schedulers, generators, order of the
    data, metrics, number of steps. They are equal to the bit, or you are told the first thing that
    differs, the likely cause and the remedy. COMMAND need not use holdfast.

    Each run has a copy of the current folder; nothing is changed in it. {dir} in COMMAND stands for
    a folder of the run's own, {ranks} for the number of ranks.

    Leaves with 0 if equal, 1 if not, 3 if two undisturbed runs differ already, 2 if it could not be
    tried.

    \b
    Example:
      holdfast prove -- python train.py
      holdfast prove --kills 50 --budget 2min -- python train.py --epochs 1
      holdfast prove --ranks 1,2,4 -- torchrun --nproc-per-node={ranks} train.py
      holdfast prove --resume-cmd "python train.py --resume" -- python train.py
    """
    wanted = list_wishes(command, ranks, options)
    from holdfast._cli.show_proof import follow, show_proof
    from holdfast._demo.story import ended_by_signals
    from holdfast._prove.prove import prove as make_proof

    proofs: list[Proof] = []
    try:
        with ended_by_signals():
            for proof in prove_all(wanted, make_proof, follow):
                proofs.append(proof)
                if not as_json:
                    show_proof(proof, with_ranks=len(wanted) > 1)
    except KeyboardInterrupt:
        kept = options["keep"]
        rest = "nothing of it is left" if kept is None else f"what there is, is in {kept}"
        click.echo(f"Interrupted: the proof is given up, and {words.name(rest)}.", err=True)
        return 130
    if as_json:
        trees = [proof.to_json() for proof in proofs]
        print_json(trees[0] if ranks is None else {"proofs": trees})
    return proofs[-1].exit_status


def list_wishes(
    command: tuple[str, ...], ranks: str | None, options: dict[str, Any]
) -> list[Wishes]:
    """One for each number of ranks, all of them checked before the first is tried."""
    from holdfast._prove.options import make_wishes, parse_ranks

    if ranks is None:
        return [make_wishes(command, **options)]
    numbers = parse_ranks(ranks)
    found = [make_wishes(command, **options, ranks=number) for number in numbers]
    if len(found) == 1:
        return found
    # Each has its own folder, or the second would find that of the first.
    return [
        wishes if wishes.keep is None else _keep_below(wishes, f"ranks-{wishes.ranks}")
        for wishes in found
    ]


def _keep_below(wishes: Wishes, name: str) -> Wishes:
    assert wishes.keep is not None
    return dataclasses.replace(wishes, keep=Path(wishes.keep, name))


def prove_all(
    wanted: Sequence[Wishes],
    make_proof: Callable[[Wishes, Watcher], Proof],
    follow: Callable[[], AbstractContextManager[Watcher]],
) -> Iterator[Proof]:
    """One proof after the other, until one is not equal; they share one budget."""
    began = time.monotonic()
    for index, wishes in enumerate(wanted):
        if wishes.budget_seconds is not None:
            left = wishes.budget_seconds - (time.monotonic() - began)
            share = max(_LEAST_SECONDS, left / (len(wanted) - index))
            wishes = dataclasses.replace(wishes, budget_seconds=share)
        with follow() as watcher:
            proof = make_proof(wishes, watcher)
        yield proof
        if proof.verdict != EQUAL:
            return
