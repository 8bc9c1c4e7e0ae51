"""The request for a proof, the plan of its interruptions, and its outcome: plain values.

The options are text, for the command line and for the fixture. All of them are checked before the
first process starts, since a proof may take an hour.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast._errors import FolderError, SettingsError
from holdfast._settings import parse_seconds
from holdfast._store.folder.attempts import find_run
from holdfast._tools.workplace import check_is_new

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

_RANKS = "{ranks}"
_TORCHRUN = re.compile(r"--nproc[-_]per[-_]node(?:=(.*))?")
_EXAMPLE = "holdfast prove -- python train.py"
_VALID_SIGNALS = (*SIGNALS, "USR1", "HUP")


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


# -- the options as text ----------------------------------------------------------


def parse_count(text: str | int, option: str, least: int = 1) -> int:
    """A whole number.

    >>> parse_count("20", "--kills")
    20
    """
    if isinstance(text, bool) or re.fullmatch(r"[0-9]{1,18}", str(text).strip()) is None:
        raise SettingsError(
            f"{option} {_name(text)} is not a whole number.\nValid: {least} or more."
        )
    if int(text) < least:
        raise SettingsError(f"{option} {int(text)} is too few.\nValid: {least} or more.")
    return int(text)


def parse_budget(text: str | float) -> float:
    """Seconds, of "2min", "90s", "1h" or a plain number of seconds.

    >>> parse_budget("2min"), parse_budget("90")
    (120.0, 90.0)
    """
    written = str(text).strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", written):
        written += "s"
    seconds = parse_seconds(written, "--budget")
    if seconds <= 0:
        raise SettingsError(
            f"--budget {_name(text)} leaves no time.\nValid: for example 2min, 90s or 1h."
        )
    return seconds


def parse_signals(names: str | Sequence[str]) -> tuple[str, ...]:
    """Names of signals, with or without SIG: "INT,SIGTERM"."""
    text = names if isinstance(names, str) else ",".join(names)
    words = [word.strip().upper().removeprefix("SIG") for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in _VALID_SIGNALS]
    if unknown or not words:
        problem = f"{unknown[0]} cannot be used to interrupt" if unknown else "no signal is named"
        raise SettingsError(
            f"--signals {_name(text)}: {problem}.\nValid: some of {','.join(_VALID_SIGNALS)}, "
            "with commas between."
        )
    return tuple(dict.fromkeys(words))


def parse_ranks(text: str) -> tuple[int, ...]:
    """Numbers of ranks, the smallest first: a fault among few is easier to find.

    >>> parse_ranks("4,1,2")
    (1, 2, 4)
    """
    numbers = {parse_count(word, "--ranks") for word in text.split(",") if word.strip()}
    if not numbers:
        raise SettingsError("--ranks names no number.\nValid: for example --ranks 1,2,4.")
    return tuple(sorted(numbers))


def split_command(text: str, option: str) -> tuple[str, ...]:
    """The words of a command, split as by a shell."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise SettingsError(
            f"{option} {_name(text)}: {str(error).lower()}.\nClose every quote, and quote the "
            "command as a whole."
        ) from error
    if not words:
        raise SettingsError(f"{option} is empty.\nWrite the command, for example: {_EXAMPLE}")
    return words


def set_ranks(
    command: tuple[str, ...], ranks: int | None, *, is_needed: bool = True
) -> tuple[str, ...]:
    """The command for so many ranks; without a number, as it is.

    >>> set_ranks(("torchrun", "--nproc-per-node=8", "train.py"), 2)
    ('torchrun', '--nproc-per-node=2', 'train.py')
    """
    if ranks is None:
        if any(_RANKS in word for word in command):
            raise SettingsError(
                f"The command has {_RANKS} in it, and no number to put there.\n"
                "Give one, or some to grow by: --ranks 1,2,4"
            )
        return command
    changed: list[str] = []
    is_set = takes_number = False
    for word in command:
        option = _TORCHRUN.fullmatch(word)
        if takes_number:
            new = str(ranks)
        elif option is not None and option[1] is not None:
            new = f"{word.partition('=')[0]}={ranks}"
        else:
            new = word.replace(_RANKS, str(ranks))
        is_set |= takes_number or new != word or (option is not None and option[1] is not None)
        takes_number = option is not None and option[1] is None
        changed.append(new)
    if is_needed and not is_set:
        raise SettingsError(
            "--ranks cannot change the number of ranks of this command.\n"
            f"Write {_RANKS} where the number belongs, for example: holdfast prove --ranks 1,2,4 "
            f"-- torchrun --nproc-per-node={_RANKS} train.py"
        )
    return tuple(changed)


