"""A checkpoint has its name only when every byte of it is on disk."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from holdfast._run.saving.direct import write_direct
from holdfast._state.capture import capture
from holdfast._store.commit.checkpoint import Policy
from holdfast._store.folder import atomic
from holdfast._store.folder.layout import RunLayout


def test_data_then_manifest_then_folder_then_the_name_then_its_parent(tmp_path, monkeypatch):
    layout = RunLayout(tmp_path / "run")
    layout.attempt(1).mkdir(parents=True)
    layout.checkpoints.mkdir()
    policy = Policy(layout, "a" * 32, 1, {1: None}, keep_last=3, best=None, version="0")
    order: list[str] = []
    real_fsync, real_publish = os.fsync, atomic.publish_folder

    def fsync(descriptor):
        order.append(Path(f"/proc/self/fd/{descriptor}").readlink().name.partition(".step")[0])
        real_fsync(descriptor)

    def publish(*arguments, **options):
        order.append("name")
        return real_publish(*arguments, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr("holdfast._store.commit.write.publish_folder", publish)
    captured = capture({"w": np.ones(1000)})
    write_direct(policy, captured, {"metrics": {}, "world": 1, "common": ""}, 1, "save")
    of_commit = order[: order.index("name") + 2]
    partial = of_commit[2]
    assert of_commit == ["rank-00000.safetensors", "manifest.json", partial, "name", "checkpoints"]
    assert partial.startswith(".partial-step-000000000001-a0001")
