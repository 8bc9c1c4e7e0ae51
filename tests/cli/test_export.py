"""`holdfast export`: a checkpoint as a file that other programs read, whole or not at all."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest

from holdfast._store.folder.layout import RunLayout
from tests.cli.command import (
    TRAIN_NUMPY,
    environment,
    holdfast,
    holdfast_process,
    output_of,
    succeed,
)
from tests.cli.test_verify import flip
from tests.cli.without import holdfast_without
from tests.crash.stages import has_snapshot
from tests.support import arena_files, checkpoint_steps, kill_both, wait_until

# Without snapshots between them a slot is free for each checkpoint.
EVERY_5 = json.dumps({"checkpoint_every": 5, "max_overhead": 0})


@pytest.fixture(scope="module")
def trained(tmp_path_factory, request):
    """A finished run with checkpoints of steps 10, 15 and 20, not to be changed."""
    from tests.support import Trainer

    arguments = ("--total", 20, "--patience", 60, "--settings", EVERY_5)
    folder = tmp_path_factory.mktemp("export") / "run"
    trainer = Trainer(folder, *arguments, script=TRAIN_NUMPY)
    assert trainer.wait() == 0, trainer.output
    assert checkpoint_steps(folder) == [10, 15, 20]
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it."""
    return shutil.copytree(trained, tmp_path / "run")


def newest(run, back=1):
    return RunLayout(run).checkpoint_folders()[-back][2]


