"""What rank 0's keeper sets ahead and makes durable for all, on a clock that stands still."""

from __future__ import annotations

import os
from unittest.mock import Mock

import pytest

from holdfast._keeper.ranks.state import KeeperServices
from holdfast._store.folder.layout import RunLayout
from holdfast._store.format.manifest import DataFile, Part
from tests.unit.tables import ATTEMPT, Table

_FILE = DataFile("rank-00000.safetensors", 1, (Part("a", 0, 1, "0" * 32),)).to_json()

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


def test_a_rank_that_was_quick_once_is_not_planned_for_for_ever():
    table = Table()
    for at in (20, 120, 320):
        plan = _plan(table, 20)
        table.now += 0.1
        table.say(1, "missed", mark=plan, why="it was past that step", at=at)
    assert _plan(table, 22) > 400  # it makes 2000 a second
    table.wait(40.0)
    for _ in range(2):
        table.wait(2.0)
        table.say(1, "beat", beat={"step": 160})  # and then an evaluation
    table.forget()
    assert _plan(table, 24) < 330


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
    assert table.hub.commits.common == (ATTEMPT, 6)
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
    table.hub.commits.committed((ATTEMPT, 4), None)
    assert table.all_told("durable") == [0, 1]
    assert table.hub.commits.durable == (ATTEMPT, 4)


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
    assert table.hub.commits.durable is None


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
    table.hub.commits.committed((ATTEMPT, 4), "attempt 4 has taken over", is_fenced=True)
    assert [fields["fenced"] for _, kind, fields in table.sent if kind == "failed"] == [True] * 2


def test_after_a_failure_the_next_checkpoint_is_written():
    table = Table()
    table.hold(4, 6)
    table.order(0, 4)
    table.order(0, 6)
    table.write(1, 4, "the disk is full")
    assert table.shelf.begun == [(ATTEMPT, 4), (ATTEMPT, 6)]
    table.write_all(6)
    assert table.hub.commits.durable == (ATTEMPT, 6)


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


def test_what_was_written_of_a_failed_commit_is_removed_at_once():
    table = Table()
    table.hold(4)
    table.order(0, 4)
    assert table.shelf.wanted[-1] == {".partial-4"}
    table.write(1, 4, "the disk is full")
    assert table.shelf.wanted[-1] == set()


def test_what_was_written_of_a_dropped_commit_is_removed_when_the_next_one_has_begun():
    table = Table()
    table.hold(4, 6)
    table.order(0, 4)
    table.say(0, "order", key=[ATTEMPT, 6], reason="stop", last=True)
    assert table.shelf.begun[-1] == (ATTEMPT, 6)
    assert table.shelf.wanted[-1] == {".partial-6"}


def test_only_folders_of_this_keeper_that_nobody_closes_are_removed(tmp_path):
    layout = RunLayout(tmp_path)
    layout.checkpoints.mkdir()
    final = {step: layout.checkpoint(step, ATTEMPT, False) for step in (2, 3, 4, 5)}
    of_another = layout.partial(final[2], os.getpid() + 1)
    given_up, wanted, closing = (layout.partial(final[step], os.getpid()) for step in (3, 4, 5))
    for folder in (of_another, given_up, wanted, closing):
        folder.mkdir()
        (folder / "rank-00000.safetensors").write_bytes(b"1")
    keeper = Mock(policy=Mock(layout=layout))
    services = KeeperServices(keeper)
    services.commit((ATTEMPT, 10), "asked", {0: {"metrics": {}, **_FILE}})
    services.remove_given_up({wanted.name})
    assert sorted(layout.partial_folders()) == sorted([of_another, wanted, closing])


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


@pytest.mark.parametrize("is_ordered", [True, False])
@pytest.mark.parametrize("has_saved", [True, False])
def test_what_a_silent_rank_is_past_when_it_speaks_again_fails_at_once(is_ordered, has_saved):
    table = Table()
    table.wish(0)
    table.at(0, 7)
    table.wait(60.0)
    assert (0, 7, "stop") in table.decisions()
    table.hold(8, ranks=range(1))
    if is_ordered:
        table.order(0, 8)
    if has_saved:
        table.hold(8, ranks=range(1, 2))
    table.at(1, 9)
    table.order(0, 8)
    assert bool(table.told(0, "failed")) != has_saved
    assert bool(table.shelf.begun) == has_saved


def test_a_silent_rank_that_comes_there_yet_is_waited_for():
    table = Table()
    table.wish(0)
    table.at(0, 7)
    table.wait(60.0)
    table.hold(8, ranks=range(1))
    table.order(0, 8)
    table.at(1, 7)
    table.hold(8, ranks=range(1, 2))
    assert table.shelf.begun == [(ATTEMPT, 8)]


@pytest.mark.parametrize("is_writing", [False, True])
def test_a_commit_whose_slot_is_gone_on_one_rank_fails(is_writing):
    table = Table()
    table.hold(4, ranks=range(2 if is_writing else 1))
    table.order(0, 4)
    table.say(1, "missed", mark=4, why="no slot was free")
    assert table.all_told("failed") == [0, 1]


def test_a_plan_that_came_too_late_does_not_fail_what_a_rank_may_still_save():
    """At the last step of a training all save; the plan for it may come when one stands there."""
    table = Table()
    table.hold(4, ranks=range(1))
    table.order(0, 4)
    table.say(1, "missed", mark=4, why="it was past that step", at=4, is_past=True)
    assert table.all_told("failed") == []
    table.hold(4, ranks=range(1, 2))
    table.order(1, 4)
    assert table.shelf.begun == [(ATTEMPT, 4)]


def test_what_is_called_bad_is_set_aside_before_anybody_leaves():
    table = Table()
    table.hold(4)
    table.say(1, "void", step=2, reason="NotFinite: loss is nan (step 2)")
    assert table.shelf.noted("set-aside-void") == [{}]


def test_what_is_durable_and_good_is_not_written_again_after_a_bad_step():
    """Its slot may be gone by then: the write would fail, and the arenas would stay."""
    table = Table()
    table.hold(4)
    table.order(0, 4)
    table.write_all(4)
    table.say(1, "void", step=3, reason="NotFinite: loss is nan (step 3)")
    table.order(1, 4)
    assert len(table.shelf.begun) == 1
    assert table.all_told("failed") == []


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
