"""Deaths among ranks: the verdict names whose fault it was, not who noticed it first.

All are nightly. `make test` judges their evidence in
tests/unit/diagnose/test_recorded_deaths.py, and tests/ranks/test_deaths.py shows real ranks die.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from holdfast._diagnose.verdict import Cause, Sure
from tests.deaths.stage import check, die, text_of
from tests.deaths.table import RANKS, cases

pytest.importorskip("torch")
_PROGRAM = str(Path(sys.executable).with_name("torchrun"))
_TORCHRUN = (_PROGRAM, "--nproc-per-node", "2", "--no-python", "--")
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


def _by_torchrun(stage, death, *words, is_run=False):
    """The leader looks once a second who there is: each step is so long that it has seen them."""
    trainer = stage.start(
        *(death.script, death.how, "--sleep", "0.25", *words),
        is_run=is_run,
        is_led=True,
        launcher=_TORCHRUN,
    )
    assert trainer.wait() == 1, trainer.output
    return trainer


@pytest.mark.nightly
def test_torchrun_leaves_with_1_and_the_rank_that_was_killed_is_named(on_stage, keep_evidence):
    death = next(d for d in RANKS if d.how == "killed")
    stage = on_stage(death)
    trainer = _by_torchrun(stage, death)
    assert "exitcode  : -9" in trainer.output
    verdict = stage.judge_led()
    check(verdict, death, death.led)
    assert verdict.cause is Cause.KILLED
    keep_evidence("deaths", death.name, "torchrun", stage.home)


@pytest.mark.nightly
@pytest.mark.parametrize("is_run", [False, True], ids=["plain", "run"])
def test_the_rank_of_a_torchrun_that_the_oom_killer_took_is_named(on_stage, is_run):
    killed = next(d for d in RANKS if d.how == "killed")
    death = dataclasses.replace(
        killed, how="oom", cause=Cause.OOM_CGROUP, needs="ranks cgroup", says=("OOM", "1.3 GB")
    )
    stage = on_stage(death)
    trainer = _by_torchrun(stage, death, is_run=is_run)
    assert "exitcode  : -9" in trainer.output
    for verdict in [stage.judge_led(), *([stage.judge_run()] if is_run else [])]:
        check(verdict, death, Sure.CERTAIN)


@pytest.mark.nightly
@pytest.mark.parametrize("is_run", [False, True], ids=["plain", "run"])
def test_the_rank_of_a_torchrun_that_the_other_waited_for_in_vain_is_named(on_stage, is_run):
    death = next(d for d in RANKS if d.how == "stuck")
    stage = on_stage(death)
    _by_torchrun(stage, death, *_words("stuck"), is_run=is_run)
    for verdict in [stage.judge_led(), *([stage.judge_run()] if is_run else [])]:
        check(verdict, death, Sure.LIKELY)
