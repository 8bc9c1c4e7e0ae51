"""`holdfast ls`: the checkpoints, and why each is kept."""

from __future__ import annotations

import json
import shutil

from tests.cli.command import TRAIN_NUMPY, holdfast, succeed

SETTINGS = json.dumps({"checkpoint_every": 5, "keep_last": 2, "keep_best": "min:val_loss"})


def listed(folder):
    return json.loads(succeed("ls", folder, "--json"))


def train(start, folder, *arguments):
    trainer = start(
        folder, "--sleep", 0.005, "--settings", SETTINGS, *arguments, script=TRAIN_NUMPY
    )
    assert trainer.wait() == 0, trainer.output


def test_each_checkpoint_says_why_it_is_kept(folder, start):
    # Beside a busy disk no slot is free in time, unless the training waits for it.
    train(start, folder, "--total", 40, "--best-at", 7, "--patience", 2)
    found = listed(folder)
    reasons = {c["step"]: c["kept_because"] for c in found["checkpoints"]}
    assert reasons[7] == "best min:val_loss"
    assert reasons[40] == "last 2"
    assert len(reasons) == 3
    assert found["watched"] == "val_loss"
    shown = succeed("ls", folder).splitlines()
    assert shown[0].split() == ["step", "age", "size", "metrics", "kept", "because", "attempt"]
    assert "val_loss 0.1, loss 0.1429" in shown[1]
    assert "best min:val_loss" in shown[1]
    assert "3 checkpoints" in shown[-1]


def test_what_is_off_the_line_and_what_is_damaged_is_told(folder, start):
    train(start, folder, "--total", 10)
    folders = sorted((folder / "checkpoints").iterdir())
    shutil.copytree(folders[-1], folder / "checkpoints" / "step-000000000099-a0007")
    (folders[0] / "manifest.json").write_text("torn")
    (folder / "set-aside").mkdir()
    (folder / "set-aside" / "step-000000000003-a0001").mkdir()
    found = {c["step"]: c for c in listed(folder)["checkpoints"]}
    assert found[99]["kept_because"] == "of another line"
    shown = succeed("ls", folder)
    assert "damaged manifest" in shown
    assert "1 damaged or unfinished, never loaded" in shown


def test_a_journal_that_does_not_know_the_settings_is_no_error(folder, start):
    train(start, folder, "--total", 10)
    (folder / "journal.jsonl").unlink()
    assert listed(folder)["checkpoints"][0]["kept_because"] is None
    assert "unknown" in succeed("ls", folder)


def test_a_run_without_checkpoints_says_so(folder, start):
    trainer = start(folder, "--sleep", 0.01, script=TRAIN_NUMPY)
    trainer.ready()
    assert "no checkpoints yet" in succeed("ls", folder)
    assert holdfast("verify", folder).stdout == f"{folder}: no checkpoints yet.\n"


def test_a_folder_with_one_run_is_enough(folder, start):
    train(start, folder, "--total", 5)
    shown = {command: succeed(command, folder) for command in ("ls", "verify")}
    for command, text in shown.items():
        assert succeed(command, folder.parent).split()[0:3] == text.split()[0:3]
    shutil.copytree(folder, folder.with_name("other"))
    refused = holdfast("ls", folder.parent)
    assert refused.returncode == 2
    assert "there are 2 runs below. Name one of them." in refused.stderr
    assert str(folder.with_name("other")) in refused.stderr
