"""`holdfast run`: what it takes. The way past click, for the sake of a quick start, is in main."""

from __future__ import annotations

import click


@click.command(
    short_help="Supervise a command: restart it, say why it died.",
    # What stands behind the first word of the command is the script's own.
    context_settings={"allow_interspersed_args": False},
)
@click.argument("command", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    metavar="N",
    help="Restart after a crash so many times at most (3); 0: never restart at all.",
)
def run(command: tuple[str, ...], max_restarts: int | None) -> int:
    """Supervise a command: say why it died, start it again where that helps.

    The screen looks as without it, and keys, Ctrl-C, Ctrl-Z and pdb work as ever. What COMMAND
    printed and how it ended is kept for `holdfast why`, whether it knows holdfast or not.

    A run of holdfast is started again by the cause of its end: after a kill or a preemption at
    once, and it counts for nothing; after a crash with pauses of 1, 2, 4 … 60 s, N times; out of
    memory once. Never: after a stop that somebody asked for, a wrong setting, a training gone bad
    (NaN), or three lives in a row without a new step. A command that opens no run would begin from
    nothing, and is restarted only if --max-restarts is given. In a step of SLURM with several tasks
    nothing is restarted unless it is given, since one rank alone cannot come back.

    As the first process of a SLURM task or of a container it keeps the newest state: both kill
    whatever is left once their first process is gone. Led by this, the keeper of a trainer that was
    killed has all the time that it needs. If this process is killed itself, COMMAND gets SIGTERM;
    so does, if COMMAND is killed, what it leaves running.

    Signals are passed on once. A warning (SIGUSR1, SIGUSR2) waits until somebody catches it: during
    `import torch` it would kill. Under torchrun it goes to the ranks. In a step of SLURM, COMMAND
    gets RANK, WORLD_SIZE, MASTER_ADDR and so on, unless they are set.

    Leaves with the status of COMMAND; 128 + n if signal n has ended it, 127 if there is no such
    program. `holdfast submit` writes the line that uses this.

    \b
    Example:
      holdfast run -- python train.py
      holdfast run --max-restarts 10 -- torchrun --nproc-per-node=4 train.py
      srun holdfast run -- python train.py
    """
    from holdfast._supervise.leader import lead

    return lead(command, max_restarts)
