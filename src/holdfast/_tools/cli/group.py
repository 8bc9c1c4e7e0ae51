"""The command `holdfast` itself: its help, and the arguments and options that commands share."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

import holdfast

FOLDER = click.Path(path_type=Path)
_COMPLETION_SECONDS = 0.5
# Every command stands in one group of the help, with the line that shows its use.
_GROUPS = {
    "Look": {
        "status": "holdfast status runs",
        "ui": "holdfast ui runs",
        "report": "holdfast report runs/a",
        "compare": "holdfast compare runs/a runs/b",
        "ls": "holdfast ls runs/a",
        "verify": "holdfast verify runs/a",
        "why": "holdfast why runs/a",
        "stacks": "holdfast stacks runs/a",
        "doctor": "holdfast doctor runs/a -- python train.py",
        "metrics": "holdfast metrics runs -o holdfast.prom",
    },
    "Ask": {
        "stop": "holdfast stop runs/a --wait",
        "save": "holdfast save runs/a",
        "resume": "holdfast resume runs/a --detach",
    },
    "Use": {
        "export": "holdfast export runs/a out.safetensors",
        "adopt": "holdfast adopt runs/a --from ckpts",
        "mirror": "holdfast mirror runs/a",
        "clean": "holdfast clean runs",
    },
    "Cluster": {
        "plan": "holdfast plan --state-size 20GB --gpus 64",
        "submit": "holdfast submit --time=8:00:00 -- python train.py",
        "run": "srun holdfast run -- python train.py",
        "lint": "holdfast lint job.sbatch",
    },
    "Try": {
        "demo": "holdfast demo",
        "prove": "holdfast prove -- python train.py",
        "completion": 'eval "$(holdfast completion bash)"',
    },
}


class PipeClosed(Exception):
    """The reader of standard output has gone."""


class _Group(click.Group):
    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except BrokenPipeError as error:
            # click would exit with status 1, which for `verify` means damage.
            raise PipeClosed from error

    def list_commands(self, context: click.Context) -> list[str]:
        known = [name for names in _GROUPS.values() for name in names]
        return known + [name for name in super().list_commands(context) if name not in known]

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, examples in _GROUPS.items():
            with formatter.section(title):
                rows = []
                for name, example in examples.items():
                    command = self.get_command(context, name)
                    assert command is not None
                    # Of one width, so that all groups have the same columns.
                    name = f"{name:<10}"
                    rows += [(name, command.get_short_help_str(100)), ("", f"$ {example}")]
                formatter.write_dl(rows, col_spacing=2)


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
    # The typed part stays as it is: `./runs/` must not become `runs/`.
    typed = incomplete[: incomplete.rfind("/") + 1]
    found = []
    for path in _runs_below(Path(typed or os.curdir)):
        word = typed + path
        if word.startswith(incomplete):
            found.append(CompletionItem(word))
    return found or [CompletionItem(incomplete, type="dir")]


def _runs_below(base: Path) -> Iterator[str]:
    from holdfast._report.status.gather import runs_below

    # A person waits for it, and the folder may be a whole home.
    deadline = time.monotonic() + _COMPLETION_SECONDS
    for path in runs_below(base, deadline_seconds=deadline):
        yield str(path.relative_to(base))


RUN = click.argument("run", metavar="RUN", type=FOLDER, shell_complete=complete_runs)
RUNS_PATH = click.argument(
    "path", metavar="[PATH]", type=FOLDER, default=".", shell_complete=complete_runs
)
# With allow_interspersed_args off: options after the first word are the script's own.
COMMAND = click.argument(
    "command", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED
)
COMMAND_SETTINGS = {"allow_interspersed_args": False}
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
