"""A file of a run folder is opened only if it is one: no FIFO, no device, no link, no giant."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import socket
from pathlib import Path

import pytest

from holdfast._store.folder.plain_file import NotPlain, open_file, open_log, open_plain, read_plain


def make_fifo(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)  # a whole path may be too long


def link_to_device(path):
    path.symlink_to("/dev/zero")


def link_to_file(path):
    other = path.with_name("other")
    other.write_bytes(b"secret")
    path.symlink_to(other)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


STRANGE = {
    "a named pipe": make_fifo,
    "a socket": make_socket,
    "a folder": lambda path: path.mkdir(),
    "a symbolic link": link_to_device,
    "a symbolic link and not": link_to_file,
}
FLAGS = [os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_RDWR | os.O_APPEND | os.O_CREAT]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_file_is_refused_at_once(tmp_path, monkeypatch, kind, flags):
    monkeypatch.chdir(tmp_path)
    STRANGE[kind](tmp_path / "it")
    before = open_files()
    with pytest.raises(NotPlain, match=kind):
        open_plain(tmp_path / "it", flags)
    assert open_files() == before
    if kind == "a symbolic link and not":
        assert (tmp_path / "other").read_bytes() == b"secret"


def test_a_device_is_refused():
    with pytest.raises(NotPlain, match="a device"):
        open_plain(Path("/dev/zero"))


def test_a_file_of_a_terabyte_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "it").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(NotPlain, match="too large"):
        read_plain(tmp_path / "it")


def test_a_file_is_read_appended_to_and_emptied(tmp_path):
    path = tmp_path / "it"
    for word in (b"one ", b"two"):
        with open_log(path) as file:
            file.write(word)
    assert read_plain(path) == b"one two"
    with open_file(path) as file:
        assert file.readline() == b"one two"
    os.close(open_plain(path, os.O_WRONLY | os.O_TRUNC))
    assert read_plain(path) == b""


def test_a_missing_file_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_plain(tmp_path / "it")


@pytest.fixture
def linter():
    path = Path(__file__).parents[3] / "tools" / "check-opens"
    loader = importlib.machinery.SourceFileLoader("check_opens", str(path))
    spec = importlib.util.spec_from_loader("check_opens", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_nothing_else_opens_files_of_a_run_folder(linter, capsys):
    assert linter.main() == 0, capsys.readouterr().out
    assert all((linter.SOURCE / name).is_file() for name in linter.ELSEWHERE)


@pytest.mark.parametrize(
    "call", ["path.read_text()", "open(path)", "path.open('rb')", "os.open(path, os.O_RDONLY)"]
)
def test_another_way_to_open_a_file_is_found(linter, tmp_path, call):
    (tmp_path / "new.py").write_text(f"def look(path):\n    return {call}\n")
    assert linter.find_opens(tmp_path / "new.py") == [(2, call)]


def test_what_opens_no_file_of_a_run_is_let_pass(linter, tmp_path):
    (tmp_path / "new.py").write_text("feed.open()\nPath('/proc/self/stat').read_text()\n")
    assert linter.find_opens(tmp_path / "new.py") == []
