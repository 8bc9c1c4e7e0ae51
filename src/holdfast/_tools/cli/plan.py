"""`holdfast plan`: how often to save, before the first step is made."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from holdfast import _text
from holdfast._errors import FolderError, SettingsError
from holdfast._tools.cli.group import AS_JSON, FOLDER, print_json
from holdfast._tools.cli.show import Screen
from holdfast._tools.plan.advice import Plan, make_plan
from holdfast._tools.plan.model import Inputs
from holdfast._tools.plan.picture import draw
from holdfast._tools.plan.simulate import PARTS
from holdfast._tools.plan.units import parse_duration, parse_share, parse_size, shown


def _parse_count(text: str, option: str) -> int:
    try:
        number = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise SettingsError(
            f"{option} {text!r}: this is not a whole number.\nValid: 1 or more, for example 64."
        ) from None
    if number < 1:
        raise SettingsError(f"{option} {text}: this must be 1 or more.\nFor example: {option} 64")
    return number


def _parse_number(text: str, option: str) -> float:
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise SettingsError(
            f"{option} {text}: this must be a number above 0.\n"
            "If there was none yet, say how rare they are: --mtbf-per-gpu 5y"
        )
    return number


_parse_wait = functools.partial(parse_duration, may_be_zero=True)
_parse_speed = functools.partial(parse_size, per_second=True)
# Each option that says something about the training: its value, its parser, its help.
_OPTIONS: tuple[tuple[str, str, Callable[..., Any], str], ...] = (
    ("--state-size", "SIZE", parse_size, "Size of model and optimizer, all ranks together (10GB)."),
    ("--gpus", "N", _parse_count, "GPUs that train together (1)."),
    ("--gpus-per-host", "N", _parse_count, "GPUs in one host (8)."),
    ("--mtbf-per-gpu", "TIME", parse_duration,
     "Mean time between failures of one GPU and its part of the host (5.8y)."),
    ("--interruptions", "N", _parse_number, "Or a count: N interruptions of the whole job …"),
    ("--over", "TIME", parse_duration, "… in this time."),
    ("--write-bandwidth", "SIZE/s", _parse_speed,
     "Write speed of all hosts together (1GB/s for each)."),
    ("--write-time", "TIME", parse_duration, "Or the time until a checkpoint is on disk."),
    ("--snapshot-cost", "TIME", parse_duration, "How long a snapshot in memory stops training."),
    ("--max-overhead", "SHARE", parse_share,
     "Share of the time for snapshots in memory (0.01); 0: none."),
    ("--interference", "SHARE", parse_share, "How much writing slows down training (0.05)."),
    ("--restart-time", "TIME", _parse_wait,
     "From an interruption to the next step (2min and reading)."),
    ("--queue-wait", "TIME", _parse_wait, "Mean wait for machines, each time (0s)."),
    ("--notice-share", "SHARE", parse_share,
     "Share of interruptions with a warning: they lose nothing (0)."),
    ("--host-loss-share", "SHARE", parse_share,
     "Share of the others that lose a host's memory (0.85)."),
    ("--run-time", "TIME", parse_duration, "Length of the training without interruptions (30d)."),
)  # fmt: skip


def _add_options(command: Callable[..., None]) -> Callable[..., None]:
    for name, metavar, parse, text in reversed(_OPTIONS):
        read = functools.partial(_read, parse)
        command = click.option(name, metavar=metavar, callback=read, help=text)(command)
    return command


def _read(
    parse: Callable[[str, str], float], _: click.Context, option: click.Parameter, text: str | None
) -> float | None:
    return None if text is None else parse(text, option.opts[0])


@click.command()
@_add_options
@click.option("--seed", type=int, default=0, help="Seed of the simulation (0).")
@click.option(
    "-o", "--output", metavar="FILE.svg", type=FOLDER, help="Draw the curve to this file."
)
@AS_JSON
def plan(seed: int, output: Path | None, as_json: bool, gpus: int | None, **said: Any) -> None:
    """Find the best interval between checkpoints, and the goodput to expect.

    Goodput is the share of the time that makes progress. The interval comes from the formulas of
    Young (1974) and Daly (2006), and from a simulation with restarts, queues, warnings and
    snapshots in memory. All options may be left out: it prints what it assumes.

    TIME is a number with ms, s, min, h, d, w or y; SIZE one with MB, GB, TB; SHARE is 0.8 or 80%.
    With checkpoint_every="auto" a run does this by itself, with what it measures.

    \b
    Example:
      holdfast plan
      holdfast plan --state-size 3GB --interruptions 6 --over 1d \\
        --notice-share 80% --queue-wait 10min
      holdfast plan --state-size 20GB --gpus 16384 --mtbf-per-gpu 5y -o plan.svg
    """
    if seed < 0:
        raise SettingsError(f"--seed {seed}: this must be 0 or more.\nFor example: --seed 1")
    if output is not None and output.suffix.lower() != ".svg":
        raise FolderError(
            f"{_text.name(output)}: a plan is drawn as SVG only.\nName the file so: -o plan.svg"
        )
    found = make_plan(Inputs(gpus=1 if gpus is None else gpus, **said), seed)
    if output is not None:
        try:
            output.write_text(draw(found), encoding="utf-8")
        except OSError as error:
            raise FolderError(
                f"{_text.name(output)}: cannot be written ({error.strerror or error}).\n"
                "Name a file in a folder that is there, and that you may write to."
            ) from error
    if as_json:
        print_json(found.to_json())
        return
    show_plan(found)
    if output is not None:
        click.echo(f"Drawn: {_text.name(output)}")


_NOWHERE = 0.001  # less of the time makes progress


def show_plan(plan: Plan) -> None:
    """The line to write, then its reasons."""
    screen, given = Screen(), plan.given
    screen.write(Text(plan.setting, style="bold green"))
    screen.write()
    gpus = f"{given.gpus:,} {'GPU' if given.gpus == 1 else 'GPUs'}"
    hosts = f"{given.hosts:,} {'host' if given.hosts == 1 else 'hosts'}"
    often = shown(plan.model.mtbf)
    screen.write(f"{gpus} in {hosts}: an interruption every {often}.", style="bold")
    screen.write(_interruptions(plan))
    for show_part in (_show_rows, _show_intervals, _show_rest, _show_ways):
        screen.write()
        show_part(screen, plan)
    if plan.assumed:
        screen.write()
        screen.write("Assumed, because you did not say it:", style="dim")
        for sentence in plan.assumed:
            screen.write(f"  {sentence}", style="dim")


def _interruptions(plan: Plan) -> str:
    model = plan.model
    anyway = f" ({shown(model.snapshot)} of that replaces a snapshot)"
    text = (
        f"A checkpoint stops training for {shown(model.cost)}"
        f"{anyway if model.has_snapshots else ''} and is on disk after {shown(model.latency)}."
    )
    if model.losing_mtbf == float("inf"):
        return f"{text} With these numbers, the work since the last checkpoint is never lost."
    return f"{text} The work since the last checkpoint is lost every {shown(model.losing_mtbf)}."


def _show_rows(screen: Screen, plan: Plan) -> None:
    names = [name for name in PARTS if any(row.parts[name] >= 5e-5 for row in plan.rows)]
    rows = []
    for row in plan.rows:
        is_best = "best" in row.marks
        cells = (
            f"{'> ' if is_best else ''}{shown(row.interval)}",
            f"{row.goodput:.2%}",
            *(f"{row.parts[name]:.2%}" for name in names),
            ", ".join(row.marks),
        )
        rows.append([Text(cell, style="bold" if is_best else "") for cell in cells])
    screen.table([">=every", ">=goodput", *(f">={name}" for name in names), "="], rows)


def _show_intervals(screen: Screen, plan: Plan) -> None:
    model, ours = plan.model, plan.ways[-1]
    low, high = ours.as_good
    screen.write(
        f"Young (1974): {shown(model.young)}. Daly (2006): {shown(model.daly)}. "
        f"The simulation: {shown(ours.best)}; from {shown(low)} to {shown(high)} the goodput is "
        "the same within 0.1 points."
    )
    if model.young < model.least_interval:
        screen.write(
            f"The disk is what limits it: a checkpoint takes {shown(model.write)} to write.",
            style="yellow",
        )


def _show_rest(screen: Screen, plan: Plan) -> None:
    row, losses = plan.chosen, plan.losses
    screen.write(
        f"Every {shown(row.interval)}: {row.goodput:.2%} of the time "
        f"(±{100 * row.error:.2f} by chance) makes progress. "
        f"The other {1.0 - row.goodput:.2%}{f': {losses}' if losses else ' do not'}."
    )
    if row.goodput < _NOWHERE:
        screen.write(
            f"Such a run gets nowhere: an interruption comes every {shown(plan.model.mtbf)}, and "
            f"a restart takes {shown(plan.model.restart)}.",
            style="bold red",
        )
    else:
        took = _days(plan.given.run_seconds / row.goodput)
        screen.write(f"{shown(plan.given.run_seconds)} of training take about {took}.")


def _days(seconds: float) -> str:
    if seconds < 2 * 3600:
        return shown(seconds)
    return f"{seconds / 86_400:.1f} d" if seconds >= 2 * 86_400 else f"{seconds / 3600:.1f} h"


def _show_ways(screen: Screen, plan: Plan) -> None:
    rows = [(way.name, shown(way.best), f"{way.goodput:.2%}") for way in plan.ways]
    screen.table(["=way of saving", ">=best every", ">=goodput"], rows)
    shared = (1 - plan.model.notice_share) * (1 - plan.model.host_loss_share)
    if plan.model.has_snapshots and shared > 0:
        screen.write(
            f"A snapshot in memory, every {shown(plan.model.snapshot_interval)}, saves the run in "
            f"{shared:.0%} of the interruptions: those that end processes but not hosts. "
            f"Snapshots take {_text.size(plan.given.host_bytes)} of a host's memory."
        )
