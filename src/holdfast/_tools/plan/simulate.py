"""The model simulated: attempts of a run, one after the other, each ended by an interruption.

Between two interruptions all is deterministic, so an attempt is arithmetic, and all runs and all
intervals are computed at once. Every interval meets the same interruptions, so that a difference
comes from the interval alone. The same seed gives the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast._tools.plan.model import Model

Array = npt.NDArray[np.float64]
PARTS = {
    "checkpoints": "checkpoints",
    "snapshots": "snapshots in memory",
    "repeated": "repeated work",
    "restarts": "restarts",
    "queue": "waiting for the queue",
}
_RUNS = 200
_ATTEMPTS = 250  # of each run


@dataclass(frozen=True)
class SimulatedOutcome:
    """By interval: the share of the time that makes progress, and where the rest goes."""

    intervals: Array
    goodput: Array
    error: Array  # standard error of goodput
    parts: dict[str, Array]  # as shares; with goodput the sum is 1


def simulate(
    model: Model, intervals: Any, *, seed: int = 0, runs: int = _RUNS, attempts: int = _ATTEMPTS
) -> SimulatedOutcome:
    tried = np.maximum(np.asarray(intervals, dtype=float), model.least_interval)
    every = tried[None, :]
    # A checkpoint is a snapshot too: only those in between cost extra.
    between = np.maximum(1 / model.snapshot_interval - 1 / every, 0.0)
    stretch = 1.0 + model.snapshot * between
    stretched = every * stretch
    period = stretched + model.cost
    random = np.random.default_rng(seed)
    progress, wall = np.zeros((2, runs, tried.size))
    parts = {name: np.zeros_like(wall) for name in PARTS}
    only_in_memory = np.zeros_like(wall)  # progress that the disk does not have yet
    on_disk_at = np.zeros_like(wall)  # seconds into the attempt, from when on it has
    for _ in range(attempts):
        # The time until the next interruption, its kind, and the wait after it.
        gap = random.exponential(model.mtbf, (runs, 1))
        kind = random.random((runs, 1))
        wait = random.exponential(1.0, (runs, 1)) * model.queue
        restarting = np.minimum(gap, model.restart)
        training = gap - restarting
        full = np.floor(training / period)
        rest = training - full * period
        work = full * every + np.minimum(rest / stretch, every)
        saving = full * model.cost + np.maximum(rest - stretched, 0.0)
        durable = np.maximum(np.floor((training + model.cost - model.latency) / period), 0.0)
        before = np.where((durable == 0) & (gap < on_disk_at), only_in_memory, 0.0)
        unsafe = work - durable * every + before

        is_warned = kind < model.notice_share
        takes_host = kind >= 1 - (1 - model.notice_share) * model.host_loss_share
        takes_host = ~is_warned & (takes_host | (not model.has_snapshots))
        leaves_memory = ~is_warned & ~takes_host
        of_memory = np.zeros_like(work)
        if model.has_snapshots:
            of_memory = np.minimum(work % model.snapshot_interval, work % every)
        lost = np.where(takes_host, unsafe, np.where(leaves_memory, of_memory, 0.0))
        # The keeper writes the last snapshot of a dead process at once.
        only_in_memory = np.where(leaves_memory, unsafe - of_memory, 0.0)
        on_disk_at = np.where(leaves_memory, np.maximum(model.write - wait, 0.0), 0.0)
        last = np.where(is_warned & (work > 0), model.snapshot + model.write, 0.0)

        progress += work - lost
        wall += gap + wait + last
        parts["checkpoints"] += saving + last
        parts["snapshots"] += np.maximum(training - saving - work, 0.0)
        parts["repeated"] += lost
        parts["restarts"] += restarting
        parts["queue"] += wait
    total = wall.sum(axis=0)
    goodput = progress.sum(axis=0) / total
    # The error of a ratio of sums, by each run's distance from it.
    spread = progress - goodput * wall
    error = np.sqrt((spread**2).sum(axis=0) * runs / (runs - 1)) / total
    shares = {name: seconds.sum(axis=0) / total for name, seconds in parts.items()}
    return SimulatedOutcome(tried, goodput, error, shares)
