"""The interval between checkpoints in closed form.

Young, "A first order approximation to the optimum checkpoint interval" (CACM 17, 1974), and
Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (FGCS 22,
2006). In both, `cost_seconds` is what one checkpoint takes from training, and `mtbf_seconds` the
mean time between interruptions that throw it back to the last one. Interruptions come at random,
as often at one moment as at any other. The interval is the training between two checkpoints.
"""

from __future__ import annotations

import math


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


def exact_goodput(
    interval_seconds: float, cost_seconds: float, restart_seconds: float, mtbf_seconds: float
) -> float:
    """The share of the time that makes progress, by Daly's sum for the whole run.

    A restart may be interrupted too. What is left out: waiting, warnings, and all that is in
    memory.

    >>> round(exact_goodput(200.0, 2.0, 60.0, 10_000.0), 4)
    0.9741
    """
    if math.isinf(mtbf_seconds):
        return interval_seconds / (interval_seconds + cost_seconds)
    exponent = (interval_seconds + cost_seconds) / mtbf_seconds
    if exponent + restart_seconds / mtbf_seconds > 700:  # e to that is beyond any float
        return 0.0
    spent = mtbf_seconds * math.exp(restart_seconds / mtbf_seconds) * math.expm1(exponent)
    return interval_seconds / spent
