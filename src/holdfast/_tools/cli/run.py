"""`holdfast run`: what it takes. The way past click, for the sake of a quick start, is in main."""

from __future__ import annotations

import click

from holdfast._supervise.ending import Timeout


class _TimeoutType(click.ParamType[str]):
    name = "timeout"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            Timeout.parse(value)
        except ValueError as error:
            self.fail(f"{error}.\nWrite seconds (90, 5min, 2h) or auto.", param, ctx)
        return value


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
@click.option(
    "--hang-timeout",
    type=_TimeoutType(),
    metavar="SECONDS|auto",
    help="End it and start it again if it hangs for so long; auto: as the run has learned.",
)
def run(command: tuple[str, ...], max_restarts: int | None, hang_timeout: str | None) -> int:
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

    A hang is found and said in any case, and nothing is killed for it unless --hang-timeout is
    given: auto is ten times the usual step of the run, and at least 20 s; SECONDS (90, 5min) are
    for a step, ten times that for a phase or the first step. A command that has opened no run
    hangs if it neither prints nor works for SECONDS (auto: 30 min). Then it gets SIGTERM, and
    SIGKILL if that is not enough. Time alone is no hang: what gets on is only slow. What is held in
    a debugger (pdb, debugpy, gdb) or stopped (Ctrl-Z) is never killed, however long it takes.

    Leaves with the status of COMMAND; 128 + n if signal n has ended it, 127 if there is no such
    program, 77 if it was ended for a hang. `holdfast submit` writes the line that uses this.

    \b
    Example:
      holdfast run -- python train.py
      holdfast run --hang-timeout auto -- python train.py
      holdfast run --max-restarts 10 -- torchrun --nproc-per-node=4 train.py
      srun holdfast run -- python train.py
    """
    from holdfast._supervise.leader import lead

    return lead(command, max_restarts, hang_timeout)
