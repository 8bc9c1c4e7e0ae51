"""A keeper that first runs when its trainer is dead, as on a crowded machine, says the same."""

from __future__ import annotations

import signal

import pytest

from holdfast._store.folder.layout import RunLayout
from tests.deaths.stage import check
from tests.deaths.table import DEATHS
from tests.support import keepers, wait_until

_OF = {death.how: death for death in DEATHS if death.sent in (0, signal.SIGKILL)}


@pytest.mark.parametrize("how", ["oom", "helper-oom", "waits"])
def test_a_keeper_that_starts_after_the_death_knows_its_cause(how, on_stage):
    death = _OF[how]
    stage = on_stage(death)
    trainer = stage.start(death.script, how, "--place", stage.place, is_run=True)
    (keeper,) = wait_until(lambda: keepers(stage.folder), what="the keeper")
    keeper.suspend()
    if death.sent:
        stage.send(death.sent)
    if death.status < 0:
        assert trainer.wait() == death.status, trainer.output
    else:  # it has raised, and waits for its keeper to save
        error = RunLayout(stage.folder).error(1)
        wait_until(error.exists, 60, "the trainer's last words")
    keeper.resume()
    if death.sent:
        check(stage.judge_live(), death, death.alone)
    check(stage.judge_run(), death, death.alone)
