"""The processes that a signal has to pass, from the first of a command to the training."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast._check.peel import RUNNERS, SHELLS, WAITING, is_python
from holdfast._check.probe import what_it_runs

SHELL = "shell"
TORCHRUN = "torchrun"
LAUNCHER = "launcher"
LEADER = "holdfast run"
RUNNER = "runner"
WAITER = "waiter"
CLIENT = "client"  # its program runs elsewhere: srun
OTHER = "other"
_LAUNCHERS = {"accelerate": "accelerate launch", "deepspeed": "deepspeed"}
_RUNNERS = (*RUNNERS, "conda", "mamba", "micromamba", "poetry", "pipenv")
# Their processes are elsewhere: killed, they would leave them there.
CLIENTS = ("srun", "salloc")
# Above the first process of a task: not the user's, and nobody signals it.
_HOSTS = ("slurmstepd",)


@dataclass(frozen=True)
class Hop:
    """One process on the way."""

    pid: int
    started: int
    label: str
    kind: str
    caught: int = 0  # as the masks of /proc: bit n-1 for signal n
    ignored: int = 0

    def catches(self, number: int) -> bool:
        return bool(self.caught >> (number - 1) & 1)

    def ignores(self, number: int) -> bool:
        return bool(self.ignored >> (number - 1) & 1)


def name_hop(words: Sequence[str], name: str = "") -> tuple[str, str]:
    """What to call a process, and what kind it is.

    >>> name_hop(["/bin/bash", "-e", "job.sh"])
    ('bash job.sh', 'shell')
    >>> name_hop(["python3", "/opt/env/bin/torchrun", "train.py"])
    ('torchrun', 'torchrun')
    >>> name_hop(["python", "-m", "holdfast", "run", "--", "true"])
    ('holdfast run', 'holdfast run')
    """
    if not words:
        return name or "?", OTHER
    program = words[0].rpartition("/")[2].removeprefix("-")
    if is_python(program):
        what = what_it_runs(words)[1]
        if what.startswith("torch.distributed."):
            return "torchrun", TORCHRUN
        first = what.partition(".")[0] if what.startswith(tuple(_LAUNCHERS)) else what
        program = first.rpartition("/")[2] or f"{program} -c"
    if program == "torchrun":
        return "torchrun", TORCHRUN
    if program in _LAUNCHERS:
        return _LAUNCHERS[program], LAUNCHER
    if program == "holdfast":
        return "holdfast run", LEADER
    if program in SHELLS:
        return _name_shell(program, words), SHELL
    if program in _RUNNERS:
        return f"{program} run", RUNNER
    if program in WAITING:
        return program, WAITER
    return program, CLIENT if program in CLIENTS else OTHER


def _name_shell(program: str, words: Sequence[str]) -> str:
    for word in words[1:]:
        if word.startswith("-") and not word.startswith("--") and word.endswith("c"):
            return f"{program} -c"
        if not word.startswith(("-", "+")):
            return f"{program} {word.rpartition('/')[2]}"
    return program


def hop_of(process: dict[str, Any]) -> Hop:
    """A process as the probe has told of it."""
    label, kind = name_hop(process["words"], process["name"])
    return Hop(
        int(process["pid"]),
        int(process["started"]),
        label,
        kind,
        int(process["caught"]),
        int(process["ignored"]),
    )


def find_hops(
    above: Sequence[dict[str, Any]], first: int, beside: Sequence[dict[str, Any]]
) -> tuple[list[Hop], list[Hop]]:
    """The hops of this host before a client, and those from the first process of the task on.

    `above` is the probe and all above it, the lowest first; `beside` the same of a client such as
    srun, where the probe is not below the command at all.
    """
    pids = [each["pid"] for each in above]
    if first in pids:
        return [], [hop_of(each) for each in reversed(above[: pids.index(first) + 1])]
    below = list(above)
    for at, each in enumerate(above):
        if each["name"].startswith(_HOSTS) or each["pid"] == 1:
            below = list(above[: at or 1])
            break
    pids = [each["pid"] for each in beside]
    before = beside[: pids.index(first) + 1] if first in pids else []
    return [hop_of(each) for each in reversed(before)], [hop_of(each) for each in reversed(below)]


def find_culprit(
    hops: Sequence[Hop], gone: Sequence[int], number: int, *, first_died_of_it: bool
) -> Hop | None:
    """Who of those above the training keeps the signal, by who has died and who catches it.

    `gone` are the pids of those that have ended since it was sent, in their order.
    """
    above = list(hops[:-1])
    if not above:
        return None
    if first_died_of_it:
        return above[0]
    for pid in gone:
        for hop in above:
            if hop.pid == pid:
                return hop
    got = above[0]
    for hop in above:
        if hop.ignores(number):
            return hop
        if not hop.catches(number):
            break  # it would have died: it did not get it
        got = hop
        if hop.kind == SHELL:
            break  # runs its trap only after what it waits for
    return got


def signal_name(number: int) -> str:
    return signal.Signals(number).name
