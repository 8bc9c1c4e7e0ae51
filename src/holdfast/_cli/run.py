"""`holdfast run`: what it takes. The way past click, for the sake of a quick start, is in main."""

from __future__ import annotations

import click


@click.command(
    short_help="Lead a command: pass signals on, outlive a kill.",
    # What stands behind the first word of the command is the script's own.
    context_settings={"allow_interspersed_args": False},
)
@click.argument("command", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...]) -> int:
    """Run a command as the first process of a SLURM task, or of a container.

    Both kill whatever is left once their first process is gone. If that is the trainer itself, a
    kill -9 or the OOM killer takes the keeper along, and with it the newest state. Led by this, the
    keeper has all the time that it needs.

    Signals are passed on once. A warning (SIGUSR1, SIGUSR2) waits until somebody catches it: during
    `import torch` it would kill. Under torchrun it goes to the ranks. In a step of SLURM, COMMAND
    gets RANK, WORLD_SIZE, MASTER_ADDR and so on, unless they are set.

    Leaves with the status of COMMAND; 128 + n if signal n has ended it, 127 if there is no such
    program. `holdfast submit` writes the line that uses this.

    \b
    Example:
      holdfast run -- python train.py
      srun holdfast run -- python train.py
    """
    from holdfast._supervise.leader import lead

    return lead(command)
