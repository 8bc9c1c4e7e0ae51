"""What may come in between: another that is at it too, a disk that is full, a store that loses."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast._errors import FolderError, MirrorError
from holdfast._run.resume.from_mirror import MirrorClient
from holdfast._settings import Settings
from holdfast._store.folder.attempts import find_run, write_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.mirror.child import Service
from holdfast._store.mirror.fetch import fetch_newest
from holdfast._store.mirror.index import Holder, MirrorIndex
from holdfast._store.mirror.store import FolderStore
from holdfast._store.mirror.uploader import Upload, Uploader
from holdfast._store.read.verify import find_damage
from holdfast._tools import mirror as by_hand
from tests.cli.command import holdfast, succeed
from tests.crash.small_disk import SmallDisk, mount_small_disk
from tests.linked_files import make_checkpoint
from tests.mirror.conftest import PIECE_BYTES, fetch, push
from tests.support import journal_events

NAME = "step-{:012d}-a0001"


def _make(folder: Path, step: int) -> Path:
    weights = np.random.default_rng(step).standard_normal(200_000)
    return make_checkpoint(folder, step, [{"weights": weights}])


class Meddled(FolderStore):
    """Another does something when a piece is read or written."""

    def __init__(self, folder: Path, meddle: Callable[[], None]) -> None:
        super().__init__(folder)
        self._meddle = meddle

    def get(self, key: str) -> bytes:
        if key.startswith("pieces/"):
            self._meddle()
        return super().get(key)

    def put(self, key: str, data: bytes) -> None:
        if key.startswith("pieces/"):
            self._meddle()
        super().put(key, data)


def _uploader(
    folder: Path,
    mirror: Path,
    monkeypatch: pytest.MonkeyPatch,
    meddle: Callable[[], None] = lambda: None,
    attempt: int = 1,
) -> Uploader:
    layout, run_id = find_run(folder)
    monkeypatch.setattr(
        "holdfast._store.mirror.uploader.open_store", lambda address: Meddled(Path(address), meddle)
    )
    service = Service(str(layout.folder), run_id, attempt, str(mirror), 1, None)
    return Uploader(service, lambda *_, **__: None)


def test_what_the_old_machine_removes_while_it_is_fetched_is_not_taken_for_damage(
    folder, mirror, tmp_path
):
    _make(folder, 10)
    push(folder, mirror)
    known = json.loads((folder / "mirror.json").read_text())
    (folder / "mirror.json").write_text(json.dumps({**known, "keep_last": 1}))
    pushed: list[int] = []

    def go_on() -> None:
        if not pushed:
            pushed.append(20)
            _make(folder, 20)
            push(folder, mirror)

    damaged: list[str] = []
    layout = RunLayout(tmp_path / "new")
    found = fetch_newest(
        MirrorIndex(Meddled(mirror, go_on)), layout, lambda name, _: damaged.append(name)
    )
    assert found is not None
    assert (found.step, damaged) == (20, [])
    assert find_damage(layout.checkpoints / found.name) == []


def test_the_uploader_of_an_earlier_life_yields_to_that_of_a_later_one(folder, mirror, monkeypatch):
    _make(folder, 10)
    layout, run_id = find_run(folder)
    later = Holder.of(layout, run_id, 2)

    def begin() -> None:
        MirrorIndex(FolderStore(mirror)).enter(later)

    _uploader(folder, mirror, monkeypatch, begin).serve()  # it leaves by itself
    assert not list(mirror.glob("checkpoints/*/manifest.json"))
    assert not journal_events(folder, "mirror-trouble")


def test_of_two_runs_that_come_to_an_empty_address_at_once_one_has_it(folder, mirror, monkeypatch):
    _make(folder, 10)

    def come_too() -> None:
        (mirror / "run.json").write_text('{"run_id": "another"}')

    with pytest.raises(MirrorError, match="another run"):
        _uploader(folder, mirror, monkeypatch, come_too).copy_newest()
    assert not list(mirror.glob("checkpoints/*/manifest.json"))


def test_a_mirror_that_was_emptied_by_hand_is_filled_again(folder, mirror, monkeypatch):
    _make(folder, 10)
    uploader = _uploader(folder, mirror, monkeypatch)
    assert uploader.copy_newest()
    shutil.rmtree(mirror)
    _make(folder, 20)
    assert uploader.copy_newest()
    assert "step 20" in succeed("mirror", folder.with_name("new"), "--fetch", "--at", mirror)


def test_a_piece_that_the_store_has_lost_is_missed_and_sent_again(folder, mirror, monkeypatch):
    _make(folder, 10)
    uploader = _uploader(folder, mirror, monkeypatch)
    assert uploader.copy_newest()
    lost = sorted((mirror / "pieces").iterdir())[0]
    lost.unlink()
    _make(folder, 20)
    uploader = _uploader(folder, mirror, monkeypatch)
    uploader._service.__dict__["keep_last"] = 2
    with pytest.raises(OSError, match="has lost pieces of step-000000000010"):
        uploader.copy_newest()
    assert {path.name for path in (mirror / "checkpoints").iterdir()} == {NAME.format(20)}
    fetch(folder.with_name("new"), mirror)


def test_a_mirror_without_room_is_not_filled_with_pieces_of_what_never_fitted(
    folder, mirror, monkeypatch
):
    _make(folder, 10)
    is_full: list[bool] = []

    def fill() -> None:
        if is_full and len(list((mirror / "pieces").iterdir())) > 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    uploader = _uploader(folder, mirror, monkeypatch, fill)
    assert uploader.copy_newest()
    is_full.append(True)
    for step in (20, 30):
        _make(folder, step)
        with pytest.raises(OSError, match="No space"):
            uploader.copy_newest()
        assert len(list((mirror / "pieces").iterdir())) == 7  # those of step 10
    is_full.clear()
    assert uploader.copy_newest()
    assert {path.name for path in (mirror / "checkpoints").iterdir()} == {NAME.format(30)}


def test_what_a_killed_copy_has_half_written_goes(folder, mirror, monkeypatch):
    _make(folder, 10)
    uploader = _uploader(folder, mirror, monkeypatch)
    (mirror / "pieces").mkdir(parents=True)
    (mirror / "pieces/.x-1.1234-abcdef01.part").write_bytes(b"half")
    (mirror / "pieces/.nfs0001").write_bytes(b"held open")  # of the file system
    assert uploader.copy_newest()
    assert [path.name for path in (mirror / "pieces").glob(".*")] == [".nfs0001"]


def test_a_store_is_not_asked_again_while_nothing_is_new(folder, mirror, monkeypatch):
    _make(folder, 10)
    uploader = _uploader(folder, mirror, monkeypatch)
    assert uploader.copy_newest()
    assert uploader.copy_newest()
    monkeypatch.setattr(FolderStore, "list", lambda *_: pytest.fail("it was asked"))
    assert uploader.copy_newest()


def test_manifests_that_are_all_damaged_keep_a_run_from_beginning_anew(folder, mirror, train):
    _make(folder, 10)
    push(folder, mirror)
    shutil.rmtree(folder)
    next(mirror.glob("checkpoints/*/manifest.json")).write_bytes(b"{")
    trainer = train(folder, mirror, "--total", 10)
    assert trainer.wait() != 0
    assert "none of the 1 checkpoints in this mirror is whole" in trainer.output


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    yield from mount_small_disk(tmp_path / "disk", "8m")


def test_a_disk_that_is_full_while_fetching_is_said_and_the_rest_comes_later(folder, mirror, disk):
    _make(folder, 10)
    push(folder, mirror)
    new = disk.place / "new"
    disk.fill(leave_bytes=1_000_000)
    refused = holdfast("mirror", new, "--fetch", "--at", mirror)
    assert refused.returncode != 0
    assert "there is no room for step 10 here: it has 1.6 MB" in refused.stderr
    assert "is not fetched again" in refused.stderr
    disk.make_room()
    fetch(new, mirror)


def test_a_disk_that_fills_up_in_the_middle_of_a_fetch_keeps_what_has_come(
    folder, mirror, tmp_path, monkeypatch
):
    _make(folder, 10)
    push(folder, mirror)
    layout = RunLayout(tmp_path / "new")
    written: list[int] = []
    pwrite = os.pwrite

    def fail(descriptor: int, data: bytes, offset: int) -> int:
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(offset)
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fail)
    index = MirrorIndex(FolderStore(mirror))
    with pytest.raises(MirrorError, match="there is no room for step 10"):
        fetch_newest(index, layout, pytest.fail)
    assert layout.checkpoint_folders() == []
    monkeypatch.setattr(os, "pwrite", pwrite)
    found = fetch_newest(index, layout, pytest.fail)
    assert found is not None
    assert found.size_bytes - found.came_bytes == 3 * PIECE_BYTES
    assert not layout.fetching_folders()


@pytest.mark.nightly  # the test above: a fetch that was cut goes on
def test_a_fetch_ends_with_the_process_that_asked_for_it(folder, mirror, train, tmp_path):
    _make(folder, 10)
    push(folder, mirror)
    fifo = next((mirror / "pieces").iterdir())
    kept = fifo.read_bytes()
    fifo.unlink()
    os.mkfifo(fifo)  # so that the fetch never ends by itself
    new = tmp_path / "new"
    trainer = train(new, mirror, "--total", 10)
    trainer.wait_for("fetching step 10")
    trainer.send(signal.SIGTERM)
    trainer.wait()
    fifo.unlink()
    fifo.write_bytes(kept)
    assert "its mirror has step 10" in succeed("status", new)
    assert "its mirror has step 10" in succeed("why", new)
    fetch(new, mirror)  # nobody holds the lock
    again = train(new, mirror, "--total", 12)
    assert again.wait() == 0, again.output
    assert "ready 10 10 3" in again.output


def test_what_is_here_already_is_not_said_to_have_come(folder, mirror):
    for step in (10, 20):
        made = _make(folder, step)
        before = set(mirror.glob("pieces/*"))
        push(folder, mirror)
    shutil.rmtree(made)
    min(set(mirror.glob("pieces/*")) - before).write_bytes(b"")
    damaged: list[str] = []
    with pytest.raises(FolderError, match="step 10 is here already"):
        by_hand.fetch(folder, str(mirror), None, lambda name, _: damaged.append(name))
    assert damaged == [NAME.format(20)]


def test_what_takes_long_is_heard_of_while_it_is_checked(folder, mirror, tmp_path):
    made = _make(folder, 10)
    heard: list[tuple[int, int]] = []

    def hear(*told: int) -> None:
        heard.append(told)

    index = MirrorIndex(FolderStore(mirror))
    layout, run_id = find_run(folder)
    index.enter(Holder.of(layout, run_id, 1))
    Upload(index, made, set(), hear).run(lambda: None)
    pieces = len(list((mirror / "pieces").iterdir()))
    assert len(heard) == 2 * pieces  # sent, and read back
    heard.clear()
    fetch_newest(index, RunLayout(tmp_path / "new"), pytest.fail, hear)
    assert len(heard) > pieces


def test_a_wait_lasts_while_what_was_sent_is_read_back(folder, mirror, monkeypatch):
    _make(folder, 10)
    layout = find_run(folder)[0]
    monkeypatch.setattr("holdfast._run.resume.from_mirror._STILL_SECONDS", 0.3)
    looks = itertools.count(1)

    def go_on() -> bool:
        number = next(looks)
        known = {"address": str(mirror), "under_way": {"done_bytes": 1}, "time": number}
        write_json(layout.mirror, known, durable=False)
        return False

    monkeypatch.setattr(MirrorClient, "_has", lambda *_: next(looks) > 24)
    assert MirrorClient(folder, Settings(mirror=mirror), 0)._wait(layout, 10, go_on)


def test_what_push_says_is_for_people_or_json(folder, mirror):
    _make(folder, 10)
    found = json.loads(succeed("mirror", folder, "--push", "--at", mirror, "--json"))
    assert [each["step"] for each in found["checkpoints"]] == [10]
    made = _make(folder, 20)
    data = bytearray((made / "rank-00000.safetensors").read_bytes())
    data[800_000] ^= 1
    (made / "rank-00000.safetensors").write_bytes(data)
    done = holdfast("mirror", folder, "--push")
    assert "is damaged" in done.stderr
    assert done.stdout == f"{folder}: step 10 is in {mirror}.\n"
    shutil.rmtree(folder / "checkpoints" / NAME.format(10))
    empty = holdfast("mirror", folder, "--push", "--at", mirror.with_name("other"))
    assert empty.returncode != 0
    assert "no checkpoint here is whole" in empty.stderr
    assert "Traceback" not in empty.stderr
