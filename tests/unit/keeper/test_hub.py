"""What rank 0's keeper decides for all, on a clock that stands still."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tables import Table

# -- agreement ------------------------------------------------------------------------


@given(marks=st.lists(st.integers(0, 1000), min_size=2, max_size=6))
def test_the_furthest_boundary_is_the_decision(marks):
    table = Table(len(marks))
    table.wish(0)
    assert table.all_told("hold") == list(range(len(marks)))
    for rank, mark in enumerate(marks[:-1]):
        table.at(rank, mark)
    assert table.decisions() == []
    table.at(len(marks) - 1, marks[-1])
    assert table.decisions() == [(rank, max(marks), "stop") for rank in range(len(marks))]


def test_a_decision_carries_who_wished_what_and_why():
    table = Table()
    table.wish(1, reason="SIGUSR1", status=75, signal=10, grace=30.0)
    table.at(0, 6)
    table.at(1, 8)
    wish = table.told(0, "decide")[0]["wish"]
    assert wish == table.told(1, "decide")[0]["wish"]
    assert wish["reason"] == "SIGUSR1"
    assert (wish["status"], wish["signal"], wish["grace"], wish["rank"]) == (75, 10, 30.0, 1)
    assert table.shelf.noted("stop-asked") == [{"rank": 1, "reason": "SIGUSR1"}]


def test_wishes_of_two_ranks_for_a_stop_are_one_stop_with_the_first_ones_status():
    table = Table()
    table.wish(1, status=130)
    table.wish(0, status=143)
    table.at(0, 4)
    table.at(1, 6)
    assert table.decisions() == [(0, 6, "stop"), (1, 6, "stop")]
    assert table.told(0, "decide")[0]["wish"]["status"] == 130
    table.wish(0, status=75)
    assert len(table.all_told("hold")) == 2


def test_an_answer_to_an_earlier_round_does_not_count():
    table = Table()
    table.wish(0, "save")
    first = table.told(0, "hold")[0]["round"]
    table.at(0, 4)
    table.at(1, 4)
    table.wish(0, "save")
    table.at(0, 8)
    table.at(1, 90, number=first)
    assert len(table.decisions()) == 2
    table.at(1, 10)
    assert table.decisions()[2:] == [(0, 10, "save"), (1, 10, "save")]


def test_rounds_of_a_hub_that_replaced_another_have_other_numbers():
    """A trainer tells by the number whether it knows a decision already."""
    table = Table()
    table.wish(0, "save")
    again = Table()
    again.now = table.now + 5.0
    again.hub = type(again.hub)(replace(again.hub.state))  # begins at this moment
    for rank in range(2):
        again.say(rank, "hello", who={}, held=[])
    again.wish(0, "save")
    assert again.told(0, "hold")[0]["round"] > table.told(0, "hold")[0]["round"]


def test_a_silent_rank_is_dropped_after_a_bound():
    table = Table(3)
    table.wish(0)
    table.at(0, 4)
    table.at(1, 6)
    table.wait(11.9)
    assert table.decisions() == []
    assert table.hub.next_at() <= table.now + 0.2
    table.wait(0.2)
    assert [mark for _, mark, _ in table.decisions()] == [6, 6, 6]


def test_a_wish_that_nobody_answers_is_not_forgotten():
    table = Table()
    table.wish(0)
    table.wait(12.1)
    assert table.decisions() == []
    table.at(0, 4)
    table.at(1, 6)
    assert [mark for _, mark, _ in table.decisions()] == [6, 6]


def test_a_rank_that_has_not_come_yet_is_waited_for():
    """After the hub was replaced, the others need a moment to find the new one."""
    table = Table(2, here=1)
    table.wish(0)
    table.at(0, 4)
    assert table.decisions() == []
    table.hub.found(1)
    table.say(1, "hello", who={"rank": 1}, held=[])
    table.at(1, 6)
    assert table.decisions() == [(0, 6, "stop"), (1, 6, "stop")]


def test_a_rank_that_never_comes_holds_up_nobody():
    table = Table(2, here=1)
    table.wish(0)
    table.at(0, 4)
    table.wait(12.1)
    assert (0, 4, "stop") in table.decisions()


def test_a_rank_that_has_left_is_not_asked():
    table = Table(3)
    table.leave(2)
    table.wish(0)
    assert table.all_told("hold") == [0, 1]
    table.at(0, 4)
    table.at(1, 2)
    assert table.decisions() == [(0, 4, "stop"), (1, 4, "stop")]


def test_a_rank_that_leaves_in_the_middle_of_a_round_is_not_waited_for():
    table = Table(3)
    table.wish(0)
    table.at(0, 4)
    table.at(1, 2)
    table.leave(2)
    assert table.decisions() == [(0, 4, "stop"), (1, 4, "stop")]


def test_a_stop_waits_until_a_save_is_decided_and_is_decided_then():
    table = Table()
    table.wish(0, "save")
    table.wish(1, "stop")
    assert len(table.all_told("hold")) == 2
    table.at(0, 4)
    table.at(1, 6)
    assert table.decisions() == [(0, 6, "save"), (1, 6, "save")]
    assert len(table.all_told("hold")) == 4
    table.forget()
    table.at(0, 6, number=table.hub.agreement.rounds)
    table.at(1, 8, number=table.hub.agreement.rounds)
    assert table.decisions() == [(0, 8, "stop"), (1, 8, "stop")]


def test_of_wishes_that_wait_the_stop_comes_first():
    table = Table()
    table.wish(0, "save")
    table.wish(0, "save")
    table.wish(1, "stop")
    table.at(0, 4)
    table.at(1, 4)
    table.forget()
    table.at(0, 6, number=table.hub.agreement.rounds)
    table.at(1, 6, number=table.hub.agreement.rounds)
    assert table.decisions()[:2] == [(0, 6, "stop"), (1, 6, "stop")]


def test_a_stop_that_came_with_the_end_of_a_loop_may_be_asked_for_in_the_next():
    table = Table()
    wish = {"kind": "stop", "reason": "SIGTERM", "status": 143}
    table.wish(0)
    table.at(0, 39)
    table.at(1, 40)
    for mark in (40, 42):
        table.forget()
        table.say(0, "wish", wish=wish, mark=mark)
        assert table.all_told("hold") == ([] if mark == 40 else [0, 1])
    table.at(0, 42)
    table.at(1, 43)
    assert table.decisions() == [(0, 43, "stop"), (1, 43, "stop")]


def test_saves_that_several_ranks_ask_for_at_one_boundary_are_one_save():
    table = Table(3)
    for rank in range(2):
        table.say(rank, "wish", wish={"kind": "save", "reason": "asked"}, mark=4)
    for rank, mark in enumerate((4, 4, 3)):
        table.at(rank, mark)
    table.say(2, "wish", wish={"kind": "save", "reason": "asked"}, mark=4)
    assert table.decisions() == [(rank, 4, "save") for rank in range(3)]
    assert table.all_told("hold") == [0, 1, 2]
    table.say(2, "wish", wish={"kind": "save", "reason": "asked"}, mark=6)
    assert len(table.all_told("hold")) == 6


def test_a_keeper_that_replaces_another_hears_of_a_stop_that_is_decided():
    table = Table()
    table.wish(0)
    table.at(0, 4)
    table.at(1, 4)
    decided = table.told(1, "decide")[0]
    table.forget()
    table.say(1, "hello", who={"rank": 1}, held=[])
    assert table.told(1, "decide") == [decided]
    table.hold(4)
    table.order(0, 4)
    table.write_all(4)
    table.forget()
    table.say(1, "hello", who={"rank": 1}, held=[])
    assert table.told(1, "decide") == []


def test_a_lost_keeper_that_is_found_again_hears_of_the_round_that_runs():
    table = Table()
    table.hub.lost(1)
    table.wish(0)
    number = table.told(0, "hold")[0]["round"]
    table.forget()
    table.hub.found(1)
    assert table.told(1, "hold") == [{"round": number}]
    assert [event for event, _ in table.shelf.notes][:2] == ["keeper-lost", "stop-asked"]
    assert table.shelf.noted("keeper-found") == [{"rank": 1}]


def test_the_first_coming_of_a_keeper_is_no_news():
    assert Table().shelf.notes == []
