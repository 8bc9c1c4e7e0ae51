"""`holdfast plan`: how often to save, before the first step is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from holdfast._cli.group import AS_JSON, FOLDER, print_json
from holdfast._errors import FolderError, SettingsError
from holdfast._plan import units
from holdfast._status import words

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
    from holdfast._plan.advice import make_plan
    from holdfast._plan.inputs import Inputs

    if seed < 0:
        raise SettingsError(f"--seed {seed}: this must be 0 or more.\nFor example: --seed 1")
    if output is not None and output.suffix.lower() != ".svg":
        raise FolderError(
            f"{words.name(output)}: a plan is drawn as SVG only.\nName the file so: -o plan.svg"
        )
    given = Inputs(gpus=1 if gpus is None else gpus, **said)
    found = make_plan(given, seed)
    if output is not None:
        _draw(found, given, output)
    if as_json:
        print_json(found.to_json())
        return
    from holdfast._cli.show_plan import show_plan

    show_plan(found, given)
    if output is not None:
        click.echo(f"Drawn: {words.name(output)}")


def _draw(found: Any, given: Any, path: Path) -> None:
    from holdfast._plan.picture import draw

    try:
        path.write_text(draw(found, given), encoding="utf-8")
    except OSError as error:
        raise FolderError(
            f"{words.name(path)}: cannot be written ({error.strerror or error}).\n"
            "Name a file in a folder that is there, and that you may write to."
        ) from error
