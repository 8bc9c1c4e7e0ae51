"""How often earlier attempts of a run died, and the checkpoint interval that follows.

Read once, when a run is opened. An attempt that was asked to stop, or left by an exception, has
made its state durable and is no death. One that was killed, or whose host is gone, is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast import _errors
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout

# -- The interval between checkpoints in closed form -----------------------------------------------
# Young, "A first order approximation to the optimum checkpoint interval" (CACM 17, 1974), and
# Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (FGCS 22,
# 2006). `cost_seconds` is the training time that one checkpoint takes, `mtbf_seconds` the mean time
# between interruptions, which come at random. The interval is the training between two checkpoints.


def young_interval(cost_seconds: float, mtbf_seconds: float) -> float:
    """The interval at which checkpoints take as much time as is lost with interruptions.

    >>> round(young_interval(2.0, 10_000.0))
    200
    """
    return math.sqrt(2.0 * cost_seconds * mtbf_seconds)


def daly_interval(cost_seconds: float, mtbf_seconds: float) -> float:
    """The same to a higher order: a checkpoint may itself be interrupted.

    >>> round(daly_interval(2.0, 10_000.0), 1)
    198.7
    """
    if math.isinf(mtbf_seconds):
        return math.inf
    if cost_seconds >= 2.0 * mtbf_seconds:
        return mtbf_seconds
    ratio = cost_seconds / (2.0 * mtbf_seconds)
    series = 1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0
    return young_interval(cost_seconds, mtbf_seconds) * series - cost_seconds


# -- The expected time to the next death, and the interval that follows ----------------------------
# The prior is one death a day with the weight of half a death (Jeffreys' prior for a rate), so the
# run's own deaths soon count for more: two of them are four fifths of the estimate, and a week
# without one makes it fifteen times longer. At one death a day a checkpoint that costs half a
# second comes every five minutes, the default of `checkpoint_every`.


SHORTEST_SECONDS = 30.0
LONGEST_SECONDS = 3600.0
FIRST_SECONDS = 60.0  # until the first checkpoint has shown what it costs
_PRIOR_DEATHS = 0.5
_PRIOR_SECONDS = 43_200.0
_LEAST_COST_SECONDS = 0.001  # below it a measurement is noise
_WRITING_SHARE = 0.5  # of the time, at most, a checkpoint is being written


@dataclass(frozen=True)
class PastAttempts:
    """How often earlier attempts died, and how long they ran in all."""

    deaths: int = 0
    seconds: float = 0.0


def expected_mtbf(deaths: int, seconds: float) -> float:
    """The mean time to the next death, by the prior and the run's own past.

    >>> expected_mtbf(0, 0.0) / 3600, expected_mtbf(2, 3600.0) / 3600
    (24.0, 5.2)
    """
    return (_PRIOR_SECONDS + seconds) / (_PRIOR_DEATHS + deaths)


def live_interval(cost_seconds: float, write_seconds: float, mtbf_seconds: float) -> float:
    """The training between two checkpoints, within sensible bounds.

    >>> round(live_interval(0.5, 2.0, 86_400.0)), live_interval(0.0, 0.0, 600.0)
    (294, 30.0)
    """
    best = daly_interval(max(cost_seconds, _LEAST_COST_SECONDS), mtbf_seconds)
    # A checkpoint begins when the previous one is on disk, and the disk has other work too.
    slowest = write_seconds / _WRITING_SHARE
    return max(slowest, min(LONGEST_SECONDS, max(SHORTEST_SECONDS, best)))


_REMEMBERED = 200  # attempts: older ones ran on other machines


def read_past_attempts(layout: RunLayout, before: int) -> PastAttempts:
    deaths, seconds = 0, 0.0
    for number in [each for each in layout.attempt_numbers() if each < before][-_REMEMBERED:]:
        ended = read_json(layout.exit(number))
        deaths += ended.get("status") in (None, _errors.HUNG)  # ended in the middle of a step
        seconds += _lived_seconds(layout, number, ended.get("time"))
    return PastAttempts(deaths, seconds)


def _lived_seconds(layout: RunLayout, number: int, ended: object) -> float:
    began = read_json(layout.lease(number)).get("since")
    ends = [
        ended,
        *(read_json(p).get("time") for p in (layout.heartbeat(number), layout.death(number))),
    ]
    last = max((each for each in ends if isinstance(each, int | float)), default=0.0)
    return max(0.0, last - began) if isinstance(began, int | float) else 0.0
