"""`holdfast plan`: how often to save, before the first step is made."""

from __future__ import annotations

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
from holdfast._tools.plan import units
from holdfast._tools.plan.advice import Plan, Row
from holdfast._tools.plan.inputs import Inputs
from holdfast._tools.plan.units import shown

_Parse = Callable[..., float]


def _said(parse: _Parse, **more: Any) -> Callable[..., float | None]:
    """A callback of click's: what was written, as a number; errors of ours, not of click's."""

    def read(_: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
        return None if text is None else parse(text, parameter.opts[0], **more)

    return read


def _count(_: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    option = parameter.opts[0]
    try:
        number = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise SettingsError(
            f"{option} {text!r}: this is not a whole number.\nValid: 1 or more, for example 64."
        ) from None
    if number < 1:
        raise SettingsError(f"{option} {text}: this must be 1 or more.\nFor example: {option} 64")
    return number


def _number(_: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise SettingsError(
            f"{parameter.opts[0]} {text}: this must be a number above 0.\n"
            "If there was none yet, say how rare they are: --mtbf-per-gpu 5y"
        )
    return number


_duration = _said(units.parse_duration)
_duration_or_none = _said(units.parse_duration, may_be_zero=True)
_share = _said(units.parse_share)


@click.command(short_help="Find the best checkpoint interval, and what to expect of it.")
@click.option(
    "--state-size",
    metavar="SIZE",
    callback=_said(units.parse_size),
    help="Of model and optimizer, all ranks together (10GB).",
)
@click.option("--gpus", metavar="N", callback=_count, help="How many train together (1).")
@click.option("--gpus-per-host", metavar="N", callback=_count, help="Of them, in a host (8).")
@click.option(
    "--mtbf-per-gpu",
    metavar="TIME",
    callback=_duration,
    help="Mean time between failures of one GPU and its part of the host (5.8y).",
)
@click.option(
    "--interruptions",
    metavar="N",
    callback=_number,
    help="Or as counted: so many of the whole job …",
)
@click.option("--over", metavar="TIME", callback=_duration, help="… in so much time.")
@click.option(
    "--write-bandwidth",
    metavar="SIZE/s",
    callback=_said(units.parse_size, per_second=True),
    help="To disk, of all hosts together (1GB/s for each).",
)
@click.option(
    "--write-time", metavar="TIME", callback=_duration, help="Or: until a checkpoint is on disk."
)
@click.option(
    "--snapshot-cost",
    metavar="TIME",
    callback=_duration,
    help="For which a snapshot in memory stops training.",
)
@click.option(
    "--max-overhead",
    metavar="SHARE",
    callback=_share,
    help="Of the time, for snapshots in memory (0.01); 0: none.",
)
@click.option(
    "--interference",
    metavar="SHARE",
    callback=_share,
    help="By which writing slows down training (0.05).",
)
@click.option(
    "--restart-time",
    metavar="TIME",
    callback=_duration_or_none,
    help="From an interruption to the next step (2min and reading).",
)
@click.option(
    "--queue-wait",
    metavar="TIME",
    callback=_duration_or_none,
    help="Mean wait for machines, each time (0s).",
)
@click.option(
    "--notice-share",
    metavar="SHARE",
    callback=_share,
    help="Of the interruptions, those with a warning: they lose nothing (0).",
)
@click.option(
    "--host-loss-share",
    metavar="SHARE",
    callback=_share,
    help="Of the others, those that take a host's memory along (0.85).",
)
@click.option(
    "--run-time",
    metavar="TIME",
    callback=_duration,
    help="The training, if nothing ever happened (30d).",
)
@click.option("--seed", type=int, default=0, help="Of the simulation (0).")
@click.option("-o", "--output", metavar="FILE.svg", type=FOLDER, help="Draw it, too.")
@AS_JSON
def plan(seed: int, output: Path | None, as_json: bool, gpus: int | None, **said: Any) -> None:
    """Find the best interval between checkpoints, and the goodput to expect.

    Goodput is the share of the time that makes progress. The interval comes from the formulas of
    Young (1974) and Daly (2006), and from a simulation that also knows restarts, queues, warnings
    and snapshots in memory. All options may be left out; what is assumed is said.

    TIME is a number with ms, s, min, h, d, w or y; SIZE one with MB, GB, TB; SHARE is 0.8 or 80%.
    With checkpoint_every="auto" a run does this by itself, with what it measures.

    \b
    Example:
      holdfast plan
      holdfast plan --state-size 3GB --interruptions 6 --over 1d \\
        --notice-share 80% --queue-wait 10min
      holdfast plan --state-size 20GB --gpus 16384 --mtbf-per-gpu 5y -o plan.svg
    """
    from holdfast._tools.plan.advice import make_plan
    from holdfast._tools.plan.inputs import Inputs

    if seed < 0:
        raise SettingsError(f"--seed {seed}: this must be 0 or more.\nFor example: --seed 1")
    if output is not None and output.suffix.lower() != ".svg":
        raise FolderError(
            f"{_text.name(output)}: a plan is drawn as SVG only.\nName the file so: -o plan.svg"
        )
    given = Inputs(gpus=1 if gpus is None else gpus, **said)
    found = make_plan(given, seed)
    if output is not None:
        _draw(found, given, output)
    if as_json:
        print_json(found.to_json())
        return

    show_plan(found, given)
    if output is not None:
        click.echo(f"Drawn: {_text.name(output)}")


def _draw(found: Any, given: Any, path: Path) -> None:
    from holdfast._tools.plan.picture import draw

    try:
        path.write_text(draw(found, given), encoding="utf-8")
    except OSError as error:
        raise FolderError(
            f"{_text.name(path)}: cannot be written ({error.strerror or error}).\n"
            "Name a file in a folder that is there, and that you may write to."
        ) from error


# -- A plan, as it is printed ----------------------------------------------------------------------


_NOWHERE = 0.001  # of the time makes progress
LABELS = {
    "checkpoints": "checkpoints",
    "snapshots": "snapshots in memory",
    "repeated": "repeated work",
    "restarts": "restarts",
    "queue": "waiting for the queue",
}


def percent(share: float) -> str:
    """A share with two digits behind the point: the third is chance."""
    return f"{100 * share:.2f}%"


def show_plan(plan: Plan, given: Inputs) -> None:
    """The table, the reasons and the line to write."""
    screen = Screen()
    screen.write(_headline(plan, given), style="bold")
    screen.write(_interruptions(plan))
    screen.write()
    _show_rows(screen, plan)
    screen.write()
    _show_intervals(screen, plan)
    screen.write()
    _show_rest(screen, plan)
    screen.write()
    _show_ways(screen, plan)
    screen.write()
    screen.write("Write:")
    screen.write(Text(f"  {plan.setting}", style="bold green"))
    if plan.better is not None:
        fewer = "Fewer" if plan.better.max_overhead < plan.model.max_overhead else "More"
        screen.write(
            f"{fewer} snapshots in memory would make it {percent(plan.better.goodput)}; a process "
            f"that dies then loses up to {shown(plan.better.most_lost)} instead of "
            f"{shown(min(plan.model.snapshot_interval, plan.chosen.interval))}:"
        )
        screen.write(Text(f"  {plan.better_setting}", style="green"))
    if plan.assumed:
        screen.write()
        screen.write("Assumed, where nothing was said:", style="dim")
        for sentence in plan.assumed:
            screen.write(f"  {sentence}", style="dim")


def _headline(plan: Plan, given: Inputs) -> str:
    noun = "GPU" if given.gpus == 1 else "GPUs"
    often = shown(plan.model.mtbf)
    return f"{given.gpus:,} {noun} in {_hosts(given)}: an interruption every {often}."


def _hosts(given: Inputs) -> str:
    return f"{given.hosts:,} {'host' if given.hosts == 1 else 'hosts'}"


def _interruptions(plan: Plan) -> str:
    model = plan.model
    anyway = f" ({shown(model.snapshot)} of it in place of another snapshot)"
    text = (
        f"A checkpoint takes {shown(model.cost)} from training"
        f"{anyway if model.has_snapshots else ''} and is on disk after {shown(model.latency)}."
    )
    if model.losing_mtbf == float("inf"):
        return f"{text} By what you say, no interruption ever costs more than what is in memory."
    return f"{text} The work since the last one is lost every {shown(model.losing_mtbf)}."


def _show_rows(screen: Screen, plan: Plan) -> None:
    names = [name for name in LABELS if any(row.parts[name] >= 5e-5 for row in plan.rows)]
    table = screen.columns()
    table.add_column("every", justify="right", no_wrap=True)
    table.add_column("goodput", justify="right", no_wrap=True)
    short = {"snapshots": "snapshots", "repeated": "repeated", "queue": "queue"}
    for name in names:
        table.add_column(short.get(name, name), justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in plan.rows:
        is_best = "best" in row.marks
        others = [mark for mark in row.marks if mark != "best"]
        told = [*(["best"] if is_best else []), *others]
        table.add_row(
            f"{'> ' if is_best else ''}{shown(row.interval)}",
            percent(row.goodput),
            *(percent(row.parts[name]) for name in names),
            ", ".join(told),
            style="bold" if is_best else None,
        )
    screen.table(table)


def _show_intervals(screen: Screen, plan: Plan) -> None:
    low, high = plan.as_good
    screen.write(
        f"Young (1974): {shown(plan.young)}. Daly (2006): {shown(plan.daly)}. "
        f"The simulation: {shown(plan.best)}, and {shown(low)} to {shown(high)} is as good to "
        "0.1 points."
    )
    if plan.young < plan.model.least_interval:
        screen.write(
            f"The disk is what limits it: a checkpoint takes {shown(plan.model.write)} to write.",
            style="yellow",
        )


def _show_rest(screen: Screen, plan: Plan) -> None:
    row: Row = plan.chosen
    rest = 1.0 - row.goodput
    parts = sorted(row.parts.items(), key=lambda part: -part[1])
    told = ", ".join(f"{LABELS[name]} {percent(share)}" for name, share in parts if share >= 5e-5)
    screen.write(
        f"Every {shown(row.interval)}: {percent(row.goodput)} (±{100 * row.error:.2f} by chance) "
        f"makes progress, {percent(rest)} "
        f"does not{f': {told}' if told else ''}."
    )
    done, needed = plan.finished, shown(plan.run_seconds)
    if row.goodput < _NOWHERE:
        screen.write(
            f"Such a run gets nowhere: an interruption comes every {shown(plan.model.mtbf)}, and "
            f"a restart takes {shown(plan.model.restart)}.",
            style="bold red",
        )
    elif done is None:
        screen.write(f"{needed} of training take about {_days(plan.run_seconds / row.goodput)}.")
    elif done.unfinished:
        screen.write(
            f"{needed} of training: {percent(done.unfinished)} of such runs get nowhere.",
            style="bold red",
        )
    else:
        low, high = _days(done.low), _days(done.high)
        spread = f"; nine of ten such runs take {low} to {high}" if low != high else ""
        screen.write(f"{needed} of training take {_days(done.mean)}{spread}.")


def _days(seconds: float) -> str:
    if seconds < 2 * 3600:
        return shown(seconds)
    return f"{seconds / 86_400:.1f} d" if seconds >= 2 * 86_400 else f"{seconds / 3600:.1f} h"


def _show_ways(screen: Screen, plan: Plan) -> None:
    table = screen.columns()
    table.add_column("way of saving", no_wrap=True)
    table.add_column("best every", justify="right", no_wrap=True)
    table.add_column("goodput", justify="right", no_wrap=True)
    for way in plan.ways:
        table.add_row(way.name, shown(way.best), percent(way.goodput))
    screen.table(table)
    shared = (1 - plan.model.notice_share) * (1 - plan.model.host_loss_share)
    if plan.model.has_snapshots and shared > 0:
        screen.write(
            f"A snapshot in memory, every {shown(plan.model.snapshot_interval)}, is what is left "
            f"of the run after {shared:.0%} of the interruptions, those that end processes and "
            "leave the hosts."
        )
