"""Deaths among ranks: the verdict names whose fault it was, not who noticed it first.

All are nightly. `make test` judges their evidence in
tests/unit/diagnose/test_recorded_deaths.py, and tests/ranks/test_deaths.py shows real ranks die.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from holdfast._diagnose.verdict import Cause
from tests.deaths.stage import check, die, text_of
from tests.deaths.table import RANKS, cases

pytest.importorskip("torch")
_PROGRAM = str(Path(sys.executable).with_name("torchrun"))
_TORCHRUN = (_PROGRAM, "--nproc-per-node", "2", "--no-python")
_QUICK = {"stuck": "2", "nobody-comes": "1", "no-master": "1"}


def _words(how):
    return ("--seconds", _QUICK[how]) if how in _QUICK else ()


@pytest.mark.parametrize("death", cases(RANKS, "alone"))
def test_of_a_run_that_nobody_leads(death, on_stage, keep_evidence):
    stage = on_stage(death)
    die(stage, death, *_words(death.how), is_run=True, is_led=False)
    verdict = stage.judge_run()
    check(verdict, death, death.alone)
    assert verdict.others, text_of(verdict)
    assert "rank 0" in verdict.others[0]
    keep_evidence("deaths", death.name, "alone", stage.home)


@pytest.mark.parametrize("death", cases(RANKS, "led"))
def test_of_a_script_that_has_never_heard_of_holdfast(death, on_stage, keep_evidence):
    stage = on_stage(death)
    # The leader looks once a second who there is: they live so long that it has seen them.
    long = ("--sleep", "0.25") if death.how == "killed" else ()
    die(stage, death, *_words(death.how), *long, is_run=False, is_led=True)
    # Forked by the script itself they have no number that could be seen from outside.
    check(stage.judge_led(), dataclasses.replace(death, rank=None), death.led)
    keep_evidence("deaths", death.name, "led", stage.home)


@pytest.mark.nightly
def test_torchrun_leaves_with_1_and_the_rank_that_was_killed_is_named(on_stage, keep_evidence):
    death = next(d for d in RANKS if d.how == "killed")
    stage = on_stage(death)
    trainer = stage.start(death.script, death.how, is_led=True, launcher=_TORCHRUN)
    assert trainer.wait() == 1, trainer.output
    assert "exitcode  : -9" in trainer.output
    verdict = stage.judge_led()
    check(verdict, death, death.led)
    assert verdict.cause is Cause.KILLED
    keep_evidence("deaths", death.name, "torchrun", stage.home)
