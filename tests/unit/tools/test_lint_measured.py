"""The lead of the signal against what a run has measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast._store.folder import journal
from holdfast._store.folder.layout import RunLayout
from holdfast._tools.doctor.run import save_seconds, step_seconds
from holdfast._tools.lint.finding import Surroundings
from holdfast._tools.lint.lint import fix, lint

SCRIPT = """#!/bin/bash
#SBATCH --time=2:00:00 --requeue --open-mode=append
#SBATCH --signal=USR2@60
srun python train.py
"""


@pytest.fixture
def layout(tmp_path) -> RunLayout:
    made = RunLayout(tmp_path / "a")
    made.attempt(1).mkdir(parents=True)
    return made


def beat(layout: RunLayout, attempt: int, **fields: object) -> None:
    layout.attempt(attempt).mkdir(exist_ok=True)
    layout.heartbeat(attempt).write_text(json.dumps(fields))


def around(layout: RunLayout) -> Surroundings:
    return Surroundings(layout.folder, layout.folder, layout.folder)


def test_an_empty_folder_knows_nothing(layout):
    assert save_seconds(layout.folder) is None
    assert step_seconds(layout.folder) is None
    assert save_seconds(Path(layout.folder, "nowhere")) is None


def test_the_newest_heartbeat_that_tells_is_taken(layout):
    beat(layout, 1, save_seconds=90.0, step_seconds=4)
    beat(layout, 2, save_seconds=12.5)
    beat(layout, 3, step=7)
    assert save_seconds(layout.folder) == 12.5
    assert step_seconds(layout.folder) == 4.0


@pytest.mark.parametrize("wrong", [None, "9", True, -1, float("nan"), float("inf")])
def test_a_number_that_is_none_is_passed_over(layout, wrong):
    beat(layout, 1, save_seconds=3.0)
    beat(layout, 2, save_seconds=wrong)
    assert save_seconds(layout.folder) == 3.0


def test_without_it_the_journal_tells_of_the_last_checkpoints(layout):
    for seconds in (500.0, *[2.0] * 19, 8.0):
        journal.append(layout.journal, "checkpoint", step=1, seconds=seconds)
    journal.append(layout.journal, "signal", name="SIGTERM", seconds=1000)
    assert save_seconds(layout.folder) == 8.0


def test_a_lead_that_a_save_does_not_fit_into_is_an_error(layout):
    beat(layout, 1, save_seconds=95.0, step_seconds=4.0)
    (found,) = lint(SCRIPT, around(layout))
    assert (found.rule, found.severity, found.line) == ("lead-too-short", "error", 3)
    assert "a save of a took up to 95 s, after a step of up to 4 s" in found.message
    assert found.corrected == ("#SBATCH --signal=USR2@180",)
    assert lint(fix(SCRIPT, around(layout)), around(layout)) == []


def test_a_lead_that_is_enough_is_left_alone(layout):
    beat(layout, 1, save_seconds=50.0, step_seconds=4.0)
    assert lint(SCRIPT, around(layout)) == []


def test_a_short_lead_is_enough_for_a_fast_save(layout):
    beat(layout, 1, save_seconds=0.2)
    assert lint(SCRIPT.replace("@60", "@10"), around(layout)) == []


def test_where_no_lead_would_do_none_is_offered(layout):
    beat(layout, 1, save_seconds=3000.0)
    (found,) = lint(SCRIPT, around(layout))
    assert found.corrected == ()
    assert not found.is_fixable
