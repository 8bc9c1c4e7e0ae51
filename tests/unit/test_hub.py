"""What rank 0's keeper decides for all, on a clock that stands still."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tables import ATTEMPT, Table

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
    again.hub = type(again.hub)(2, ATTEMPT, again._send, again.shelf, lambda: again.now)
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
    table.at(0, 6, number=table.hub._rounds)
    table.at(1, 8, number=table.hub._rounds)
    assert table.decisions() == [(0, 8, "stop"), (1, 8, "stop")]


def test_of_wishes_that_wait_the_stop_comes_first():
    table = Table()
    table.wish(0, "save")
    table.wish(0, "save")
    table.wish(1, "stop")
    table.at(0, 4)
    table.at(1, 4)
    table.forget()
    table.at(0, 6, number=table.hub._rounds)
    table.at(1, 6, number=table.hub._rounds)
    assert table.decisions()[:2] == [(0, 6, "stop"), (1, 6, "stop")]


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


# -- snapshots set ahead ----------------------------------------------------------------


def _plan(table: Table, mark: int, reason: str | None = None) -> int:
    table.say(0, "due", mark=mark, reason=reason)
    return table.told(0, "plan")[-1]["mark"]


def test_a_snapshot_is_set_ahead_for_all_at_a_boundary_between_steps():
    table = Table(3)
    mark = _plan(table, 20)
    assert table.all_told("plan") == [0, 1, 2]
    assert mark > 20
    assert mark % 2 == 0
    assert {fields["mark"] for _, what, fields in table.sent if what == "plan"} == {mark}


def test_one_plan_at_a_time_until_all_hold_it():
    table = Table()
    first = _plan(table, 20)
    assert _plan(table, 22) == first
    table.hold(first)
    assert _plan(table, first) > first


def test_a_plan_that_a_rank_has_missed_is_given_up():
    table = Table()
    first = _plan(table, 20)
    table.say(1, "missed", mark=first, why="it was past that step")
    table.forget()
    assert _plan(table, 24) > 24


def test_a_plan_that_nobody_fulfils_is_given_up_in_time():
    table = Table()
    _plan(table, 20)
    table.wait(31.0)
    table.forget()
    assert _plan(table, 400) > 400


def test_a_plan_lies_beyond_the_rank_that_was_too_quick_for_the_last_one():
    """Ranks that run free: rank 0 would set each snapshot where the others were long ago."""
    table = Table()
    first = _plan(table, 20)
    table.say(1, "missed", mark=first, why="it was past that step", at=300)
    table.forget()
    assert _plan(table, 24) > 300


def test_nothing_is_planned_while_a_rank_is_not_there_yet():
    table = Table(3, here=2)
    table.say(0, "due", mark=20, reason=None)
    assert table.all_told("plan") == []


def test_nothing_is_planned_in_a_round_or_after_a_stop():
    table = Table()
    table.wish(0)
    table.say(0, "due", mark=20, reason=None)
    table.at(0, 20)
    table.at(1, 20)
    table.say(0, "due", mark=20, reason=None)
    assert table.all_told("plan") == []


def test_a_plan_with_a_reason_becomes_a_checkpoint_when_all_hold_it():
    table = Table()
    mark = _plan(table, 20, "cadence")
    table.hold(mark, ranks=range(1))
    assert table.shelf.begun == []
    table.hold(mark, ranks=range(1, 2))
    assert table.shelf.begun == [(ATTEMPT, mark)]
    table.write_all(mark)
    assert table.shelf.closing == [((ATTEMPT, mark), "cadence", [0, 1])]


def test_the_newest_boundary_that_all_hold_is_told_to_all():
    table = Table(3)
    table.hold(4, 6, 8, ranks=range(2))
    assert table.all_told("common") == []
    table.hold(4, 6, ranks=range(2, 3))
    assert table.hub.common == (ATTEMPT, 6)
    assert [fields["key"] for _, kind, fields in table.sent if kind == "common"] == [[3, 6]] * 3


# -- one checkpoint of all --------------------------------------------------------------


def test_parts_are_written_when_all_hold_the_boundary_and_the_manifest_when_all_are_durable():
    table = Table()
    table.hold(4, ranks=range(1))
    table.order(0, 4)
    assert table.all_told("write") == []
    table.hold(4, ranks=range(1, 2))
    assert table.all_told("write") == [0, 1]
    table.write(0, 4)
    assert table.shelf.closing == []
    table.write(1, 4)
    assert table.shelf.closing == [((ATTEMPT, 4), "asked", [0, 1])]
    assert table.all_told("durable") == []
    table.hub.committed((ATTEMPT, 4), None)
    assert table.all_told("durable") == [0, 1]
    assert table.hub.durable == (ATTEMPT, 4)


def test_orders_of_all_ranks_are_one_checkpoint():
    table = Table()
    table.hold(4)
    table.order(0, 4)
    table.order(1, 4)
    table.write_all(4)
    assert table.shelf.begun == [(ATTEMPT, 4)]
    assert len(table.shelf.closing) == 1
    table.order(1, 4)
    assert table.told(1, "durable")[-1]["key"] == [ATTEMPT, 4]
    assert len(table.shelf.begun) == 1


def test_checkpoints_are_written_one_after_the_other_the_oldest_first():
    table = Table()
    table.hold(4, 6)
    table.order(0, 4)
    table.order(0, 6)
    assert table.shelf.begun == [(ATTEMPT, 4)]
    table.write_all(4)
    assert table.shelf.begun == [(ATTEMPT, 4), (ATTEMPT, 6)]


def test_a_checkpoint_that_is_there_already_is_durable_at_once():
    table = Table()
    table.shelf.there.add((ATTEMPT, 4))
    table.hold(4)
    table.order(1, 4)
    assert table.all_told("durable") == [0, 1]


def test_what_one_rank_cannot_write_fails_for_all_and_is_noted():
    table = Table()
    table.hold(4)
    table.order(0, 4)
    table.write(0, 4)
    table.write(1, 4, "the disk is full")
    assert table.all_told("failed") == [0, 1]
    assert table.told(0, "failed")[0]["error"] == "rank 1: the disk is full"
    assert table.shelf.noted("save-failed") == [{"step": 2, "error": "rank 1: the disk is full"}]
    assert table.shelf.closing == []
    assert table.hub.durable is None


def test_what_cannot_be_begun_or_closed_fails_for_all():
    table = Table()
    table.shelf.refuses = "read-only"
    table.hold(4)
    table.order(0, 4)
    assert table.all_told("failed") == [0, 1]
    table.shelf.refuses = None
    table.forget()
    table.order(0, 4)
    table.write(0, 4)
    table.write(1, 4)
    table.hub.committed((ATTEMPT, 4), "attempt 4 has taken over", is_fenced=True)
    assert [fields["fenced"] for _, kind, fields in table.sent if kind == "failed"] == [True] * 2


def test_after_a_failure_the_next_checkpoint_is_written():
    table = Table()
    table.hold(4, 6)
    table.order(0, 4)
    table.order(0, 6)
    table.write(1, 4, "the disk is full")
    assert table.shelf.begun == [(ATTEMPT, 4), (ATTEMPT, 6)]
    table.write_all(6)
    assert table.hub.durable == (ATTEMPT, 6)


def test_a_part_that_was_written_for_a_failed_commit_does_not_count_for_the_next_one():
    """Its folder is removed when the next one begins."""
    table = Table()
    table.hold(4)
    table.order(0, 4)
    first = table.told(0, "write")[0]
    table.write(1, 4, "the disk is full")
    table.order(1, 4)
    assert len(table.shelf.begun) == 2
    table.say(0, "written", key=[ATTEMPT, 4], file={}, number=first["number"])
    table.say(1, "written", key=[ATTEMPT, 4], file={}, number=table.told(1, "write")[1]["number"])
    assert table.shelf.closing == []
    table.say(0, "written", key=[ATTEMPT, 4], file={}, number=table.told(0, "write")[1]["number"])
    assert len(table.shelf.closing) == 1


def test_a_part_of_a_commit_that_is_over_is_ignored():
    table = Table()
    table.hold(4)
    table.order(0, 4)
    table.write(1, 4, "the disk is full")
    table.write(0, 4)
    assert table.shelf.closing == []


def test_a_keeper_that_replaces_another_writes_what_that_one_did_not():
    table = Table()
    table.hold(4)
    table.order(0, 4)
    table.write(0, 4)
    table.hub.lost(1)
    table.forget()
    table.hub.found(1)
    table.say(1, "hello", who={"rank": 1}, held=[])  # its trainer gives it the arena later
    assert table.told(1, "write") == []
    table.hold(4, ranks=range(1, 2))
    assert len(table.told(1, "write")) == 1
    assert table.told(0, "write") == []
    table.write(1, 4)
    assert len(table.shelf.closing) == 1


@pytest.mark.parametrize("is_writing", [False, True])
def test_a_commit_whose_slot_is_gone_on_one_rank_fails(is_writing):
    table = Table()
    table.hold(4, ranks=range(2 if is_writing else 1))
    table.order(0, 4)
    table.say(1, "missed", mark=4, why="no slot was free")
    assert table.all_told("failed") == [0, 1]


# -- the deadline -----------------------------------------------------------------------


def test_the_last_common_snapshot_is_on_its_way_before_the_grace_time_ends():
    table = Table()
    table.hold(4)
    table.wish(0, grace=10.0)
    table.wait(8.4)
    assert table.shelf.begun == []
    assert table.hub.next_at() <= table.now + 0.2
    table.wait(0.2)
    assert table.shelf.begun == [(ATTEMPT, 4)]
    table.write_all(4)
    assert table.shelf.closing[0][1] == "deadline"


def test_the_earliest_of_several_deadlines_counts():
    table = Table()
    table.hold(4)
    table.wish(0, grace=100.0)
    table.wish(1, grace=5.0)
    table.wait(3.6)
    assert table.shelf.begun == [(ATTEMPT, 4)]


def test_a_person_sets_no_deadline():
    table = Table()
    table.hold(4)
    table.wish(0, grace=None)
    table.wait(600.0)
    assert table.shelf.begun == []


def test_what_is_durable_already_is_not_written_again_for_the_deadline():
    table = Table()
    table.hold(4)
    table.order(0, 4)
    table.write_all(4)
    table.wish(0, grace=2.0)
    table.wait(3.0)
    assert len(table.shelf.begun) == 1
