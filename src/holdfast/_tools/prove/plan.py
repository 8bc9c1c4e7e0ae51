"""Which interruptions to make, and when: drawn from the seed, so that each can be repeated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

#: Whom an interruption of a job of several ranks meets: one of them, whatever has started
#: them, or every process at once.
ONE, AGENT, ALL = "one rank", "the agent", "all"

# What is most often wrong comes first, however few interruptions are asked for.
_FIRST = [
    ("KILL", "save"),
    ("TERM", "update"),
    ("INT", "update"),
    ("KILL", "commit"),
    ("KILL", "step"),
    ("INT", "phase"),
    ("USR2", "update"),
]
# In turn, and each signal begins elsewhere: few interruptions meet all of them, too.
_TARGETS = {"KILL": (ONE, AGENT, ALL), "TERM": (AGENT, ONE, ALL), "INT": (ALL, ONE, AGENT)}
_OTHER_TARGETS = (AGENT, ONE, ALL)


@dataclass(frozen=True)
class Planned:
    """One interruption: in the first life that comes so far, at the next such moment."""

    number: int  # from 1
    signal: str
    moment: str
    share: float  # of the training that is behind it
    delay: float  # between 0 and 1, of the time that the moment takes
    target: str = ONE
    rank_share: float = 0.0  # which of the ranks, if one is meant


def draw(seed: int, kills: int, signals: Sequence[str], moments: Sequence[str]) -> list[Planned]:
    """The interruptions in the order in which they come."""
    rng = random.Random(seed)
    pairs = list(itertools.product(signals, moments))
    rng.shuffle(pairs)
    pairs.sort(key=lambda pair: _FIRST.index(pair) if pair in _FIRST else len(_FIRST))
    chosen: list[tuple[str, str]] = []
    while len(chosen) < kills:
        chosen += pairs[: kills - len(chosen)]
        rng.shuffle(pairs)
    rng.shuffle(chosen)
    # One in each part of the training: however few there are, they are not all at its beginning.
    shares = [0.02 + 0.95 * (part + rng.random()) / kills for part in range(kills)]
    delays = [rng.random() for _ in range(kills)]
    return [
        Planned(number, name, moment, share, delay, *target)
        for number, ((name, moment), share, delay, target) in enumerate(
            zip(chosen, shares, delays, _targets(seed, chosen), strict=True), start=1
        )
    ]


def _targets(seed: int, chosen: Sequence[tuple[str, str]]) -> list[tuple[str, float]]:
    """Whom each one meets, where there are several ranks; what else is drawn stays as it is."""
    rng = random.Random(f"targets {seed}")
    met: dict[str, int] = {}
    found = []
    for name, _ in chosen:
        turns = _TARGETS.get(name, _OTHER_TARGETS)
        found.append((turns[met.setdefault(name, 0) % len(turns)], rng.random()))
        met[name] += 1
    return found
