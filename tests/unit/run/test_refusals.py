"""What the system refuses is told as what it is, and no name sends escapes to a terminal."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast import FolderError, _text
from holdfast._run.ranks.meeting import make_key
from holdfast._run.saving.arena_builder import ArenaBuilder
from holdfast._store.folder.attempts import cannot_write
from holdfast._store.folder.layout import RunLayout
from holdfast._store.memory import backing
from tests.support import SHM

RUN_ID = "e1" * 16


@pytest.fixture
def taken():
    """The name of the first arena of a run, which something else has."""
    path = SHM / f"holdfast-{os.geteuid()}-{RUN_ID}-a1-g1"
    path.touch(mode=0o600)
    yield path
    path.unlink()


def test_a_taken_name_in_shared_memory_is_told_as_that(taken):
    found = backing.reserve(RUN_ID, 1, 1, 1 << 16)
    assert found is not None
    assert found.path is None
    assert found.why_not_shm == f"{taken} cannot be made (File exists)"
    os.close(found.descriptor)


def test_too_little_room_in_shared_memory_is_told_as_that(monkeypatch):
    monkeypatch.setattr(backing, "_reserve_shm", lambda *_: None)
    found = backing.reserve(RUN_ID, 1, 1, 1 << 16)
    assert found is not None
    assert found.why_not_shm == "/dev/shm has no room for the snapshots"
    os.close(found.descriptor)


def test_memory_that_the_system_refuses_is_not_too_little_room_in_shared_memory(monkeypatch):
    """For the first file, in /dev/shm; then for all files."""
    asked: list[int] = []

    def refuse(descriptor: int, *_: int) -> None:
        asked.append(descriptor)
        if len(asked) in (1, 3, 4):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(backing.os, "posix_fallocate", refuse)
    path = backing.arena_path(RUN_ID, 1, 1)
    found = backing.reserve(RUN_ID, 1, 1, 1 << 16)
    assert found is not None
    assert found.why_not_shm == f"{path} cannot be made (Cannot allocate memory)"
    os.close(found.descriptor)
    assert backing.reserve(RUN_ID, 1, 1, 1 << 16) is None
    assert len(asked) == 4
    assert not path.exists()


def test_too_many_open_files_are_not_too_little_memory(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(backing.os, "memfd_create", refuse)
    monkeypatch.setattr(backing, "_reserve_shm", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        backing.reserve(RUN_ID, 1, 1, 1 << 16)
    said = []
    ArenaBuilder((RUN_ID, 1, 0), said.append)._build([], 100, 1)
    assert "the system refuses the memory for them (Too many open files)" in said[0]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "run folder cannot be written (No space left on device).\nFree some room"),
        (
            errno.EACCES,
            "cannot be written (Permission denied).\nChoose a folder that you may write",
        ),
        (errno.EMFILE, "this run cannot be opened (Too many open files).\nClose some files"),
        (errno.ENOMEM, "this run cannot be opened (Cannot allocate memory).\nFree some memory"),
        (errno.ENAMETOOLONG, "(File name too long).\nChoose a folder with a shorter name."),
    ],
)
def test_the_advice_fits_the_error(number, said):
    error = cannot_write(Path("runs/a"), OSError(number, os.strerror(number)))
    assert said in str(error)
    assert ("room" in str(error)) == (number in (errno.ENOSPC, errno.EACCES))


def test_a_folder_name_sends_no_escape_to_the_terminal(capsys):
    _text.say("runs/a\x1b[2J\x07\u202eb: a new run\nsecond line")
    shown = capsys.readouterr().err
    assert shown == "holdfast: runs/a\\x1b[2J\\x07\\u202eb: a new run\nsecond line\n"


def put_fifo(path):
    os.mkfifo(path, 0o600)


def put_link(path):
    target = path.with_name("target")
    target.write_text("00")
    target.chmod(0o600)
    path.symlink_to(target)


@pytest.mark.parametrize("put", [put_fifo, put_link])
def test_a_key_that_is_not_a_file_is_refused_before_a_keeper_reads_it(tmp_path, put):
    layout = RunLayout(tmp_path)
    put(layout.key)
    with pytest.raises(FolderError, match="must be a file"):
        make_key(layout)
