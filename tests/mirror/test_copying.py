"""Copying to a second folder: beside the training, after any kill, and nothing twice."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from holdfast._store.read.verify import find_damage
from tests.cli.command import environment, holdfast, holdfast_process, succeed
from tests.linked_files import link_unchanged, make_checkpoint
from tests.mirror.conftest import (
    SIZE,
    copied_steps,
    fetch,
    push,
    settings,
    uploaders,
    wait_for_copy,
)
from tests.support import journal_events, keepers, wait_until

_STAGES = (
    "mirror-piece",
    pytest.param("mirror-sent", marks=pytest.mark.nightly),
    "mirror-indexed",
    "mirror-committed",
)


def _pieces(mirror: Path) -> dict[Path, int]:
    """When each was written; not what a killed copy was still writing."""
    return {path: path.stat().st_mtime_ns for path in mirror.glob("pieces/[!.]*")}


def _state(number: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(number)
    return {"weights": generator.standard_normal(400_000)}


def test_checkpoints_are_copied_while_training_goes_on_and_status_tells(
    folder, gate, mirror, train
):
    # Of a training as quick as this one, only the first checkpoint is sure to be made.
    trainer = train(folder, mirror, "--total", 100, "--hold-at", 15)
    trainer.wait_for("holding")
    wait_for_copy(folder, 10)
    assert "step 10" in succeed("status", folder)
    assert f"in {mirror}" in succeed("status", folder)
    found = json.loads(succeed("status", folder, "--json"))[0]["mirror"]
    assert (found["address"], found["step"]) == (str(mirror), 10)
    assert "fsspec" not in Path(f"/proc/{keepers(folder)[0].pid}/maps").read_text()


def test_the_mirror_has_a_retention_of_its_own(folder, mirror, tmp_path):
    held: list[int] = []
    for step in (10, 20, 30):
        make_checkpoint(folder, step, [_state(step)])
        push(folder, mirror)
        held.append(len(list((mirror / "pieces").iterdir())))
        known = json.loads((folder / "mirror.json").read_text())
        (folder / "mirror.json").write_text(json.dumps({**known, "keep_last": 2}))
    listed = json.loads(succeed("mirror", folder, "--json"))
    assert [each["step"] for each in listed["checkpoints"]] == [20, 30]
    assert held[0] * 2 == held[1] == held[2]  # those of what was removed went with it
    assert journal_events(folder, "mirror-removed")[0]["names"] == ["step-000000000010-a0001"]


@pytest.mark.parametrize("victim", ["uploader", "keeper"])
def test_copying_goes_on_after_kill_9_of_the(victim, folder, gate, mirror, train):
    trainer = train(folder, mirror, "--total", 30, "--hold-at", 15)
    trainer.wait_for("holding")
    wait_for_copy(folder, 10)
    found = uploaders(folder) if victim == "uploader" else keepers(folder)
    os.kill(found[0].pid, signal.SIGKILL)
    gate.touch()
    assert trainer.wait() == 0, trainer.output
    wait_for_copy(folder, 30)
    assert "Traceback" not in trainer.output


def test_after_the_end_of_the_run_the_last_checkpoint_is_copied_and_nobody_stays(
    folder, mirror, train
):
    trainer = train(folder, mirror, "--total", 20)
    assert trainer.wait() == 0, trainer.output
    wait_for_copy(folder, 20)
    wait_until(lambda: not uploaders(folder), what="the end of the uploader")


@pytest.mark.parametrize("stage", _STAGES)
def test_a_copy_that_was_killed_goes_on_where_it_was(stage, folder, mirror, tmp_path):
    make_checkpoint(folder, 10, [_state(1)])
    marker = tmp_path / "marker"
    fault = environment(HOLDFAST_FAULT=f"{stage}@{marker}")
    done = holdfast_process("mirror", folder, "--push", "--at", mirror, env=fault)
    assert done.returncode == -9
    committed = list(mirror.glob("checkpoints/*/manifest.json"))
    assert bool(committed) == (stage == "mirror-committed")
    before = _pieces(mirror)
    assert before
    push(folder, mirror)
    assert before.items() <= _pieces(mirror).items()  # not written again
    fetch(tmp_path / "new", mirror)
    assert find_damage(tmp_path / "new/checkpoints/step-000000000010-a0001") == []


def test_a_removal_that_was_killed_leaves_no_half_checkpoint(folder, mirror, tmp_path):
    for step in (10, 20, 30, 40):
        make_checkpoint(folder, step, [_state(step)])
        if step < 40:
            done = holdfast("mirror", folder, "--push", "--at", mirror)
            assert done.returncode == 0, done.stderr
    fault = environment(HOLDFAST_FAULT=f"mirror-half-removed@{tmp_path / 'marker'}")
    done = holdfast_process("mirror", folder, "--push", "--at", mirror, env=fault)
    assert done.returncode == -9, done.stderr
    listed = json.loads(succeed("mirror", folder, "--json"))
    assert [each["step"] for each in listed["checkpoints"]] == [20, 30, 40]
    push(folder, mirror)
    names = {path.name for path in (mirror / "checkpoints").iterdir()}
    assert names == {f"step-{step:012d}-a0001" for step in (20, 30, 40)}


def test_a_piece_that_was_damaged_there_is_sent_again(folder, mirror, tmp_path):
    make_checkpoint(folder, 10, [_state(1)])
    push(folder, mirror)
    newer = (make_checkpoint(folder, 20, [_state(1)]) / "rank-00000.safetensors").read_bytes()
    pieces = sorted((mirror / "pieces").iterdir())
    victim = next(path for path in pieces if path.read_bytes() in newer)  # both need it
    data = victim.read_bytes()
    victim.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    push(folder, mirror)
    assert victim.read_bytes() == data
    assert "is here" in succeed("mirror", tmp_path / "new", "--fetch", "--at", mirror)


def test_what_two_checkpoints_share_is_there_once(folder, mirror, tmp_path):
    frozen = np.random.default_rng(1).standard_normal(400_000)
    older = make_checkpoint(folder, 10, [{"frozen": frozen, "head": np.zeros(1000)}])
    newer = make_checkpoint(folder, 20, [{"frozen": frozen, "head": np.ones(1000)}])
    link_unchanged(newer, older)
    newer.rename(tmp_path / newer.name)
    push(folder, mirror)
    (tmp_path / newer.name).rename(newer)
    push(folder, mirror)
    first, second = journal_events(folder, "mirrored")
    assert first["sent_bytes"] > 3_000_000
    assert second["size_bytes"] > 3_000_000
    assert second["sent_bytes"] < 100_000
    fetch(tmp_path / "new", mirror)
    assert find_damage(tmp_path / "new/checkpoints" / newer.name) == []


def test_a_checkpoint_that_is_damaged_here_is_not_copied_as_if_it_were_good(folder, mirror):
    made = make_checkpoint(folder, 10, [_state(1)])
    data = bytearray((made / "rank-00000.safetensors").read_bytes())
    data[2_000_000] ^= 1
    (made / "rank-00000.safetensors").write_bytes(data)
    holdfast("mirror", folder, "--push", "--at", mirror)
    assert not list(mirror.glob("checkpoints/*/manifest.json"))
    assert "is damaged" in journal_events(folder, "mirror-trouble")[0]["why"]


def test_the_mirror_of_another_run_is_left_alone_and_training_goes_on(
    folder, mirror, tmp_path, gate, train
):
    make_checkpoint(tmp_path / "other", 10, [_state(1)])
    push(tmp_path / "other", mirror)
    before = sorted(path.name for path in mirror.rglob("*"))
    make_checkpoint(folder, 10, [{"weights": np.zeros(SIZE)}])
    trainer = train(folder, mirror, "--total", 30, "--hold-at", 20)
    trainer.wait_for("this is the mirror of another run")  # its uploader has started by then
    gate.touch()
    assert trainer.wait() == 0, trainer.output
    assert sorted(path.name for path in mirror.rglob("*")) == before


def test_a_mirror_inside_the_run_folder_is_refused(folder, start, train):
    trainer = train(folder, folder / "mirror", "--total", 30)
    assert trainer.wait() != 0
    assert "one inside the other" in trainer.output
    assert settings("x")  # what it was started with is JSON
    assert copied_steps(folder) == []
