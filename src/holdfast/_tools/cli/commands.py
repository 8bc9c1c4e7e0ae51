"""The commands that show a run, send it a request or start it; and the table of all commands."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from holdfast import _text
from holdfast._supervise.ending import Timeout
from holdfast._tools.cli.compare import compare
from holdfast._tools.cli.doctor import doctor
from holdfast._tools.cli.group import (
    AS_JSON,
    COMMAND,
    COMMAND_SETTINGS,
    FOLDER,
    RUN,
    RUNS_PATH,
    cli,
    print_json,
)
from holdfast._tools.cli.lint import lint
from holdfast._tools.cli.pages import metrics, report, ui
from holdfast._tools.cli.plan import plan
from holdfast._tools.cli.prove import prove
from holdfast._tools.cli.resume import resume
from holdfast._tools.cli.stacks import stacks
from holdfast._tools.cli.submit import submit
from holdfast._tools.cli.using import adopt, clean, completion, export, mirror
from holdfast._tools.cli.why import why

__all__ = ["cli"]

_WATCH_SECONDS = 1


class _Status(click.Command):
    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        # The seconds may be left out, and then the next word is a folder.
        for at, word in enumerate(args):
            if word == "--watch" and not _is_number("".join(args[at + 1 : at + 2])):
                args = [*args[:at], f"--watch={_WATCH_SECONDS}", *args[at + 1 :]]
                break
        return super().parse_args(context, args)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_seconds(_: click.Context, __: click.Parameter, seconds: float | None) -> float | None:
    if seconds is not None and not 0.1 <= seconds <= 86400:  # nan is neither
        raise click.BadParameter(f"{seconds} is not between 0.1 and 86400 seconds.")
    return seconds


@cli.command(cls=_Status)
@RUNS_PATH
@click.option(
    "--watch",
    metavar="[SECONDS]",
    type=float,
    callback=_check_seconds,
    help=f"Look again every so often ({_WATCH_SECONDS} s), until Ctrl-C.",
)
@AS_JSON
def status(path: Path, watch: float | None, as_json: bool) -> None:
    """Show how a run does and what of it is safe.

    PATH is a run folder, or a folder with runs in it (up to three levels down); without it, the
    current folder. With --json: a list with one object for each run.

    With --watch a terminal is drawn over in place; into a pipe goes a block (with --json a line)
    whenever something has changed. It goes on when a run ends: the run may come back.

    \b
    Example:
      holdfast status runs/a
      holdfast status runs --watch
    """
    if watch is not None:
        from holdfast._tools.cli.watch import watch as keep_watching

        keep_watching(path, watch, as_json=as_json)
        return
    from holdfast._report.status.gather import find_runs, summarize_all

    runs = summarize_all(find_runs(path))
    if as_json:
        print_json([run.as_record() for run in runs])
        return
    from holdfast._tools.cli.show import Screen, show_run, show_runs

    if len(runs) == 1:
        show_run(Screen(), runs[0])
    else:
        show_runs(Screen(), runs)


@cli.command()
@RUN
@AS_JSON
def ls(run: Path, as_json: bool) -> None:
    """List the checkpoints of a run, and why each is kept.

    \b
    Example:
      holdfast ls runs/a
    """
    from holdfast._report.status.gather import only_run
    from holdfast._tools.cli.checkpoints import list_with_reasons

    run = only_run(run)
    found = list_with_reasons(run)
    if as_json:
        print_json(asdict(found))
        return
    from holdfast._tools.cli.show import Screen, show_checkpoints

    show_checkpoints(Screen(), run, found)


@cli.command()
@RUN
@AS_JSON
def verify(run: Path, as_json: bool) -> int:
    """Check every byte of every checkpoint of a run.

    Reads only: nothing is moved or changed. Leaves with status 1 if a checkpoint is damaged. A run
    that is started again never loads a damaged one; it takes the one before.

    \b
    Example:
      holdfast verify runs/a
    """
    from holdfast._report.status.gather import only_run
    from holdfast._tools.cli.checkpoints import verify_all
    from holdfast._tools.cli.show import Screen, show_verdict

    run = only_run(run)
    screen = Screen()
    verdicts = []
    for verdict in verify_all(run):
        verdicts.append(verdict)
        if not as_json:
            show_verdict(screen, verdict)
    if as_json:
        print_json([asdict(verdict) for verdict in verdicts])
    elif not verdicts:
        screen.write(f"{_text.name(run)}: no checkpoints yet.")
    return int(any(verdict.damage for verdict in verdicts))


@cli.command()
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
    from holdfast._report.status.ask import ask_run, wait_until_gone
    from holdfast._report.status.parts import read_stuck

    asked = ask_run(run, "stop", reason=reason or "holdfast stop", now=now)
    what = (
        "It makes its last snapshot durable and leaves at once"
        if now
        else "It ends the step that it is in, makes it durable and leaves"
    )
    is_stuck = not now and read_stuck(asked.beat) is not None
    click.echo(
        f"{_text.name(run)}: asked to stop (attempt {asked.attempt}, pid {asked.pid} on "
        f"{_text.name(asked.host)}). {what}, with status 130."
    )
    if is_stuck:
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


@cli.command()
@RUN
@click.option("--wait", is_flag=True, help="Return when the checkpoint is durable.")
def save(run: Path, wait: bool) -> int:
    """Ask a run for a checkpoint now; it goes on training.

    \b
    Example:
      holdfast save runs/a --wait
    """
    from holdfast._report.status.ask import ask_run, wait_until_saved

    asked = ask_run(run, "save")
    click.echo(
        f"{_text.name(run)}: asked for a checkpoint (attempt {asked.attempt}, pid {asked.pid} on "
        f"{_text.name(asked.host)}). It is taken at the end of the step."
    )
    if not wait:
        click.echo(f"To look: {_text.command('ls', run)}")
        return 0
    outcome = wait_until_saved(asked)
    if outcome.error is not None:
        click.echo(f"{_text.name(run)}: no checkpoint was made: {outcome.error}.", err=True)
        return 1
    click.echo(f"{_text.name(run)}: step {outcome.step} is durable.")
    return 0


@cli.command()
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

    Trains a small model twice: once undisturbed, once killed with -9 in the middle of a step and
    started again. Then it compares every bit of the two ends. Takes some fifteen seconds, most of
    them imports, and leaves nothing behind.

    \b
    Example:
      holdfast demo
      holdfast demo --keep demo-runs
    """
    from holdfast._tools.cli.demo import run_demo

    return run_demo(framework, keep, sabotage=sabotage)


