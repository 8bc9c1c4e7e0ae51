"""Rules: when they hold, what they say, and that a life in between changes nothing."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from datetime import datetime

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast._adapters.metrics import Metrics
from holdfast._run.ruling import has_not_finite, not_finite
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import (
    is_void,
    note_void,
    set_aside_void,
    void_steps,
    without_void,
)
from holdfast.rules import At, Budget, Diverged, NotFinite, Plateau, Rule, Threshold, When
from holdfast.rules._judge import Judge
from tests.cli.command import status_of, succeed
from tests.support import wait_until

NAN = math.nan


def fires_at(rule: Rule, *logged: dict[str, float], cut: int | None = None) -> tuple[int, str]:
    """The step at which a rule stops a run that logs so; with `cut` in a second life after it."""
    judge = Judge(rule)
    for step, values in enumerate(logged, 1):
        for name, value in values.items():
            judge.note(name, value)
        if judge.look(step):
            assert judge.verdict is not None
            return step, judge.verdict.reason
        if step == cut:
            stored = json.dumps(judge.state(), allow_nan=False)
            judge = Judge(rule)
            judge.load(json.loads(stored))
    return 0, ""


def losses(*values: float) -> list[dict[str, float]]:
    return [{"loss": value} for value in values]


CASES = [
    (
        Plateau("loss", 2),
        losses(3, 2, 2.5, 2.0),
        4,
        "not improved for 2 values; the best is 2 (step 2), the last",
    ),
    (Plateau("loss", 2, min_delta=0.5), losses(3, 2.6, 2.4, 2.4, 2.4), 5, "by more than 0.5"),
    (Plateau("acc", 1, mode="max"), [{"acc": 0.5}, {"acc": 0.6}, {"acc": 0.6}], 3, "acc has not"),
    (Plateau("loss", 2), losses(NAN, NAN), 2, "no finite value"),
    (Plateau("loss", 2), losses(3, 2, 1), 0, ""),
    (
        When(lambda seen: seen["val"] > 2 and seen["loss"] < 5),
        [{"val": 3}, {"loss": 6}, {"loss": 4}],
        3,
        "val 3, loss 4",
    ),
    (Threshold("acc", above=0.9), [{"acc": 0.9}, {"loss": 9}, {"acc": 0.91}], 3, "0.91, above 0.9"),
    (Threshold("loss", below=0.1), losses(0.2, NAN, 0.05), 3, "loss is 0.05, below 0.1"),
    (
        NotFinite(),
        [{"loss": 1, "lr": 1}, {"loss": 1, "grad_norm": math.inf}],
        2,
        "grad_norm is inf",
    ),
    (NotFinite("loss"), [{"lr": NAN}, {"loss": NAN}], 2, "NotFinite: loss is nan (step 2)"),
    (
        Diverged("loss", 10),
        losses(1, 9.9, 10.5),
        3,
        "10.5, more than 10 times its best 1 of step 1",
    ),
    (Diverged("loss", 2), losses(-4, -3, 1), 3, "more than 2 times its best -4"),
    (Diverged("loss", 2, patience=2), losses(1, 3, 1, 3, 3), 5, "2 values in a row"),
    (Diverged("loss", 2), losses(0, 5, NAN), 3, "not finite any more; its best was 0"),
    (Diverged("loss", 2), losses(NAN), 1, "never was finite"),
    (Budget(steps=3), [{}] * 5, 3, "3 of 3 steps are used"),
    (Budget(samples=100), [{"samples": 40}] * 5, 3, "120 of 100 samples are used"),
    (At("2020-01-01 12:00"), [{}], 1, "it is 2020-01-01 12:00:00"),
    # No hour from now: the name of the case would differ from worker to worker.
    (At(datetime(2226, 1, 1)), [{}] * 3, 0, ""),
    (When(lambda seen: seen["loss"] < 0.5), [{"lr": 1}, *losses(1, 0.4)], 3, "loss 0.4"),
    (When(lambda seen: seen.step > 1 and "why", outcome="failure"), losses(1, 1), 2, "When: why"),
    (Budget(steps=2) & Threshold("loss", below=1), losses(0.5, 2, 0.5), 3, "steps are used; Thr"),
    (Budget(steps=9) | Threshold("loss", below=1), losses(5, 0.5), 2, "Threshold: loss"),
    (NotFinite() & Budget(steps=3), losses(NAN, 1, 1, NAN), 4, "loss is nan"),
    (Threshold("a", above=1) | NotFinite(), [{"a": 2, "loss": NAN}], 1, "(step 1)"),
]


@pytest.mark.parametrize("cut", [None, 1, 2, 3])
@pytest.mark.parametrize(("rule", "logged", "step", "said"), CASES, ids=lambda v: repr(v)[:60])
def test_a_rule_holds_at_its_step_whatever_lives_there_are(rule, logged, step, said, cut):
    found, reason = fires_at(rule, *logged, cut=cut)
    assert found == step
    assert said in reason


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30),
    st.integers(0, 30),
    st.sampled_from([Plateau("loss", 3), Diverged("loss", 3, patience=2), NotFinite()]),
)
def test_an_interruption_at_any_step_changes_nothing(values, cut, rule):
    assert fires_at(rule, *losses(*values), cut=cut) == fires_at(rule, *losses(*values))


def test_outcomes_bad_wins():
    def outcome(rule, **values):
        judge = Judge(rule)
        for name, value in values.items():
            judge.note(name, value)
        assert judge.look(1)
        return judge.verdict.outcome

    assert outcome(Plateau("loss", 1), loss=NAN) == "success"
    assert outcome(NotFinite(), loss=NAN) == "failure"
    assert outcome(Plateau("loss", 1) | NotFinite(), loss=NAN) == "failure"
    assert outcome(Threshold("loss", above=1, outcome="failure"), loss=2) == "failure"


def test_one_rule_given_to_two_runs_does_not_mix_them_up():
    rule = Plateau("loss", 2)
    assert fires_at(rule, *losses(1, 1))[0] == 0
    assert fires_at(rule, *losses(1, 1))[0] == 0


def test_what_is_known_survives_other_numbers_but_not_another_metric():
    judge = Judge(Plateau("loss", 5))
    for step in range(1, 5):
        judge.note("loss", 1.0)
        judge.look(step)
    again = Judge(Plateau("loss", 3))
    again.load(judge.state())
    assert again.holds(4)
    other = Judge(Plateau("val_loss", 3))
    other.load(judge.state())
    assert not other.holds(4)


def test_samples_are_counted_for_all_ranks():
    judge = Judge(Budget(samples=100), world=4)
    judge.look(0)
    judge.note("samples", 30)
    assert judge.look(1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Plateau("loss", 0), "whole number, 1 or more"),
        (lambda: Plateau("loss", 3, mode="least"), "no such mode"),
        (lambda: Plateau("", 3), "not the name of a metric"),
        (lambda: Plateau("loss", 3, min_delta=-1), "0 or more"),
        (lambda: Threshold("loss"), "one of above= and below="),
        (lambda: Threshold("loss", above=1, below=2), "one of above= and below="),
        (lambda: Threshold("loss", above=1, outcome="good"), "no such outcome"),
        (lambda: Diverged("loss", 1), "above 1"),
        (lambda: Budget(), "one of hours="),
        (lambda: Budget(hours=1, steps=2), "one of hours="),
        (lambda: Budget(hours=0), "above 0"),
        (lambda: At("18:00 tomorrow"), "this is not a time"),
        (lambda: When("loss < 1"), "cannot be called"),
        (lambda: holdfast.Run("x", stop_when=NotFinite), "is a class"),
        (lambda: holdfast.Run("x", stop_when="nan"), "a rule of holdfast.rules"),
        (lambda: holdfast.Run("x", stop_when=[NotFinite()]), "combined with"),
    ],
)
def test_what_cannot_be_is_refused_by_a_sentence(make, words):
    with pytest.raises(holdfast.SettingsError, match=words):
        make()


def test_a_mistake_in_a_function_of_ones_own_is_not_hidden():
    with pytest.raises(KeyError, match="typo"):
        fires_at(When(lambda seen: {}["typo"]), *losses(1))


# -- values on a device -------------------------------------------------------------------------


class _Late:
    """A number of a framework that can only be waited for, as on a device."""

    device = "/device:GPU:0"
    shape = ()

    def __init__(self, value: float) -> None:
        self._value = value
        self.there = threading.Event()

    def __float__(self) -> float:
        assert self.there.wait(30)
        return self._value


def test_what_is_on_a_device_is_not_waited_for_at_a_boundary_but_before_a_snapshot():
    judge, metrics = Judge(NotFinite()), Metrics(None)
    values = [_Late(1.0), _Late(NAN), _Late(1.0)]
    for step, value in enumerate(values, 1):
        metrics.note({"loss": value})
        judge.note("loss", metrics.held("loss"))
        assert not judge.look(step)
    for value in values:
        value.there.set()
    assert judge.wait_for_values()
    assert judge.verdict.step == 2  # in which it was logged, and not the one that found it


def test_values_come_in_the_order_of_the_steps_whichever_is_there_first():
    judge = Judge(Plateau("loss", 2))
    values = [_Late(1.0), _Late(2.0), _Late(2.0)]
    for step, value in enumerate(values, 1):
        judge.note("loss", value)
        judge.look(step)
    values[2].there.set()
    assert not judge.look(4)
    values[0].there.set()
    values[1].there.set()
    deadline = time.monotonic() + 30
    while not judge.look(5):
        assert time.monotonic() < deadline
        time.sleep(0.001)  # the threads that read are to get their turn
    assert judge.verdict.step == 3


def test_a_value_is_read_as_it_was_when_it_was_logged():
    judge, running = Judge(Threshold("loss", above=5)), torch.zeros(())
    running += 9
    judge.note("loss", running)
    running.zero_()
    assert judge.look(1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_no_step_waits_for_the_device():
    judge, metrics = Judge(NotFinite()), Metrics(None)
    busy = torch.randn(8192, 8192, device="cuda")
    metrics.note({"loss": (busy @ busy).tanh().sum() * 1.0})  # the first of each takes its time
    judge.note("loss", metrics.held("loss"))
    assert not judge.wait_for_values()
    judge.look(0)
    torch.cuda.synchronize()
    assert not judge.look(0)
    began = time.monotonic()
    for _ in range(100):
        busy = (busy @ busy).tanh()
    loss = busy.sum() * NAN
    metrics.note({"loss": loss})
    judge.note("loss", metrics.held("loss"))
    is_seen = judge.look(1)
    queued = time.monotonic() - began
    torch.cuda.synchronize()
    assert not is_seen
    assert queued < (time.monotonic() - began) / 2
    wait_until(lambda: judge.look(2), 5, "the page that the value is on")
    assert judge.verdict.step == 1


# -- void ------------------------------------------------------------------------------------------


def test_what_is_void_is_off_the_line_and_out_of_the_way(tmp_path):
    layout = RunLayout(tmp_path)
    layout.checkpoints.mkdir()
    for attempt in (1, 2, 3):
        layout.attempt(attempt).mkdir(parents=True)
    note_void(layout, 2, 50, "bad", rank=1)
    note_void(layout, 2, 60, "bad")
    note_void(layout, 2, 70, "bad", rank=1)  # a later step does not undo the earlier one
    for step, attempt in ((49, 1), (50, 1), (50, 2), (51, 3)):
        layout.checkpoint(step, attempt).mkdir()
    voids = void_steps(layout)
    assert voids == {2: 50}
    assert [is_void(voids, *state) for state in ((1, 49), (1, 50), (2, 50), (3, 51))] == [
        *(False, True, True, False)
    ]
    assert without_void({3: None, 2: 55, 1: 40}, voids) == {3: None, 2: 49, 1: 40}
    assert len(set_aside_void(layout)) == 2
    assert [step for step, _, _ in layout.checkpoint_folders()] == [49, 51]
    assert sorted(path.name for path in layout.set_aside.iterdir()) == [
        "void-step-000000000050-a0001",
        "void-step-000000000050-a0002",
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [1e4, NAN, math.inf, -math.inf])
def test_tensors_that_are_not_finite_are_found_by_their_bits(dtype, value):
    state = {"a": torch.ones(3, dtype=dtype), "b": [torch.tensor([0.0, value], dtype=dtype)]}
    assert not_finite(state) == ([] if math.isfinite(value) else ["b.0"])


def test_gradients_that_are_not_finite_are_named():
    model = torch.nn.Linear(2, 2)
    (model(torch.ones(2)).sum() * NAN).backward()
    assert not_finite({"model": model}) == ["model.weight.grad", "model.bias.grad"]


def test_whole_numbers_are_always_finite():
    assert not has_not_finite(np.full(4, -1).tobytes(), "I64")


def test_a_nan_is_told_from_an_infinity():
    for value, is_nan in ((1.0, False), (-math.inf, False), (-NAN, True)):
        data = np.array([0.0, value], np.float32).tobytes()
        assert has_not_finite(data, "F32", only_nan=True) == is_nan


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (When(lambda seen: seen["loss"] > 2), When(lambda seen: seen["loss"] > 9)),
        (Plateau("loss", 2, mode="min"), Plateau("loss", 2, mode="max")),
    ],
)
def test_a_rule_that_has_ended_a_run_and_was_changed_does_not_hold(before, after):
    judge, same, changed = Judge(before), Judge(before), Judge(after)
    for step in (1, 2, 3):
        judge.note("loss", float(step))
        judge.look(step)
    assert judge.verdict is not None
    same.load(judge.state())
    changed.load(judge.state())
    assert (same.holds(3), changed.holds(3)) == (True, False)


def test_if_all_saved_states_have_a_parameter_that_is_nan_none_of_them_is_left(tmp_path):
    model = torch.nn.Linear(2, 1)
    model.register_buffer("mask", torch.full((2,), -math.inf))
    settings = holdfast.Settings(checkpoint_every=1)
    with (
        pytest.raises(holdfast.Stopped),
        holdfast.Run(tmp_path, settings=settings, stop_when=NotFinite(), model=model) as run,
    ):
        with torch.no_grad():
            model.weight.fill_(NAN)
        for step in run.steps(5):
            loss = model(torch.ones(2)).sum()
            loss.backward()
            if step == 3:
                run.log(loss=loss)
    assert RunLayout(tmp_path).checkpoint_folders() == []
    assert void_steps(RunLayout(tmp_path))[1] < 4


def test_an_array_that_is_nan_in_all_saved_states_leaves_none_of_them(tmp_path):
    weights, settings = np.zeros(3), holdfast.Settings(checkpoint_every=1)
    with (
        pytest.raises(holdfast.Stopped),
        holdfast.Run(tmp_path, settings=settings, stop_when=NotFinite(), w=weights) as run,
    ):
        for step in run.steps(6):
            weights += NAN
            if step == 4:
                run.log(loss=float(weights.sum()))
    assert RunLayout(tmp_path).checkpoint_folders() == []
    found = status_of(tmp_path)
    assert (found["disk_step"], found["memory_step"]) == (None, None)
    assert re.search(r"^ +safe +nothing$", succeed("status", tmp_path), re.MULTILINE)


def test_an_array_that_was_nan_at_the_start_is_meant_to_be(tmp_path):
    """Not one of the states is void because of the places that are not filled yet."""
    later = np.full(4, NAN)
    settings = holdfast.Settings(checkpoint_every=1)
    with (
        pytest.raises(holdfast.Stopped),
        holdfast.Run(
            tmp_path, settings=settings, stop_when=NotFinite(), w=np.zeros(3), later=later
        ) as run,
    ):
        for step in run.steps(6):
            run.state["w"][:] = NAN if step > 2 else step
            if step == 4:
                run.log(loss=float(run.state["w"].sum()))
    assert [step for step, _, _ in RunLayout(tmp_path).checkpoint_folders()][-1] == 3
