"""What is asked of a proof, and what comes out of it: plain values, for tables and for JSON."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast._tools.prove.plan import Planned

SIGNALS = ("INT", "TERM", "USR2", "QUIT", "KILL", "STOP")

EQUAL, DIFFERS, UNREPEATABLE, UNTRIED = "equal", "differs", "not repeatable", "not tried"
EXIT_STATUSES = {EQUAL: 0, DIFFERS: 1, UNTRIED: 2, UNREPEATABLE: 3}


@dataclass(frozen=True)
class Wishes:
    """What to prove, and how."""

    command: tuple[str, ...]
    kills: int = 20
    signals: tuple[str, ...] = SIGNALS
    seed: int = 7
    only: int | None = None
    budget_seconds: float | None = None
    resume_command: tuple[str, ...] | None = None
    compare: tuple[str, ...] = ()
    reference: Path | None = None
    keep: Path | None = None
    folder: Path = field(default_factory=Path.cwd)
    ranks: int | None = None
    plan: tuple[Planned, ...] = ()  # these and no others, in place of what the seed would draw

    @property
    def more(self) -> tuple[str, ...]:
        """The options that decide what is run and compared."""
        words: list[str] = []
        if self.resume_command is not None:
            words += ["--resume-cmd", shlex.join(self.resume_command)]
        for name in self.compare:
            words += ["--compare", name]
        if self.reference is not None:
            words += ["--reference", str(self.reference)]
        return tuple(words)


@dataclass
class Interruption:
    """One interruption: what was meant, and what became of it."""

    number: int  # from 1, the one that --only takes
    signal: str  # KILL, TERM, …
    moment: str  # start, step, update, save, load, boundary, commit, phase
    step: int | None = None  # how many steps of the undisturbed run were made when it struck
    status: int | None = None  # of the process, negative for a signal; None: it lived on
    resumed_at: int | None = None  # the step from which the next life went on
    struck: bool = False  # False: the script ended before its moment came
    target: str | None = None  # of several ranks, whom it met: "rank 1", "the agent", "all"


@dataclass(frozen=True)
class Difference:
    """The first thing that is not as in the undisturbed run."""

    item: str  # e.g. "optimizer state exp_avg of net.0.weight"
    step: int | None  # of the undisturbed run, counted from 1: the step that it takes part in
    after: int | None  # number of the interruption before it
    expected: str
    found: str
    cause: str  # a word that stays the same, e.g. "scheduler-not-saved"
    why: str  # the cause as a sentence
    remedy: str  # what to do about it
    rank: int | None = None
    others: tuple[str, ...] = ()  # where the cause is not sure: all else that differs
    at_the_end: str | None = None  # how far apart the ends are, e.g. "weights differ by up to 3%"


@dataclass
class Proof:
    """The outcome."""

    command: tuple[str, ...]
    seed: int
    kills: int
    signals: tuple[str, ...]
    verdict: str = UNTRIED
    interruptions: list[Interruption] = field(default_factory=list)
    difference: Difference | None = None  # of an interrupted run from the undisturbed one
    unrepeatable: Difference | None = None  # of two undisturbed runs from each other
    within_spread: bool | None = None  # for one that is not repeatable by itself
    steps: int = 0
    lives: int = 0
    ranks: int = 1
    seconds: float = 0.0
    compared: list[str] = field(default_factory=list)  # e.g. "12 tensors of weights"
    notes: list[str] = field(default_factory=list)
    trouble: str | None = None  # why it could not be tried
    kept: str | None = None  # the folder that stays
    more: tuple[str, ...] = ()  # options that a replay needs too

    @property
    def exit_status(self) -> int:
        """0 only when equal."""
        return EXIT_STATUSES[self.verdict]

    @property
    def replay(self) -> str | None:
        """The command that repeats the interruption after which something differs."""
        if self.difference is None or self.difference.after is None:
            return None
        words = ["holdfast", "prove", "--seed", str(self.seed), "--kills", str(self.kills)]
        words += ["--signals", ",".join(self.signals), "--only", str(self.difference.after)]
        words += self.more
        return f"{shlex.join(words)} -- {shlex.join(self.command)}"

    def to_json(self) -> dict[str, Any]:
        """All of it, for `--json`."""
        tree = dataclasses.asdict(self)
        return tree | {"exit_status": self.exit_status, "replay": self.replay}


class Watcher:
    """Hears how a proof goes on; this one keeps quiet."""

    def stage(self, text: str, done: int, total: int) -> None:
        """A new part of the work: `done` of `total` interruptions are behind it."""

    def interruption(self, interruption: Interruption) -> None:
        """One has struck."""

    def step(self, step: int, total: int | None) -> None:
        """The script has made so many steps."""


def parse_signals(text: str) -> tuple[str, ...]:
    """`INT,TERM` or `SIGINT,SIGTERM` as names; ValueError says which one is none."""
    names = [word.strip().upper().removeprefix("SIG") for word in text.split(",") if word.strip()]
    for name in names:
        if name not in (*SIGNALS, "USR1", "HUP"):
            raise ValueError(f"{name} is no signal to interrupt with")
    if not names:
        raise ValueError("no signal is named")
    return tuple(dict.fromkeys(names))
