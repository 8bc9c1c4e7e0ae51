"""`holdfast resume`: start a run again, the same way as before."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from holdfast import _text
from holdfast._tools.cli.group import RUN


@click.command(
    short_help="Start a run again, the same way as before.",
    context_settings={"allow_interspersed_args": True},
)
@RUN
@click.argument("command", metavar="[-- COMMAND...]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--detach", is_flag=True, help="In the background; the output goes to RUN/resume.log."
)
def resume(run: Path, command: tuple[str, ...], detach: bool) -> int:
    """Start a run again as it was started: by python, torchrun, `holdfast run` or sbatch.

    The command, its folder and its environment are those that the run has recorded
    (attempts/NNNN/start.json), whatever folder and shell this is called from. The run goes on from
    its last state, to the same bits. A batch job is submitted again.

    Secrets are never recorded. If the command had one, this says which, and takes the whole
    COMMAND. A run that is live or finished is not started.

    \b
    Example:
      holdfast resume runs/a
      holdfast resume runs/a --detach
      holdfast resume runs/a -- python train.py --api-key VALUE
    """
    from holdfast._report.status.gather import only_run
    from holdfast._tools import resume as by_record

    run = only_run(run)
    found = by_record.plan_resumption(run, command)
    for note in found.notes:
        click.echo(f"{_text.name(run)}: {note}", err=True)
    shown = _text.name(shlex.join(found.command))
    how = "as given" if command else f"as attempt {found.attempt} was, by {found.launcher}"
    click.echo(f"{_text.name(run)}: starting it {how}, in {_text.name(found.cwd)}:", err=True)
    click.echo(f"  {shown}", err=True)
    if found.launcher == "sbatch":
        job = by_record.submit_again(found)
        click.echo(f"{_text.name(run)}: submitted as job {_text.name(job)}.")
        return 0
    if not detach:
        by_record.replace_this_process(found)
    started = by_record.start_detached(found)
    log = _text.name(found.layout.resume_log)
    if started.status is not None and started.attempt is None:
        click.echo(
            f"{_text.name(run)}: it has ended with status {started.status}, before it opened the "
            f"run.\nWhat it printed: {log}",
            err=True,
        )
        return 1
    which = "still starting" if started.attempt is None else f"attempt {started.attempt}"
    click.echo(f"{_text.name(run)}: {which}, pid {started.pid}. To follow it: tail -F {log}")
    return 0
