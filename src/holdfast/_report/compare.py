"""Runs side by side: what each was started with, what came of it, and its curves.

The page, `holdfast compare` and its JSON all use exactly this. Every string in it may be hostile.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from holdfast._report.attempts import AttemptHistory, Config, Scalar, at_step
from holdfast._report.model import RunModel
from holdfast._report.status.parts import main_metric
from holdfast._report.view import Metric, View
from holdfast._store.format import version

SCHEMA = 1
MOST_RUNS = 100
_MOST_POINTS = 400  # of a curve
_MOST_METRICS = 60
_HIGHER = (
    *("acc", "auc", "f1", "bleu", "rouge", "reward", "return", "score", "precision", "recall"),
    *("map", "iou", "dice", "psnr", "ssim", "r2", "win", "throughput", "per_second"),
)


class ComparedCurve(TypedDict):
    """`seconds` is the time in which processes of the run lived, up to the step."""

    step: list[int]
    seconds: list[float | None]
    value: list[float | None]


class Result(TypedDict):
    """Of one metric: its newest value, and its extremes over all steps that count."""

    last: float | None
    low: float | None
    high: float | None


class ComparedRun(TypedDict):
    key: str
    name: str
    state: str
    is_live: bool
    step: int | None
    total: int | None
    attempts: int
    started: float | None
    seconds: float
    config: Config
    results: dict[str, Result]
    tags: list[str]
    note: str


class RunComparison(TypedDict):
    """`curves` has for each metric one curve for each run, or null."""

    schema: int
    made_at: float
    version: str
    metric: str | None
    metrics: list[str]
    higher: list[str]  # those of which a higher value is better, by their names
    differing: list[str]
    runs: list[ComparedRun]
    curves: dict[str, list[ComparedCurve | None]]


@dataclass(frozen=True)
class ComparedFacts:
    run: ComparedRun
    curves: dict[str, ComparedCurve] = field(default_factory=dict)


def gather_facts(model: RunModel, key: str, name: str) -> ComparedFacts:
    """What a comparison shows of a run, as of the model's last update."""
    view = model.view()
    clock, seconds = _clock(view, model.histories)
    metrics = view["metrics"][:_MOST_METRICS]
    run = ComparedRun(
        key=key,
        name=name,
        state=view["run"]["state"],
        is_live=view["run"]["is_live"],
        step=view["run"]["step"],
        total=view["run"]["total"],
        attempts=len(view["attempts"]),
        started=view["attempts"][0]["start"] if view["attempts"] else None,
        seconds=seconds,
        config=view["run"]["config"],
        results={metric["name"]: _result(metric) for metric in metrics},
        tags=view["run"]["tags"],
        note=view["run"]["note"],
    )
    return ComparedFacts(run, {metric["name"]: _curve(metric, clock) for metric in metrics})


def assemble_comparison(
    found: Sequence[ComparedFacts], metric: str | None = None, *, has_all_curves: bool = True
) -> RunComparison:
    """Side by side; without `has_all_curves` only the curves of the one metric."""
    runs = [each.run for each in found]
    # Those that most runs have come first.
    counts = Counter(name for run in runs for name in run["results"])
    names = [name for name, _ in counts.most_common(_MOST_METRICS)]
    chosen = metric if metric in names else main_metric(names)
    wanted = names if has_all_curves else [chosen] if chosen is not None else []
    return RunComparison(
        schema=SCHEMA,
        made_at=time.time(),
        version=version.__version__,
        metric=chosen,
        metrics=names,
        higher=list(filter(is_higher_better, names)),
        differing=differing_keys([run["config"] for run in runs]),
        runs=runs,
        curves={name: [each.curves.get(name) for each in found] for name in wanted},
    )


def differing_keys(configs: Sequence[Mapping[str, Scalar]]) -> list[str]:
    """The hyperparameters that are not the same in all runs; a missing one differs.

    >>> differing_keys([{"lr": 0.1, "seed": 1}, {"lr": 0.2, "seed": 1}, {"seed": 1, "wd": 0}])
    ['lr', 'wd']
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    missing = object()
    return [key for key in keys if len({_same(c.get(key, missing)) for c in configs}) > 1]


def is_higher_better(metric: str) -> bool:
    """By the name of a metric; the reader of a page can say otherwise.

    >>> is_higher_better("val_accuracy"), is_higher_better("loss")
    (True, False)
    """
    words = metric.lower()
    return "loss" not in words and "error" not in words and any(w in words for w in _HIGHER)


def _same(value: object) -> object:
    # 1, 1.0 and True are one key of a set, and three values to a reader.
    return (type(value).__name__, value) if isinstance(value, bool) else value


Clock = Callable[[int, int], float | None]


def _clock(view: View, histories: Mapping[int, AttemptHistory]) -> tuple[Clock, float]:
    """The time that a run has spent in its processes: by attempt and step, and in all."""
    spans: dict[int, tuple[float, float]] = {}  # the time before an attempt, and its start
    total = 0.0
    for attempt in view["attempts"]:
        spans[attempt["number"]] = total, attempt["start"]
        end = view["made_at"] if attempt["end"] is None else attempt["end"]
        total += max(0.0, end - attempt["start"])
    courses = {number: history.timeline.steps() for number, history in histories.items()}

    def seconds(attempt: int, step: int) -> float | None:
        if attempt not in spans or not (course := courses.get(attempt)):
            return None
        before, start = spans[attempt]
        return before + max(0.0, at_step(course, step).t - start)

    return seconds, total


def _result(metric: Metric) -> Result:
    values = [value for value in metric["value"] if value is not None]
    return Result(
        last=values[-1] if values else None,
        low=min((v for v in metric["low"] if v is not None), default=None),
        high=max((v for v in metric["high"] if v is not None), default=None),
    )


def _curve(metric: Metric, clock: Clock) -> ComparedCurve:
    found = ComparedCurve(step=[], seconds=[], value=[])
    # The places at which the steps rise: a chart goes from left to right.
    rising: list[int] = []
    for at, step in enumerate(metric["step"]):
        if step > (metric["step"][rising[-1]] if rising else -1):
            rising.append(at)
    stride = max(1, math.ceil(len(rising) / _MOST_POINTS))
    for at in sorted({*rising[::stride], *rising[-1:]}):
        step = metric["step"][at]
        seconds = clock(metric["attempt"][at], step)
        found["step"].append(step)
        found["seconds"].append(None if seconds is None else round(seconds, 3))
        found["value"].append(metric["value"][at])
    return found
