"""`holdfast verify`: every byte of every checkpoint, and nothing is changed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from holdfast._store.folder.layout import MANIFEST, RunLayout
from holdfast._store.read.verify import read_manifest
from tests.cli.command import TRAIN_NUMPY, holdfast


@pytest.fixture
def run(folder, start):
    settings = json.dumps({"checkpoint_every": 5})
    trainer = start(
        folder, "--total", 20, "--patience", 2, "--settings", settings, script=TRAIN_NUMPY
    )
    assert trainer.wait() == 0
    return folder


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def newest(run):
    return RunLayout(run).checkpoint_folders()[-1][2]


def test_whole_checkpoints_are_whole(run):
    done = holdfast("verify", run)
    assert done.returncode == 0
    assert done.stdout.count(": whole,") == len(RunLayout(run).checkpoint_folders()) >= 2


def test_a_file_that_was_made_longer_is_damaged_though_the_manifest_agrees(run):
    checkpoint = newest(run)
    found = read_manifest(checkpoint)
    (file,) = found.files
    with (checkpoint / file.name).open("r+b") as data:
        data.truncate(1 << 40)
    forged = replace(found, files=(replace(file, size_bytes=1 << 40),))
    (checkpoint / MANIFEST).write_bytes(forged.to_bytes())
    done = holdfast("verify", run)
    assert done.returncode == 1
    assert "DAMAGED: the manifest is damaged (its file is larger than its parts)" in done.stdout


def test_every_damaged_tensor_is_named_and_the_status_is_1(run):
    checkpoint = newest(run)
    (file,) = read_manifest(checkpoint).files
    for part in file.parts:
        if part.name in ("weights", "holdfast.scalars"):
            flip(checkpoint / file.name, part.offset + part.size_bytes // 2)
    before = sorted(p for p in run.rglob("*"))
    done = holdfast("verify", run)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if "DAMAGED" in line]
    assert line.startswith("step 20 (attempt 1): DAMAGED: ")
    assert "tensor weights is damaged" in line
    assert "tensor holdfast.scalars is damaged" in line
    assert ": whole," in done.stdout
    assert sorted(p for p in run.rglob("*")) == before
    found = json.loads(holdfast("verify", run, "--json").stdout)
    assert [bool(v["damage"]) for v in found] == [False] * (len(found) - 1) + [True]


@pytest.mark.parametrize("harm", ["header", "cut", "missing", "manifest", "no manifest"])
def test_any_other_harm_is_found(run, harm):
    checkpoint = newest(run)
    data = next(checkpoint.glob("*.safetensors"))
    expected = {
        "header": "the header is damaged",
        "cut": "bytes, the manifest says",
        "missing": "No such file",
        "manifest": "the manifest is damaged",
        "no manifest": "the manifest is missing",
    }
    if harm == "header":
        flip(data, 40)
    elif harm == "cut":
        with data.open("r+b") as file:
            file.truncate(5000)
    elif harm == "missing":
        data.unlink()
    elif harm == "manifest":
        flip(checkpoint / "manifest.json", 60)
    else:
        (checkpoint / "manifest.json").unlink()
    done = holdfast("verify", run)
    assert done.returncode == 1
    assert expected[harm] in done.stdout


def test_a_live_run_may_be_verified(folder, start):
    settings = json.dumps({"checkpoint_every": 2, "keep_last": 1})
    start(folder, "--sleep", 0.001, "--settings", settings, script=TRAIN_NUMPY).ready()
    for _ in range(10):
        done = holdfast("verify", folder)
        assert done.returncode == 0, done.stdout
