"""Which process keeps a signal from the training, in a sentence, and what to do about it."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from holdfast._tools.doctor.check import Check
from holdfast._tools.doctor.signals.chain import CLIENTS
from holdfast._tools.doctor.signals.probe import read_python
from holdfast._tools.lint.launch import CONDA, RUNNERS, SHELLS, WAITING, is_python, shell_input

SHELL = "shell"
LEADER = "holdfast run"
RUNNER = "runner"
WAITER = "waiter"
CLIENT = "client"  # its program runs on other nodes: srun
OTHER = "other"
# Programs: how they are called here, and their kind.
_KNOWN = {
    "accelerate": ("accelerate launch", OTHER),
    "holdfast": ("holdfast run", LEADER),
    **{name: (f"{name} run", RUNNER) for name in (*RUNNERS, *CONDA, "poetry", "pipenv")},
    **{name: (name, WAITER) for name in WAITING},
    **{name: (name, CLIENT) for name in CLIENTS},
}
_SLURMS_OWN = "slurmstepd"  # above the first process of a task

TO_FIRST = "first"  # kill PID
TO_GROUP = "group"  # as Ctrl-C in a terminal
TO_STEP = "step"  # as SLURM's warning, to the first process of each task
# A line of a script that starts a Python, and what follows it there.
_STARTS = re.compile(r"(?!\s*#).*(?:python|run\b|launch|deepspeed)")
_PIPE = re.compile(r"(?<!\|)\|(?!\|)")
_BACKGROUND = re.compile(r"(?<![&>])&(?![&>\d])")
_FORWARDED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


# -- The processes that a signal passes, from the first of a command to the training ---------------


@dataclass(frozen=True)
class Hop:
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
    """The label and the kind of a process.

    >>> name_hop(["/bin/bash", "-e", "job.sh"])
    ('bash job.sh', 'shell')
    >>> name_hop(["python3", "/opt/env/bin/torchrun", "train.py"])
    ('torchrun', 'other')
    >>> name_hop(["python", "-m", "holdfast", "run", "--", "true"])
    ('holdfast run', 'holdfast run')
    """
    if not words:
        return name or "?", OTHER
    program = words[0].rpartition("/")[2].removeprefix("-")
    if is_python(program):
        what = read_python(words).name
        if what.startswith("torch.distributed."):
            what = "torchrun"
        elif what.startswith(("accelerate", "deepspeed")):
            what = what.partition(".")[0]  # its module
        program = what.rpartition("/")[2] or f"{program} -c"
    if program in SHELLS:
        kind, at = shell_input(words) or ("", 0)
        if kind == "text":
            return f"{program} -c", SHELL
        return f"{program} {words[at].rpartition('/')[2]}" if kind else program, SHELL
    return _KNOWN.get(program, (program, OTHER))


def hop_of(process: dict[str, Any]) -> Hop:
    """The hop of a process that the probe has read."""
    label, kind = name_hop(process["words"], process["name"])
    masks = process["caught"], process["ignored"]
    return Hop(process["pid"], process["started"], label, kind, *masks)


def find_hops(
    above: Sequence[dict[str, Any]], first: int, above_client: Sequence[dict[str, Any]]
) -> tuple[list[Hop], list[Hop]]:
    """The hops of this host up to a client, and those from the first process of the task on.

    `above` is the probe and all above it, the lowest first; `above_client` the same of a
    client such as srun, if the probe is not a descendant of the command.
    """
    if hops := _hops_from(first, above):
        return [], hops
    # Pid 1 is the first process of a container, which may be the probe itself.
    is_end = [each["name"].startswith(_SLURMS_OWN) or each["pid"] == 1 for each in above]
    below = above[: is_end.index(True) or 1] if any(is_end) else above
    return _hops_from(first, above_client), _hops_from(below[-1]["pid"], below)


def _hops_from(first: int, above: Sequence[dict[str, Any]]) -> list[Hop]:
    """From the process `first` down to the lowest; none if it is not among them."""
    pids = [each["pid"] for each in above]
    count = pids.index(first) + 1 if first in pids else 0
    return [hop_of(each) for each in reversed(above[:count])]


# -- One signal: what happened, and the check that says so -----------------------------------------


@dataclass
class Tried:
    number: int
    route: str
    hops: list[Hop]  # from the process that it was sent to, down to the training
    counts: dict[int, int]  # how often it arrived, by rank
    gone: list[int] = field(default_factory=list)  # pids of hops that ended, in their order
    status: int | None = None  # of the first process, as in subprocess; None while it lives
    living: int | None = 0  # trainings that still live; None: on another host, not visible
    instead: list[str] = field(default_factory=list)  # other signals that arrived in its place
    seconds: float | None = None  # until the last rank had it
    asked: list[str] = field(default_factory=list)  # what a trap would ask of SLURM
    scripts: Mapping[Path, str] = field(default_factory=dict)  # of the shell, on the way

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    @property
    def above(self) -> list[Hop]:
        """The hops above the training."""
        return self.hops[:-1]

    @property
    def label(self) -> str:
        """Of the training."""
        return self.hops[-1].label

    @property
    def missed(self) -> list[int]:
        return [rank for rank, count in self.counts.items() if not count]

    @property
    def lost(self) -> list[Hop]:
        """The hops above the training that have ended, unless a living leader is above them."""
        found: list[Hop] = []
        for hop in self.above:
            if hop.pid in self.gone:
                found.append(hop)
            elif hop.kind == LEADER:
                return []  # it passes signals on to all that is left
        return found


def find_culprit(tried: Tried) -> Hop | None:
    """The hop above the training that keeps the signal, by who has died and who catches it."""
    if not tried.above:
        return None
    if tried.status == -tried.number:
        return tried.above[0]
    if tried.gone:
        return next(hop for hop in tried.above if hop.pid == tried.gone[0])
    last = tried.above[0]
    for hop in tried.above:
        if hop.ignores(tried.number):
            return hop
        if not hop.catches(tried.number):
            break  # it would have died: it did not receive it
        last = hop
        if hop.kind == SHELL:
            break  # it runs its trap only when its foreground command has ended
    return last


def judge(tried: Tried, wanted: Collection[str], *, in_job: bool) -> Check:
    """`wanted` are the signals without which work is lost here; others are only warned of."""
    culprit = find_culprit(tried) if tried.missed else next(iter(tried.lost), None)
    times = max(tried.counts.values(), default=0)
    data: dict[str, Any] = {
        "signal": tried.name,
        "sent_to": tried.route,
        "hops": [hop.label for hop in tried.hops],
        "ranks": len(tried.counts),
        "arrived": len(tried.counts) - len(tried.missed),
        "times": times,
        "milliseconds": None if tried.seconds is None else round(1000 * tried.seconds),
        "asked_of_slurm": tried.asked,
        "swallowed_by": None if culprit is None else culprit.label,
    }
    check = partial(Check, f"signal {tried.name}", data=data)
    if tried.missed:
        found = _describe_missed(tried, culprit)
        remedy = "" if culprit is None else _remedy(tried, culprit, in_job)
        return check("fail" if tried.name in wanted else "warn", found, remedy)
    whom = tried.label if len(tried.counts) == 1 else f"all {len(tried.counts)} ranks"
    through = ", ".join(hop.label for hop in tried.above)
    by = {TO_GROUP: "sent as Ctrl-C, ", TO_STEP: "sent by SLURM, "}.get(tried.route, "")
    after = f" after {1000 * tried.seconds:.0f} ms" if tried.seconds is not None else ""
    found = f"{by}it arrives at {whom}{after}{', through ' if through else ''}{through}"
    if culprit is not None:
        found += f"; but {culprit.label} ends by it, and the training goes on without it"
        return check("warn", found, _remedy(tried, culprit, tried.route == TO_STEP))
    if times > 1 and tried.number == signal.SIGINT:
        found += f", {times} times: a second Ctrl-C often means to leave at once, unsaved"
        return check("warn", found, "put `holdfast run --` in front: it passes each on once")
    return check("ok", found)


def _describe_missed(tried: Tried, culprit: Hop | None) -> str:
    label, instead = tried.label, " and ".join(tried.instead)
    if culprit is None:
        return f"{label} is the process that it is sent to, and does not get it"
    who = culprit.label
    # The process that it is sent to dies of it unless it handles it, observed or not.
    heeds = culprit.catches(tried.number) or culprit.ignores(tried.number)
    died = culprit.pid in tried.gone or (culprit == tried.hops[0] and not heeds)
    if died:
        how = "ends by it" if culprit.catches(tried.number) else "dies of it"
    elif culprit.ignores(tried.number):
        how = "ignores it"
    elif culprit.kind != SHELL:
        how = "does not pass it on"
    elif instead:
        how = f"passes on {instead} in its place"
    else:
        how = "runs its trap only when the program in front of it has ended"
    if len(tried.missed) < len(tried.counts):
        missed = ", ".join(map(str, tried.missed[:8]))
        return f"it does not arrive at rank {missed} of {len(tried.counts)}: {who} {how}"
    rest = "runs on and never hears of it" if tried.living else "is killed without having seen it"
    if instead:
        rest = f"gets {instead} in its place"
    elif tried.living is None:
        rest = "below it never hears of it"
    return f"it does not arrive: {who} {how}{f', and {label} {rest}' if died else ''}"


def _remedy(tried: Tried, culprit: Hop, in_job: bool) -> str:
    label = culprit.label
    led = f"holdfast run -- {label} …"
    if culprit.kind == SHELL:
        return _remedy_of_shell(tried, culprit, in_job)
    if label == "torchrun":
        return f"torchrun --signals-to-handle={_FORWARDED},{tried.name} …, or {led}"
    if culprit.kind == CLIENT:
        return "let SLURM send it to the tasks: --signal=USR2@90, without B:"
    if culprit.kind == RUNNER:
        return f"activate the environment and call python itself, or: {led}"
    if culprit.kind == WAITER and in_job:
        return f"put {label} outside: {label} … srun …, or let the job's time limit do it"
    if culprit.kind == WAITER:
        return f"start it without {label}, or: {led}"
    return f"let holdfast give it to the training itself: {led}"


def _remedy_of_shell(tried: Tried, culprit: Hop, in_job: bool) -> str:
    label = culprit.label
    if tried.missed and tried.number == signal.SIGINT:
        return "start it without &: what a shell has in its background ignores Ctrl-C"
    # Any shell that waits catches SIGINT.
    has_trap = tried.number != signal.SIGINT and culprit.catches(tried.number)
    if has_trap and tried.instead:
        return f"pass it on as it is, in the trap: kill -{tried.name.removeprefix('SIG')} …"
    if has_trap:
        return "start the training with & and `wait` for it twice, or with exec and no trap"
    at = tried.hops.index(culprit) + 1
    below = f"{tried.hops[at].label} …"
    if at + 1 == len(tried.hops):
        below = f"python {'' if tried.hops[at].label.endswith('.py') else '-m '}{below}"
    place, line = _find_line(tried.scripts, label.partition(" ")[2], tried.label)
    if below.startswith("srun "):
        return f"--signal without B:, which goes to the tasks; or {place}exec {below}"
    if in_job and tried.route == TO_FIRST:
        return f"{place}srun {below}, and --signal without B:; or: exec {below}"
    if label.endswith(" -c"):
        return f"leave {label} out, or: holdfast run -- {label} …"
    # Where the script starts several trainings itself, exec could become only one of them.
    if len(tried.counts) > 1 and tried.route != TO_STEP and tried.hops[-2].kind == SHELL:
        return f"holdfast run -- {label}"
    behind = line.partition(tried.label)[2]
    how = ""
    if _BACKGROUND.search(behind):
        how = " without &"
    elif _PIPE.search(behind):
        how = " > >(tee …) in place of the pipe (in bash, not in sh)"
    return f"{place}exec {below}{how}, or: holdfast run -- {label}"


def _find_line(scripts: Mapping[Path, str], script: str, label: str) -> tuple[str, str]:
    text = next((text for path, text in scripts.items() if path.name == script), "")
    for number, line in enumerate(text.splitlines(), 1):
        if label in line and _STARTS.match(line):
            return f"{script}:{number}: ", line
    return f"in {script}: ", ""
