"""The keeper's timers: each call at its time, once, and the newest of its name."""

from __future__ import annotations

import select
import threading
import time
from types import SimpleNamespace

import pytest

from holdfast._keeper import timers as timers_module
from holdfast._keeper.timers import Timers


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets, in a list."""
    now = [1000.0]
    monkeypatch.setattr(timers_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def timers(clock):
    found = Timers()
    yield found
    found.close()


def test_calls_are_made_in_the_order_of_their_times(timers, clock):
    made: list[str] = []
    timers.after(2.0, lambda: made.append("late"))
    timers.after(1.0, lambda: made.append("early"))
    timers.after(1.0, lambda: made.append("early too"))
    timers.run_due()
    assert made == []
    assert timers.next_at() == 1001.0
    clock[0] = 1003.0
    timers.run_due()
    assert made == ["early", "early too", "late"]
    timers.run_due()
    assert len(made) == 3


def test_a_named_timer_replaces_the_one_before_it(timers, clock):
    made: list[str] = []
    timers.after(1.0, lambda: made.append("first"), "kill")
    timers.after(5.0, lambda: made.append("second"), "kill")
    assert timers.due_at("kill") == timers.next_at() == 1005.0
    clock[0] = 1004.0
    timers.run_due()
    assert made == []
    clock[0] = 1005.0
    timers.run_due()
    assert made == ["second"]
    assert timers.due_at("kill") is None


def test_a_cancelled_timer_is_not_due(timers, clock):
    made: list[str] = []
    timers.after(1.0, lambda: made.append("it"), "insure")
    timers.cancel("insure")
    assert timers.next_at() == float("inf")
    clock[0] = 1002.0
    timers.run_due()
    assert made == []


def test_a_call_may_set_itself_again(timers, clock):
    made: list[float] = []

    def poll() -> None:
        made.append(clock[0])
        timers.after(1.0, poll, "poll")

    timers.after(0.0, poll, "poll")
    timers.run_due()
    assert (made, timers.next_at()) == ([1000.0], 1001.0)


def test_a_deadline_that_moves_is_checked_again(timers, clock):
    class Deadline:
        at = 1001.0

        def is_over(self) -> bool:
            is_over, self.at = clock[0] >= 1003.0, 1003.0
            return is_over

    made: list[str] = []
    timers.on_deadline(Deadline(), lambda: made.append("over"), "kill")
    clock[0] = 1001.0
    timers.run_due()
    assert (made, timers.due_at("kill")) == ([], 1003.0)
    clock[0] = 1003.0
    timers.run_due()
    assert made == ["over"]


def test_only_another_thread_wakes_the_loop():
    timers = Timers()
    timers.after(60.0, lambda: None)
    assert select.select([timers], [], [], 0) == ([], [], [])
    thread = threading.Thread(target=timers.after, args=(0.0, lambda: None))
    thread.start()
    thread.join()
    assert select.select([timers], [], [], 10) == ([timers], [], [])
    timers.drain()
    assert select.select([timers], [], [], 0) == ([], [], [])
    assert timers.next_at() <= time.monotonic()
    timers.close()


def test_a_call_that_is_always_late_does_not_block_the_loop(timers, clock):
    made: list[float] = []

    def slow() -> None:
        made.append(clock[0])
        clock[0] += 2.0
        timers.at(clock[0] - 1.0, slow)

    timers.after(0.0, slow)
    timers.run_due()
    assert made == [1000.0]
