"""`holdfast demo`."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.text import Text

from holdfast import _text
from holdfast._tools.cli.group import FOLDER
from holdfast._tools.cli.show import Screen, some
from holdfast._tools.demo import story
from holdfast._tools.workplace import check_is_new, ended_by_signals, open_workplace

_NAMED = 6
_DRAW_SECONDS = 0.1


@click.command()
@click.option(
    "--framework",
    type=click.Choice(["auto", "torch", "numpy"]),
    default="auto",
    help="What to train with; auto takes PyTorch if it is installed.",
)
@click.option("--keep", metavar="FOLDER", type=FOLDER, help="Keep the two runs there.")
@click.option(
    "--sabotage", is_flag=True, help="Spoil one number after the resume, to see it noticed."
)
def demo(framework: str, keep: Path | None, sabotage: bool) -> int:
    """See a training die and come back, to the same bits.

    It trains a small model twice: once undisturbed, once killed with -9 in the middle of a step and
    started again. Then it compares every bit of the two results. It takes about fifteen seconds,
    most of them imports, and leaves nothing behind.

    \b
    Example:
      holdfast demo
      holdfast demo --keep demo-runs
    """
    framework = story.choose_framework(framework)
    screen = Screen()
    name = story.FRAMEWORKS[framework]
    if keep is not None:
        check_is_new(keep)
    with ended_by_signals(), open_workplace("holdfast-demo-", keep) as folder:
        screen.write(
            f"A small {name} model learns two spirals: {story.STEPS} steps, with dropout, shuffled "
            "data and AdamW."
        )
        screen.write()
        with _counting(screen, "undisturbed") as watch:
            whole = story.run_attempt(framework, folder / "undisturbed", watch)
        taken, steps = _text.duration(whole.seconds_since(0)), _text.steps(story.STEPS)
        _line(screen, 1, f"undisturbed: {steps} in {taken}, accuracy {whole.accuracy:.1%}")
        with _counting(screen, "the same again") as watch:
            cut = story.run_attempt(framework, folder / "killed", watch, kill_at=story.KILL_AT)
        killed = f"the same again, and kill -9 in the middle of step {cut.last_step + 1}: "
        _line(screen, 2, f"{killed}after the gradients, before the optimizer")
        with _counting(screen, "started again") as watch:
            rest = story.run_attempt(framework, folder / "killed", watch, sabotage=sabotage)
        lost = _text.steps(cut.last_step - rest.begin)
        work = _text.duration(cut.seconds_since(rest.begin))
        _line(
            screen, 3, f"started again: goes on at step {rest.begin}; lost {lost}, {work} of work"
        )
        if sabotage:
            screen.write("   (sabotage: one weight was changed by 0.001 after the resume)")
    _line(screen, 4, "every bit of the two ends: weights, optimizer, generators, order of the data")
    status = show_comparison(screen, whole.digests, rest.digests)
    if keep is not None:
        shown = _text.command("status", keep)
        screen.write(f"The two runs are in {_text.name(keep)}. To look: {shown}")
    return status


def show_comparison(screen: Screen, whole: dict[str, str], killed: dict[str, str]) -> int:
    """The two hashes, one above the other; 0 if they are the same, else 1."""
    screen.write(f"   undisturbed  {_hash(whole)}")
    screen.write(f"   killed       {_hash(killed)}")
    screen.write()
    different = story.find_differences(whole, killed)
    if not different:
        equal = f"Equal to the last bit, in all {len(whole)} parts: as if nothing had happened."
        screen.write(equal, style="bold green")
        return 0
    names = some(different, _NAMED)
    text = f"NOT equal: {len(different)} of {len(whole)} parts differ: {names}."
    screen.write(text, style="bold red")
    return 1


def _hash(digests: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:32]


def _line(screen: Screen, number: int, text: str) -> None:
    screen.grid("  ", [(Text(f"{number}.", style="bold"), text)], gap=1)


@contextmanager
def _counting(screen: Screen, what: str) -> Iterator[Callable[[int], None]]:
    """Steps that count up on a terminal during an attempt; in a pipe, nothing."""
    if not screen.is_terminal:
        yield lambda _: None
        return
    shown = 0.0

    def watch(step: int) -> None:
        nonlocal shown
        # Drawing each of hundreds of steps a second would slow down the training.
        if time.monotonic() - shown > _DRAW_SECONDS:
            shown = time.monotonic()
            spinner.update(f"{what}: step {step} of {story.STEPS}")

    with screen.status(f"{what}: starting") as spinner:
        yield watch
