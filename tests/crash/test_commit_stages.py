"""A kill at every stage of a commit: of the keeper alone, or of keeper and trainer.

Whatever the stage, a good checkpoint is there afterwards, nothing half-made is taken for
one, and the run ends with the bits of an undisturbed one.
"""

from __future__ import annotations

import json

import pytest

from holdfast._store.folder.layout import RunLayout
from holdfast._store.read.merge_ranks import read_checkpoint
from tests.crash.stages import COMMIT_STAGES
from tests.often import few
from tests.support import (
    SCRIPTS,
    arena_files,
    environment,
    journal_events,
    train_to_the_end,
    wait_for_keeper_gone,
    wait_until,
)

LIGHT = SCRIPTS / "light.py"
TOTAL = 120
KEEP = 2
SETTINGS = ("--settings", json.dumps({"checkpoint_every": 10, "keep_last": KEEP}))
PACE = ("--sleep", 0.005, "--patience", 0.4)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final hash of a run in which nothing is killed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return train_to_the_end(folder, "--total", TOTAL, script=LIGHT)


def good_steps(folder) -> list[int]:
    """The steps of the committed checkpoints, each read with all its checksums."""
    found = []
    for step, _, path in RunLayout(folder).checkpoint_folders():
        assert read_checkpoint(path).head["step"] == step
        found.append(step)
    return found


def check_the_end(folder, trainer, undisturbed) -> None:
    """Trained to the end: right bits, whole checkpoints, and nothing half-made in the way."""
    assert trainer.state_hash() == undisturbed
    assert "Traceback" not in trainer.output
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []
    before, last = good_steps(folder)
    # Beside a busy disk no slot may be free in time, and a checkpoint is made some steps later.
    assert TOTAL - 10 <= before < last == TOTAL
    left = {path.name for path in RunLayout(folder).checkpoints.iterdir()}
    assert {name for name in left if not name.startswith("step-")} == set()
    logs = [path.read_text() for path in folder.glob("attempts/*/keeper.log")]
    assert "Traceback" not in "".join(logs)


@pytest.mark.parametrize("stage", COMMIT_STAGES)
def test_a_keeper_killed_in_a_commit_is_replaced_and_nothing_is_lost(
    stage, folder, tmp_path, start, undisturbed
):
    marker = tmp_path / "killed"
    env = environment(HOLDFAST_FAULT=f"{stage}@{marker}")
    arguments = (folder, "--total", TOTAL, *PACE, *SETTINGS)
    trainer = start(*arguments, script=LIGHT, env=env)
    trainer.wait_for("started another")
    assert "was killed by SIGKILL; started another" in trainer.output
    assert marker.exists()
    check_the_end(folder, trainer, undisturbed)
    assert len(journal_events(folder, "start")) == 1


@pytest.mark.parametrize("stage", few(COMMIT_STAGES, ("half-written", "before-publish")))
def test_keeper_and_trainer_killed_in_a_commit_leave_a_good_checkpoint(
    stage, folder, tmp_path, start, undisturbed
):
    arguments = (folder, "--total", TOTAL, *PACE, *SETTINGS)
    before = start(*arguments, "--hold-at", 25, "--gate", tmp_path / "never", script=LIGHT)
    before.wait_for("holding")
    # Beside a busy disk no slot may be free in time, and one is made some steps later.
    wait_until(lambda: len(good_steps(folder)) == 2, 30, "two checkpoints")
    assert min(good_steps(folder)) >= 10
    assert max(good_steps(folder)) >= 20
    before.kill()
    before.wait()
    wait_for_keeper_gone(folder)
    assert max(good_steps(folder)) >= 20  # by now also what the keeper made of the kill
    before_kill = good_steps(folder)

    marker = tmp_path / "killed"
    env = environment(HOLDFAST_FAULT=f"{stage}@{marker}")
    killed = start(*arguments, script=LIGHT, env=env)
    wait_until(marker.exists, 30, "the fault")
    killed.kill()
    killed.wait()
    wait_for_keeper_gone(folder)
    assert "Traceback" not in killed.output
    assert good_steps(folder) != []
    assert max(good_steps(folder)) >= max(before_kill)
    unfinished = RunLayout(folder).partial_folders()

    after = start(*arguments, script=LIGHT)
    assert after.ready() >= max(before_kill)
    aside = {e["name"] for e in journal_events(folder, "set-aside")}
    assert {path.name for path in unfinished} <= aside
    for path in unfinished:
        assert (RunLayout(folder).set_aside / path.name.lstrip(".")).is_dir()
    check_the_end(folder, after, undisturbed)
