"""Compares the ranks: which one delays the others, and which ones train on the same data."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast._keeper.ranks.state import HubState, RankEntry

# -- The straggler ---------------------------------------------------------------------------------
# Ranks that train in lockstep all have the same step time. But the rank that comes last to a
# collective waits least in it, and the others wait for as long as it was late. So the straggler is
# the rank that waits least, if it does so repeatedly and by enough.
#
# How much is enough was measured with 2 and 4 ranks on 2 cores that other programs kept busy.
# There one rank's waits range from nothing to twice the step, and eight samples in a row can look
# like a straggler; of ten or more, with one in five left out, none did in 6,500 windows. A rank
# that slept 50 ms a step was named within 21 steps, and no other rank ever was.


FEWEST_SAMPLES = 10  # of each rank, before a straggler is named
ENOUGH_SAMPLES = 20  # only the newest are used
_LEAST_SECONDS = 0.005
_LEAST_SHARE = 0.05  # of a step
_LEFT_OUT = 5  # one sample in so many is an outlier


def name_straggler(
    waits: Mapping[int, Sequence[float]], step_seconds: float
) -> tuple[int, float] | None:
    """The rank that the others wait for, and for how many seconds of each step.

    `waits` has for each rank how long it waited in the collectives of recent steps, the newest
    last. They need not be of the same steps.

    >>> name_straggler({0: [0.5] * 10, 1: [0.25] * 10, 2: [0.5] * 10}, step_seconds=0.75)
    (1, 0.25)
    """
    if len(waits) < 2 or any(len(samples) < FEWEST_SAMPLES for samples in waits.values()):
        return None
    recent = {rank: sorted(samples[-ENOUGH_SAMPLES:]) for rank, samples in waits.items()}
    middle = {rank: statistics.median(samples) for rank, samples in recent.items()}
    late = min(middle, key=lambda rank: (middle[rank], rank))
    # The shortest and the longest without outliers, such as a machine that is busy for a moment.
    shortest = {rank: each[len(each) // _LEFT_OUT] for rank, each in recent.items()}
    longest = recent[late][-1 - len(recent[late]) // _LEFT_OUT]
    bar = longest + max(_LEAST_SECONDS, _LEAST_SHARE * step_seconds)
    others = [rank for rank in recent if rank != late]
    if any(shortest[rank] < bar for rank in others):
        return None
    return late, statistics.median(middle[rank] for rank in others) - middle[late]


class Comparison:
    """Compares what the ranks report of their training."""

    def __init__(self, state: HubState) -> None:
        self._state = state
        self.straggler: dict[str, Any] | None = None
        self.waits: dict[int, deque[float]] = {}  # the recent ones of each rank
        self._named: set[int] = set()
        self._prints: dict[int, list[str]] = {}  # of each rank's first batches
        self._passes: dict[tuple[int, int], dict[int, int]] = {}  # (epoch, loop): rank, batches

    def on_waits(self, entry: RankEntry, waited: float, step_seconds: float) -> None:
        """How long a rank waited in the collectives of its last steps."""
        samples = self.waits.setdefault(entry.rank, deque(maxlen=ENOUGH_SAMPLES))
        samples.append(waited)
        if len(self.waits) < self._state.size:
            return
        waits = {rank: list(each) for rank, each in self.waits.items()}
        found = name_straggler(waits, step_seconds)
        if found is None:
            self.straggler = None
            return
        rank, seconds = found
        is_new = self.straggler is None or self.straggler["rank"] != rank
        host = self._state.entries[rank].beat.get("host", "")
        self.straggler = {"rank": rank, "host": host, "seconds": round(seconds, 4)}
        if is_new and rank not in self._named:
            self._named.add(rank)  # once in an attempt: it may come and go
            self._state.services.note("straggler", **self.straggler)

    def on_lap(self, entry: RankEntry, epoch: int, number: int, batches: int) -> None:
        """A rank has used all batches of a loop: the others must have used as many."""
        key = epoch, number
        counts = self._passes.setdefault(key, {})
        counts[entry.rank] = batches
        if len(set(counts.values())) > 1:
            of_ranks = sorted(counts.items())
            self._state.services.note("uneven-batches", epoch=epoch, batches=of_ranks)
            self._state.all_trainers.uneven(epoch=epoch, batches=of_ranks)
        if len(counts) == self._state.size:
            del self._passes[key]

    def on_print(self, entry: RankEntry, print: str) -> None:
        """Fingerprints of a rank's first batches: two ranks must not train on the same data."""
        self._prints.setdefault(entry.rank, []).append(print)
        if len(self._prints) < self._state.size or any(
            len(each) < 2 for each in self._prints.values()
        ):
            return
        seen: dict[tuple[str, ...], int] = {}
        for rank, prints in sorted(self._prints.items()):
            twin = seen.setdefault(tuple(prints[:2]), rank)
            if twin != rank:
                self._state.services.note("identical-batches", ranks=[twin, rank])
                self._state.trainer(0).twins(ranks=[twin, rank])
                break
        self._prints = {rank: [] for rank in self._prints}  # compared once
