"""The policy of the keeper's writes, on a disk and a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._store.commit.write_queue import (
    CADENCE,
    PublishOrder,
    Superseded,
    Urgency,
    expected_seconds,
    gives_way,
    sort_out,
)

BACKGROUND, ASKED, LAST = Urgency


@dataclass(frozen=True)
class Write:
    mark: int
    urgency: Urgency
    is_kept: bool = False
    attempt: int = 1

    @property
    def key(self):
        return self.attempt, self.mark


class FakeDisk:
    """Writes as the policy says; a write takes `seconds`, of which the flush can be no shorter."""

    def __init__(self, seconds, flush_seconds=0.0):
        self.now = 0.0
        self.seconds = seconds
        self.flush_seconds = flush_seconds
        self.waiting = []
        self.under_way = []  # (write, when it began, whether it is given up)
        self.durable = []  # (write, when)
        self.dropped = []
        self.deadline = None
        self.order = PublishOrder()

    @property
    def newest(self):
        return max((write.key for write, _ in self.durable), default=None)

    def add(self, *writes):
        for write in writes:
            self.waiting.append(write)
            self._advance()

    def run(self, seconds):
        """Let time pass."""
        end = self.now + seconds
        while self.under_way:
            write, began = min(self.under_way, key=lambda pair: pair[1])
            if began + self.seconds > end:
                break
            self.now = began + self.seconds
            self.under_way.remove((write, began))
            try:
                with self.order.take("name", write.key):
                    self.durable.append((write, self.now))
            except Superseded:
                self.dropped.append(write)
            self._advance()
        self.now = end

    def _advance(self):
        self.waiting, dropped = sort_out(self.waiting, self.newest)
        self.dropped += dropped
        if not self.waiting:
            return
        if all(self._gives_way(each, self.waiting[0]) for each in self.under_way):
            for write, began in list(self.under_way):
                if self.now - began < self.seconds - self.flush_seconds:
                    self.under_way.remove((write, began))
                    self.dropped.append(write)
            self.under_way.append((self.waiting.pop(0), self.now))

    def _gives_way(self, under_way, write):
        return gives_way(
            under_way[0],
            write,
            elapsed_seconds=self.now - under_way[1],
            needed_seconds=self.seconds,
            left_seconds=None if self.deadline is None else self.deadline - self.now,
        )

    def marks(self):
        return [write.mark for write, _ in self.durable]


def test_a_stop_is_durable_after_one_write_and_nothing_that_was_queued_is_written():
    disk = FakeDisk(4.0)
    disk.add(Write(1, BACKGROUND), Write(3, ASKED), Write(4, ASKED))
    disk.run(1.0)
    disk.add(Write(118, LAST))
    disk.run(60.0)
    assert disk.durable == [(Write(118, LAST), 5.0)]
    assert [write.mark for write in disk.dropped] == [3, 4, 1]


def test_a_write_that_is_only_flushed_goes_on_beside_and_is_durable_first():
    disk = FakeDisk(4.0, flush_seconds=4.0)
    disk.add(Write(1, BACKGROUND))
    disk.run(3.0)
    disk.add(Write(118, LAST))
    disk.run(60.0)
    assert disk.durable == [(Write(1, BACKGROUND), 4.0), (Write(118, LAST), 7.0)]


def test_the_state_under_way_is_not_written_twice():
    disk = FakeDisk(4.0)
    disk.add(Write(7, BACKGROUND))
    disk.run(3.0)
    disk.add(Write(7, LAST))
    disk.run(0.5)
    assert [write for write, _ in disk.under_way] == [Write(7, BACKGROUND)]


def test_where_the_newest_cannot_be_durable_in_time_the_one_under_way_is_not_given_up():
    disk = FakeDisk(16.0)
    disk.add(Write(1, BACKGROUND))
    disk.run(10.0)
    disk.deadline = disk.now + 10.0
    disk.add(Write(118, LAST))
    disk.run(10.0)
    assert disk.marks() == [1]
    disk.run(60.0)
    assert disk.marks() == [1, 118]


def test_where_neither_can_be_durable_in_time_the_newest_comes_first():
    disk = FakeDisk(16.0)
    disk.add(Write(1, BACKGROUND))
    disk.run(2.0)
    disk.deadline = disk.now + 10.0
    disk.add(Write(118, LAST))
    disk.run(60.0)
    assert disk.marks() == [118]


def test_what_somebody_has_asked_for_is_written_in_order_and_the_cadence_only_as_it_is_now():
    disk = FakeDisk(4.0)
    disk.add(*(Write(mark, BACKGROUND) for mark in (1, 2, 3)), Write(4, ASKED), Write(5, ASKED))
    disk.run(60.0)
    assert disk.marks() == [1, 4, 5]


def test_a_write_after_which_the_trainer_leaves_is_neither_dropped_nor_given_up():
    disk = FakeDisk(4.0)
    disk.add(Write(1, BACKGROUND), Write(8, LAST, is_kept=True), Write(9, LAST))
    disk.run(60.0)
    assert disk.marks() == [8, 9]


def test_a_newer_attempt_is_newer_whatever_its_step():
    disk = FakeDisk(4.0)
    disk.add(Write(1, ASKED), Write(90, ASKED, attempt=1), Write(6, LAST, attempt=2))
    disk.run(60.0)
    assert disk.marks() == [6]


@pytest.mark.parametrize("what", ["name", "note"])
def test_a_checkpoint_is_neither_named_nor_noted_after_a_newer_one(what):
    order = PublishOrder()
    with order.take(what, (1, 94)):
        pass
    with pytest.raises(Superseded), order.take(what, (1, 93)):
        raise AssertionError
    order.forget()  # 94 was called bad
    with order.take(what, (1, 93)):
        pass


def test_how_long_a_write_takes_is_known_from_the_one_under_way_too():
    assert expected_seconds(None, 0.0) == 0.0
    assert expected_seconds(None, 3.0) == 6.0
    assert expected_seconds(4.0, 1.0) == 4.0
    assert expected_seconds(4.0, 37.0) == 37.0


def test_only_the_cadence_is_in_the_background():
    assert Urgency.of(CADENCE, is_last=False) is BACKGROUND
    assert Urgency.of(CADENCE, is_last=True) is LAST
    assert Urgency.of("asked", is_last=False) is ASKED


_WRITES = st.lists(
    st.tuples(st.sampled_from([BACKGROUND, ASKED, LAST]), st.floats(0.0, 9.0)), max_size=20
)


@given(_WRITES, st.floats(0.1, 20.0), st.floats(0.0, 20.0), st.none() | st.floats(0.0, 30.0))
def test_states_become_durable_in_their_order_and_the_newest_always_does(
    orders, seconds, flush_seconds, deadline
):
    disk = FakeDisk(seconds, min(flush_seconds, seconds))
    disk.deadline = deadline
    for mark, (urgency, pause) in enumerate(orders):
        disk.add(Write(mark, urgency))
        disk.run(pause)
    disk.run(1000.0)
    assert disk.marks() == sorted(set(disk.marks()))
    assert disk.marks()[-1:] == [len(orders) - 1][: len(orders)]
    asked = [mark for mark, (urgency, _) in enumerate(orders) if urgency is ASKED]
    if all(urgency is not LAST for urgency, _ in orders):
        assert set(asked) <= set(disk.marks())
    assert sorted(disk.marks() + [write.mark for write in disk.dropped]) == list(range(len(orders)))


@given(_WRITES, st.floats(0.1, 20.0))
def test_a_last_state_is_durable_one_write_after_it_came(orders, seconds):
    disk = FakeDisk(seconds)
    for mark, (urgency, pause) in enumerate(orders):
        disk.add(Write(mark, BACKGROUND if urgency is LAST else urgency))
        disk.run(pause)
    came = disk.now
    disk.add(Write(len(orders), LAST))
    disk.run(1000.0)
    assert disk.durable[-1] == (Write(len(orders), LAST), pytest.approx(came + seconds))
