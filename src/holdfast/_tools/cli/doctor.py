"""`holdfast doctor`: its options and its output."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click
from rich.text import Text

from holdfast import _text
from holdfast._errors import SettingsError
from holdfast._settings import parse_bytes
from holdfast._tools.cli.group import AS_JSON, WithCommand, complete_runs, print_json
from holdfast._tools.cli.show import Screen
from holdfast._tools.doctor.check import STATES, Check, worst
from holdfast._tools.doctor.doctor import DoctorRequest, Examination, examine_command
from holdfast._tools.doctor.run import RunNeeds

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def _parse_size(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    size = None if text is None else parse_bytes(text, "--size")
    if size == 0:
        raise click.BadParameter("a state has more than 0 bytes.")
    return size


def _check_grace(_: click.Context, __: click.Parameter, seconds: float | None) -> float | None:
    if seconds is not None and not 0 < seconds <= 1e6:  # nan is neither
        raise click.BadParameter(f"{seconds} is not a number of seconds above 0.")
    return seconds


@click.command(cls=WithCommand, options_metavar="[OPTIONS] [RUN] [-- COMMAND...]")
# A string: click would check a path, and a dead file system would block it.
@click.argument("run", metavar="", required=False, shell_complete=complete_runs)
@click.option("--quick", is_flag=True, help="Leave out what takes seconds, and COMMAND.")
@click.option(
    "--size",
    "size_bytes",
    metavar="SIZE",
    callback=_parse_size,
    help="Size of the state, such as 4GB, if there is no checkpoint yet.",
)
@click.option(
    "--grace",
    "grace_seconds",
    metavar="SECONDS",
    type=float,
    callback=_check_grace,
    help="Time from the signal to the kill (10, or as SLURM says).",
)
@AS_JSON
@click.pass_context
def doctor(
    context: click.Context,
    run: str | None,
    quick: bool,
    size_bytes: int | None,
    grace_seconds: float | None,
    as_json: bool,
) -> int:
    """Check the machine before a long run: what is ok, what may hurt, what will fail, and the
    remedy for each.

    Everything is measured on the machine where this runs, so run it where the training will: under
    `srun`, in the container. RUN is a run folder, also one that is not there yet; without it, the
    current folder. The size of its newest checkpoint is compared with memory, disk and the time
    that a signal leaves.

    COMMAND is the whole command that will train, with its launchers. A small program takes the
    place of your script, which is not run. Real signals are sent through the launchers, to see
    which one swallows them, and the ranks meet and do an all_reduce.

    It changes nothing and takes some seconds. The exit status is 0 if all is ok or there are only
    warnings, 1 if something will fail, 2 if it was called wrongly.

    \b
    Example:
      holdfast doctor
      holdfast doctor runs/a
      holdfast doctor runs/a --size 4GB -- torchrun --nproc-per-node=4 train.py
      srun holdfast doctor --quick --json runs/a
    """
    command: tuple[str, ...] = context.obj or ()
    if context.obj == ():
        raise SettingsError(
            "There is no command after the dashes.\nName the command that trains: "
            "holdfast doctor -- python train.py"
        )
    folder = Path(run) if run is not None else _here()
    examined = Examination(DoctorRequest(folder, command, quick, size_bytes, grace_seconds))
    checks = examined.run()
    if not quick:
        if command and sys.stderr is not None and sys.stderr.isatty():
            shown = _text.name(shlex.join(command))
            click.echo(f"trying the way of the signals and the ranks of: {shown}", err=True)
        checks += examine_command(command)
    state = worst(checks)
    if as_json:
        print_json(
            {
                "state": state,
                "folder": str(folder.absolute()),
                "run_id": examined.known.run_id,
                "state_bytes": examined.known.state_bytes,
                "command": list(command),
                "quick": quick,
                "counts": _counts(checks),
                "checks": [each.as_json() for each in checks],
            }
        )
    else:
        _show(checks, examined.known, size_bytes)
    return int(state == "fail")


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise SettingsError(
            "The current folder has been removed.\nGo to one that is there: cd ~"
        ) from None


def _counts(checks: list[Check]) -> dict[str, int]:
    return {kind: sum(each.state == kind for each in checks) for kind in _STYLES}


def _show(checks: list[Check], known: RunNeeds, size_bytes: int | None) -> None:
    screen = Screen()
    rows = []
    # The gravest last, next to the prompt.
    for each in sorted(checks, key=lambda check: STATES.index(check.state)):
        name = Text(each.name, style="" if each.state == "ok" else "bold")
        found = Text(_text.name(each.found), style="dim" if each.state == "ok" else "")
        rows.append((Text(each.state, style=_STYLES[each.state]), name, found))
        if each.remedy:
            remedy = Text.assemble(("→ ", "bold"), (_text.name(each.remedy), "cyan"))
            rows.append((Text(), Text(), remedy))
    screen.grid(("=", "=", ""), rows)
    counts = _counts(checks)
    warnings = _text.count(counts["warn"], "warning")
    if known.state_bytes is not None and size_bytes is None:
        screen.write(
            f"compared with {_text.size(known.state_bytes)}, the checkpoint of step {known.step}",
            style="dim",
        )
    if counts["fail"]:
        more = f", {warnings}" if counts["warn"] else ""
        things = _text.count(counts["fail"], "thing")
        screen.write(f"{things} will fail{more}.", style="bold red")
    elif counts["warn"]:
        screen.write(f"Nothing will fail; {warnings}.", style="yellow")
    else:
        screen.write(f"All {len(checks)} checks are ok.", style="green")
