"""Time spent waiting for a processor: read of real threads, and left out of deadlines."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import pytest

from holdfast._environment.processes.activity import waits_between
from holdfast._environment.processes.proc import (
    FairDeadline,
    read_schedstat,
    waited_seconds,
    waits_of,
)
from holdfast._environment.processes.threads import ThreadSample


class Machine:
    """A clock and threads that wait as they are told."""

    def __init__(self) -> None:
        self.time = 100.0
        self.waits = {7: 50.0}  # by thread: what it has waited in all its life

    def deadline(self, seconds: float) -> FairDeadline:
        return FairDeadline(seconds, lambda: [1], lambda: self.time, self._waits)

    def _waits(self, pids: Iterable[int]) -> dict[int, float]:
        assert list(pids) == [1]
        return dict(self.waits)

    def over_after(self, deadline: FairDeadline, waiting: float, tid: int = 7) -> float:
        """The seconds until it is over, if a thread waits for this share of them."""
        began = self.time
        while not deadline.is_over():
            self.time += 0.01
            self.waits[tid] = self.waits.get(tid, 0.0) + 0.01 * waiting
            assert self.time - began < 1000
        return self.time - began


def test_a_deadline_is_as_long_as_it_says_where_nobody_waits():
    machine = Machine()
    assert machine.over_after(machine.deadline(5.0), 0.0) == pytest.approx(5.0, abs=0.02)


@pytest.mark.parametrize("tid", [7, 8], ids=["known", "begun since"])
def test_what_a_thread_waits_for_a_processor_is_added(tid):
    machine = Machine()
    assert machine.over_after(machine.deadline(5.0), 0.75, tid) == pytest.approx(20.0, abs=0.1)


def test_of_one_that_always_waits_it_is_over_all_the_same():
    machine = Machine()
    assert machine.over_after(machine.deadline(5.0), 1.0) == pytest.approx(60.0, abs=0.1)


def test_what_one_has_waited_that_is_gone_stays_added():
    machine = Machine()
    deadline = machine.deadline(5.0)
    machine.time, machine.waits = 105.0, {7: 54.0}
    assert not deadline.is_over()
    assert deadline.at == pytest.approx(109.0)
    machine.time, machine.waits = 108.0, {}
    assert not deadline.is_over()
    machine.time = 109.1
    assert deadline.is_over()


@pytest.mark.parametrize(("waiting", "is_starved"), [(0.9, True), (0.2, False)])
def test_who_waited_long_for_a_processor_was_starved(waiting, is_starved):
    machine = Machine()
    deadline = machine.deadline(5.0)
    assert not deadline.is_starved()
    machine.over_after(deadline, waiting)
    assert deadline.is_starved() == is_starved
    machine.time, machine.waits = machine.time + 100, {}  # it has ended
    assert deadline.is_starved() == is_starved


def test_no_time_is_no_time():
    machine = Machine()
    assert machine.deadline(0.0).is_over()


def test_the_kernel_tells_it_of_every_thread():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        pid, tid = os.getpid(), thread.native_id
        assert tid is not None
        found = waits_of([pid])
        assert {pid, tid} <= set(found)
        assert found[pid] >= 0
        assert waited_seconds(pid, tid) is not None
        told = read_schedstat(f"/proc/{pid}/task/{pid}")
        assert told is not None
        assert told[0] > 0
    finally:
        done.set()
        thread.join()
    assert waits_of([2**22 + 1]) == {}
    assert waited_seconds(pid, 2**22 + 1) is None


def _sample(state: str, cpu: float, waited: float | None, wakes: int = 5) -> ThreadSample:
    return ThreadSample(1, "python", state, cpu, wakes, None, waited)


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        (_sample("R", 1.0, 2.0), _sample("R", 1.5, 2.0), 0.0),  # it had a core of its own
        (_sample("R", 1.0, 2.0), _sample("R", 1.02, 2.48), 0.96),
        (_sample("S", 1.0, 2.0), _sample("S", 1.0, 2.3, wakes=9), 0.6),
        (_sample("S", 1.0, 2.0), _sample("S", 1.0, 2.0), 0.0),
        # The kernel counts a wait when it is over: this one was not.
        (_sample("R", 1.0, 2.0), _sample("R", 1.0, 2.0), 1.0),
        (_sample("R", 1.0, None), _sample("R", 1.1, None), 0.8),
        (_sample("R", 1.0, 2.0), _sample("R", 1.0, 2.0, wakes=6), 0.0),  # it slept in between
    ],
)
def test_the_share_of_a_window_that_a_thread_was_ready_and_did_not_run(before, after, share):
    assert waits_between(before, after, 0.5) == pytest.approx(share)


def test_a_thread_that_was_seen_once_tells_nothing():
    only = _sample("R", 1.0, 2.0)
    assert waits_between(only, only, 0.5) == 0.0
    assert waits_between(only, only, 0.0) == 0.0
