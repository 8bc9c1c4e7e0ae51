"""A folder that cannot be written: a sentence at the start, and no harm in the middle of a run."""

from __future__ import annotations

import json
import os
import signal

import pytest

import holdfast
from holdfast._store.folder.layout import RunLayout
from holdfast._store.read.merge_ranks import read_checkpoint
from tests.crash.small_disk import mount_small_disk
from tests.support import (
    SCRIPTS,
    arena_files,
    checkpoint_steps,
    keepers,
    train_to_the_end,
    wait_for_keeper_gone,
    wait_until,
)

LIGHT = SCRIPTS / "light.py"
TOTAL = 150
SETTINGS = ("--settings", json.dumps({"checkpoint_every": 10, "keep_last": 2}))
ARGUMENTS = ("--total", TOTAL, "--sleep", 0.01, *SETTINGS)


@pytest.fixture
def disk(tmp_path):
    yield from mount_small_disk(tmp_path / "disk", "4m")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return train_to_the_end(folder, "--total", TOTAL, script=LIGHT)


def train_to_two_checkpoints(folder, start, gate, *more):
    """The training waits in step 45, until there is the file `gate`."""
    held = ("--hold-at", 45, "--gate", gate, "--patience", 0.4)
    trainer = start(folder, *ARGUMENTS, *held, *more, script=LIGHT)
    trainer.wait_for("holding")
    wait_until(lambda: len(checkpoint_steps(folder)) == 2, what="two checkpoints")
    return trainer


def check_refused(refused) -> None:
    assert refused.wait() == 1
    assert "this run folder cannot be written (Read-only file system)." in refused.output
    assert "\nChoose a folder that you may write to" in refused.output
    assert "Traceback" not in refused.output
    assert "ready " not in refused.output


def test_a_new_run_in_a_read_only_place_is_refused_in_a_sentence(disk, start):
    disk.make_read_only()
    check_refused(start(disk.place / "run", *ARGUMENTS, script=LIGHT))


def test_a_run_whose_folder_became_read_only_is_refused_and_left_as_it_was(
    disk, start, undisturbed, tmp_path
):
    folder = disk.place / "run"
    killed = train_to_two_checkpoints(folder, start, tmp_path / "never")
    killed.kill()
    killed.wait()
    wait_for_keeper_gone(folder)
    before = checkpoint_steps(folder)
    disk.make_read_only()
    check_refused(start(folder, *ARGUMENTS, script=LIGHT))
    disk.make_writable()
    assert checkpoint_steps(folder) == before
    again = start(folder, *ARGUMENTS, script=LIGHT)
    assert again.ready() == max(before)
    assert again.state_hash() == undisturbed


def test_training_goes_on_in_a_folder_that_becomes_read_only(disk, start, undisturbed, tmp_path):
    folder, gate = disk.place / "run", tmp_path / "gate"
    trainer = train_to_two_checkpoints(folder, start, gate)
    disk.make_read_only()
    before = checkpoint_steps(folder)
    gate.touch()
    line = trainer.wait_for("could not be made")
    assert line.startswith("holdfast: a checkpoint could not be made: Read-only file system (")
    assert trainer.wait() == 74
    assert f"trained to step {TOTAL}, but the last checkpoint was not made." in trainer.output
    assert f"step {TOTAL} stays in the memory of this machine" in trainer.output
    assert "Traceback" not in trainer.output
    assert "hash " not in trainer.output
    wait_for_keeper_gone(folder)
    assert arena_files(folder) != []
    assert checkpoint_steps(folder) == before
    for step, _, path in RunLayout(folder).checkpoint_folders():
        assert read_checkpoint(path).head["step"] == step

    disk.make_writable()
    after = start(folder, *ARGUMENTS, script=LIGHT)
    assert after.ready() == TOTAL
    assert f"resumed at step {TOTAL} from memory" in after.output
    assert after.state_hash() == undisturbed
    wait_for_keeper_gone(folder)
    assert max(checkpoint_steps(folder)) == TOTAL
    assert arena_files(folder) == []


def test_training_goes_on_when_the_keeper_dies_in_a_read_only_folder(disk, start, tmp_path):
    folder, gate = disk.place / "run", tmp_path / "gate"
    trainer = train_to_two_checkpoints(folder, start, gate, "--total", 100_000)
    disk.make_read_only()
    gate.touch()
    trainer.wait_for("Read-only file system")
    keepers(folder)[0].kill()
    trainer.wait_for("started another")
    disk.make_writable()
    trainer.send(signal.SIGTERM)
    assert trainer.wait() == 143, trainer.output
    assert "Traceback" not in trainer.output
    wait_for_keeper_gone(folder)
    before, last = checkpoint_steps(folder)
    assert 20 <= before < last
    total = last + 20
    again = start(folder, *ARGUMENTS, "--total", total, script=LIGHT)
    assert again.ready() == last
    whole = train_to_the_end(tmp_path / "undisturbed", "--total", total, script=LIGHT)
    assert again.state_hash() == whole
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere: run as another user")
def test_a_folder_without_the_right_to_write_is_refused_in_a_sentence(tmp_path):
    tmp_path.chmod(0o555)
    try:
        with (
            pytest.raises(holdfast.FolderError, match=r"cannot be written \(Permission denied\)"),
            holdfast.Run(tmp_path / "run", number=1),
        ):
            pass
    finally:
        tmp_path.chmod(0o755)


def test_a_file_in_the_place_of_the_folder_is_refused_in_a_sentence(tmp_path):
    place = tmp_path / "run"
    place.write_text("mine")
    with (
        pytest.raises(holdfast.FolderError, match=r"cannot be written \(Not a directory\)"),
        holdfast.Run(place, number=1),
    ):
        pass
    assert place.read_text() == "mine"