def damage(checkpoint):
    data = next(checkpoint.glob("*.safetensors"))
    flip(data, data.stat().st_size // 3)


def two_lines(done, status, *parts):
    assert (done.returncode, done.stdout) == (status, ""), done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 2, done.stderr
    for part in parts:
        assert part in done.stderr


def weights(path):
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        return file.get_tensor("weights")


def test_plain_safetensors_opens_it(run, tmp_path):
    from safetensors import safe_open

    out = tmp_path / "out.safetensors"
    shown = succeed("export", run, out)
    assert shown.startswith(f"{out}: step 20 (attempt 1) of {run}, 1 tensor, 8.")
    with safe_open(out, "np") as file:
        assert list(file.keys()) == ["weights"]
        assert file.get_tensor("weights").shape == (1000,)
        about = json.loads(file.metadata()["holdfast"])
        assert (about["step"], about["attempt"]) == (20, 1)
        state = json.loads(file.metadata()["holdfast.state"])
        assert state == {"weights": {"$t": "weights"}}


def test_it_needs_neither_numpy_nor_torch(run, tmp_path):
    program = (
        "import sys; from pathlib import Path\n"
        "from holdfast._tools.convert.export import export\n"
        "from holdfast._tools.convert.writers import ExportRequest\n"
        f"export(Path({str(run)!r}), ExportRequest(Path({str(tmp_path / 'o.safetensors')!r})))\n"
        "print([m for m in ('numpy', 'torch', 'click', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_a_step_can_be_named_and_a_wrong_one_lists_those_there_are(run, tmp_path):
    assert "step 15 " in succeed("export", run, "--step", 15, tmp_path / "a.safetensors")
    done = holdfast("export", run, "--step", 7, tmp_path / "b.safetensors")
    two_lines(done, 2, "no checkpoint of step 7", "There are: 10, 15, 20.", "holdfast ls")
    assert not (tmp_path / "b.safetensors").exists()


def test_a_damaged_one_is_passed_over_and_said_and_left_where_it_is(run, tmp_path):
    damage(newest(run))
    before = sorted(run.rglob("*"))
    done = holdfast("export", run, tmp_path / "out.safetensors")
    assert done.returncode == 0
    assert "step 15 (attempt 1)" in done.stdout
    (line,) = done.stderr.splitlines()
    assert "has checksum" in line
    assert line.endswith("The previous one is taken.")
    assert sorted(run.rglob("*")) == before


def test_a_damaged_one_that_was_named_is_refused(run, tmp_path):
    damage(newest(run))
    done = holdfast("export", run, "--step", 20, tmp_path / "out.safetensors")
    two_lines(done, 1, "has checksum", f"holdfast verify {run}")
    for back in (2, 3):
        damage(newest(run, back))
    done = holdfast("export", run, tmp_path / "out.safetensors")
    two_lines(done, 1, "none of its 3 checkpoints is whole", f"holdfast verify {run}")
    assert not (tmp_path / "out.safetensors").exists()


def test_what_is_off_the_line_is_taken_only_if_it_is_named(run, tmp_path):
    stranger = RunLayout(run).checkpoint(99, 1)
    newest(run).rename(stranger)
    done = holdfast("export", run, "--step", 99, tmp_path / "a.safetensors")
    two_lines(done, 1, "it holds step 20 of attempt 1")  # and is not what its name says
    (run / "attempts" / "0002").mkdir()
    (run / "attempts" / "0002" / "origin.json").write_text('{"attempt": 1, "step": 10}')
    assert "step 10 (attempt 1)" in succeed("export", run, tmp_path / "b.safetensors")
    shown = succeed("export", run, "--step", 15, tmp_path / "c.safetensors")
    assert "step 15 (attempt 1)" in shown


def test_the_turn_of_an_epoch_is_newer_than_its_step(run, tmp_path):
    plain = newest(run)
    shutil.copytree(plain, plain.with_name(f"{plain.name}-turn"))
    damage(plain)
    assert "step 20 " in succeed("export", run, tmp_path / "out.safetensors")
    assert "step 20 " in succeed("export", run, "--step", 20, tmp_path / "same.safetensors")


def test_a_live_run_that_removes_its_checkpoints_can_be_exported(folder, start, tmp_path):
    settings = json.dumps({"checkpoint_every": 2, "keep_last": 1})
    trainer = start(folder, "--sleep", 0.002, "--settings", settings, script=TRAIN_NUMPY)
    trainer.ready()
    wait_until(lambda: RunLayout(folder).checkpoint_folders())
    for _ in range(6):
        shown = succeed("export", folder, tmp_path / "out.safetensors", "--force")
        assert "every checksum was verified" in shown
    assert trainer.process.poll() is None


def test_a_step_that_is_only_in_memory_is_told(folder, start, tmp_path):
    trainer = start(folder, "--sleep", 0.01, script=TRAIN_NUMPY)
    trainer.ready()
    done = holdfast("export", folder, tmp_path / "out.safetensors")
    two_lines(done, 1, "there is no checkpoint yet", f"holdfast save {folder} --wait")
    succeed("save", folder, "--wait")
    (step,) = checkpoint_steps(folder)
    wait_until(lambda: has_snapshot(folder, hashed=True, after=step))
    kill_both(folder, trainer)
    shown = succeed("export", folder, tmp_path / "out.safetensors")
    assert f"step {step} " in shown
    assert "is newer, and only in memory" in shown
    for arena in arena_files(folder):
        arena.unlink()


def test_a_file_that_is_there_is_replaced_only_by_force(run, tmp_path):
    out = tmp_path / "out.safetensors"
    out.write_text("mine")
    done = holdfast("export", run, out)
    two_lines(done, 2, "this file exists already", "--force")
    assert out.read_text() == "mine"
    succeed("export", run, out, "--force")
    assert weights(out).shape == (1000,)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.safetensors", "run"]


@pytest.mark.parametrize("stage", ["export-half-written", "before-naming"])
@pytest.mark.parametrize("old", [None, "mine"])
def test_a_killed_export_leaves_what_was_there(run, tmp_path, stage, old):
    out = tmp_path / "there" / "out.safetensors"
    out.parent.mkdir()
    if old is not None:
        out.write_text(old)
    fault = environment(HOLDFAST_FAULT=f"{stage}@{tmp_path / 'killed'}")
    force = [] if old is None else ["--force"]
    done = holdfast_process("export", run, out, *force, env=fault)
    assert done.returncode == -signal.SIGKILL
    assert [p.read_text() for p in out.parent.iterdir()] == ([] if old is None else [old])
    succeed("export", run, out, *force)
    assert weights(out).shape == (1000,)


def test_a_full_disk_is_a_sentence_and_leaves_nothing(run, tmp_path):
    out = tmp_path / "out.safetensors"
    limit = (resource.RLIMIT_FSIZE, (4096, 4096))
    done = holdfast_process("export", run, out, preexec_fn=lambda: resource.setrlimit(*limit))
    two_lines(done, 1, f"{out}: could not be written (", "Nothing was left there")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_wrong_wishes_are_two_lines(run, tmp_path):
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "file").touch()
    wishes = [
        ([run, tmp_path / "out.bin"], 2, ["must be .safetensors or .pt", "out.safetensors"]),
        ([run, tmp_path / "out"], 2, ["must be .safetensors or .pt"]),
        ([run, tmp_path / "no" / "o.pt"], 2, ["no such folder", "mkdir -p"]),
        ([run, tmp_path / "file" / "o.pt"], 2, ["no such folder"]),
        ([run, tmp_path / "folder.pt"], 2, ["is a folder"]),
        ([run, newest(run) / "out.pt", "--force"], 2, ["the run's own checkpoints"]),
        (
            [run, tmp_path / "o.safetensors", "--only", "model"],
            2,
            ["no model", "There is: weights"],
        ),
        ([run, tmp_path / "o.safetensors", "--strip"], 2, ["--only model --strip"]),
        ([tmp_path / "no", tmp_path / "o.pt"], 2, ["there is no run here"]),
    ]
    for arguments, status, parts in wishes:
        two_lines(holdfast("export", *arguments), status, *parts)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.pt", "run"]


def test_without_torch_a_pt_file_says_what_to_install(run, tmp_path):
    commands = [["export", run, tmp_path / name] for name in ("out.pt", "out.safetensors")]
    refused, done = holdfast_without(["torch"], commands)
    two_lines(refused, 1, "needs PyTorch", "pip install 'torch>=2.4'")
    output_of(done)
    assert weights(tmp_path / "out.safetensors").shape == (1000,)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_two_lines(run, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    done = holdfast("export", run, tmp_path / "closed" / "out.safetensors")
    two_lines(done, 1, "could not be written (Permission denied)")
