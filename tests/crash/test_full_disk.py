"""A full disk costs checkpoints, never the training, and never a good checkpoint."""

from __future__ import annotations

import json
import signal

import pytest

from holdfast._store.folder.layout import RunLayout
from holdfast._store.memory.control import STEP
from holdfast._store.read.merge_ranks import read_checkpoint
from tests.control_words import SharedWords
from tests.crash.small_disk import mount_small_disk
from tests.crash.stages import has_snapshot
from tests.support import (
    SCRIPTS,
    arena_files,
    checkpoint_steps,
    journal_events,
    train_to_the_end,
    wait_for_keeper_gone,
    wait_until,
)

LIGHT = SCRIPTS / "light.py"
SIZE = 40_000  # 320 kB of weights
TOTAL = 400
EVERY_TEN = json.dumps({"checkpoint_every": 10, "keep_last": 2})
SELDOM = json.dumps({"checkpoint_every": "1h"})


@pytest.fixture
def disk(tmp_path):
    yield from mount_small_disk(tmp_path / "disk", "3m")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return train_to_the_end(folder, "--total", TOTAL, "--size", SIZE, script=LIGHT)


def arguments(folder, settings, total=TOTAL):
    return (folder, "--total", total, "--size", SIZE, "--sleep", 0.005, "--settings", settings)


def check_all_good(folder) -> list[int]:
    for step, _, path in RunLayout(folder).checkpoint_folders():
        assert read_checkpoint(path).head["step"] == step
    return checkpoint_steps(folder)


def test_training_goes_on_beside_a_full_disk_and_saves_when_there_is_room(disk, start, tmp_path):
    folder = disk.place / "run"
    slow = ("--sleep", 0.025)  # the last one counts
    trainer = start(*arguments(folder, EVERY_TEN, total=100_000), *slow, script=LIGHT)
    wait_until(lambda: len(checkpoint_steps(folder)) == 2, what="two checkpoints")

    def is_full() -> bool:
        disk.fill()  # again: one that was on its way has pushed out an older one
        return "the disk is full" in trainer.output

    wait_until(is_full, what="a checkpoint that does not fit")
    line = trainer.wait_for("the disk is full")
    assert line.startswith("holdfast: a checkpoint could not be made: the disk is full (")
    assert "MB wanted, " in line
    assert "MB free at " in line
    before = check_all_good(folder)
    assert len(before) == 2
    # It still trains: a later checkpoint is tried, and fails too, beside the same two.
    words = SharedWords(trainer.pid).words
    seen = words[STEP]
    wait_until(lambda: words[STEP] > seen + 30, what="the steps of three more attempts")
    assert trainer.output.count("the disk is full") == 1  # told once
    assert check_all_good(folder) == before
    # None stays; another attempt may be at work.
    wait_until(lambda: RunLayout(folder).partial_folders() == [], what="the end of an attempt")

    disk.make_room()
    wait_until(lambda: max(checkpoint_steps(folder)) > max(before), what="a new checkpoint")
    trainer.send(signal.SIGTERM)
    assert trainer.wait() == 143, trainer.output
    wait_for_keeper_gone(folder)
    total = check_all_good(folder)[-1] + 20
    again = start(*arguments(folder, EVERY_TEN, total=total), script=LIGHT)
    assert again.ready() == total - 20
    whole = arguments(tmp_path / "undisturbed", EVERY_TEN, total=total)
    assert again.state_hash() == train_to_the_end(*whole, "--sleep", 0, script=LIGHT)
    assert "Traceback" not in trainer.output + again.output
    wait_for_keeper_gone(folder)
    one, last = check_all_good(folder)
    assert max(before) < one < last == total
    assert arena_files(folder) == []
    assert "Traceback" not in RunLayout(folder).keeper_log(1).read_text()


def test_a_trainer_that_writes_itself_says_once_that_the_disk_is_full(disk, start):
    folder = disk.place / "run"
    trainer = start(*arguments(folder, EVERY_TEN), "--room", 0, script=LIGHT)
    wait_until(lambda: len(checkpoint_steps(folder)) == 2, what="two checkpoints")
    disk.fill()
    trainer.wait_for("It will be tried again")
    words = SharedWords(trainer.pid).words
    seen = words[STEP]
    wait_until(lambda: words[STEP] > seen + 30, what="the steps of three more attempts")
    trainer.send(signal.SIGTERM)
    assert trainer.wait() == 74
    assert trainer.output.count("It will be tried again") == 1
    assert trainer.output.count("could not be made durable") == 1
    disk.make_room()
    again = start(*arguments(folder, EVERY_TEN), script=LIGHT)
    assert again.ready() == max(check_all_good(folder))


