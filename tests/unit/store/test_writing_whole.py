"""A large file that is written bit by bit has its name when it is whole, or never."""

from __future__ import annotations

import os

import pytest

from holdfast._store.folder import atomic


@pytest.fixture(params=["nameless", "named"])
def path(request, tmp_path, monkeypatch):
    """A file that is not there yet, on a system with and without files that have no name."""
    if request.param == "named":
        monkeypatch.setattr(atomic, "_open_nameless", lambda _: None)
    return tmp_path / "file"


def only(path):
    return [entry.name for entry in path.parent.iterdir()]


def test_the_name_comes_with_the_last_byte(path):
    with atomic.writing_whole(path, replace=False) as file:
        file.write(b"whole")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert only(path) == ["file"]


def test_a_name_that_is_taken_meanwhile_is_left_alone(path):
    with pytest.raises(FileExistsError), atomic.writing_whole(path, replace=False) as file:
        file.write(b"ours")
        path.write_bytes(b"theirs")
    assert path.read_bytes() == b"theirs"
    assert only(path) == ["file"]


def test_an_old_file_is_replaced_if_that_is_wanted(path):
    path.write_bytes(b"old")
    with atomic.writing_whole(path, replace=True) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert only(path) == ["file"]


@pytest.mark.parametrize("replace", [False, True])
def test_an_error_leaves_nothing(path, replace):
    with (
        pytest.raises(KeyboardInterrupt),
        atomic.writing_whole(path, replace=replace) as file,
    ):
        file.write(b"half")
        raise KeyboardInterrupt
    assert only(path) == []


def test_a_file_system_without_hard_links_is_served(path, monkeypatch):
    monkeypatch.setattr(atomic, "_open_nameless", lambda _: None)

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with atomic.writing_whole(path, replace=False) as file:
        file.write(b"whole")
    assert path.read_bytes() == b"whole"
    assert only(path) == ["file"]


def test_others_may_read_it_as_any_new_file(path):
    before = os.umask(0o027)
    try:
        with atomic.writing_whole(path, replace=False) as file:
            file.write(b"x")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
