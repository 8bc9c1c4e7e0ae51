"""The command `holdfast` itself: its help, and the arguments and options that commands share."""

from __future__ import annotations

import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

import holdfast

FOLDER = click.Path(path_type=Path)
_COMPLETION_SECONDS = 0.5
# The groups of the help; for each command its line there, and an example.
_HELP: dict[str, dict[str, tuple[str, str]]] = {
    "Look": {
        "status": ("Show the state of a run, and what of it is safe.", "holdfast status runs"),
        "ui": ("Open a live page of all runs below a folder.", "holdfast ui runs"),
        "report": ("Write a page of HTML that shows how a run went.", "holdfast report runs/a"),
        "compare": ("Show runs side by side: settings, results, curves.",
                    "holdfast compare runs/a runs/b"),
        "ls": ("List the checkpoints of a run, and why each is kept.", "holdfast ls runs/a"),
        "verify": ("Check every byte of every checkpoint of a run.", "holdfast verify runs/a"),
        "why": ("Say why a training ended, hangs or is slow, and how sure that is.",
                "holdfast why runs/a"),
        "stacks": ("Show where every rank of a run stands now.", "holdfast stacks runs/a"),
        "doctor": ("Check the machine before a long run.",
                   "holdfast doctor runs/a -- python train.py"),
        "metrics": ("Write the state of runs as metrics, for Prometheus.",
                    "holdfast metrics runs -o holdfast.prom"),
    },
    "Ask": {
        "stop": ("Ask a run to stop; nothing is lost.", "holdfast stop runs/a --wait"),
        "save": ("Ask a run for a checkpoint now; it goes on training.", "holdfast save runs/a"),
        "resume": ("Start a run again, the same way as before.", "holdfast resume runs/a --detach"),
    },
    "Use": {
        "export": ("Write a checkpoint for other programs, in their formats.",
                   "holdfast export runs/a out.safetensors"),
        "adopt": ("Start a run from checkpoints that other libraries wrote.",
                  "holdfast adopt runs/a --from ckpts"),
        "mirror": ("See what the mirror of a run holds; copy to it, or fetch from it.",
                   "holdfast mirror runs/a"),
        "clean": ("Show what dead runs have left behind; --yes removes it.",
                  "holdfast clean runs"),
    },
    "Cluster": {
        "plan": ("Find the best checkpoint interval, and what to expect of it.",
                 "holdfast plan --state-size 20GB --gpus 64"),
        "submit": ("Submit a training to SLURM so that it cannot be lost.",
                   "holdfast submit --time=8:00:00 -- python train.py"),
        "run": ("Supervise a command: restart it, say why it died.",
                "srun holdfast run -- python train.py"),
        "lint": ("Find what in an sbatch script or a pod loses the job.",
                 "holdfast lint job.sbatch"),
    },
    "Try": {
        "demo": ("See a training die and come back, to the same bits.", "holdfast demo"),
        "prove": ("Show that your script can be interrupted anywhere.",
                  "holdfast prove -- python train.py"),
        "completion": ("Print the script for completion with the Tab key.",
                       'eval "$(holdfast completion bash)"'),
    },
}  # fmt: skip
_LINES = {name: line for group in _HELP.values() for name, (line, _) in group.items()}
# The modules with several commands; any other command has a module of its name.
_MODULES = {
    **dict.fromkeys(("ls", "verify"), "checkpoints"),
    **dict.fromkeys(("stop", "save", "resume", "run"), "control"),
    **dict.fromkeys(("report", "compare", "metrics", "ui"), "pages"),
    **dict.fromkeys(("export", "adopt", "mirror", "clean"), "using"),
    "completion": "group",
}


class PipeClosed(Exception):
    """The reader of standard output has gone."""


class _Group(click.Group):
    """Imports the module of a command only for that command: `--help` and Tab need none."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except BrokenPipeError as error:
            # click would exit with status 1, which for `verify` means damage.
            raise PipeClosed from error

    def list_commands(self, _: click.Context | None) -> list[str]:
        return list(_LINES)

    def get_command(self, _: click.Context | None, name: str) -> click.Command | None:
        if name not in _LINES:
            return None
        module = importlib.import_module(f"holdfast._tools.cli.{_MODULES.get(name, name)}")
        command: click.Command = getattr(module, name)
        return command

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in _HELP.items():
            with formatter.section(title):
                rows = []
                for name, (line, example) in commands.items():
                    # Of one width, so that all groups have the same columns.
                    rows += [(f"{name:<10}", line), ("", f"$ {example}")]
                formatter.write_dl(rows, col_spacing=2)

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in _LINES if name.startswith(incomplete)]
        found = [CompletionItem(name, help=_LINES[name]) for name in names]
        return found + super(click.Group, self).shell_complete(context, incomplete)


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog="RUN is the folder that holdfast.Run was given. For the options of a command: "
    "holdfast COMMAND --help. For completion with Tab, put the line of `completion` into "
    "~/.bashrc (zsh and fish: holdfast completion --help).",
)
@click.version_option(holdfast.__version__, message="holdfast %(version)s")
def cli() -> None:
    """holdfast makes an ML training run impossible to lose: stopped, killed or preempted, it goes
    on from where it was when you start it again. Your script does that with holdfast.Run; these
    commands look at the run folder and talk to the run, from any shell that can see the folder.
    """


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1))


def complete_runs(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The run folders that a half-typed word may mean; without one, any folder."""
    from holdfast._report.status.gather import RunFinder

    # The typed part stays as it is: `./runs/` must not become `runs/`.
    typed = incomplete[: incomplete.rfind("/") + 1]
    base = Path(typed or os.curdir)
    # A person waits for it, and the folder may be a whole home.
    deadline = time.monotonic() + _COMPLETION_SECONDS
    runs = RunFinder(base, deadline_seconds=deadline).find()[0]
    words = (f"{typed}{path.relative_to(base)}" for path in sorted(runs - {base}))
    found = [CompletionItem(word) for word in words if word.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="dir")]


AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
RUN = click.argument("run", metavar="RUN", type=FOLDER, shell_complete=complete_runs)
RUNS_PATH = click.argument(
    "path", metavar="[PATH]", type=FOLDER, default=".", shell_complete=complete_runs
)
# With allow_interspersed_args off: options after the first word are the script's own.
COMMAND = click.argument(
    "command", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED
)
COMMAND_SETTINGS = {"allow_interspersed_args": False}


class WithCommand(click.Command):
    """Keeps the words after `--` in `context.obj`: click would mix them with those before."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        context.obj = tuple(args[at + 1 :]) if at < len(args) else None
        # `submit` has no option -h: click would find it in -Jhello.
        return super().parse_args(context, ["--help" if w == "-h" else w for w in args[:at]])


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script with which the Tab key completes commands, options and run folders.

    \b
    To have it in every shell from now on, put one line into its start-up file:
      ~/.bashrc                     eval "$(holdfast completion bash)"
      ~/.zshrc (after compinit)     eval "$(holdfast completion zsh)"
      ~/.config/fish/config.fish    holdfast completion fish | source

    \b
    Example:
      holdfast completion bash
    """
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(cli, {}, "holdfast", "_HOLDFAST_COMPLETE").source())