def test_a_stop_beside_a_full_disk_leaves_with_74_and_loses_nothing(disk, start, undisturbed):
    folder = disk.place / "run"
    trainer = start(*arguments(folder, SELDOM), script=LIGHT)
    trainer.ready()
    wait_until(lambda: has_snapshot(folder), what="a snapshot")
    disk.fill()
    trainer.send(signal.SIGTERM)
    assert trainer.wait() == 74, trainer.output
    failure = "could not be made durable: the checkpoint was not made: the disk is full"
    assert trainer.output.count(failure) == 1
    assert "stays in the memory of this machine; leaving with status 74 (SIGTERM)" in trainer.output
    assert "Traceback" not in trainer.output
    assert "is durable; leaving" not in trainer.output
    wait_for_keeper_gone(folder)
    assert arena_files(folder) != []
    assert checkpoint_steps(folder) == []
    said = next(line for line in trainer.lines if "could not be made durable" in line)
    stopped_at = int(said.split("step ")[1].split()[0])
    assert stopped_at > 0

    disk.make_room()
    after = start(*arguments(folder, SELDOM), script=LIGHT)
    assert after.ready() == stopped_at
    assert f"resumed at step {stopped_at} from memory" in after.output
    # What was only in memory becomes durable at once, and then goes.
    wait_until(lambda: stopped_at in check_all_good(folder), what="the salvaged checkpoint")
    assert after.state_hash() == undisturbed
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []
    assert next(e["reason"] for e in journal_events(folder, "checkpoint")) == "salvaged"


def test_a_kill_beside_a_full_disk_leaves_the_snapshot_in_memory(disk, start, undisturbed):
    folder = disk.place / "run"
    trainer = start(*arguments(folder, SELDOM), script=LIGHT)
    trainer.ready()
    wait_until(lambda: has_snapshot(folder), what="a snapshot")
    disk.fill()
    trainer.kill()
    trainer.wait()
    wait_for_keeper_gone(folder)
    assert arena_files(folder) != []
    disk.make_room()
    after = start(*arguments(folder, SELDOM), script=LIGHT)
    assert after.ready() > 0
    assert "from memory" in after.output
    assert after.state_hash() == undisturbed
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []


@pytest.mark.parametrize("is_new", [True, False], ids=["a new run", "a run to go on with"])
def test_a_start_on_a_full_disk_is_refused_in_a_sentence(is_new, disk, start, undisturbed):
    folder = disk.place / "run"
    if not is_new:
        first = start(*arguments(folder, EVERY_TEN), script=LIGHT)
        wait_until(lambda: len(checkpoint_steps(folder)) == 2, what="two checkpoints")
        first.kill()
        first.wait()
        wait_for_keeper_gone(folder)
    disk.fill()
    refused = start(*arguments(folder, EVERY_TEN), script=LIGHT)
    assert refused.wait() == 1
    assert "cannot be written (No space left on device)" in refused.output
    assert "Traceback" not in refused.output
    disk.make_room()
    assert start(*arguments(folder, EVERY_TEN), script=LIGHT).state_hash() == undisturbed


def test_ctrl_c_beside_a_full_disk_says_each_thing_once_and_what_to_do(disk, start):
    folder = disk.place / "run"
    settings = json.dumps({"checkpoint_every": 1})
    trainer = start(*arguments(folder, settings, total=100_000), script=LIGHT)
    trainer.ready()
    disk.fill()
    trainer.wait_for("It will be tried again")
    words = SharedWords(trainer.pid).words
    seen = words[STEP]
    wait_until(lambda: words[STEP] > seen + 20, what="steps beside the full disk")
    trainer.send(signal.SIGINT)
    assert trainer.wait() == 74
    assert trainer.output.count("It will be tried again") == 1
    asked, failed, kept, advice = trainer.output.splitlines()[-4:]
    step = asked.removeprefix("holdfast: Ctrl-C: step ").split()[0]
    assert failed.startswith(f"holdfast: step {step} could not be made durable: ")
    assert kept == (
        f"holdfast: step {step} stays in the memory of this machine; leaving with status 74 "
        "(SIGINT)."
    )
    assert advice.startswith("Make room on the disk")
    assert "start the same command again on this machine, before it is rebooted" in advice
    assert "Traceback" not in trainer.output
