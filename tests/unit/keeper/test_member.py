"""How a rank's keeper answers for its trainer, which is never asked, and tells it what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from holdfast._keeper.protocol import sender
from holdfast._keeper.ranks.agent import RankAgent
from holdfast._keeper.writer import WriteJob
from holdfast._store.memory import control

ATTEMPT = 3


class Keeper:
    """The keeper around a member, with the words that its trainer writes."""

    def __init__(self) -> None:
        self.words = words = control.private_words()
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.written: list[WriteJob] = []
        self.snapshots: list[tuple[int, int]] = []
        self.waiting: list[Any] = []
        trainer = Mock(words=words, post=self._tell, tell=sender(self._tell))
        type(trainer).rests = property(lambda _: words[control.REST] == control.RESTS)
        self.holdings = holdings = Mock(boundaries=lambda: self.snapshots)
        storage = Mock(holdings=holdings, writer=Mock(submit=self.written.append))
        body = Mock(trainer=trainer, storage=storage, timers=Mock(after=self._later), hangs=None)
        body.policy = Mock(attempt=ATTEMPT, layout=Mock(checkpoints=Path("checkpoints")))
        self.member = RankAgent(body, sender(self._say), Mock())

    def _say(self, kind: str, /, **fields: Any) -> None:
        self.said.append((kind, fields))

    def _tell(self, kind: str, /, **fields: Any) -> None:
        self.told.append((kind, fields))

    def _later(self, seconds: float, act: Any) -> None:
        assert seconds > 0
        self.waiting.append(act)

    def hear(self, kind: str, /, **fields: Any) -> None:
        self.member.receive(kind, **fields)

    def decide(self, number: int, mark: int, kind: str = "stop") -> None:
        self.hear("decide", round=number, mark=mark, wish={"kind": kind, "reason": "why"})

    def pass_moment(self) -> None:
        waiting, self.waiting = self.waiting, []
        for act in waiting:
            act()

    def marks_said(self) -> list[int]:
        return [fields["mark"] for kind, fields in self.said if kind == "at"]

    def reports(self) -> list[dict[str, Any]]:
        """What became of the parts that it was to write."""
        return [fields for kind, fields in self.said if kind == "written"]


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


def test_on_a_hold_the_trainer_must_look_up_and_the_answer_waits_a_moment(keeper):
    keeper.words[control.MARK] = 8
    keeper.hear("hold", round=5)
    assert (keeper.words[control.HOLD], keeper.words[control.DUE]) == (5, 0)
    assert keeper.marks_said() == []
    keeper.words[control.MARK] = 10  # it had passed that boundary before it could see the hold
    keeper.pass_moment()
    assert keeper.marks_said() == [11]


def test_a_trainer_that_waits_for_this_agreement_stands_where_it_is(keeper):
    keeper.words[control.MARK] = 8
    keeper.hear("hold", round=5)
    keeper.words[control.WAITS] = 5
    keeper.pass_moment()
    assert keeper.marks_said() == [8]


def test_a_trainer_that_waits_for_another_agreement_may_go_on(keeper):
    keeper.words[control.MARK] = 8
    keeper.words[control.WAITS] = 4
    keeper.hear("hold", round=5)
    keeper.pass_moment()
    assert keeper.marks_said() == [9]


def test_a_finished_trainer_stands_at_its_end(keeper):
    keeper.words[control.MARK] = 80
    keeper.words[control.DONE] = 1
    keeper.hear("hold", round=5)
    keeper.pass_moment()
    assert keeper.marks_said() == [80]


@pytest.mark.parametrize(("is_held", "mark"), [(True, 8), (False, 9)])
def test_in_a_phase_it_stands_at_the_boundary_before_it_if_that_is_in_memory(keeper, is_held, mark):
    keeper.words[control.MARK] = 8
    keeper.words[control.REST] = control.RESTS
    keeper.snapshots = [(ATTEMPT, 8)] if is_held else [(ATTEMPT - 1, 8)]
    keeper.hear("hold", round=5)
    keeper.pass_moment()
    assert keeper.marks_said() == [mark]


def test_a_decision_is_told_and_the_hold_stays_until_the_trainer_has_heard_it(keeper):
    """Else it would pass the boundary between the two."""
    keeper.words[control.MARK] = 8
    keeper.hear("hold", round=5)
    keeper.pass_moment()
    keeper.decide(5, 10)
    assert keeper.words[control.HOLD] == 5
    assert keeper.words[control.DUE] == 10
    ((kind, told),) = keeper.told
    assert (kind, told["mark"], told["round"], told["what"]) == ("decide", 10, 5, "stop")


def test_when_a_decision_is_carried_out_the_trainer_need_not_look_up_any_more(keeper):
    keeper.hear("hold", round=5)
    keeper.pass_moment()
    keeper.decide(5, 10, "save")
    keeper.member.order((ATTEMPT, 10), "asked")
    assert keeper.words[control.DUE] == control.NEVER
    order = {"key": (ATTEMPT, 10), "reason": "asked", "last": False}
    assert keeper.said[-1] == ("order", order)


def test_a_plan_is_set_for_a_boundary_that_is_ahead(keeper):
    keeper.words[control.MARK] = 8
    keeper.hear("plan", mark=12)
    assert (keeper.words[control.PLANNED], keeper.words[control.DUE]) == (12, 12)
    keeper.snapshots = [(ATTEMPT, 12)]
    keeper.member.report()
    assert (keeper.words[control.PLANNED], keeper.words[control.DUE]) == (0, control.NEVER)


def test_a_plan_for_a_boundary_that_is_passed_is_missed_and_says_where_the_trainer_is(keeper):
    keeper.words[control.MARK] = 40
    keeper.hear("plan", mark=12)
    assert keeper.said[-1][0] == "missed"
    assert (keeper.said[-1][1]["mark"], keeper.said[-1][1]["at"]) == (12, 40)
    assert keeper.said[-1][1]["is_past"]
    assert keeper.words[control.PLANNED] == 0


def test_a_hold_makes_plans_void(keeper):
    keeper.hear("plan", mark=12)
    keeper.hear("hold", round=5)
    assert keeper.words[control.PLANNED] == 0
    keeper.hear("plan", mark=14)
    assert keeper.said[-1][0] == "missed"


def test_where_the_trainer_is_is_told_before_it_hears_a_decision_that_was_made_without_it(keeper):
    """It would act on it, and be somewhere else."""
    keeper.words[control.MARK] = 20
    keeper.hear("hold", round=5)
    keeper.decide(5, 12)
    assert keeper.told == []
    answer, decide = keeper.waiting
    answer()
    assert keeper.marks_said() == [21]
    decide()
    assert [kind for kind, _ in keeper.told] == ["decide"]


def test_a_new_keeper_passes_on_a_decision_of_before_its_time(keeper):
    keeper.words[control.MARK] = 12
    keeper.decide(5, 12)
    assert [kind for kind, _ in keeper.told] == ["decide"]


def test_a_letter_to_the_keeper_before_this_one_waits_until_the_slots_are_here(keeper):
    """Else it would answer that the slot is gone, and a checkpoint that can be made would fail."""
    letter = {"key": [ATTEMPT, 8], "partial": "p", "number": 1, "reason": "SIGTERM", "last": True}
    keeper.member.greet()
    keeper.hear("write", **letter)
    assert (keeper.written, keeper.reports()) == ([], [])
    keeper.snapshots = [(ATTEMPT, 6), (ATTEMPT, 8)]
    keeper.member.report()
    found = Mock(), Mock(mark=8)
    keeper.holdings.at = lambda *_: found
    keeper.hear("write", **letter)
    assert [job.record for job in keeper.written] == [found[1]]


def test_a_write_of_what_was_held_and_is_gone_is_answered(keeper):
    keeper.snapshots = [(ATTEMPT, 8)]
    keeper.member.report()
    keeper.snapshots = [(ATTEMPT, 10)]
    keeper.member.report()
    keeper.holdings.at = lambda *_: None
    keeper.hear("write", key=[ATTEMPT, 8], partial="p", number=1, reason="cadence", last=False)
    assert keeper.written == []
    assert keeper.reports() == [{"key": (ATTEMPT, 8), "number": 1, "error": "the slot is gone"}]
