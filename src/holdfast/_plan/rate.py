"""How often a run is to be expected to die, and the interval that follows while it trains.

Before anything is known, one death a day is assumed, and that is worth half a death: half of
one in half a day. Half is the shape of Jeffreys' prior for a rate, so the run's own deaths soon
count for more: two of them are four fifths of what is known, and a week without one makes
the expectation fifteen times longer. One a day because then a checkpoint that costs half a
second comes every five minutes, which is the default for those who choose nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast._plan.closed import daly_interval

SHORTEST_SECONDS = 30.0
LONGEST_SECONDS = 3600.0
FIRST_SECONDS = 60.0  # until the first checkpoint has shown what it costs
_PRIOR_DEATHS = 0.5
_PRIOR_SECONDS = 43_200.0
_LEAST_COST_SECONDS = 0.001  # what is measured below it is noise
_WRITING_SHARE = 0.5  # of the time, at most, a checkpoint is being written


@dataclass(frozen=True)
class Lives:
    """What is known of the lives before this one: how often they died, and how long they were."""

    deaths: int = 0
    seconds: float = 0.0


def expected_mtbf(deaths: int, seconds: float) -> float:
    """The mean time to the next death, as far as this run's own past tells.

    >>> expected_mtbf(0, 0.0) / 3600, expected_mtbf(2, 3600.0) / 3600
    (24.0, 5.2)
    """
    return (_PRIOR_SECONDS + seconds) / (_PRIOR_DEATHS + deaths)


def live_interval(cost_seconds: float, write_seconds: float, mtbf_seconds: float) -> float:
    """The training between two checkpoints, within what is sensible at all.

    >>> round(live_interval(0.5, 2.0, 86_400.0)), live_interval(0.0, 0.0, 600.0)
    (294, 30.0)
    """
    best = daly_interval(max(cost_seconds, _LEAST_COST_SECONDS), mtbf_seconds)
    # The next one begins when the one before is on disk, and the disk has other work too.
    slowest = write_seconds / _WRITING_SHARE
    return max(slowest, min(LONGEST_SECONDS, max(SHORTEST_SECONDS, best)))
