"""A file is whole or absent, whatever goes wrong while it is written."""

from __future__ import annotations

import errno
import os
import resource
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._store.folder import atomic


def only(folder):
    return [path.name for path in folder.iterdir()]


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.booleans())
def test_the_last_bytes_written_are_read(tmp_path_factory, versions, durable):
    path = tmp_path_factory.mktemp("atomic") / "file"
    for data in versions:
        atomic.write_atomic(path, data, durable=durable)
        assert path.read_bytes() == data
    assert only(path.parent) == ["file"]


def test_old_bytes_stay_when_the_file_may_not_grow(tmp_path):
    path = tmp_path / "file"
    atomic.write_atomic(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large") as failed:
            atomic.write_atomic(path, b"new" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failed.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old"
    assert only(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_old_bytes_stay_when_a_stage_of_the_write_fails(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    atomic.write_atomic(path, b"old")

    def fail(*_):
        raise OSError(errno.EIO, "planted")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="planted"):
        atomic.write_atomic(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert only(tmp_path) == ["file"]


def test_the_bytes_are_flushed_before_the_name_and_the_name_before_the_return(
    tmp_path, monkeypatch
):
    order = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor):
        order.append("folder" if Path(f"/proc/self/fd/{descriptor}").is_dir() else "bytes")
        real_fsync(descriptor)

    def replace(*paths):
        order.append("name")
        real_replace(*paths)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    atomic.write_atomic(tmp_path / "file", b"new")
    assert order == ["bytes", "name", "folder"]


def test_a_name_that_is_taken_is_not_published_over(tmp_path):
    prepared, final = tmp_path / "prepared", tmp_path / "final"
    for folder, text in ((prepared, "new"), (final, "old")):
        folder.mkdir()
        (folder / "x").write_text(text)
    assert atomic.publish_folder(prepared, final) is False
    assert (final / "x").read_text() == "old"
    assert (prepared / "x").read_text() == "new"


def test_publishing_moves_the_whole_folder(tmp_path):
    prepared, final = tmp_path / "prepared", tmp_path / "final"
    prepared.mkdir()
    (prepared / "x").write_text("new")
    assert atomic.publish_folder(prepared, final) is True
    assert only(tmp_path) == ["final"]
    assert (final / "x").read_text() == "new"


def test_publishing_what_is_not_there_is_an_error_and_not_a_refusal(tmp_path):
    with pytest.raises(FileNotFoundError):
        atomic.publish_folder(tmp_path / "absent", tmp_path / "final")


def test_moving_aside_finds_a_free_name_and_loses_nothing(tmp_path):
    aside = tmp_path / "set-aside"
    places = []
    for number in range(3):
        folder = tmp_path / ".partial-x"
        folder.mkdir()
        (folder / "n").write_text(str(number))
        places.append(atomic.move_aside(folder, aside))
    assert sorted(only(aside)) == ["partial-x", "partial-x.2", "partial-x.3"]
    assert [(place / "n").read_text() for place in places] == ["0", "1", "2"]


def test_a_removal_that_fails_half_way_leaves_no_folder_of_the_old_name(tmp_path, monkeypatch):
    folder = tmp_path / "step-1"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_text("x")
    calls = []

    def die(stage):
        calls.append(stage)
        if stage == "half-removed":
            raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "fault_point", die)
    with pytest.raises(KeyboardInterrupt):
        atomic.discard_folder(folder)
    assert calls == ["before-removal", "half-removed"]
    assert only(tmp_path) == [".removing-step-1"]


def test_neither_a_removal_nor_a_move_goes_through_a_symbolic_link(tmp_path):
    behind = tmp_path / "behind"
    behind.mkdir()
    (behind / "thesis.tex").touch()
    link = tmp_path / "link"
    link.symlink_to(behind)
    with pytest.raises(OSError, match="Not a directory"):
        atomic.discard_folder(link)
    (tmp_path / "step").mkdir()
    with pytest.raises(OSError, match="Not a directory"):
        atomic.move_aside(tmp_path / "step", link)
    assert link.is_symlink()
    assert only(behind) == ["thesis.tex"]


def test_files_that_are_flushed_together_are_all_flushed_and_an_error_is_raised(
    tmp_path, monkeypatch
):
    flushed, real = [], os.fsync
    files = [os.open(tmp_path / name, os.O_WRONLY | os.O_CREAT) for name in "abc"]
    bad = files[1]

    def fsync(descriptor):
        flushed.append(descriptor)
        if descriptor == bad:
            raise OSError(errno.EIO, "planted")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="planted"):
        atomic.sync_together(files)
    assert sorted(flushed) == sorted(files)
    bad = -1
    atomic.sync_together(files)
    for descriptor in files:
        os.close(descriptor)


def test_a_process_that_ends_waits_for_a_write_that_another_thread_has_begun(tmp_path, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    flush = os.fsync

    def slow_flush(descriptor):
        begun.set()
        assert may_end.wait(10)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", slow_flush)
    writer = threading.Thread(target=atomic.write_atomic, args=(tmp_path / "record", b"whole"))
    writer.start()
    assert begun.wait(10)
    atomic.wait_for_writes(0.01)
    assert [path.name for path in tmp_path.iterdir()] != ["record"], "it is still being written"
    may_end.set()
    atomic.wait_for_writes(10)
    assert [path.name for path in tmp_path.iterdir()] == ["record"]
    writer.join()
