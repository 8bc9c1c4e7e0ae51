"""What rank 0's keeper does where a scheduler has started the ranks, and may start them again."""

from __future__ import annotations

import signal

import pytest

from tests.unit.tables import ATTEMPT, Table

TERM = int(signal.SIGTERM)


def job_table() -> Table:
    table = Table()
    table.shelf.has_job = True
    table.hold(4)
    return table


def test_a_sigterm_is_decided_on_when_its_cause_is_known():
    table = job_table()
    table.wish(0, reason="SIGTERM", signal=TERM)
    assert table.all_told("hold") == []
    table.shelf.asked[0]("preempted by SLURM", 75)
    table.at(0, 6)
    table.at(1, 6)
    decided = table.told(1, "decide")[0]["wish"]
    assert (decided["reason"], decided["status"]) == ("preempted by SLURM", 75)
    assert table.shelf.noted("stop-asked")[0]["reason"] == "preempted by SLURM"


def test_what_all_hold_is_durable_in_time_though_nobody_says_why():
    table = job_table()
    table.shelf.grace = {TERM: 5.0}
    table.wish(0, reason="SIGTERM", signal=TERM)
    table.wait(4.0)
    assert table.shelf.begun == [(ATTEMPT, 4)]
    assert table.decisions() == []


def test_a_sigterm_outside_of_a_job_is_what_it_is():
    table = Table()
    table.wish(0, reason="SIGTERM", signal=TERM)
    assert table.all_told("hold") == [0, 1]
    assert table.shelf.asked == []


def stop_all(table: Table, status: int) -> None:
    table.wish(0, reason="SIGUSR2", signal=int(signal.SIGUSR2), status=status)
    for rank in (0, 1):
        table.at(rank, 6)
    table.hold(4, 6)
    table.order(0, 6)
    table.write_all(6)


def test_nobody_is_let_go_before_the_job_is_requeued():
    table = job_table()
    stop_all(table, 75)
    table.leave(0, status=75, agreed=True)
    table.leave(1, status=75, agreed=True)
    assert table.shelf.requeued == [3]  # once, and the step that is durable
    assert table.all_told("bye") == []
    table.shelf.answers[0]("job 12 is requeued", 75)
    assert table.all_told("bye") == [0, 1]
    assert table.told(0, "bye")[0] == {"step": 3, "said": "job 12 is requeued", "status": 75}
    assert table.hub.is_over


def test_a_stop_of_a_person_after_the_warning_keeps_the_job_from_coming_back():
    table = job_table()
    stop_all(table, 75)
    table.wish(1, status=130, reason="holdfast stop")
    table.leave(0, status=75, agreed=True)
    assert table.shelf.requeued == []
    assert table.told(0, "bye")[0]["status"] == 130


def test_a_long_grace_of_a_preemption_is_used():
    table = job_table()
    table.shelf.grace = {TERM: 5.0}
    table.wish(0, reason="SIGTERM", signal=TERM)
    table.shelf.asked[0]("preempted by SLURM", 75)
    table.at(0, 6)
    table.at(1, 6)
    table.shelf.preemption = 60.0
    table.wait(30.0)
    assert table.shelf.begun == []
    table.shelf.preemption = 1.0
    table.wait(1.0)
    assert table.shelf.begun == [(ATTEMPT, 4)]


@pytest.mark.parametrize("status", [130, 143])
def test_a_stop_that_a_person_wants_is_not_requeued(status):
    table = job_table()
    stop_all(table, status)
    table.leave(0, status=status, agreed=True)
    assert table.shelf.requeued == []
    assert table.told(0, "bye") == [{"step": 3}]


def test_who_comes_to_the_end_of_training_after_the_warning_is_not_requeued():
    table = job_table()
    table.wish(0, reason="SIGUSR2", signal=int(signal.SIGUSR2), status=75)
    table.leave(0, status=0, agreed=True)
    table.leave(1, status=0, agreed=True)
    table.write_all(4)
    assert table.shelf.requeued == []
    assert table.all_told("bye") == [0, 1]


def test_a_job_that_ends_in_mid_step_is_requeued_with_what_all_hold():
    table = job_table()
    table.shelf.grace = {int(signal.SIGUSR2): 20.0}
    table.wish(0, reason="SIGUSR2", signal=int(signal.SIGUSR2), status=75, grace=5.0)
    for rank in (0, 1):
        table.at(rank, 6)
    table.wait(10.0)  # what this keeper knows counts, not what the other one guessed
    assert table.shelf.begun == []
    table.wait(9.0)
    assert table.shelf.begun == [(ATTEMPT, 4)]
    table.write_all(4)
    assert table.shelf.requeued == [2]
    assert table.all_told("leave") == []
    table.shelf.answers[0]("job 12 is requeued", 75)
    assert table.all_told("leave") == [0, 1]
    assert table.told(1, "leave")[0]["said"] == "job 12 is requeued"


def test_a_rank_that_dies_does_not_requeue_the_job():
    table = job_table()
    table.die(1)
    table.write_all(4)
    assert table.all_told("leave") == [0, 1]
    assert table.shelf.requeued == []


def test_a_rank_that_is_terminated_outside_of_its_loop_asks_too():
    table = job_table()
    table.leave(1, status=143, reason="SIGTERM")
    assert table.shelf.begun == [(ATTEMPT, 4)]  # whatever the answer
    table.shelf.asked[0]("requeued by SLURM", 75)
    table.write_all(4)
    assert table.shelf.requeued == [2]
    table.shelf.answers[0]("job 12 is requeued", 75)
    assert table.all_told("leave") == [0]
    assert table.all_told("bye") == [1]