class _TimeoutType(click.ParamType[str]):
    name = "timeout"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            Timeout.parse(value)
        except ValueError as error:
            self.fail(f"{error}.\nWrite seconds (90, 5min, 2h) or auto.", param, ctx)
        return value


@cli.command(
    short_help="Supervise a command: restart it, say why it died.",
    context_settings=COMMAND_SETTINGS,
)
@COMMAND
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    metavar="N",
    help="Restart after a crash so many times at most (3); 0: never restart at all.",
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
    help="Have a second process ready that has done the imports: a restart goes on in it.",
)
def run(
    command: tuple[str, ...], max_restarts: int | None, hang_timeout: str | None, *, spare: bool
) -> int:
    """Supervise a command: say why it died, start it again where that helps.

    The screen looks as without it, and keys, Ctrl-C, Ctrl-Z and pdb work as ever. What COMMAND
    printed and how it ended is kept for `holdfast why`, whether it knows holdfast or not.

    A run of holdfast is started again by the cause of its end: after a kill or a preemption at
    once, and it counts for nothing; after a crash with pauses of 1, 2, 4 … 60 s, N times; out of
    memory once. Never: after a requested stop, a wrong setting, a training gone bad (NaN), or three
    lives in a row without a new step. A command that opens no run would begin from
    nothing, and is restarted only if --max-restarts is given. In a step of SLURM with several tasks
    nothing is restarted unless it is given, since one rank alone cannot come back.

    As the first process of a SLURM task or of a container it keeps the newest state: both kill
    whatever is left once their first process is gone. Led by this, the keeper of a trainer that was
    killed has all the time that it needs. If this process is killed itself, COMMAND gets SIGTERM;
    so does, if COMMAND is killed, what it leaves running.

    Signals are passed on once. A warning (SIGUSR1, SIGUSR2) waits until it is caught: during
    `import torch` it would kill. Under torchrun it goes to the ranks. In a step of SLURM, COMMAND
    gets RANK, WORLD_SIZE, MASTER_ADDR and so on, unless they are set.

    A hang is found and said in any case, and nothing is killed for it unless --hang-timeout is
    given: auto is ten times the usual step of the run, and at least 20 s; SECONDS (90, 5min) are
    for a step, ten times that for a phase or the first step. A command that has opened no run
    hangs if it neither prints nor works for SECONDS (auto: 30 min). Then it gets SIGTERM, and
    SIGKILL if that is not enough. Time alone is no hang: what gets on is only slow. What is held in
    a debugger (pdb, debugpy, gdb) or stopped (Ctrl-Z) is never killed, however long it takes.

    --spare is for `python SCRIPT` and `python -m MODULE`. A few seconds after the run has opened, a
    second process does the imports at the top of the script, up to the first statement of another
    kind, and waits. It takes no GPU, and what it takes of memory is said once. A restart goes on in
    it. If a module of the script writes a file, starts a thread or a process, or connects while it
    is imported, or if one has changed since, the restart is a plain start, and why is said.

    Leaves with the status of COMMAND; 128 + n if signal n has ended it, 127 if there is no such
    program, 77 if it was ended for a hang. `holdfast submit` writes the line that uses this.

    \b
    Example:
      holdfast run -- python train.py
      holdfast run --hang-timeout auto -- python train.py
      holdfast run --spare -- python train.py
      holdfast run --max-restarts 10 -- torchrun --nproc-per-node=4 train.py
      srun holdfast run -- python train.py
    """
    from holdfast._supervise.leader import lead

    return lead(command, max_restarts, hang_timeout, spare=spare)


for _command in (
    *(adopt, clean, compare, completion, doctor, export, lint, metrics, mirror, plan, prove),
    *(report, resume, stacks, submit, ui, why),
):
    cli.add_command(_command)
