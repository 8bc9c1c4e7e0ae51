"""Checkpoints that share what has not changed: killed at any stage, resumed, and removed."""

from __future__ import annotations

import json
import signal

import pytest

from holdfast._store.folder.layout import MANIFEST, RunLayout
from holdfast._store.format import manifest
from holdfast._store.read.merge_ranks import read_checkpoint
from tests.crash.stages import COMMIT_STAGES
from tests.support import (
    SCRIPTS,
    arena_files,
    environment,
    journal_events,
    train_to_the_end,
    wait_for_keeper_gone,
    wait_until,
)

ADAPTER = SCRIPTS / "adapter.py"
TOTAL = 60
SETTINGS = json.dumps({"checkpoint_every": 10, "keep_last": 2})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final hash of a run in which nothing is killed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    found = train_to_the_end(folder, TOTAL, SETTINGS, script=ADAPTER)
    check_kept(folder)
    return found


def check_kept(folder) -> None:
    """All that is kept loads, and none of it was written whole but one that nothing came before."""
    wait_for_keeper_gone(folder)
    kept = RunLayout(folder).checkpoint_folders()
    assert kept[-1][0] == TOTAL
    first = journal_events(folder, "checkpoint")[0]["name"]
    for step, _, path in kept:
        assert read_checkpoint(path).head["step"] == step
        if path.name == first:
            continue
        file = manifest.parse((path / MANIFEST).read_bytes(), "").files[0]
        assert file.size_bytes < 0.1 * file.image_bytes
        assert len(file.linked) == 1
    left = {path.name for path in RunLayout(folder).checkpoints.iterdir()}
    assert left == {path.name for _, _, path in kept}


QUICK = ("half-written", "synced", "half-removed")


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(stage, marks=() if stage in QUICK else pytest.mark.nightly)
        for stage in COMMIT_STAGES
    ],
)
def test_a_keeper_killed_at_any_stage_leaves_linked_checkpoints_whole(
    stage, folder, tmp_path, start, undisturbed
):
    train_to_the_end(folder, 20, SETTINGS, script=ADAPTER)  # so that it is a linked one
    env = environment(HOLDFAST_FAULT=f"{stage}@{tmp_path / 'killed'}")
    trainer = start(folder, TOTAL, SETTINGS, 0.06, 0.4, script=ADAPTER, env=env)
    trainer.wait_for("started another")
    assert trainer.state_hash() == undisturbed
    check_kept(folder)
    assert arena_files(folder) == []


def test_the_first_checkpoint_after_a_resume_shares_with_the_last_before(
    folder, start, undisturbed
):
    trainer = start(folder, TOTAL, SETTINGS, 0.05, 0, script=ADAPTER)
    wait_until(lambda: len(RunLayout(folder).checkpoint_folders()) >= 2, 60, "two checkpoints")
    trainer.process.send_signal(signal.SIGTERM)
    trainer.process.wait(60)
    wait_for_keeper_gone(folder)
    assert train_to_the_end(folder, TOTAL, SETTINGS, script=ADAPTER) == undisturbed
    check_kept(folder)
    names = {
        path.name
        for _, _, each in RunLayout(folder).checkpoint_folders()
        for path in each.iterdir()
    }
    # All that was ever written whole is the first one of the first life.
    assert len([name for name in names if "-a0001." in name]) == 1
    assert not [name for name in names if "-a0002." in name]
