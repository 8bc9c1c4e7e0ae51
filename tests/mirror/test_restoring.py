"""An empty folder goes on from its mirror: to the same bits, or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from holdfast._store.read.verify import find_damage
from tests.cli.command import environment, holdfast, holdfast_process, succeed
from tests.mirror.conftest import SIZE, uploaders, wait_for_copy
from tests.support import checkpoint_steps, journal_events, run_id, wait_for_keeper_gone, wait_until


def _lose_machine(folder: Path, step: int) -> str:
    """The run folder is gone with its machine; returns the run's id."""
    wait_for_copy(folder, step)
    wait_for_keeper_gone(folder)
    wait_until(lambda: not uploaders(folder), what="the end of the uploader")
    found = run_id(folder)
    shutil.rmtree(folder)
    return found


def test_a_killed_run_goes_on_on_a_new_machine_to_the_same_bits(
    folder, mirror, train, light_reference
):
    trainer = train(folder, mirror, "--total", 50, "--hold-at", 15)
    trainer.wait_for("holding")
    wait_for_copy(folder, 10)
    trainer.kill()
    trainer.wait()
    wait_for_keeper_gone(folder)
    newest = max(checkpoint_steps(folder))  # the keeper has saved what was in memory
    known = _lose_machine(folder, newest)
    again = train(folder, mirror, "--total", 50)
    assert again.state_hash() == light_reference(50, SIZE)
    assert f"ready {newest} {newest} 2" in again.output
    assert run_id(folder) == known
    assert journal_events(folder, "restored")[0]["step"] == newest
    assert again.output.count("every byte checked") == 1


@pytest.mark.parametrize("what", ["pieces", pytest.param("checkpoints", marks=pytest.mark.nightly)])
def test_a_damaged_copy_is_not_used_and_does_not_hide_the_one_before(
    what, folder, gate, mirror, train, light_reference
):
    trainer = train(folder, mirror, "--total", 20, "--hold-at", 15, mirror_wait=True)
    trainer.wait_for("holding")
    wait_for_copy(folder, 10)
    gate.touch()
    assert trainer.wait() == 0, trainer.output
    _lose_machine(folder, 20)
    index = mirror / "checkpoints/step-000000000020-a0001/index.json"
    if what == "checkpoints":
        victim = index
    else:
        mine, other = (
            json.loads(path.read_bytes().partition(b"\n")[2])["files"][0]["pieces"]
            for path in sorted(mirror.glob("checkpoints/*/index.json"))[::-1]
        )
        own = {mine[at : at + 32] for at in range(0, len(mine), 32)} - {
            other[at : at + 32] for at in range(0, len(other), 32)
        }
        victim = next(mirror.glob(f"pieces/{sorted(own)[0]}-*"))
    data = victim.read_bytes()
    victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    again = train(folder, mirror, "--total", 30)
    assert again.state_hash() == light_reference(30, SIZE)
    assert "is damaged" in again.output
    assert "ready 10 10 2" in again.output


@pytest.mark.nightly  # with damaged manifests it is in test_strange.py
def test_where_every_copy_is_damaged_nothing_is_begun_anew(folder, mirror, train):
    trainer = train(folder, mirror, "--total", 10, mirror_wait=True)
    assert trainer.wait() == 0, trainer.output
    _lose_machine(folder, 10)
    for path in (mirror / "pieces").iterdir():
        path.write_bytes(b"")
    again = train(folder, mirror, "--total", 20)
    assert again.wait() != 0
    assert "none of the 1 checkpoints in this mirror is whole" in again.output
    assert "ready" not in again.output


def test_a_fetch_that_was_killed_goes_on_where_it_was(folder, mirror, train, tmp_path):
    trainer = train(folder, mirror, "--total", 10, mirror_wait=True)
    assert trainer.wait() == 0, trainer.output
    _lose_machine(folder, 10)
    fault = environment(HOLDFAST_FAULT=f"mirror-fetched@{tmp_path / 'marker'}")
    new = tmp_path / "new"
    done = holdfast_process("mirror", new, "--fetch", "--at", mirror, env=fault)
    assert done.returncode == -9
    assert checkpoint_steps(new) == []
    found = json.loads(succeed("mirror", new, "--fetch", "--at", mirror, "--json"))
    assert (found["step"], found["came_bytes"]) == (10, 0)
    assert find_damage(new / "checkpoints" / found["name"]) == []
    assert not list((new / "checkpoints").glob(".fetching-*"))


@pytest.mark.nightly
def test_a_folder_that_was_left_behind_says_so_and_copies_nothing(folder, mirror, train, tmp_path):
    trainer = train(folder, mirror, "--total", 10, mirror_wait=True)
    assert trainer.wait() == 0, trainer.output
    wait_for_keeper_gone(folder)
    wait_until(lambda: not uploaders(folder), what="the end of the uploader")
    new = tmp_path / "new"
    there = train(new, mirror, "--total", 20, mirror_wait=True)
    assert there.wait() == 0, there.output
    here = train(folder, mirror, "--total", 30, "--sleep", 0.1)
    assert here.wait() == 0, here.output
    assert "has taken this mirror over" in here.output
    listed = json.loads(succeed("mirror", new, "--json"))
    assert [(each["step"], each["attempt"]) for each in listed["checkpoints"]][-1] == (20, 2)
    refused = holdfast("mirror", folder, "--fetch")
    assert refused.returncode == 2
    assert "has gone its own way" in refused.stderr


def test_a_mirror_that_does_not_answer_keeps_an_empty_folder_from_beginning(folder, train):
    away = folder.with_name("unmounted")
    trainer = train(folder, away / "mirror", "--total", 10)
    assert trainer.wait() != 0
    assert f"there is no folder {away}: mount its disk" in trainer.output
    assert "Nothing was begun" in trainer.output
    assert not (folder / "run.json").exists()
