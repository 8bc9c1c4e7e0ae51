"""A course has a copy of the user's folder: nothing that it writes reaches the original."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._tools.prove import copying
from holdfast._tools.prove.copying import copy_folder, place_command


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def target(tmp_path):
    return tmp_path / "course" / "copy"


def inside(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def write(path, text="x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_files_come_with_mode_and_times(source, target):
    script = write(source / "tools" / "go.sh", "#!/bin/sh\n")
    script.chmod(0o750)
    os.utime(script, (1000, 2000))
    os.utime(script.parent, (1000, 3000))
    assert copy_folder(source, target) == []
    copy = target / "tools" / "go.sh"
    assert copy.read_text() == "#!/bin/sh\n"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o750
    assert copy.stat().st_mtime == 2000
    assert copy.parent.stat().st_mtime == 3000


def test_what_is_written_in_place_does_not_reach_the_original(source, target):
    write(source / "log.txt", "before")
    copy_folder(source, target)
    with (target / "log.txt").open("r+") as file:
        file.write("AFTER!")
    assert (source / "log.txt").read_text() == "before"


def test_environments_caches_and_histories_are_left_out(source, target):
    for name in (".git", ".hg", "__pycache__", "node_modules", ".mypy_cache", ".ruff_cache"):
        write(source / name / "file")
        write(source / "deep" / name / "file")
    write(source / "my-env" / "pyvenv.cfg")
    write(source / "my-env" / "bin" / "python")
    write(source / "conda" / "conda-meta" / "history")
    write(source / ".github" / "file")
    copy_folder(source, target)
    assert inside(target) == [".github", ".github/file", "deep"]


def test_runs_are_left_out_and_other_files_of_that_name_are_not(source, target):
    write(source / "runs" / "a" / "run.json", '{"run_id": "abc"}')
    write(source / "runs" / "a" / "journal.jsonl")
    write(source / "b" / "run.json", '{"name": "mine"}')
    copy_folder(source, target)
    assert inside(target) == ["b", "b/run.json", "runs"]


def test_large_data_is_linked_and_large_checkpoints_are_copied(source, target, monkeypatch):
    monkeypatch.setattr(copying, "LARGE_BYTES", 10)
    data = write(source / "data.bin", "x" * 11)
    write(source / "model.pt", "x" * 11)  # a script would overwrite the original through a link
    write(source / "small.bin", "x" * 10)
    assert copy_folder(source, target) == [data]
    assert (target / "data.bin").is_symlink()
    assert (target / "data.bin").resolve() == data
    assert not (target / "model.pt").is_symlink()
    assert not (target / "small.bin").is_symlink()


def test_of_very_many_files_the_data_is_linked(source, target, monkeypatch):
    monkeypatch.setattr(copying, "MOST_FILES", 3)
    monkeypatch.setattr(copying, "MOST_SMALL_FILES", 6)
    monkeypatch.setattr(copying, "SMALL_BYTES", 4)
    for name in ("a0", "a1", "a2", "a3"):
        write(source / "data" / name, "image")
    write(source / "e", "x")
    write(source / "model.pt", "x" * 100)
    write(source / "train.py", "x" * 100)
    write(source / "zz", "x")
    linked = copy_folder(source, target)
    assert [path.name for path in linked] == ["a3", "zz"]


def test_of_very_many_bytes_the_data_is_linked(source, target, monkeypatch):
    monkeypatch.setattr(copying, "MOST_BYTES", 20)
    monkeypatch.setattr(copying, "SMALL_BYTES", 4)
    for name in ("a", "b", "c"):
        write(source / name, "x" * 8)
    assert [path.name for path in copy_folder(source, target)] == ["c"]


def test_links_to_outside_lead_to_the_original(source, target, tmp_path):
    outside = write(tmp_path / "elsewhere" / "data.bin")
    (source / "data").symlink_to("../elsewhere")
    assert copy_folder(source, target) == [outside.parent]
    assert (target / "data" / "data.bin").read_text() == "x"


def test_links_to_inside_lead_to_the_copy(source, target):
    write(source / "step-5.pt", "old")
    (source / "latest.pt").symlink_to(source / "step-5.pt")
    (source / "soon.pt").symlink_to("step-6.pt")
    assert copy_folder(source, target) == []
    (target / "latest.pt").write_text("new")
    assert (source / "step-5.pt").read_text() == "old"
    assert (target / "step-5.pt").read_text() == "new"
    (target / "soon.pt").write_text("new")
    assert not (source / "step-6.pt").exists()


def test_links_to_nowhere_outside_and_rings_are_left_out(source, target, tmp_path):
    (source / "gone").symlink_to(tmp_path / "gone")
    (source / "a").symlink_to("b")
    (source / "b").symlink_to("a")
    (source / "self").symlink_to(".")
    copy_folder(source, target)
    assert not (target / "gone").is_symlink()
    assert (target / "self").resolve() == target.resolve()


def test_pipes_and_sockets_are_left_out(source, target, monkeypatch):
    os.mkfifo(source / "pipe")
    monkeypatch.chdir(source)  # the name of a socket may not be long
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        write(source / "file")
        copy_folder(source, target)
    assert inside(target) == ["file"]


@pytest.mark.skipif(
    getattr(os, "geteuid", int)() == 0, reason="root reads everything; run as another user"
)
def test_what_cannot_be_read_is_left_out(source, target):
    write(source / "secret").chmod(0)
    write(source / "file")
    (source / "closed").mkdir(mode=0)
    copy_folder(source, target)
    assert inside(target) == ["closed", "file"]


def test_a_file_that_is_gone_meanwhile_is_left_out(source, target, monkeypatch):
    write(source / "gone")
    write(source / "here")
    copy = shutil.copyfile

    def remove_and_copy(path, place):
        (source / "gone").unlink(missing_ok=True)
        return copy(path, place)

    monkeypatch.setattr(shutil, "copyfile", remove_and_copy)
    copy_folder(source, target)
    assert inside(target) == ["here"]


def test_a_folder_that_nobody_may_write_to_can_be_copied_and_removed(source, target):
    write(source / "fixed" / "file").chmod(0o444)
    (source / "fixed").chmod(0o555)
    copy_folder(source, target)
    (source / "fixed").chmod(0o755)
    assert (target / "fixed" / "file").read_text() == "x"
    (target / "fixed" / "file").unlink()


def test_copies_inside_the_folder_itself_are_not_copied_again(source):
    write(source / "train.py")
    write(source / "kept" / "first" / "train.py")
    copy_folder(source, source / "kept" / "second")
    assert inside(source / "kept" / "second") == ["train.py"]
    copy_folder(source, source / "third", without=[source / "kept"])
    assert inside(source / "third") == ["train.py"]


@pytest.mark.parametrize(
    "name",
    ["with blank", "-rf", "naïve", "line\nbreak", "a'b\"c", "{dir}", os.fsdecode(b"\xff\xfe")],
)
def test_odd_names_are_kept(source, target, name):
    write(source / name / name)
    copy_folder(source, target)
    assert (target / name / name).read_text() == "x"


def test_an_empty_folder_gives_an_empty_one(source, target):
    assert copy_folder(source, target) == []
    assert inside(target) == []


# -- the command ------------------------------------------------------------------


def place(source, *words, **substitutes):
    named = {f"{{{name}}}": text for name, text in substitutes.items()}
    return place_command(words, source, Path("/copy"), named)


def test_words_without_paths_stay(source):
    words = ("python", "-m", "train", "--lr=0.1", "conf/a.yaml", "-c", 'print({"a": 1})', "{}")
    assert place(source, *words) == list(words)


def test_substitutes_are_put_in(source):
    placed = place(source, "run", "--to={dir}/x", "{dir}", "-n{ranks}", dir="/d", ranks="2")
    assert placed == ["run", "--to=/d/x", "/d", "-n2"]


def test_absolute_paths_in_the_folder_become_those_of_the_copy(source):
    words = (f"{source}/train.py", f"--out={source}/out", f"out.dir={source}", f"{source}/a/")
    assert place(source, *words) == [
        "/copy/train.py",
        "--out=/copy/out",
        "out.dir=/copy",
        "/copy/a/",
    ]


def test_absolute_paths_elsewhere_stay(source):
    words = ("/usr/bin/env", f"{source}-2/train.py", "--data=/data")
    assert place(source, *words) == list(words)


def test_paths_through_a_link_to_the_folder_are_found(source, tmp_path):
    (tmp_path / "link").symlink_to(source)
    assert place(source, f"{tmp_path}/link/train.py") == ["/copy/train.py"]


def test_existing_paths_above_become_absolute(source, tmp_path):
    write(tmp_path / "data" / "file")
    placed = place(source, "../data", "--in=../data/file", "../nothing", "..", "../source/t.py")
    assert placed == [
        f"{tmp_path}/data",
        f"--in={tmp_path}/data/file",
        "../nothing",
        str(tmp_path),
        "/copy/t.py",
    ]


def test_an_environment_in_the_folder_is_used_where_it_is(source):
    write(source / ".venv" / "pyvenv.cfg")
    python = write(source / ".venv" / "bin" / "python")
    assert place(source, ".venv/bin/python", str(python)) == [str(python), str(python)]


@given(st.lists(st.text(st.characters(exclude_characters="{}\0"), max_size=12)))
def test_any_words_give_as_many(words):
    placed = place_command(tuple(words), Path("/no/such"), Path("/copy"), {"{dir}": "/d"})
    assert len(placed) == len(words)
    assert all(a == b for a, b in zip(placed, words, strict=True) if "/" not in b and b != "..")
