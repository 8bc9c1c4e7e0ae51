"""Who holds the others up.

Ranks that train in lockstep all show the same time for a step. But whoever comes last to a
collective waits least in it, and the others wait for as long as it was late: so the rank that
holds them up is the one that waits least, if it does so again and again and by enough.

In enough: on 2 cores that 4 ranks and other programs shared, waiting times spread over 20 ms
at steps of 20 ms, but the quarters of one rank never cleared those of all others by 5 ms. A
rank that slept 50 ms a step cleared them by 40.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

FEWEST_SAMPLES = 8  # of each rank, before anybody is named
ENOUGH_SAMPLES = 20  # more than these, the newest, tell nothing new
_LEAST_SECONDS = 0.005
_LEAST_SHARE = 0.05  # of a step


def name_straggler(
    waits: Mapping[int, Sequence[float]], step_seconds: float
) -> tuple[int, float] | None:
    """The rank that the others wait for, and for how many seconds of each step.

    `waits` has for each rank how long it waited in the collectives of a step, a few samples of
    late, the newest last. They need not be of the same steps.

    >>> name_straggler({0: [0.06] * 8, 1: [0.01] * 8, 2: [0.07] * 8}, step_seconds=0.08)
    (1, 0.055)
    """
    if len(waits) < 2 or any(len(samples) < FEWEST_SAMPLES for samples in waits.values()):
        return None
    recent = {rank: sorted(samples[-ENOUGH_SAMPLES:]) for rank, samples in waits.items()}
    middle = {rank: statistics.median(samples) for rank, samples in recent.items()}
    late = min(middle, key=lambda rank: (middle[rank], rank))
    # Three quarters of its samples lie below three quarters of everybody else's: a hiccup, or a
    # machine that is busy for a moment, does not bring that about.
    bar = _upper_quarter(recent[late]) + max(_LEAST_SECONDS, _LEAST_SHARE * step_seconds)
    others = [rank for rank in recent if rank != late]
    if any(_lower_quarter(recent[rank]) < bar for rank in others):
        return None
    return late, statistics.median(middle[rank] for rank in others) - middle[late]


def _lower_quarter(ordered: Sequence[float]) -> float:
    return ordered[len(ordered) // 4]


def _upper_quarter(ordered: Sequence[float]) -> float:
    return ordered[-1 - len(ordered) // 4]
