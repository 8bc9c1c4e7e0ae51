"""The commands that send a request to a run, or start it: `stop`, `save`, `resume`, `run`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from holdfast import _text
from holdfast._errors import PERSON
from holdfast._report.status.ask import RunRequest, ask_run, wait_until_gone, wait_until_saved
from holdfast._report.status.gather import only_run
from holdfast._report.status.parts import read_stuck
from holdfast._supervise.hangs import Timeout
from holdfast._tools.cli.group import COMMAND, COMMAND_SETTINGS, RUN


@click.command()
@RUN
@click.option("--now", is_flag=True, help="Do not finish the step: keep the last snapshot.")
@click.option("--reason", metavar="TEXT", default="", help="Noted in the run's journal.")
@click.option("--wait", is_flag=True, help="Return when the run has stopped (Ctrl-C: sooner).")
def stop(run: Path, now: bool, reason: str, wait: bool) -> int:
    """Ask a run to stop; nothing is lost.

    The run ends the step that it is in, makes it durable and leaves with status 130. Started again,
    it goes on from there. It is asked through a file in the run folder, so this works from any
    machine that can write there.

    \b
    Example:
      holdfast stop runs/a --reason "the node is needed" --wait
    """
    asked = ask_run(run, "stop", reason=reason or "holdfast stop", now=now)
    what = "It ends the step that it is in, makes it durable and leaves"
    if now:
        what = "It makes its last snapshot durable and leaves at once"
    click.echo(f"{_text.name(run)}: asked to stop {_whom(asked)}. {what}, with status {PERSON}.")
    if not now and read_stuck(asked.beat) is not None:
        click.echo(
            "It makes no step any more, and so would not leave. To keep its last snapshot and "
            f"leave now: {_text.command('stop --now', run)}"
        )
    if not wait:
        click.echo(f"To look: {_text.command('status', run)}")
        return 0
    found = wait_until_gone(run, asked)
    step = found.safe.disk_step
    safe = "nothing is on disk" if step is None else f"step {step} is durable"
    click.echo(f"{_text.name(run)}: {found.state}; {safe}.")
    return 0 if found.state in ("stopped", "finished", "closed") else 1


@click.command()
@RUN
@click.option("--wait", is_flag=True, help="Return when the checkpoint is durable.")
def save(run: Path, wait: bool) -> int:
    """Ask a run for a checkpoint now; it goes on training.

    \b
    Example:
      holdfast save runs/a --wait
    """
    asked = ask_run(run, "save")
    about = "It is taken at the end of the step."
    click.echo(f"{_text.name(run)}: asked for a checkpoint {_whom(asked)}. {about}")
    if not wait:
        click.echo(f"To look: {_text.command('ls', run)}")
        return 0
    outcome = wait_until_saved(asked)
    if outcome.error is not None:
        click.echo(f"{_text.name(run)}: no checkpoint was made: {outcome.error}.", err=True)
        return 1
    click.echo(f"{_text.name(run)}: step {outcome.step} is durable.")
    return 0


def _whom(asked: RunRequest) -> str:
    return f"(attempt {asked.attempt}, pid {asked.pid} on {_text.name(asked.host)})"


@click.command()
@RUN
@click.argument("command", metavar="[-- COMMAND...]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--detach", is_flag=True, help="In the background; the output goes to RUN/resume.log."
)
def resume(run: Path, command: tuple[str, ...], detach: bool) -> int:
    """Start a run again as it was started: by python, a launcher, `holdfast run` or sbatch.

    The command, its folder and its environment are those that the run has recorded
    (attempts/NNNN/start.json), whatever folder and shell this is called from. The run goes on from
    its last state, to the same bits. A batch job is submitted again; of an array, that task alone.

    Secrets are never recorded. If the command had one, this says which, and takes the whole
    COMMAND. A run that is live or finished is not started.

    \b
    Example:
      holdfast resume runs/a
      holdfast resume runs/a --detach
      holdfast resume runs/a -- python train.py --api-key VALUE
    """
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


class _TimeoutType(click.ParamType[str]):
    name = "timeout"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            Timeout.parse(value)
        except ValueError as error:
            self.fail(f"{error}.\nWrite seconds (90, 5min, 2h) or auto.", param, ctx)
        return value


@click.command(context_settings=COMMAND_SETTINGS)
@COMMAND
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    metavar="N",
    help="Most restarts after crashes (3); 0: no restart at all.",
)
@click.option(
    "--hang-timeout",
    type=_TimeoutType(),
    metavar="SECONDS|auto",
    help="End it and start it again if it hangs for so long; auto: as the run has learned.",
)
@click.option(
    "--spare",
    is_flag=True,
    help="Have a second process ready, with installed packages imported: a restart goes on in it.",
)
def run(
    command: tuple[str, ...], max_restarts: int | None, hang_timeout: str | None, *, spare: bool
) -> int:
    """Supervise a command: say why it died, start it again where that helps.

    The screen looks the same as without it, and keys, Ctrl-C, Ctrl-Z and pdb work as usual. It
    keeps the output and the end of COMMAND for `holdfast why`, also if COMMAND does not use
    holdfast.

    A run of holdfast is restarted by the cause of its end: at once after a kill or a preemption,
    which are not counted; after a crash with pauses of 1, 2, 4 … 60 s, N times; out of memory once.
    Never after a requested stop, a wrong setting, a training gone bad (NaN), or three attempts in a
    row without a new step. A command that opens no run, and a SLURM step of several tasks, is
    restarted only if --max-restarts is given.

    SLURM and containers kill all processes once the first one ends. As the first process, `holdfast
    run` gives the keeper of a killed trainer time to save. If it is killed itself, COMMAND gets
    SIGTERM.

    Signals are passed on once. A warning (SIGUSR1, SIGUSR2) waits until it is caught: during
    `import torch` it would kill. Under torchrun it goes to the ranks. In a SLURM step, COMMAND gets
    RANK, WORLD_SIZE, MASTER_ADDR and so on, unless they are set.

    A hang is always reported. Only with --hang-timeout is the command ended, by SIGTERM and then
    SIGKILL. auto is ten times the usual step, and at least 20 s. SECONDS (90, 5min) is the limit
    for a step; a phase and the first step have ten times as long. A command that has opened no run
    hangs if it neither prints nor works for SECONDS (auto: 30 min). Slow progress is no hang. A
    process in a debugger (pdb, debugpy, gdb) or stopped (Ctrl-Z) is never killed.

    --spare is for `python SCRIPT` and `python -m MODULE`. Soon after the run has opened, a second
    process does the imports at the top of the script, and waits; it takes no GPU. A restart goes on
    in it, unless an import has side effects (a file, a thread, a connection) or has changed.

    The exit status is that of COMMAND: 128 + n if signal n has ended it, 127 if there is no such
    program, 77 if it was ended for a hang. `holdfast submit` writes the line that uses this.

    \b
    Example:
      holdfast run -- python train.py
      holdfast run --hang-timeout auto -- python train.py
      holdfast run --spare -- python train.py
      holdfast run --max-restarts 10 -- torchrun --nproc-per-node=4 train.py
      srun holdfast run -- python train.py
    """
    from holdfast._supervise import lead

    return lead(command, max_restarts, hang_timeout, spare=spare)
