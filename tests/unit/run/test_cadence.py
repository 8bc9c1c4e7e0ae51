"""When snapshots and checkpoints are due, on a simulated clock."""

from __future__ import annotations

import math
import sys

from hypothesis import given
from hypothesis import strategies as st

from holdfast._run.saving.cadence import Cadence
from holdfast._settings import Settings

costs = st.floats(1e-6, 5.0)


def make(*, now=0.0, step=0, max_overhead=0.01, every="5min"):
    return Cadence(Settings(max_overhead=max_overhead, checkpoint_every=every), now, step)


@given(
    max_overhead=st.floats(0.001, 1.0),
    spent=st.lists(costs, min_size=1, max_size=40),
    step_seconds=st.floats(0.001, 20.0),
    began=st.floats(0, 1e6),
)
def test_snapshots_cost_at_most_their_share_of_the_time(max_overhead, spent, step_seconds, began):
    cadence = make(now=began, max_overhead=max_overhead, every=10**9)
    now, paid = began, 0.0
    for number, cost in enumerate(spent):
        while not cadence.snapshot_due(now):
            now += step_seconds * max(1, (cadence.next_due() - now) // step_seconds)
        # All that was paid before has been earned by now, but for half a second and the first.
        assert paid <= max_overhead * (now - began) * (1 + 1e-6) + 0.5 + 1e-6
        now += cost
        paid += cost if number else 0.0
        cadence.took_snapshot(now, cost)


@given(spent=st.lists(costs, min_size=1, max_size=20))
def test_snapshots_come_as_soon_as_they_are_paid_for(spent):
    cadence = make(max_overhead=0.01)
    now = 0.0
    for cost in spent:
        now += cost
        cadence.took_snapshot(now, cost)
    assert cadence.snapshot_due(max(0.05, sum(spent) / 0.01) + now)
    assert not cadence.snapshot_due(now + min(0.049, spent[-1] / 0.02))


@given(usual=st.floats(1e-5, 0.004), outlier=st.floats(0.01, 0.3))
def test_after_one_slow_snapshot_the_next_comes_within_half_a_second(usual, outlier):
    cadence = make(max_overhead=0.01)
    for number in range(8):
        cadence.took_snapshot(10.0 * number, outlier if number == 7 else usual)
    assert cadence.snapshot_due(70.0 + 0.5)


@given(cold=costs)
def test_after_the_first_snapshot_of_a_life_the_next_comes_soon(cold):
    cadence = make(max_overhead=0.01)
    cadence.took_snapshot(cold, cold)
    assert cadence.snapshot_due(cold + 0.1 + 1e-6)


def test_the_first_snapshot_is_due_at_once():
    assert make(now=7.0).snapshot_due(7.0)


def test_one_outlier_does_not_slow_down_the_snapshots_for_long():
    cadence = make(max_overhead=0.01)
    now = 0.0
    for cost in (0.001, 0.001, 5.0, 0.001):
        now += 1000
        cadence.took_snapshot(now, cost)
    assert cadence.snapshot_seconds == 0.1
    assert cadence.snapshot_due(now + 0.1)


@given(times=st.lists(st.floats(0, 1e9), min_size=1, max_size=10), cost=costs)
def test_an_overhead_of_zero_turns_snapshots_off(times, cost):
    cadence = make(max_overhead=0)
    assert not any(cadence.snapshot_due(now) for now in times)
    cadence.took_snapshot(times[0], cost)  # a checkpoint has taken one
    assert not any(cadence.snapshot_due(now) for now in times)
    assert cadence.snapshot_seconds is None


def test_without_memory_there_are_no_more_snapshots():
    cadence = make()
    cadence.forget_snapshots()
    assert not cadence.snapshot_due(1e12)


@given(began=st.integers(0, 10_000), every=st.integers(1, 500))
def test_counted_checkpoints_fall_on_multiples_also_after_a_resume(began, every):
    cadence = make(step=began, every=every)
    due = []
    for step in range(began + 1, began + 3 * every + 1):
        assert (step >= cadence.next_step()) == cadence.checkpoint_due(0.0, step)
        if cadence.checkpoint_due(0.0, step):
            due.append(step)
            cadence.took_checkpoint(0.0, step)
    assert due == [s for s in range(began + 1, began + 3 * every + 1) if s % every == 0]


def test_a_counted_checkpoint_that_was_late_is_not_made_up_for():
    cadence = make(every=10)
    assert cadence.checkpoint_due(0.0, 17)
    cadence.took_checkpoint(0.0, 17)
    assert cadence.next_step() == 20


def test_counted_checkpoints_do_not_look_at_the_clock():
    cadence = make(every=10)
    assert not cadence.checkpoint_due(1e12, 9)
    cadence.took_snapshot(5.0, 0.01)
    assert cadence.next_due() == 5.1


@given(milliseconds=st.integers(1, 10**8), began=st.floats(0, 1e5))
def test_timed_checkpoints_are_due_after_their_time_and_not_before(milliseconds, began):
    cadence, every = make(now=began, every=f"{milliseconds}ms"), milliseconds / 1000
    assert not cadence.checkpoint_due(began + every * 0.999, 10**6)
    assert cadence.checkpoint_due(began + every * 1.001 + 1e-6, 1)
    assert cadence.next_step() == sys.maxsize
    cadence.forget_snapshots()
    assert math.isclose(cadence.next_due(), began + every)
    cadence.took_checkpoint(began + every, 1)
    assert not cadence.checkpoint_due(began + every * 1.9, 2)


def test_a_rest_is_afforded_by_its_cost_and_always_where_all_time_may_go_into_it():
    careful, generous = make(), make(max_overhead=1.0)
    for cadence in (careful, generous):
        for _ in range(3):
            cadence.took_snapshot(10.0, 0.5)
    assert not careful.affords_rest(10.1)
    assert careful.affords_rest(20.1)
    assert generous.affords_rest(10.1)


def test_pauses_of_about_a_second_are_shorter_at_first_so_that_a_kill_costs_less():
    cadence, now, pauses = make(max_overhead=0.01), 0.0, []
    for _ in range(200):
        now += 0.009
        cadence.took_snapshot(now, 0.009)
        began = now
        while not cadence.snapshot_due(now):
            now += 0.01
        pauses.append(now - began)
    assert max(pauses[:40]) < 0.77
    assert min(pauses[100:]) > 0.89
    assert 0.01 * now + 0.1 + 0.05 >= 200 * 0.009
