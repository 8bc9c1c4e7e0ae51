"""The commands: what they take, and which function each calls."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import holdfast
from holdfast._cli import words

_FOLDER = click.Path(path_type=Path)
_RUN = click.argument("run", metavar="RUN", type=_FOLDER)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class NobodyReads(Exception):
    """The other end of the pipe has gone."""


class _Group(click.Group):
    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except BrokenPipeError as error:
            # click would leave with status 1, which for `verify` means damage.
            raise NobodyReads from error


@click.group(
    cls=_Group,
    context_settings=_SETTINGS,
    epilog="RUN is the folder that holdfast.Run was given. To see it work: holdfast demo",
)
@click.version_option(holdfast.__version__, message="holdfast %(version)s")
def cli() -> None:
    """Makes an ML training run impossible to lose.

    A training that uses holdfast.Run keeps itself; these commands look at it and talk to it, from
    any shell that can see the run folder.

    \b
    Example:
      holdfast status runs        how do my runs do, and what is safe?
      holdfast stop runs/a        end this step, save, leave
    """


@cli.command()
@click.argument("path", metavar="[PATH]", type=_FOLDER, default=".")
@_JSON
def status(path: Path, as_json: bool) -> None:
    """Show how a run does and what of it is safe.

    PATH is a run folder, or a folder with runs in it (up to three levels down); without it, the
    current folder. With --json: a list with one object for each run.

    \b
    Example:
      holdfast status runs/a
      holdfast status runs
    """
    from holdfast._cli.gather import find_runs, summarize_all

    runs = summarize_all(find_runs(path))
    if as_json:
        _print_json([asdict(run) for run in runs])
        return
    from holdfast._cli.show import Screen, show_run, show_runs

    if len(runs) == 1:
        show_run(Screen(), runs[0])
    else:
        show_runs(Screen(), runs)


@cli.command()
@_RUN
@_JSON
def ls(run: Path, as_json: bool) -> None:
    """List the checkpoints of a run, and why each is kept.

    \b
    Example:
      holdfast ls runs/a
    """
    from holdfast._cli.checkpoints import list_with_reasons

    found = list_with_reasons(run)
    if as_json:
        _print_json(asdict(found))
        return
    from holdfast._cli.show import Screen, show_checkpoints

    show_checkpoints(Screen(), run, found)


@cli.command()
@_RUN
@_JSON
def verify(run: Path, as_json: bool) -> int:
    """Check every byte of every checkpoint of a run.

    Reads only: nothing is moved or changed. Leaves with status 1 if a checkpoint is damaged. A run
    that is started again never loads a damaged one; it takes the one before.

    \b
    Example:
      holdfast verify runs/a
    """
    from holdfast._cli.checkpoints import verify_all
    from holdfast._cli.show import Screen, show_verdict

    screen = Screen()
    verdicts = []
    for verdict in verify_all(run):
        verdicts.append(verdict)
        if not as_json:
            show_verdict(screen, verdict)
    if as_json:
        _print_json([asdict(verdict) for verdict in verdicts])
    elif not verdicts:
        screen.write(f"{words.name(run)}: no checkpoints yet.")
    return int(any(verdict.damage for verdict in verdicts))


@cli.command()
@_RUN
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
    from holdfast._cli.asking import ask_run, wait_until_gone

    asked = ask_run(run, "stop", reason=reason or "holdfast stop", now=now)
    what = (
        "It makes its last snapshot durable and leaves at once"
        if now
        else "It ends the step that it is in, makes it durable and leaves"
    )
    click.echo(
        f"{words.name(run)}: asked to stop (attempt {asked.attempt}, pid {asked.pid} on "
        f"{words.name(asked.host)}). {what}, with status 130."
    )
    if not wait:
        click.echo(f"To look: {words.command('status', run)}")
        return 0
    found = wait_until_gone(run, asked)
    safe = "nothing is on disk" if found.disk_step is None else f"step {found.disk_step} is durable"
    click.echo(f"{words.name(run)}: {found.state}; {safe}.")
    return 0 if found.state in ("stopped", "finished", "closed") else 1


@cli.command()
@_RUN
@click.option("--wait", is_flag=True, help="Return when the checkpoint is durable.")
def save(run: Path, wait: bool) -> int:
    """Ask a run for a checkpoint now; it goes on training.

    \b
    Example:
      holdfast save runs/a --wait
    """
    from holdfast._cli.asking import ask_run, wait_until_saved

    asked = ask_run(run, "save")
    click.echo(
        f"{words.name(run)}: asked for a checkpoint (attempt {asked.attempt}, pid {asked.pid} on "
        f"{words.name(asked.host)}). It is taken at the end of the step."
    )
    if not wait:
        click.echo(f"To look: {words.command('ls', run)}")
        return 0
    outcome = wait_until_saved(asked)
    if outcome.error is not None:
        click.echo(f"{words.name(run)}: no checkpoint was made: {outcome.error}.", err=True)
        return 1
    click.echo(f"{words.name(run)}: step {outcome.step} is durable.")
    return 0


@cli.command()
@click.option(
    "--framework",
    type=click.Choice(["auto", "torch", "numpy"]),
    default="auto",
    help="What to train with; auto takes PyTorch if it is installed.",
)
@click.option("--keep", metavar="FOLDER", type=_FOLDER, help="Keep the two runs there.")
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
    from holdfast._cli.demo import tell

    return tell(framework, keep, sabotage=sabotage)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1))
