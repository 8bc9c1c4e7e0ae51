"""What `run.log` was given: folded without waiting for a device, and sent in small messages."""

from __future__ import annotations

import json
import math
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast._adapters.metrics import Metrics, ready, without_devices
from holdfast._keeper import metric_batches
from holdfast._keeper.metric_batches import Logged, add_fold
from holdfast._run.saving.keeper_client import KeeperClient

numbers = st.lists(st.one_of(st.floats(), st.integers(-(10**400), 10**400)), max_size=30)


def send(logged: Logged) -> dict[str, list[Any]]:
    sent: dict[str, list[Any]] = {}

    def post(part: dict[str, list[Any]]) -> bool:
        sent.update(part)
        return True

    logged.send(post)
    return sent


@given(numbers)
def test_a_fold_has_the_least_the_greatest_and_the_last(values):
    logged = Logged(ready)
    for step, value in enumerate(values):
        logged.append((step, {"loss": value}))
    known = []
    for value in values:
        try:
            known.append(float(value))
        except OverflowError:
            continue
    finite = [each for each in known if math.isfinite(each)]
    sent = send(logged)
    json.dumps(sent, allow_nan=False)
    if not known:
        assert sent == {}
        return
    last, low, high, count, bad, _ = sent["loss"]
    assert count == len(known)
    assert bad == len(known) - len(finite)
    assert last == (finite[-1] if finite else None)
    assert (low, high) == ((min(finite), max(finite)) if finite else (None, None))
    assert send(logged) == {}


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=20))
def test_two_folds_make_the_fold_of_both(values):
    whole, parts = Logged(ready), Logged(ready)
    known: dict[str, list[Any]] = {}
    for step, value in enumerate(values):
        whole.append((step, {"x": value}))
        parts.append((step, {"x": value}))
        for name, fold in send(parts).items():
            add_fold(known, name, fold)
    assert known == send(whole)


def test_there_are_at_most_two_hundred_names_and_the_first_ones_stay():
    logged = Logged(ready)
    logged.append((0, {f"m{number}": 1.0 for number in range(250)}))
    logged.append((1, {"m0": 2.0, "more": 2.0}))
    sent = send(logged)
    assert len(sent) == 200
    assert sent["m0"][0] == 2.0
    assert "more" not in sent


def test_messages_stay_small_whatever_the_names_are():
    logged = Logged(ready)
    logged.append((0, {f"{number}" + "\U0001f600" * 10_000: 1.0 for number in range(200)}))
    parts: list[dict[str, Any]] = []
    logged.send(lambda part: parts.append(part) is None)
    assert sum(map(len, parts)) == 200
    assert all(len(json.dumps(part)) < 60_000 for part in parts)


def test_what_could_not_be_sent_is_sent_later():
    logged = Logged(ready)
    logged.append((0, {"x": 1.0}))
    logged.send(lambda _: False)
    logged.append((1, {"x": 3.0}))
    assert send(logged) == {"x": [3.0, 1.0, 3.0, 2, 0, 1]}


def test_more_calls_than_can_be_kept_cost_the_oldest(monkeypatch):
    monkeypatch.setattr(metric_batches, "_MOST_KEPT", 10)
    logged = Logged(ready)
    for step in range(100):
        logged.append((step, {"x": float(step)}))
    assert send(logged)["x"] == [99.0, 90.0, 99.0, 10, 0, 99]


class OnItsWay:
    """As an array of JAX is."""

    device = "cpu"

    def __init__(self) -> None:
        self.is_there = False

    def is_ready(self) -> bool:
        return self.is_there

    def __float__(self) -> float:
        assert self.is_there, "waited for"
        return 5.0


class OnDevice:
    device = "cuda:0"

    def __float__(self) -> float:
        raise AssertionError("waited for")


class SizedOnDevice(OnDevice):
    size = 1


class Broken:
    device = "cpu"

    def __float__(self) -> float:
        raise ValueError


def test_nothing_waits_for_a_device():
    logged, value = Logged(ready), OnItsWay()
    logged.append((7, {"jax": value, "cuda": OnDevice(), "broken": Broken(), "plain": 1}))
    assert set(send(logged)) == {"plain"}
    assert send(logged) == {}
    value.is_there = True
    assert send(logged) == {"jax": [5.0, 5.0, 5.0, 1, 0, 7]}


def test_a_value_that_never_comes_is_forgotten():
    logged, value = Logged(ready), OnItsWay()
    logged.append((0, {"jax": value}))
    for _ in range(20):
        send(logged)
    value.is_there = True
    assert send(logged) == {}


def test_what_a_snapshot_has_read_from_a_device_is_told_once():
    class Arrived(SizedOnDevice):
        def __float__(self) -> float:
            return 0.25

    metrics = Metrics(None)
    metrics.note({"loss": Arrived(), "plain": 2.0})
    assert metrics.values() == {"loss": 0.25, "plain": 2.0}
    assert metrics.take_late() == {"loss": 0.25}
    assert metrics.values() == {"loss": 0.25, "plain": 2.0}
    assert metrics.take_late() == {}


def test_what_is_added_up_in_place_is_told_as_it_was():
    metrics, logged = Metrics(None), Logged(ready)
    total = np.zeros(())
    for step in range(3):
        total += 1.0
        given = {"total": total}
        metrics.note(given)
        logged.append((step, given))
    assert send(logged)["total"] == [3.0, 1.0, 3.0, 3, 0, 2]


def test_what_is_on_a_device_is_not_held_for_long():
    metrics = Metrics(None)
    metrics.note({"x": 1.0, "y": np.float32(2)})
    assert metrics.are_numbers
    given = {"x": 1.0, "y": SizedOnDevice(), "z": True}
    metrics.note(given)
    assert not metrics.are_numbers
    assert without_devices(given) == {"x": 1.0, "z": True}


def test_what_is_logged_may_wait_until_the_end_and_no_longer():
    sent = []
    custody = object.__new__(KeeperClient)
    custody._quit = threading.Event()
    custody._link = SimpleNamespace(send=lambda kind, may_drop, m: sent.append(may_drop) or True)
    custody.logged = Logged(ready)
    for _ in range(2):
        custody.logged.append((1, {"loss": 0.5}))
        custody._send_logged()
        custody._quit.set()  # as `close` does
    assert sent == [True, False]
