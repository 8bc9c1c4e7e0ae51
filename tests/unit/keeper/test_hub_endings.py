"""What rank 0's keeper does when a rank dies, fails, leaves, or cannot be reached."""

from __future__ import annotations

import pytest

from tests.unit.tables import ATTEMPT, Table


def test_when_a_rank_dies_the_newest_common_snapshot_becomes_durable_and_the_rest_leave():
    table = Table(3)
    table.hold(4, 6)
    table.hold(4, 6, 8, ranks=range(1))
    table.die(1)
    assert table.shelf.begun == [(ATTEMPT, 6)]
    assert table.all_told("leave") == []
    table.write_all(6)
    assert table.shelf.closing == [((ATTEMPT, 6), "death", [0, 1, 2])]
    assert table.all_told("leave") == [0, 1, 2]
    told = table.told(0, "leave")[0]
    assert told["reason"] == "rank 1 on here was killed by SIGKILL"
    assert (told["status"], told["step"], told["asked"]) == (75, 3, False)
    assert table.shelf.noted("rank-died")[0]["how"] == "was killed by SIGKILL"
    assert table.hub.is_over


def test_a_death_before_any_common_snapshot_ends_the_others_at_once():
    table = Table()
    table.hold(4, ranks=range(1))
    table.die(1)
    assert table.told(0, "leave")[0]["step"] is None
    assert table.shelf.begun == []


def test_a_death_in_a_round_ends_the_round():
    table = Table()
    table.hold(4)
    table.wish(0)
    table.at(0, 6)
    table.die(1)
    assert table.decisions() == []
    table.at(1, 8, number=1)
    table.wait(13.0)
    assert table.decisions() == []
    table.write_all(4)
    assert table.all_told("leave") == [0, 1]


def test_after_a_death_the_status_is_that_of_the_stop_which_was_asked_for():
    table = Table()
    table.hold(4)
    table.wish(0, status=130)
    table.die(1)
    table.write_all(4)
    told = table.told(0, "leave")[0]
    assert (told["status"], told["asked"]) == (130, True)


def test_a_death_while_a_checkpoint_is_written_waits_for_it():
    """The keeper of a dead rank lives, and writes its part."""
    table = Table()
    table.hold(4)
    table.order(0, 4)
    table.write(0, 4)
    table.die(1)
    assert table.all_told("leave") == []
    table.write(1, 4)
    table.hub.commits.committed((ATTEMPT, 4), None)
    assert table.all_told("leave") == [0, 1]
    assert table.told(0, "leave")[0]["step"] == 2


def test_who_waits_for_a_boundary_that_the_dead_rank_never_came_to_is_told_to_leave():
    """And not that it failed: he would leave for that, and not for the death."""
    table = Table()
    table.hold(4)
    table.hold(4, 8, ranks=range(1))
    table.order(0, 8)
    table.die(1)
    assert table.shelf.begun == [(ATTEMPT, 4)]
    assert table.all_told("leave") == []
    table.order(0, 8)
    table.write_all(4)
    assert table.all_told("failed") == []
    assert table.told(0, "leave")[0]["step"] == 2


def test_a_death_whose_last_checkpoint_fails_still_ends_the_others():
    table = Table()
    table.hold(4)
    table.die(1)
    table.write(0, 4, "the disk is full")
    assert table.all_told("leave") == [0, 1]
    assert table.told(0, "leave")[0]["step"] is None


def test_wishes_and_plans_after_a_death_are_void():
    table = Table()
    table.die(1)
    table.forget()
    table.wish(0)
    table.say(0, "due", mark=20, reason=None)
    assert table.sent == []


def test_two_deaths_are_told_as_the_first():
    table = Table(3)
    table.hold(4)
    table.die(2)
    table.die(1)
    table.write_all(4)
    assert "rank 2 " in table.told(0, "leave")[0]["reason"]
    assert len(table.told(0, "leave")) == 1


# -- an error in one rank ---------------------------------------------------------------


def _fail(table: Table, rank: int, reason: str, *, victim: bool) -> None:
    table.leave(rank, clean=False, reason=f"failed: {reason}", status=1, victim=victim)


@pytest.mark.parametrize("victim_first", [True, False])
def test_the_rank_that_failed_is_named_and_not_its_victim(victim_first):
    table = Table()
    table.hold(4)
    errors = [(0, "Connection closed by peer", True), (1, "ValueError: bad sample", False)]
    for rank, reason, victim in errors if victim_first else errors[::-1]:
        _fail(table, rank, reason, victim=victim)
    assert table.shelf.begun == []
    table.wait(0.8)
    table.write_all(4)
    assert table.told(0, "leave")[0]["reason"] == "rank 1 failed: ValueError: bad sample"
    assert table.told(0, "leave")[0]["status"] == 1


def test_a_rank_that_failed_by_itself_shows_its_own_error_and_is_only_let_go():
    table = Table()
    _fail(table, 1, "ValueError", victim=False)
    table.wait(0.8)
    assert table.all_told("bye") == [1]
    assert table.all_told("leave") == [0]


