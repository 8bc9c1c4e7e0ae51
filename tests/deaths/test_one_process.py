"""Every death of one process, made for real, and the verdict on it.

The table says which of them `make test` makes; the evidence of all is judged there by
tests/unit/diagnose/test_recorded_deaths.py.
"""

from __future__ import annotations

import pytest

from tests.deaths.stage import check, die
from tests.deaths.table import DEATHS, cases

_OF_USERS = [d for d in DEATHS if d.as_user]


@pytest.mark.parametrize("death", cases(DEATHS, "alone"))
def test_of_a_run_that_nobody_leads(death, on_stage, keep_evidence):
    stage = on_stage(death)
    die(stage, death, is_run=True, is_led=False)
    check(stage.judge_run(), death, death.alone)
    keep_evidence("deaths", death.name, "alone", stage.home)


@pytest.mark.parametrize("death", cases(DEATHS, "led"))
def test_of_a_script_that_has_never_heard_of_holdfast(death, on_stage, keep_evidence):
    stage = on_stage(death)
    die(stage, death, is_run=False, is_led=True)
    check(stage.judge_led(), death, death.led)
    keep_evidence("deaths", death.name, "led", stage.home)


@pytest.mark.nightly  # the same deaths are above
@pytest.mark.parametrize("death", cases(_OF_USERS, "alone"))
def test_of_a_run_of_an_ordinary_user(death, on_users_stage):
    stage = on_users_stage(death)
    die(stage, death, is_run=True, is_led=False)
    check(stage.judge_run(), death, death.alone)


@pytest.mark.nightly  # the same deaths are above
@pytest.mark.parametrize("death", cases(_OF_USERS, "led"))
def test_of_a_script_of_an_ordinary_user(death, on_users_stage):
    stage = on_users_stage(death)
    die(stage, death, is_run=False, is_led=True)
    check(stage.judge_led(), death, death.led)
