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
_MOST_ATTEMPTS = 3000  # a run with more gets nowhere


@dataclass(frozen=True)
class SimulatedOutcome:
    """By interval: the share of the time that makes progress, and where the rest goes."""

    intervals: Array
    goodput: Array
    error: Array  # standard error of goodput
    parts: dict[str, Array]  # as shares; with goodput the sum is 1


@dataclass(frozen=True)
class Finished:
    """How long whole runs take: the mean, and the range of nine of ten."""

    mean: float
    low: float
    high: float
    unfinished: float  # share of the runs that get nowhere


class _Runs:
    """Many runs at many intervals, each between two attempts."""

    def __init__(self, model: Model, intervals: Array, runs: int, seed: int) -> None:
        self._model = model
        self._every = intervals[None, :]
        # A checkpoint is a snapshot too: only those in between cost extra.
        between = np.maximum(1 / model.snapshot_interval - 1 / self._every, 0.0)
        self._stretch = 1.0 + model.snapshot * between
        self._runs = runs
        self._random = np.random.default_rng(seed)
        shape = (runs, intervals.size)
        self.progress = np.zeros(shape)
        self.wall = np.zeros(shape)
        self.parts = {name: np.zeros(shape) for name in PARTS}
        self._only_in_memory = np.zeros(shape)  # progress that the disk does not have yet
        self._on_disk_at = np.zeros(shape)  # seconds into the attempt, from when on it has

    def draw(self) -> tuple[Array, Array, Array]:
        """The time until the next interruption, its kind, and the wait after it."""
        column = (self._runs, 1)
        gap = self._random.exponential(self._model.mtbf, column)
        kind = self._random.random(column)
        return gap, kind, self._random.exponential(1.0, column) * self._model.queue

    def attempt(self, gap: Array, kind: Array, wait: Array) -> None:
        """One attempt, which ends after `gap` seconds, and the wait for the next."""
        model, every = self._model, self._every
        stretched = every * self._stretch
        period = stretched + model.cost
        restarting = np.minimum(gap, model.restart)
        training = gap - restarting
        full = np.floor(training / period)
        rest = training - full * period
        work = full * every + np.minimum(rest / self._stretch, every)
        saving = full * model.cost + np.maximum(rest - stretched, 0.0)
        durable = np.maximum(np.floor((training + model.cost - model.latency) / period), 0.0)
        before = np.where((durable == 0) & (gap < self._on_disk_at), self._only_in_memory, 0.0)
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
        self._only_in_memory = np.where(leaves_memory, unsafe - of_memory, 0.0)
        self._on_disk_at = np.where(leaves_memory, np.maximum(model.write - wait, 0.0), 0.0)
        last = np.where(is_warned & (work > 0), model.snapshot + model.write, 0.0)

        self.progress += work - lost
        self.wall += gap + wait + last
        for name, seconds in {
            "checkpoints": saving + last,
            "snapshots": np.maximum(training - saving - work, 0.0),
            "repeated": lost,
            "restarts": restarting,
            "queue": wait,
        }.items():
            self.parts[name] += seconds

    def seconds_to_do(self, work: Array) -> Array:
        """The time of an attempt that is not interrupted before so much work is done."""
        model = self._model
        saves = np.floor(work / self._every)
        return model.restart + work * self._stretch + saves * model.cost


def simulate(
    model: Model, intervals: Any, *, seed: int = 0, runs: int = _RUNS, attempts: int = _ATTEMPTS
) -> SimulatedOutcome:
    tried = np.maximum(np.asarray(intervals, dtype=float), model.least_interval)
    played = _Runs(model, tried, runs, seed)
    for _ in range(attempts):
        played.attempt(*played.draw())
    wall = played.wall.sum(axis=0)
    goodput = played.progress.sum(axis=0) / wall
    # The error of a ratio of sums, by each run's distance from it.
    spread = played.progress - goodput * played.wall
    error = np.sqrt((spread**2).sum(axis=0) * runs / (runs - 1)) / wall
    parts = {name: seconds.sum(axis=0) / wall for name, seconds in played.parts.items()}
    return SimulatedOutcome(tried, goodput, error, parts)


def simulate_run(
    model: Model, interval: float, run_seconds: float, *, seed: int = 0, runs: int = 400
) -> Finished:
    """How long a training takes that would take `run_seconds` without interruptions."""
    every = np.array([max(interval, model.least_interval)])
    played = _Runs(model, every, runs, seed)
    took = np.full((runs, 1), np.nan)
    for _ in range(_MOST_ATTEMPTS):
        gap, kind, wait = played.draw()
        needed = played.seconds_to_do(run_seconds - played.progress)
        ends = np.isnan(took) & (needed <= gap)
        took = np.where(ends, played.wall + needed, took)
        if not np.isnan(took).any():
            break
        played.attempt(gap, kind, wait)
    done = took[~np.isnan(took)]
    unfinished = 1.0 - done.size / runs
    if not done.size:
        return Finished(np.inf, np.inf, np.inf, unfinished)
    low, high = (float(each) for each in np.quantile(done, (0.05, 0.95)))
    return Finished(float(done.mean()), low, high, unfinished)
