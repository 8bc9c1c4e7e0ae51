"""The plan: the best interval, its goodput, and where the rest of the time goes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from holdfast._report.html import finite
from holdfast._tools.plan.model import MAX_OVERHEAD, Inputs, Model, build_model
from holdfast._tools.plan.simulate import PARTS, SimulatedOutcome, simulate
from holdfast._tools.plan.units import as_setting, round_interval

COMMON_SECONDS = (30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 43_200, 86_400)
LONGEST_SECONDS = 14_400.0  # no model knows all that can happen to a run
_SHORTEST_SECONDS = 1.0
_POINTS = 33
_CURVE_RUNS = 80  # fewer than for one interval: the points of a curve are smoothed together
_AS_GOOD = 0.001  # of the time: a smaller difference between two intervals does not matter


@dataclass(frozen=True)
class IntervalRow:
    interval: float
    goodput: float
    error: float
    parts: dict[str, float]
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Way:
    """One way of saving: its best interval, and its goodput at all others."""

    name: str
    best: float  # by the simulation, before it is rounded
    goodput: float
    error: float
    intervals: list[float]
    curve: list[float]

    @property
    def as_good(self) -> tuple[float, float]:
        """The range of intervals that are as good as the best one."""
        least = max(self.curve) - _AS_GOOD  # all of them meet the same interruptions
        points = zip(self.intervals, self.curve, strict=True)
        good = [interval for interval, goodput in points if goodput >= least]
        return min(good), max(good)


@dataclass(frozen=True)
class Plan:
    given: Inputs
    seed: int
    model: Model
    assumed: list[str]
    chosen: IntervalRow  # the interval to write down
    rows: list[IntervalRow]
    ways: list[Way]  # the last one is that of the model

    @property
    def setting(self) -> str:
        overhead = self.model.max_overhead
        share = "" if overhead == MAX_OVERHEAD else f", max_overhead={overhead:g}"
        return f'Settings(checkpoint_every="{as_setting(self.chosen.interval)}"{share})'

    @property
    def losses(self) -> str:
        """Where the time goes that makes no progress, the largest share first."""
        shares = sorted(self.chosen.parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{PARTS[name]} {share:.2%}" for name, share in shares if share >= 5e-5)

    def to_json(self) -> dict[str, Any]:
        """For scripts; times in seconds, and an infinite time is null."""
        model, chosen, ours, whole = self.model, self.chosen, self.ways[-1], asdict(self)
        found: dict[str, Any] = {
            "setting": self.setting,
            "checkpoint_every_seconds": chosen.interval,
            "goodput": chosen.goodput,
            "goodput_error": chosen.error,
            "parts": chosen.parts,
            "young_seconds": model.young,
            "daly_seconds": model.daly,
            "simulated_seconds": ours.best,
            "as_good_seconds": ours.as_good,
            "rows": whole["rows"],
            "ways": whole["ways"],
            "run_seconds": self.given.run_seconds,
            "host_bytes": self.given.host_bytes,
            "model": {
                **whole["model"],
                "checkpoint_cost": model.cost,
                "extra_checkpoint_cost": model.extra_cost,
                "snapshot_interval": model.snapshot_interval,
                "losing_mtbf": model.losing_mtbf,
            },
            "assumed": self.assumed,
            "seed": self.seed,
        }
        return {name: finite(value) for name, value in found.items()}


def make_plan(given: Inputs, seed: int = 0) -> Plan:
    """Takes about a second."""
    model, assumed = build_model(given)
    no_snapshots = replace(model, max_overhead=0.0)
    blocking = replace(no_snapshots, is_blocking=True)
    ways = [
        _try_way("training stands still while it writes", blocking, seed),
        _try_way("written beside the training", no_snapshots, seed),
    ]
    if model.has_snapshots:
        share = f"{100 * model.max_overhead:g}%"
        ways.append(_try_way(f"and {share} of the time for snapshots in memory", model, seed))
    # A round one, and 30 s or more if that is as good.
    calm = max(ways[-1].best, min(COMMON_SECONDS[0], ways[-1].as_good[1]))
    choice = round_interval(calm, max(model.least_interval, _SHORTEST_SECONDS))
    rows = _rows(model, choice, given.run_seconds, seed)
    chosen = next(row for row in rows if "best" in row.marks)
    return Plan(given, seed, model, assumed, chosen, rows, ways)


def _try_way(name: str, model: Model, seed: int) -> Way:
    guess = min(model.young, LONGEST_SECONDS)
    least = max(model.least_interval, _SHORTEST_SECONDS)
    low = max(least, min(guess / 20, COMMON_SECONDS[0]))
    high = max(LONGEST_SECONDS, low * 4)
    outcome = simulate(model, np.geomspace(low, high, _POINTS), seed=seed, runs=_CURVE_RUNS)
    best = _smooth_best(outcome)
    at_best = simulate(model, [best], seed=seed)
    goodput, error = float(at_best.goodput[0]), float(at_best.error[0])
    return Way(name, best, goodput, error, outcome.intervals.tolist(), outcome.goodput.tolist())


def _smooth_best(outcome: SimulatedOutcome) -> float:
    """The best interval without the noise: the loss is fitted by a + b/interval + c*interval."""
    top = float(outcome.intervals[int(outcome.goodput.argmax())])
    near = (outcome.intervals >= top / 4) & (outcome.intervals <= top * 4)
    every = outcome.intervals[near]
    terms = np.stack([np.ones_like(every), 1 / every, every], axis=1)
    (_, shrinks, grows), *_ = np.linalg.lstsq(terms, -outcome.goodput[near], rcond=None)
    if shrinks <= 0 or grows <= 0:
        return top  # at one end of the curve
    found = math.sqrt(shrinks / grows)
    return min(max(found, float(outcome.intervals[0])), float(outcome.intervals[-1]))


def _rows(model: Model, choice: float, run_seconds: float, seed: int) -> list[IntervalRow]:
    young, daly = model.young, model.daly
    if math.isclose(young, daly, rel_tol=0.02):
        young = daly  # one row is enough
    longest = max(run_seconds, choice)
    common = [float(each) for each in COMMON_SECONDS if model.least_interval <= each <= longest]
    marks: dict[float, list[str]] = {interval: [] for interval in common}
    for interval, mark in ((choice, "best"), (young, "Young"), (daly, "Daly")):
        if model.least_interval <= interval < math.inf:
            marks.setdefault(interval, []).append(mark)
    intervals = sorted(marks)
    outcome = simulate(model, intervals, seed=seed)
    return [
        IntervalRow(
            interval,
            float(outcome.goodput[at]),
            float(outcome.error[at]),
            {name: float(share[at]) for name, share in outcome.parts.items()},
            tuple(marks[interval]),
        )
        for at, interval in enumerate(intervals)
    ]
