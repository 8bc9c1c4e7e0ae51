"""Deaths that need torch: loaders and their workers, a full /dev/shm, torch.save."""

from __future__ import annotations

import pytest

from tests.deaths.stage import check, die
from tests.deaths.table import TORCH, cases

pytest.importorskip("torch")
_OWN_MOUNTS = [d for d in TORCH if d.needs == "small shm"]
_PLAIN = [d for d in TORCH if d.needs in ("", "small disk")]
_SHORT_OF_MEMORY = [d for d in TORCH if d.needs == "large cgroup"]


@pytest.mark.parametrize("death", cases(_PLAIN, "alone"))
def test_of_a_run_that_nobody_leads(death, on_stage):
    stage = on_stage(death)
    die(stage, death, is_run=True, is_led=False)
    check(stage.judge_run(), death, death.alone)


@pytest.mark.slow
@pytest.mark.parametrize("death", cases(_OWN_MOUNTS, "alone"))
def test_of_a_run_with_mounts_of_its_own(death, on_stage):
    stage = on_stage(death)
    die(stage, death, is_run=True, is_led=False)
    check(stage.judge_run(), death, death.alone)


@pytest.mark.slow
@pytest.mark.parametrize("death", cases(_PLAIN + _OWN_MOUNTS, "led"))
def test_of_a_script_that_has_never_heard_of_holdfast(death, on_stage):
    stage = on_stage(death)
    die(stage, death, is_run=False, is_led=True)
    check(stage.judge_led(), death, death.led)


@pytest.mark.slow
@pytest.mark.parametrize("death", cases(_SHORT_OF_MEMORY, "led"))
def test_of_a_run_that_is_led(death, on_stage):
    stage = on_stage(death)
    die(stage, death, is_run=True, is_led=True)
    check(stage.judge_run(), death, death.alone)
    check(stage.judge_led(), death, death.led)
