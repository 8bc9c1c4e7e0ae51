"""Several ranks on a disk that is slower than their cadence: what is written, and what not."""

from __future__ import annotations

from tests.unit.tables import ATTEMPT, Table


def _hold_planned(table: Table, *before: int, reason: str | None = None) -> int:
    """Rank 0 finds it time for a snapshot, or a checkpoint; all take it where it is planned."""
    table.say(0, "due", mark=max(before, default=0), reason=reason)
    mark = table.told(0, "plan")[-1]["mark"]
    table.hold(*before, mark)
    return mark


def test_of_what_the_clock_wants_only_the_newest_waits_and_keeps_no_slot():
    table = Table()
    first = _hold_planned(table, reason="cadence")
    second = _hold_planned(table, first, reason="cadence")
    third = _hold_planned(table, first, second)  # a snapshot, and no checkpoint
    assert table.shelf.begun == [(ATTEMPT, first)]
    assert [each["key"] for each in table.told(1, "dropped")] == [[ATTEMPT, second]]
    table.hold(first, third)
    table.write_all(first)
    assert table.shelf.begun == [(ATTEMPT, first), (ATTEMPT, third)]
    assert table.shelf.noted("save-failed") == []


def test_what_the_trainers_have_ordered_is_written_in_order():
    """Also by the cadence: they have counted the steps, and keep the slots."""
    table = Table()
    table.hold(4, ranks=range(1))
    table.order(0, 4, "cadence")
    table.hold(4, 6, 8, ranks=range(1))
    table.order(0, 6, "cadence")
    table.order(0, 8, "cadence")
    table.hold(4, 6, 8)
    for mark in (4, 6, 8):
        table.write_all(mark)
    assert table.shelf.begun == [(ATTEMPT, mark) for mark in (4, 6, 8)]


def test_the_state_of_a_stop_waits_for_nothing_older():
    table = Table()
    table.hold(4, 6)
    table.order(0, 4, "cadence")
    table.order(0, 6)
    table.hold(4, 6, 118)
    table.say(0, "order", key=[ATTEMPT, 118], reason="stop: SIGTERM", last=True)
    assert table.shelf.begun == [(ATTEMPT, 4), (ATTEMPT, 118)]
    dropped = sorted(tuple(each["key"]) for each in table.told(1, "dropped"))
    assert dropped == [(ATTEMPT, 4), (ATTEMPT, 6)]
    assert table.told(1, "write")[-1]["last"] is True
    table.write_all(118)
    assert table.hub.commits.durable == (ATTEMPT, 118)
    assert table.shelf.noted("save-failed") == []


def test_a_write_that_alone_can_be_durable_before_the_kill_is_not_given_up():
    table = Table()
    table.shelf.seconds = 32.0  # on the safe side: 16 are measured
    table.hold(4)
    table.order(0, 4, "cadence")
    table.now += 10.0
    table.wish(0, grace=10.0)
    table.hold(4, 118)
    table.say(0, "order", key=[ATTEMPT, 118], reason="stop: SIGTERM", last=True)
    assert table.shelf.begun == [(ATTEMPT, 4)]
    table.write_all(4)
    assert table.shelf.begun == [(ATTEMPT, 4), (ATTEMPT, 118)]


def test_nothing_is_dropped_for_a_state_that_not_all_ranks_hold():
    """One rank waits in the step of the stop, and another never gets there."""
    table = Table()
    table.hold(14)
    table.wish(0, grace=2.5)
    table.hold(14, 26, ranks=range(1))
    table.say(0, "order", key=[ATTEMPT, 26], reason="stop: SIGTERM", last=True)
    table.wait(2.0)
    assert table.shelf.begun == [(ATTEMPT, 14)]
    table.write_all(14)
    assert table.hub.commits.durable == (ATTEMPT, 14)
