"""Deaths that need torch: loaders and their workers, a full /dev/shm, torch.save.

Importing torch takes longer than dying, so all are nightly; `make test` judges their evidence in
tests/unit/diagnose/test_recorded_deaths.py.
"""

from __future__ import annotations

import pytest

from tests.deaths.stage import check, die
from tests.deaths.table import TORCH, cases

pytest.importorskip("torch")
_OWN_MOUNTS = [d for d in TORCH if d.needs == "small shm"]
_PLAIN = [d for d in TORCH if d.needs in ("", "small disk")]
_SHORT_OF_MEMORY = [d for d in TORCH if d.needs == "large cgroup"]


@pytest.mark.parametrize("death", cases(_PLAIN, "alone"))
def test_of_a_run_that_nobody_leads(death, on_stage, keep_evidence):
    stage = on_stage(death)
    die(stage, death, is_run=True, is_led=False)
    check(stage.judge_run(), death, death.alone)
    keep_evidence("deaths", death.name, "alone", stage.home)


@pytest.mark.parametrize("death", cases(_OWN_MOUNTS, "alone"))
def test_of_a_run_with_mounts_of_its_own(death, on_stage, keep_evidence):
    stage = on_stage(death)
    die(stage, death, is_run=True, is_led=False)
    check(stage.judge_run(), death, death.alone)
    keep_evidence("deaths", death.name, "alone", stage.home)


@pytest.mark.parametrize("death", cases(_PLAIN + _OWN_MOUNTS, "led"))
def test_of_a_script_that_has_never_heard_of_holdfast(death, on_stage, keep_evidence):
    stage = on_stage(death)
    die(stage, death, is_run=False, is_led=True)
    check(stage.judge_led(), death, death.led)
    keep_evidence("deaths", death.name, "led", stage.home)


@pytest.mark.parametrize("death", cases(_SHORT_OF_MEMORY, "led"))
def test_of_a_run_that_is_led(death, on_stage, keep_evidence):
    stage = on_stage(death)
    die(stage, death, is_run=True, is_led=True)
    check(stage.judge_run(), death, death.alone)
    keep_evidence("deaths", death.name, "alone", stage.home)
    check(stage.judge_led(), death, death.led)
    keep_evidence("deaths", death.name, "led", stage.home)
