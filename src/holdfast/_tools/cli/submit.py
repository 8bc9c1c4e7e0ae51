"""`holdfast submit`: a right script for SLURM, printed or passed to sbatch."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from holdfast import _text
from holdfast._environment import variables
from holdfast._errors import FolderError
from holdfast._tools.cli.group import FOLDER, WithCommand
from holdfast._tools.submit import LEAD_SECONDS, MARK, Script, call_sbatch, write_script


@click.command(
    cls=WithCommand,
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
    options_metavar="[OPTIONS] [SBATCH OPTIONS] -- COMMAND...",
)
@click.argument("options", metavar="", nargs=-1, type=click.UNPROCESSED)
@click.option("--print", "only_print", is_flag=True, help="Show the script; submit nothing.")
@click.option(
    "--lead",
    metavar="SECONDS",
    type=click.IntRange(1, 65535),
    help=f"The warning comes so long before the time limit ({LEAD_SECONDS}, or what fits).",
)
@click.option("--to", metavar="FILE", type=FOLDER, help="Keep the script there, too.")
@click.pass_context
def submit(
    context: click.Context,
    options: tuple[str, ...],
    only_print: bool,
    lead: int | None,
    to: Path | None,
) -> int:
    """Write a batch script in which the warning arrives and the job comes back, and submit it.

    Options for sbatch are passed on as they are. It adds, unless you give them: --signal,
    --requeue, --open-mode=append, --output (in logs/, which is made), --job-name. Each task runs
    COMMAND under `holdfast run`, with RANK, WORLD_SIZE and so on set: ask for one task for each
    rank. With torchrun it is one task for each node, and the launchers find each other.

    Containers: write the whole command, such as `apptainer exec image.sif python train.py`. With
    --container-image, holdfast must be installed in the image.

    \b
    Example:
      holdfast submit --time=8:00:00 --gpus-per-node=1 -- python train.py --lr 1
      holdfast submit -N 2 --ntasks-per-node=4 -- python train.py
      holdfast submit -N 2 -c 16 -- torchrun --nproc-per-node=4 train.py
      holdfast submit --print --array=0-9 -- python train.py
    """
    command = context.obj or ()
    script = write_script(options, command, python=sys.executable, lead_seconds=lead)
    for note in script.notes:
        click.echo(f"Note: {_text.name(note)}", err=True)
    if to is not None:
        if to.exists() and (not to.is_file() or MARK not in to.read_text(errors="replace")):
            raise FolderError(
                f"{to}: is there already, and holdfast has not written it.\nChoose another name."
            )
        to.write_text(script.text)
    if to is not None or not only_print:
        _make_folders(script.options)
    if only_print:
        click.echo(script.text, nl=False)
        return 0
    return _submit_script(script)


def _make_folders(options: Mapping[str, str]) -> None:
    """A job whose log cannot be opened fails without a message."""
    base = Path(options.get("chdir", "."))
    for name in ("output", "error"):
        folder = (base / options.get(name, "")).parent
        if "%" in str(folder):
            click.echo(
                f"Note: --{name}={_text.name(options[name])}: SLURM makes no folders. If this one "
                "is not there when the job starts, the job fails and leaves no log.",
                err=True,
            )
        else:
            folder.mkdir(parents=True, exist_ok=True)


def _submit_script(script: Script) -> int:
    remedy = "Submit on a machine of the cluster; to see the script: holdfast submit --print …"
    environment = variables.for_another_job()
    done = call_sbatch(["sbatch", "--parsable"], script.text, remedy, env=environment)
    if done.returncode != 0:
        return done.returncode  # sbatch has printed why
    match = re.fullmatch(r"(\d+)(?:;.*)?", done.stdout.strip())
    if match is None:  # an option such as --test-only
        click.echo(_text.name(done.stdout.strip()))
        return 0
    _print_job(match[1], script.options)
    return 0


def _print_job(job: str, options: Mapping[str, str]) -> None:
    name, is_array = options["job-name"], "array" in options
    log = options["output"]
    if not re.search(r"%[^xjJAa]|\\", log):
        numbers = {"%x": name, "%A": job, "%a": "*", "%j": "*" if is_array else job, "%J": job}
        log = re.sub("%[xjJAa]", lambda found: numbers[found[0]], log)
        log = str(Path(options.get("chdir", "."), log))
    shown = log if "*" in log else shlex.quote(log)
    click.echo(f"{_text.name(name)}: submitted as job {job}{' (an array)' if is_array else ''}.")
    click.echo(f"To follow it: tail -F {_text.name(shown)}")
    click.echo(f"To stop it: scancel {job} (its state is saved, and it stays cancelled)")
    click.echo("To see what is safe: holdfast status RUN, or holdfast status for all runs here")