def make_request(
    command: Sequence[str],
    *,
    kills: str | int = 20,
    signals: str | Sequence[str] = SIGNALS,
    seed: str | int = 7,
    only: str | int | None = None,
    budget: str | float | None = None,
    resume_cmd: str | Sequence[str] | None = None,
    compare: str | Sequence[str] = (),
    reference: str | Path | None = None,
    keep: str | Path | None = None,
    folder: str | Path | None = None,
    ranks: int | None = None,
) -> ProofRequest:
    if sys.platform == "win32":
        raise SettingsError(
            "holdfast prove needs the signals of Linux and macOS.\nRun it there, or in WSL."
        )
    where = Path.cwd() if folder is None else Path(folder).absolute()
    if not where.is_dir():
        raise FolderError(
            f"{folder}: is not a folder.\nName the one that the script is started in."
        )
    words = set_ranks(tuple(command), ranks)
    _check_program(words, where)
    resume: tuple[str, ...] | None = None
    if resume_cmd is not None:
        if isinstance(resume_cmd, str):
            resume_cmd = split_command(resume_cmd, "--resume-cmd")
        # It may know its number of ranks from the checkpoint.
        resume = set_ranks(tuple(resume_cmd), ranks, is_needed=False)
        _check_program(resume, where)
    if keep is not None:
        check_is_new(Path(keep))
    wanted = parse_count(kills, "--kills")
    number = None if only is None else parse_count(only, "--only")
    if number is not None and number > wanted:
        raise SettingsError(
            f"--only {number}: there are {wanted} interruptions.\n"
            f"Valid: 1 to {wanted}; or give the --kills with which it was found."
        )
    files = [compare] if isinstance(compare, str) else compare
    return ProofRequest(
        command=words,
        kills=wanted,
        signals=parse_signals(signals),
        seed=parse_count(seed, "--seed", least=0),
        only=number,
        budget_seconds=None if budget is None else parse_budget(budget),
        resume_command=resume,
        compare=tuple(_relative(each, where) for each in files),
        reference=None if reference is None else find_run(Path(reference))[0].folder,
        keep=None if keep is None else Path(keep).absolute(),
        folder=where,
        ranks=ranks,
    )


def _check_program(command: tuple[str, ...], folder: Path) -> None:
    if not command:
        raise SettingsError(f"There is no command to prove.\nFor example: {_EXAMPLE}")
    program = command[0]
    if shutil.which(program) is None and not ("/" in program and (folder / program).is_file()):
        raise SettingsError(
            f"{_name(program)}: there is no such program.\nWrite the command as you would in a "
            f"shell, for example: {_EXAMPLE}"
        )


def _relative(text: str, folder: Path) -> str:
    """A file to compare, relative to the folder of which each run has a copy."""
    if "{dir}" in text:
        return text
    path = Path(text)
    path = path.relative_to(folder) if path.is_relative_to(folder) else path
    if path.is_absolute() or ".." in path.parts or path == Path():
        raise SettingsError(
            f"--compare {_name(text)}: is not a file below the current folder.\n"
            "Each run has a copy of that folder: name a file that the script writes there, or into "
            "{dir}."
        )
    return str(path)


def _name(text: object) -> str:
    return shlex.quote(str(text)) if str(text).isprintable() else repr(str(text))
