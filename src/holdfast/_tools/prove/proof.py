"""The request for a proof, the plan of its interruptions, and its outcome: plain values."""

from __future__ import annotations

import dataclasses
import itertools
import random
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SIGNALS = ("INT", "TERM", "USR2", "QUIT", "KILL", "STOP")

EQUAL, DIFFERS, UNREPEATABLE, UNTRIED = "equal", "differs", "not repeatable", "not tried"
EXIT_STATUSES = {EQUAL: 0, DIFFERS: 1, UNTRIED: 2, UNREPEATABLE: 3}

#: The target of an interruption of several ranks: one of them, their launcher, or every process.
ONE, AGENT, ALL = "one rank", "the agent", "all"

# The likeliest faults come first, however few interruptions are asked for.
_FIRST = [
    ("KILL", "save"),
    ("TERM", "update"),
    ("INT", "update"),
    ("KILL", "commit"),
    ("KILL", "step"),
    ("INT", "phase"),
    ("USR2", "update"),
]
# In turn, and each signal begins with another one: so a few interruptions use all of them.
_TARGETS = {"KILL": (ONE, AGENT, ALL), "TERM": (AGENT, ONE, ALL), "INT": (ALL, ONE, AGENT)}
_OTHER_TARGETS = (AGENT, ONE, ALL)


@dataclass(frozen=True)
class ProofRequest:
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
    plan: tuple[Planned, ...] = ()  # in place of a plan drawn from the seed

    @property
    def more(self) -> tuple[str, ...]:
        """The options that a replay needs too."""
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
    number: int  # from 1, the one that --only takes
    signal: str  # KILL, TERM, …
    moment: str  # start, step, update, save, load, boundary, commit, phase
    step: int  # steps of the undisturbed run behind it
    status: int | None = None  # of the process, negative for a signal; None: it survived
    resumed_at: int | None = None  # the step from which the next attempt went on
    target: str | None = None  # among several ranks: "rank 1", "the agent", "all"


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
    is_in_later_epoch: bool = False  # than the one from which the script went on


@dataclass
class Proof:
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
        tree = dataclasses.asdict(self)
        return tree | {"exit_status": self.exit_status, "replay": self.replay}


class Watcher:
    """Receives the progress of a proof; this one ignores it."""

    def stage(self, text: str, done: int, total: int) -> None:
        """A new part of the work, after `done` of `total` interruptions."""

    def interruption(self, interruption: Interruption) -> None:
        """One was made."""

    def step(self, step: int, total: int | None) -> None:
        """The script has made so many steps."""


@dataclass(frozen=True)
class Planned:
    """One interruption: in the first attempt that comes so far, at the next such moment."""

    number: int  # from 1
    signal: str
    moment: str
    share: float  # of the training that is behind it
    delay: float  # between 0 and 1, of the moment's duration
    target: str = ONE
    rank_share: float = 0.0  # which of the ranks, if one is meant


def draw(seed: int, kills: int, signals: Sequence[str], moments: Sequence[str]) -> list[Planned]:
    """The interruptions in their order, drawn from the seed so that each can be repeated."""
    rng = random.Random(seed)
    pairs = list(itertools.product(signals, moments))
    rng.shuffle(pairs)
    pairs.sort(key=lambda pair: _FIRST.index(pair) if pair in _FIRST else len(_FIRST))
    chosen: list[tuple[str, str]] = []
    while len(chosen) < kills:
        chosen += pairs[: kills - len(chosen)]
        rng.shuffle(pairs)
    rng.shuffle(chosen)
    # One in each part of the training, so that a few are not all at its beginning.
    shares = [0.02 + 0.95 * (part + rng.random()) / kills for part in range(kills)]
    delays = [rng.random() for _ in range(kills)]
    return [
        Planned(number, name, moment, share, delay, *target)
        for number, ((name, moment), share, delay, target) in enumerate(
            zip(chosen, shares, delays, _targets(seed, chosen), strict=True), start=1
        )
    ]


def _targets(seed: int, chosen: Sequence[tuple[str, str]]) -> list[tuple[str, float]]:
    """The target of each among several ranks, from a generator of its own."""
    rng = random.Random(f"targets {seed}")
    met: dict[str, int] = {}
    found = []
    for name, _ in chosen:
        turns = _TARGETS.get(name, _OTHER_TARGETS)
        found.append((turns[met.setdefault(name, 0) % len(turns)], rng.random()))
        met[name] += 1
    return found
