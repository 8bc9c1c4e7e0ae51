"""A checkpoint has its name only when all of it is on the disk."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from holdfast._errors import SaveFailed
from holdfast._store.commit.chunks import CommitThreads
from holdfast._store.commit.source import Ranges, Source
from holdfast._store.commit.write import Policy, State, keep_checkpoint, keep_parts, write_part
from holdfast._store.commit.write_queue import PublishOrder
from holdfast._store.folder.attempts import claim, open_folder
from holdfast._store.folder.layout import MANIFEST, rank_file
from holdfast._store.format.image import encode_scalars, plan_image
from holdfast._store.read.merge_ranks import read_checkpoint


def commit(folder: Path) -> tuple[Policy, State]:
    layout, run_id = open_folder(folder)
    number = claim(layout, folder, lambda _: None)
    return Policy(layout, run_id, number, {}, 3, None, "made"), State(number, 3, "asked", {})


def source() -> Source:
    scalars = encode_scalars({"step": 3, "tree": {"state": {}, "extra": {}}})
    plan = plan_image([], len(scalars))
    image = plan.header + scalars.ljust(plan.scalars.size_bytes)
    return Source([memoryview(bytearray(image))], Ranges.of(plan.extents()))


def watch_order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is flushed and what gets its name, in this order, from now on."""
    order: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        real_fsync(descriptor)
        order.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    def rename(before, after, **options):
        real_rename(before, after, **options)
        order.append(f"name {Path(after).name}")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    return order


def test_data_and_manifest_are_flushed_before_the_name_and_the_name_before_the_return(
    folder, monkeypatch
):
    policy, state = commit(folder)
    layout, final = policy.layout, state.folder(policy.layout)
    order = watch_order(monkeypatch)
    keep_checkpoint(policy, state, source(), CommitThreads(is_background=False))
    assert set(order[:2]) == {rank_file(0), MANIFEST}
    assert order[2].startswith(".")  # the folder, before it has its name
    assert order[3:] == [f"name {final.name}", layout.checkpoints.name]
    assert read_checkpoint(final).head["step"] == 3


def test_the_parts_of_all_ranks_are_flushed_before_the_manifest_and_the_name(folder, monkeypatch):
    policy, state = commit(folder)
    partial = policy.layout.checkpoints / ".partial-of-two"
    partial.mkdir(parents=True)
    order = watch_order(monkeypatch)
    threads = CommitThreads(is_background=False)
    parts = [write_part(partial, rank, source(), threads) for rank in (0, 1)]
    assert order == [rank_file(0), rank_file(1)]
    keep_parts(policy, state, partial, parts, time.monotonic(), PublishOrder())
    named = f"name {state.folder(policy.layout).name}"
    assert order[2:] == [MANIFEST, partial.name, named, policy.layout.checkpoints.name]


@pytest.mark.parametrize("bad", [rank_file(0), MANIFEST])
def test_without_one_of_the_flushes_there_is_no_checkpoint(folder, monkeypatch, bad):
    (policy, state), real = commit(folder), os.fsync

    def fsync(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == bad:
            raise OSError(errno.EIO, "planted")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(SaveFailed, match="planted"):
        keep_checkpoint(policy, state, source(), CommitThreads(is_background=False))
    assert list(policy.layout.checkpoints.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before
