"""A notice for the machine of one rank concerns all of them."""

from __future__ import annotations

from tests.unit.tables import Table

_TOLD = {"cloud": "AWS", "what": "rebalance", "reason": "r", "seconds": None, "at": None, "lead": 1}


def _announce(table: Table, rank: int, acts: str) -> None:
    table.say(rank, "notice", host=f"h{rank}", mark=4, told={**_TOLD, "acts": acts})


def test_a_save_that_one_machine_is_advised_is_made_by_all():
    table = Table(2)
    _announce(table, 1, "save")
    assert [len(table.told(rank, "hold")) for rank in (0, 1)] == [1, 1]
    assert table.shelf.noted("notice")[0]["host"] == "h1"
    assert len(table.told(0, "notice")) == 1
    assert table.told(1, "notice") == []


def test_a_notice_alone_stops_nobody():
    table = Table(2)
    _announce(table, 1, "later")
    assert table.told(0, "hold") == []
    assert table.hub.stop is None
