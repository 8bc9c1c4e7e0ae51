"""What became of a signal on its way to the training, in a sentence, and what to do about it."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast._tools.doctor.finding import Check, State
from holdfast._tools.doctor.signals.processes import (
    CLIENT,
    LAUNCHER,
    LEADER,
    RUNNER,
    SHELL,
    TORCHRUN,
    WAITER,
    Hop,
    find_culprit,
)

TO_FIRST = "first"  # kill PID
TO_GROUP = "group"  # as Ctrl-C in a terminal
TO_STEP = "step"  # as SLURM's warning, to the first process of each task
# A line of a script that starts something in Python, and what it has behind that.
_STARTS = re.compile(r"(?!\s*#).*(?:python|run\b|launch|deepspeed)")
_PIPE = re.compile(r"(?<!\|)\|(?!\|)")
_BACKGROUND = re.compile(r"(?<![&>])&(?![&>\d])")
_FORWARDED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


@dataclass
class Tried:
    """One signal that was sent, and all that was seen of it."""

    number: int
    route: str
    label: str  # the training
    hops: list[Hop]  # from the one that it was sent to down to the training
    counts: dict[int, int]  # how often it came, by rank
    gone: list[int] = field(default_factory=list)  # pids of hops that ended, in their order
    status: int | None = None  # of the first process, as subprocess has it; None while it lives
    living: int | None = 0  # trainings that are still there; None: on another host, unseen
    instead: list[str] = field(default_factory=list)  # other signals that came in its place
    senders: list[str] = field(default_factory=list)
    seconds: float | None = None  # until the last rank had it
    asked: list[str] = field(default_factory=list)  # what a trap would ask of SLURM
    scripts: list[Path] = field(default_factory=list)  # of the shell, on the way
    python: str = ""  # that would train

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    @property
    def missed(self) -> list[int]:
        return [rank for rank, count in self.counts.items() if not count]

    @property
    def lost(self) -> list[Hop]:
        """The hops above the training that have ended, and that nobody stands in for."""
        found: list[Hop] = []
        for hop in self.hops[:-1]:
            if hop.pid in self.gone:
                found.append(hop)
            elif hop.kind == LEADER:
                return []  # it passes on to whoever is left
        return found


def judge(tried: Tried, wanted: Collection[str], *, in_job: bool) -> Check:
    """`wanted` are the signals without which work is lost here; of others it is a warning."""
    data: dict[str, Any] = {
        "signal": tried.name,
        "sent_to": tried.route,
        "hops": [hop.label for hop in tried.hops],
        "ranks": len(tried.counts),
        "arrived": len(tried.counts) - len(tried.missed),
        "times": max(tried.counts.values(), default=0),
        "milliseconds": None if tried.seconds is None else round(1000 * tried.seconds),
        "senders": tried.senders,
        "asked_of_slurm": tried.asked,
        "python": tried.python,
        "swallowed_by": None,
    }
    name = f"signal {tried.name}"
    if not tried.missed:
        return _judge_arrived(tried, name, data)
    culprit = find_culprit(
        tried.hops, tried.gone, tried.number, first_died_of_it=tried.status == -tried.number
    )
    data["swallowed_by"] = None if culprit is None else culprit.label
    state: State = "fail" if tried.name in wanted else "warn"
    return Check(name, state, _tell_missed(tried, culprit), _remedy(tried, culprit, in_job), data)


def _judge_arrived(tried: Tried, name: str, data: dict[str, Any]) -> Check:
    whom = tried.label if len(tried.counts) == 1 else f"all {len(tried.counts)} ranks"
    through = [hop.label for hop in tried.hops[:-1]]
    way = f", through {', '.join(through)}" if through else ""
    by = {TO_GROUP: "sent as Ctrl-C, ", TO_STEP: "sent by SLURM, "}.get(tried.route, "")
    after = f" after {1000 * tried.seconds:.0f} ms" if tried.seconds is not None else ""
    found = f"{by}it arrives at {whom}{after}{way}"
    lost = tried.lost
    if lost:
        return Check(
            name,
            "warn",
            f"{found}; but {lost[0].label} ends by it, and nobody leads the training any more",
            _remedy(tried, lost[0], tried.route == TO_STEP),
            {**data, "swallowed_by": lost[0].label},
        )
    most = max(tried.counts.values())
    if most > 1 and tried.number == signal.SIGINT:
        return Check(
            name,
            "warn",
            f"{found}, {most} times: a second Ctrl-C often means to leave at once, unsaved",
            "put `holdfast run --` in front: it passes each on once",
            data,
        )
    return Check(name, "ok", found, "", data)


def _tell_missed(tried: Tried, culprit: Hop | None) -> str:
    who = culprit.label if culprit is not None else tried.label
    label = tried.label
    if culprit is None:
        return f"{label} is the process that it is sent to, and does not get it"
    # To whom it is sent, and who does nothing about it, dies of it, seen or not.
    heeds = culprit.catches(tried.number) or culprit.ignores(tried.number)
    died = culprit.pid in tried.gone or (culprit == tried.hops[0] and not heeds)
    if died:
        how = f"{who} {'ends by' if culprit.catches(tried.number) else 'dies of'} it"
    elif culprit.ignores(tried.number):
        how = f"{who} ignores it"
    elif culprit.kind == SHELL and tried.instead:
        how = f"{who} passes on {' and '.join(tried.instead)} in its place"
    elif culprit.kind == SHELL:
        how = f"{who} runs its trap only when the program in front of it has ended"
    else:
        how = f"{who} does not pass it on"
    some = len(tried.missed) < len(tried.counts)
    if some:
        missed = ", ".join(map(str, tried.missed[:8]))
        return f"it does not arrive at rank {missed} of {len(tried.counts)}: {how}"
    if tried.instead:
        rest = f"{label} gets {' and '.join(tried.instead)} in its place"
    elif tried.living is None:
        rest = f"{label} below it never hears of it"
    elif tried.living:
        rest = f"{label} runs on and never hears of it"
    else:
        rest = f"{label} is killed with it, without having seen it"
    return f"it does not arrive: {how}, and {rest}" if died else f"it does not arrive: {how}"


def _remedy(tried: Tried, culprit: Hop | None, in_job: bool) -> str:
    if culprit is None:
        return ""
    kind, label = culprit.kind, culprit.label
    lead = "holdfast run -- " + _below(tried.hops, culprit)
    if kind == SHELL:
        if tried.missed and tried.number == signal.SIGINT:
            return "start it without &: what a shell has in its background ignores Ctrl-C"
        catches = tried.number != signal.SIGINT and culprit.catches(tried.number)
        if catches and tried.instead:
            return f"pass it on as it is, in the trap: kill -{tried.name.removeprefix('SIG')} …"
        if catches:  # Ctrl-C is caught by any shell that waits
            return "start the training with & and `wait` for it twice, or with exec and no trap"
        below = _below(tried.hops, culprit)
        place, line = _find_line(tried.scripts, label.partition(" ")[2], tried.label)
        if below.startswith("srun "):
            return f"--signal without B:, which goes to the tasks; or {place}exec {below}"
        if in_job and tried.route == TO_FIRST:
            return f"{place}srun {below}, and --signal without B:; or: exec {below}"
        if label.endswith(" -c"):
            return f"leave {label} out, or: holdfast run -- {label} …"
        return " or: ".join([*_with_exec(tried, place, line, below), f"holdfast run -- {label}"])
    if kind == TORCHRUN:
        return f"torchrun --signals-to-handle={_FORWARDED},{tried.name} …, or {lead}"
    if kind == LAUNCHER:
        return f"let holdfast give it to the ranks itself: holdfast run -- {label} …"
    if kind == RUNNER:
        return f"activate the environment and call python itself, or: holdfast run -- {label} …"
    if kind == WAITER and not in_job:
        return f"start it without {label}, or: holdfast run -- {label} …"
    if kind == WAITER:
        return f"put {label} outside: {label} … srun …, or let the job's time limit do it"
    if kind == CLIENT:
        return "let SLURM send it to the tasks: --signal=USR2@90, without B:"
    return f"let holdfast give it to the training itself: holdfast run -- {label} …"


def _below(hops: Sequence[Hop], culprit: Hop) -> str:
    """What the culprit starts, in a few words."""
    at = hops.index(culprit)
    if culprit.kind != SHELL:
        return f"{culprit.label} …"
    below = hops[at + 1]
    if at + 2 < len(hops):
        return f"{below.label} …"
    return f"python {'' if below.label.endswith('.py') else '-m '}{below.label} …"


def _with_exec(tried: Tried, place: str, line: str, below: str) -> list[str]:
    """How the script becomes the training: in a pipe or the background, exec alone does not help.

    Nothing where it starts several by itself, of which it could become only one.
    """
    has_one_each = len(tried.counts) == 1 or tried.route == TO_STEP
    if not has_one_each and tried.hops[-2].kind == SHELL:
        return []
    behind = line.partition(tried.label)[2]
    if _BACKGROUND.search(behind):
        return [f"{place}exec {below} without &,"]
    if not _PIPE.search(behind):
        return [f"{place}exec {below},"]
    return [f"{place}exec {below} > >(tee …) in place of the pipe (in bash, not in sh),"]


def _find_line(scripts: Sequence[Path], script: str, label: str) -> tuple[str, str]:
    """Where in a script the training is started, to stand before what to write; and that line."""
    for path in scripts:
        if path.name != script:
            continue
        with contextlib.suppress(OSError):
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if label in line and _STARTS.match(line):
                    return f"{path.name}:{number}: ", line
    return f"in {script}: ", ""
