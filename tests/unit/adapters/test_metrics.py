"""Metrics: read late, and only a finite improvement is the best."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast._adapters.metrics import Metrics

values = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=20)


@given(values, st.sampled_from(["min", "max"]))
def test_exactly_the_finite_improvements_are_best(logged, mode):
    metrics = Metrics((mode, "loss"))
    better = min if mode == "min" else max
    best = None
    for value in logged:
        expected = math.isfinite(value) and (
            best is None or (value != best and better(value, best) == value)
        )
        assert metrics.note({"loss": value}) is expected
        if expected:
            best = value


@given(values)
def test_without_a_watched_metric_nothing_is_best(logged):
    metrics = Metrics(None)
    assert not any(metrics.note({"loss": value}) for value in logged)


def test_another_metric_is_not_the_watched_one():
    metrics = Metrics(("min", "val_loss"))
    assert metrics.note({"val_loss": 1.0})
    assert not metrics.note({"loss": 0.0})
    assert metrics.values() == {"val_loss": 1.0, "loss": 0.0}


def test_what_is_no_finite_number_is_none():
    metrics = Metrics(None)
    metrics.note({"a": math.nan, "b": math.inf, "c": 3})
    assert metrics.values() == {"a": None, "b": None, "c": 3.0}


def test_numbers_of_every_framework_are_taken():
    metrics = Metrics(("min", "t"))
    with_graph = (torch.ones(1, requires_grad=True) * 0.5).sum()
    assert metrics.note({"t": with_graph, "n": np.float32(0.25), "a": np.array([2])})
    assert metrics.values() == {"t": 0.5, "n": 0.25, "a": 2.0}
    assert not getattr(metrics.held("t"), "requires_grad", False)


@pytest.mark.parametrize("value", ["0.5", None, torch.zeros(2), np.zeros(3), [1.0], torch.zeros(0)])
def test_what_is_not_one_number_is_refused_by_name(value):
    with pytest.raises(holdfast.HoldfastError, match="loss=…"):
        Metrics(None).note({"loss": value})


def test_restored_metrics_come_back_as_they_were():
    metrics = Metrics(("min", "loss"))
    metrics.restore({"loss": 0.5, "bad": None}, best={"min:loss": 0.5, "max:loss": 9.0})
    assert metrics.values() == {"loss": 0.5, "bad": None}
    assert not metrics.note({"loss": 0.6})
    assert metrics.note({"loss": 0.4})


def test_a_number_that_no_float_can_hold_is_taken_for_an_infinite_one():
    metrics = Metrics(("max", "a"))
    assert not metrics.note({"a": 10**400, "b": -(10**400), "c": 10**300})
    assert [metrics.held(name) for name in "ab"] == [math.inf, -math.inf]
    assert metrics.values() == {"a": None, "b": None, "c": 1e300}