def test_a_death_that_is_heard_of_after_its_victims_is_the_cause():
    table = Table(3)
    table.hold(4)
    _fail(table, 0, "Connection reset by peer", victim=True)
    _fail(table, 2, "Connection reset by peer", victim=True)
    table.wait(0.3)
    table.die(1)
    table.write_all(4)
    for rank in (0, 2):
        assert table.told(rank, "leave")[0]["reason"] == "rank 1 on here was killed by SIGKILL"
    assert [table.told(rank, "leave")[0]["speaks"] for rank in range(3)] == [True, False, False]


# -- leaving ----------------------------------------------------------------------------


def test_whoever_leaves_cleanly_is_let_go_when_what_all_hold_is_durable():
    table = Table()
    table.hold(4)
    table.leave(1)
    assert table.all_told("bye") == []
    table.write_all(4)
    assert table.told(1, "bye") == [{"step": 2}]
    assert not table.hub.is_over
    table.leave(0)
    assert table.told(0, "bye") == [{"step": 2}]
    assert table.hub.is_over


def test_who_leaves_when_all_is_durable_is_let_go_at_once():
    table = Table()
    table.hold(4)
    table.order(0, 4)
    table.write_all(4)
    table.leave(0)
    assert table.told(0, "bye") == [{"step": 2}]


def test_what_needs_a_rank_that_has_left_fails_and_holds_up_nobody():
    """Ranks whose loops have different lengths would wait for each other for ever."""
    table = Table()
    table.leave(1)
    table.hold(8, ranks=range(1))
    table.order(0, 8)
    assert table.all_told("failed") == [0, 1]
    assert "rank 1" in table.told(0, "failed")[0]["error"]


def test_a_rank_that_leaves_fails_what_waits_for_it():
    table = Table()
    table.hold(8, ranks=range(1))
    table.order(0, 8)
    table.leave(1)
    assert "rank 1" in table.told(0, "failed")[0]["error"]
    assert table.told(1, "bye") == [{"step": None}]


@pytest.mark.parametrize("asks", [False, True])
def test_a_rank_that_is_stopped_outside_of_its_loop_takes_the_others_with_it(asks):
    table = Table()
    table.hold(4)
    if asks:
        table.wish(0)
    table.leave(1, status=143, reason="SIGTERM")
    table.write_all(4)
    told = table.told(0, "leave")[0]
    assert (told["status"], told["asked"]) == (143, True)
    assert told["reason"] == "SIGTERM (rank 1)"
    assert table.all_told("bye") == [1]


def test_ranks_that_leave_by_the_stop_that_was_agreed_are_let_go():
    table = Table()
    table.wish(0)
    table.at(0, 3)
    table.at(1, 4)
    table.hold(4)
    table.order(0, 4)
    table.write_all(4)
    for rank in range(2):
        table.leave(rank, status=143, reason="SIGTERM", agreed=True)
    assert table.all_told("leave") == []
    assert table.all_told("bye") == [0, 1]


def test_a_second_ctrl_c_saves_what_all_hold_and_ends_all_now():
    table = Table()
    table.hold(4)
    table.wish(0, status=130)
    table.wish(0, now=True, reason="second Ctrl-C", status=130)
    assert table.decisions() == []
    assert table.shelf.begun == [(ATTEMPT, 4)]
    table.write_all(4)
    assert table.all_told("leave") == [0, 1]
    told = table.told(1, "leave")[0]
    assert (told["reason"], told["status"], told["asked"]) == ("second Ctrl-C", 130, True)


def test_stop_now_without_a_stop_before_it_is_a_stop():
    table = Table()
    table.wish(0, now=True, reason="stop --now", status=130)
    assert table.told(1, "leave")[0]["asked"]
    assert table.told(1, "leave")[0]["status"] == 130


def test_a_lost_launcher_is_a_stop_with_the_status_to_start_again():
    table = Table()
    table.say(1, "launcher", reason="torchrun (pid 5) is gone")
    table.at(0, 4)
    table.at(1, 6)
    wish = table.told(0, "decide")[0]["wish"]
    assert (wish["reason"], wish["status"]) == ("torchrun (pid 5) is gone", 75)


# -- a rank that cannot be reached --------------------------------------------------------


def test_a_rank_that_is_lost_for_long_counts_as_dead():
    table = Table()
    table.hold(4)
    table.hub.lost(1)
    table.wait(59.0)
    assert table.shelf.noted("rank-died") == []
    table.wait(2.0)
    assert table.shelf.noted("rank-died") == [{"rank": 1, "how": "cannot be reached any more"}]


def test_nobody_waits_for_the_part_of_a_rank_that_cannot_be_reached():
    table = Table()
    table.hold(4)
    table.hub.lost(1)
    table.order(0, 4)
    table.write(0, 4)
    table.wait(61.0)
    table.wait(61.0)
    assert table.told(0, "leave")[0]["reason"] == "rank 1 cannot be reached any more"


def test_a_rank_that_is_found_in_time_is_not_dead():
    table = Table()
    table.hub.lost(1)
    table.wait(59.0)
    table.hub.found(1)
    table.wait(600.0)
    assert table.shelf.noted("rank-died") == []


def test_messages_of_no_known_kind_or_rank_are_dropped():
    table = Table()
    table.say(0, "from the future")
    table.say(9, "died", how="?", step=0)
    assert table.sent == []
