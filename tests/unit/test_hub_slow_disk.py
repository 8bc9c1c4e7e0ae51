"""Several ranks on a disk that is slower than their cadence: what is written, and what not."""

from __future__ import annotations

from tests.unit.tables import ATTEMPT, Table


def test_of_what_the_cadence_wants_only_the_newest_waits():
    table = Table()
    table.hold(4)
    table.order(0, 4, "cadence")
    table.hold(4, 6)
    table.order(0, 6, "cadence")
    table.hold(4, 6, 8)
    table.order(0, 8, "cadence")
    assert table.shelf.begun == [(ATTEMPT, 4)]
    assert {tuple(each["key"]) for each in table.told(1, "dropped")} == {(ATTEMPT, 6)}
    table.write_all(4)
    assert table.shelf.begun == [(ATTEMPT, 4), (ATTEMPT, 8)]
    assert table.shelf.noted("save-failed") == []


def test_what_waits_is_written_as_all_hold_it_when_its_turn_comes():
    """Its own slot may be another's by then."""
    table = Table()
    table.hold(4)
    table.order(0, 4)
    table.hold(4, 6)
    table.order(0, 6, "cadence")
    table.hold(8, 10)
    table.write_all(4)
    assert table.shelf.begun == [(ATTEMPT, 4), (ATTEMPT, 10)]
    assert table.shelf.noted("save-failed") == []


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
    assert table.hub.durable == (ATTEMPT, 118)
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
