"""The parts of a mirror: stores, stretches, claims, settings."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast._errors import DamagedCheckpoint, MirrorError, SettingsError
from holdfast._settings import Settings
from holdfast._store.format.manifest import Part
from holdfast._store.mirror.child import ask, why
from holdfast._store.mirror.index import (
    Holder,
    IndexedFile,
    MirrorIndex,
    PartsCheck,
    TakenOver,
    decode_index,
    encode_index,
)
from holdfast._store.mirror.store import FolderStore, MirrorStore, MissingPlace, open_store


@pytest.fixture(params=["folder", "fsspec"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> MirrorStore:
    if request.param == "folder":
        return FolderStore(tmp_path / "mirror")
    pytest.importorskip("fsspec", reason="pip install 'holdfast[mirror]'")
    return open_store(f"memory://{tmp_path.name}/mirror")


def test_a_store_gives_back_what_it_was_given(store):
    store.put("pieces/a-3", b"abc")
    store.put("pieces/b-0", b"")
    store.put("run.json", b"{}")
    assert store.get("pieces/a-3") == b"abc"
    assert {key: held.size_bytes for key, held in store.list("pieces/").items()} == {
        "pieces/a-3": 3,
        "pieces/b-0": 0,
    }
    store.remove(["pieces/a-3", "pieces/none"])
    assert list(store.list("pieces/")) == ["pieces/b-0"]
    assert store.list("nothing/") == {}
    with pytest.raises(FileNotFoundError):
        store.get("pieces/a-3")


def test_what_cannot_be_listed_is_not_taken_for_empty(store, monkeypatch):
    store.put("checkpoints/a/manifest.json", b"{}")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if isinstance(store, FolderStore):
        monkeypatch.setattr(os, "scandir", fail)
    else:
        monkeypatch.setattr(store._files, "ls", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        MirrorIndex(store).checkpoints()


def test_a_disk_that_is_not_mounted_is_not_an_empty_mirror(tmp_path):
    store = FolderStore(tmp_path / "disk/mirror")
    with pytest.raises(MissingPlace, match="mount its disk"):
        MirrorIndex(store).identity()
    with pytest.raises(MissingPlace):
        store.put("run.json", b"{}")
    assert not list(tmp_path.iterdir())


def test_a_mirror_that_was_emptied_is_not_called_that_of_another_run(store):
    index, holder = MirrorIndex(store), Holder("one", 1, "a" * 16)
    index.enter(holder)
    store.remove(["run.json"])
    with pytest.raises(OSError, match=r"run\.json has gone"):
        index.check(holder)
    index.enter(holder)  # as before the next manifest


def test_what_a_site_prints_when_python_starts_is_no_answer(monkeypatch):
    told = ["sh", "-c", 'echo welcome; echo \'{"kind": "empty"}\'']
    monkeypatch.setattr(
        "holdfast._store.mirror.child.start_speaker",
        lambda *_: subprocess.Popen(told, stdin=subprocess.PIPE, stdout=subprocess.PIPE),
    )
    assert ask({"address": "x"}) == [{"kind": "empty"}]


def test_only_one_run_has_a_mirror(store):
    MirrorIndex(store).enter(Holder("one", 1, "a" * 16))
    with pytest.raises(MirrorError, match="another run"):
        MirrorIndex(store).enter(Holder("two", 1, "b" * 16))


def test_a_later_life_of_the_same_folder_goes_on_and_ends_the_earlier_ones_claim(store):
    index = MirrorIndex(store)
    index.enter(Holder("one", 1, "a" * 16))
    index.enter(Holder("one", 2, "a" * 16))
    index.drop_old_claims(Holder("one", 2, "a" * 16))
    assert index.claims() == {2: {"a" * 16}}


def test_a_folder_that_was_restored_takes_over_from_the_one_it_came_from(store):
    old, new = Holder("one", 1, "f" * 16), Holder("one", 2, "a" * 16, known_before=1)
    index = MirrorIndex(store)
    index.enter(old)
    index.enter(new)
    index.check(new)
    with pytest.raises(TakenOver, match="attempt 2"):
        index.check(old)
    with pytest.raises(TakenOver):  # started again where it was, it does not know of the other
        index.enter(Holder("one", 2, "f" * 16))
    with pytest.raises(TakenOver):  # nor with a higher number
        index.enter(Holder("one", 7, "f" * 16))


def test_of_two_folders_that_come_in_the_same_moment_one_goes_on(store):
    first, second = Holder("one", 2, "a" * 16), Holder("one", 2, "b" * 16)
    index = MirrorIndex(store)
    index.enter(first)
    store.put("attempts/0002." + "b" * 16 + ".json", b"{}")  # it had looked before
    index.check(first)
    with pytest.raises(TakenOver):
        index.check(second)


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 50), st.integers(0, 400))
def test_every_part_is_checked_however_the_bytes_come(blobs, step, flip):
    data = b"".join(blobs)
    parts, at = [], 0
    for number, blob in enumerate(blobs):
        checksum = xxhash.xxh3_128_hexdigest(blob)
        parts.append(Part(f"t{number}", at, len(blob), checksum))
        at += len(blob)
    _go_by(parts, len(data), data, step)
    if flip < len(data):
        wrong = data[:flip] + bytes([data[flip] ^ 1]) + data[flip + 1 :]
        with pytest.raises(DamagedCheckpoint):
            _go_by(parts, len(data), wrong, step)
        with pytest.raises(DamagedCheckpoint):
            _go_by(parts, len(data), data[:flip], step)


def _go_by(parts: list[Part], size_bytes: int, data: bytes, step: int) -> None:
    check = PartsCheck("x", size_bytes, parts)
    for at in range(0, len(data), step):
        check.update(data[at : at + step])
    check.finish()


def test_an_index_tells_what_was_put_into_it_and_a_flipped_bit_is_found():
    files = [IndexedFile("a", 25, 10, ("0" * 32, "1" * 32, "2" * 32)), IndexedFile("b", 0, 10, ())]
    data = encode_index(files)
    assert decode_index(data, "x") == files
    assert [size for _, _, size in files[0].chunks()] == [10, 10, 5]
    for at in range(len(data)):
        with pytest.raises(DamagedCheckpoint):
            decode_index(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "x")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mirror": ""}, "is not a place to copy"),
        ({"mirror": 3}, "is not a place to copy"),
        ({"mirror_keep_last": 0}, "1 or more"),
        ({"mirror_wait": "yes"}, "neither True nor False"),
        ({"mirror": "ftp://me:secret@host/x"}, "there is a password"),
    ],
)
def test_settings_refuse_at_once_what_cannot_be(given, words):
    with pytest.raises(SettingsError, match=words):
        Settings(**given)


def test_a_missing_package_is_named_with_its_install_line(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 's3fs>=2024\.2'"):
        Settings(mirror="s3://bucket/run")


def test_a_folder_is_known_from_the_root_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Settings(mirror="second").mirror_address == str(tmp_path / "second")
    assert Settings(mirror=tmp_path / "x").mirror_address == str(tmp_path / "x")


def test_the_same_trouble_has_the_same_words():
    assert why(ConnectionError("http://a/1")) == why(ConnectionError("http://a/2"))
    assert "refused" in why(PermissionError("The AWS Access Key Id you provided does not exist"))
    assert why(OSError(errno.EROFS, "Read-only", "/m/.a")) == why(
        OSError(errno.EROFS, "Read-only", "/m/.b")
    )
    assert "credentials" not in why(PermissionError(errno.EACCES, "Permission denied", "/m/.a"))
    assert why(ValueError("x " * 500)).endswith("…")
