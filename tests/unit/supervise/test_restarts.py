"""Restart by cause: the table, and what it remembers."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from holdfast._diagnose.verdict import Cause, Restart, Sure, Verdict
from holdfast._supervise.record import SupervisionRecord
from holdfast._supervise.restart import CommandEnd, RestartDecision, Restarts, explain

KILLED = CommandEnd(-9, Restart.FREE, has_run=True)
CRASHED = CommandEnd(1, Restart.BACKOFF, has_run=True)
OUT_OF_MEMORY = CommandEnd(-9, Restart.ONCE, has_run=True)


def _at(end: CommandEnd, step: int | None, **other: object) -> CommandEnd:
    return CommandEnd(**{**vars(end), "step": step, **other})


def test_a_kill_is_free_however_often():
    restarts = Restarts(1)
    for step in range(1, 30):
        assert restarts.after(_at(KILLED, step)) == RestartDecision(
            True, "the command is not at fault, and this does not count"
        )


def test_a_crash_is_counted_and_its_pauses_grow_to_a_minute():
    restarts = Restarts(10)
    pauses = [restarts.after(_at(CRASHED, step)).pause_seconds for step in range(1, 11)]
    for pause, middle in zip(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60, 60], strict=True):
        assert 0.75 * middle <= pause <= 1.25 * middle
    last = restarts.after(_at(CRASHED, 11))
    assert last == RestartDecision(False, "it has been restarted 10 times", is_news=True)
    assert restarts.after(_at(KILLED, 12)).restart  # which costs nothing


def test_three_by_default():
    restarts = Restarts(None)
    decisions = [restarts.after(_at(CRASHED, step)).restart for step in range(1, 6)]
    assert decisions == [True, True, True, False, False]


def test_out_of_memory_is_tried_once_in_all():
    restarts = Restarts(None)
    assert restarts.after(_at(OUT_OF_MEMORY, 1)).restart
    assert restarts.after(_at(KILLED, 2)).restart
    assert not restarts.after(_at(OUT_OF_MEMORY, 3)).restart


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (_at(CRASHED, 1, kind=Restart.NEVER), "it would happen again"),
        (_at(CRASHED, 1, kind=Restart.DONE), "it is done"),
        (_at(CRASHED, 1, was_asked=True), "it was asked to end"),
        (_at(KILLED, 1, was_asked=True), "it was asked to end"),
        (CommandEnd(0, Restart.DONE), "it is done"),
    ],
)
def test_what_is_never_restarted(end, why):
    assert Restarts(100).after(end) == RestartDecision(False, why)


def test_none_at_all_if_none_are_allowed():
    assert not Restarts(0).after(_at(KILLED, 1)).restart


def test_a_command_without_a_run_begins_from_nothing_and_only_if_that_is_wanted():
    without = CommandEnd(1, Restart.BACKOFF)
    assert not Restarts(None).after(without).restart
    wanted = Restarts(2)
    assert [wanted.after(without).restart for _ in range(3)] == [True, True, False]


def test_one_rank_of_several_stays_away_unless_it_is_wanted():
    assert not Restarts(None, in_job=True, tasks=2).after(_at(KILLED, 1)).restart
    assert Restarts(3, in_job=True, tasks=2).after(_at(KILLED, 1)).restart


def test_what_the_scheduler_brings_back_is_left_to_it():
    requeued = CommandEnd(75, Restart.FREE, has_run=True, step=1)
    assert not Restarts(None, in_job=True).after(requeued).restart
    assert Restarts(None).after(requeued).restart


def test_three_lives_without_a_new_step_are_enough():
    restarts = Restarts(None)
    ends = [_at(KILLED, 50, began_at=None)] + [_at(KILLED, 50, began_at=45)] * 3
    decisions = [restarts.after(end) for end in ends]
    assert [each.restart for each in decisions] == [True, True, True, False]
    assert decisions[-1].why == "3 attempts in a row have made no new step"
    assert decisions[-1].is_news


def test_a_new_step_begins_the_count_anew():
    restarts = Restarts(None)
    steps = [5, 5, 5, 6, 6, 6, 6]
    found = [restarts.after(_at(KILLED, step)).restart for step in steps]
    assert found == [True] * 6 + [False]


def test_a_life_that_only_comes_to_where_it_began_has_made_none():
    restarts = Restarts(None)
    ends = [_at(KILLED, 100, began_at=100)] * 3
    assert [restarts.after(end).restart for end in ends] == [True, True, False]


def test_a_kill_counts_where_no_run_shows_whether_it_gets_any_further():
    restarts = Restarts(2)
    killed = CommandEnd(-9, Restart.FREE)
    assert [restarts.after(killed).restart for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("restart", [True, False])
def test_no_advice_says_to_start_what_is_started_again(restart):
    runs = [{"folder": "/runs/a", "attempt": 1}]
    told: dict[str, Any] = {"runs.return_value": runs, "has_printed.return_value": False}
    record = Mock(spec=SupervisionRecord, said=[], **told)
    again = "Start the same command again: it goes on at step 40."
    verdict = Verdict(
        Cause.PYTHON_EXCEPTION, "It left.", Sure.CERTAIN, advice=(again,), restart=Restart.BACKOFF
    )
    said: list[str] = []
    explain(said.append, record, verdict, RestartDecision(restart, "why", is_news=True), 7)
    assert "More: holdfast why /runs/a --attempt 1" in said[0]
    assert (again in said[0]) != restart
    assert (
        said[1]
        == f"{'' if restart else 'not '}starting it again{' (why)' if restart else ': why'}."
    )


@pytest.mark.parametrize(("runs", "is_said"), [([], True), ([{"folder": "/a"}], False)])
def test_what_ended_a_plain_script_is_said_and_a_run_has_said_it_itself(runs, is_said):
    record = Mock(spec=SupervisionRecord, said=[])
    record.runs.return_value, record.has_printed.return_value = runs, False
    sentence = "The kernel ended it at its limit of processor time: 8.0 s (ulimit -t)."
    verdict = Verdict(Cause.TIME_LIMIT, sentence, Sure.LIKELY, restart=Restart.DONE)
    said: list[str] = []
    explain(said.append, record, verdict, RestartDecision(False, "it is done"), 7)
    assert [sentence in each for each in said] == [True] * is_said
