"""Who holds the others up.

Ranks that train in lockstep all show the same time for a step. But whoever comes last to a
collective waits least in it, and the others wait for as long as it was late: so the rank that
holds them up is the one that waits least, if it does so again and again and by enough.

How much is enough was measured with 2 and 4 ranks on 2 cores that other programs kept busy.
There one rank's waits range from nothing to twice the step, and eight samples in a row can look
like a straggler; of ten or more, with one in five left out, none did in 6,500 windows. A rank
that slept 50 ms a step was named within 21 steps, and no other ever in its place.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

FEWEST_SAMPLES = 10  # of each rank, before anybody is named
ENOUGH_SAMPLES = 20  # more than these, the newest, tell nothing new
_LEAST_SECONDS = 0.005
_LEAST_SHARE = 0.05  # of a step
_LEFT_OUT = 5  # one sample in so many, at the end where it would speak for the others


def name_straggler(
    waits: Mapping[int, Sequence[float]], step_seconds: float
) -> tuple[int, float] | None:
    """The rank that the others wait for, and for how many seconds of each step.

    `waits` has for each rank how long it waited in the collectives of a step, a few samples of
    late, the newest last. They need not be of the same steps.

    >>> name_straggler({0: [0.5] * 10, 1: [0.25] * 10, 2: [0.5] * 10}, step_seconds=0.75)
    (1, 0.25)
    """
    if len(waits) < 2 or any(len(samples) < FEWEST_SAMPLES for samples in waits.values()):
        return None
    recent = {rank: sorted(samples[-ENOUGH_SAMPLES:]) for rank, samples in waits.items()}
    middle = {rank: statistics.median(samples) for rank, samples in recent.items()}
    late = min(middle, key=lambda rank: (middle[rank], rank))
    bar = _longest(recent[late]) + max(_LEAST_SECONDS, _LEAST_SHARE * step_seconds)
    others = [rank for rank in recent if rank != late]
    if any(_shortest(recent[rank]) < bar for rank in others):
        return None
    return late, statistics.median(middle[rank] for rank in others) - middle[late]


def _shortest(ordered: Sequence[float]) -> float:
    """Of most of them: a hiccup, or a machine that is busy for a moment, is left out."""
    return ordered[len(ordered) // _LEFT_OUT]


def _longest(ordered: Sequence[float]) -> float:
    return ordered[-1 - len(ordered) // _LEFT_OUT]
