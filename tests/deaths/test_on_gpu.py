"""Deaths that only a GPU can make; test_recorded.py has them by their text, for everybody."""

from __future__ import annotations

import pytest

from tests.deaths.stage import check, die
from tests.deaths.table import GPU, cases

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a torch built for it"
)


@pytest.mark.parametrize("death", cases(GPU, "alone"))
def test_of_a_run_that_nobody_leads(death, on_stage, keep_evidence):
    stage = on_stage(death)
    die(stage, death, is_run=True, is_led=False)
    check(stage.judge_run(), death, death.alone)
    keep_evidence("deaths", death.name, "alone", stage.home)


@pytest.mark.parametrize("death", cases(GPU, "led"))
def test_of_a_script_that_has_never_heard_of_holdfast(death, on_stage, keep_evidence):
    stage = on_stage(death)
    die(stage, death, is_run=False, is_led=True)
    check(stage.judge_led(), death, death.led)
    keep_evidence("deaths", death.name, "led", stage.home)


@pytest.mark.nightly
@pytest.mark.skip(reason="a timeout of NCCL needs two GPUs: see test_recorded.py for its text")
def test_nccl_timeout_of_one_rank():
    raise NotImplementedError
