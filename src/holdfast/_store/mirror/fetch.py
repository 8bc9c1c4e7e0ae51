"""A checkpoint comes back from the mirror: every piece checked, and whole before it has its name.

What came before a cut need not come again: the folder in which a checkpoint is put together
stays, and a stretch that fits its checksum is there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from holdfast._errors import DamagedCheckpoint, FolderError, MirrorError
from holdfast._store.commit.fault_points import pass_point
from holdfast._store.commit.retention import Kept
from holdfast._store.folder.atomic import publish_folder, remove_folder, sync_folder, write_atomic
from holdfast._store.folder.layout import MANIFEST, RunLayout
from holdfast._store.folder.lineage import is_on_line
from holdfast._store.folder.plain_file import open_plain
from holdfast._store.format.checksum import digest
from holdfast._store.mirror.chunks import (
    IndexedFile,
    PartsCheck,
    StoredFile,
    files_of,
    read_at,
    read_stretches,
)
from holdfast._store.mirror.index import Shelf
from holdfast._store.mirror.protocol import NO_ROOM, why
from holdfast._store.mirror.store import Store
from holdfast._store.mirror.upload import THREADS, checksum_of
from holdfast._store.read.files import place_of
from holdfast._text import size as in_words

_PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class Fetched:
    """A checkpoint that is in the run folder now."""

    name: str
    step: int
    attempt: int
    size_bytes: int
    came_bytes: int  # the rest was there from a try before
    seconds: float


def candidates(shelf: Shelf) -> list[Kept]:
    """The checkpoints that lead to the newest life known here, the newest first."""
    held = shelf.checkpoints()
    newest = max((each.attempt for each in held), default=0)
    line = shelf.line(None, newest)
    return [each for each in reversed(held) if is_on_line(line, each.attempt, each.step)]


def fetch_newest(
    shelf: Shelf,
    layout: RunLayout,
    tell_damage: Callable[[str, str], None],
    progress: Callable[[int, int], None] = lambda *_: None,
    step: int | None = None,
) -> Fetched | None:
    """The newest that is whole, or that of a step, in the run folder; None if none is."""
    tried: set[str] = set()
    while True:
        # Anew each time: where the old machine still copies, it removes older ones meanwhile.
        wanted = [
            each
            for each in candidates(shelf)
            if each.path.name not in tried and step in (None, each.step)
        ]
        if not wanted:
            return None
        name = wanted[0].path.name
        tried.add(name)
        try:
            return _fetch(shelf, layout, wanted[0], layout.checkpoints / name, progress)
        except DamagedCheckpoint as error:
            if name in {each.path.name for each in shelf.checkpoints()}:
                tell_damage(name, str(error))


def _fetch(
    shelf: Shelf,
    layout: RunLayout,
    wanted: Kept,
    final: Path,
    progress: Callable[[int, int], None],
) -> Fetched:
    began = time.monotonic()
    name = final.name
    if final.exists():
        raise _is_here(layout, wanted)
    raw, manifest = shelf.whole(name)
    indexed = {file.name: file for file in shelf.index(name)}
    files = files_of(manifest)
    total = sum(file.size_bytes for file in files)
    part = layout.fetching(final)
    came, seen = 0, 0
    with _room_for(layout, wanted.step, total, part):
        part.mkdir(parents=True, exist_ok=True)
        for file in files:
            found = indexed.get(file.name)
            if found is None or found.size_bytes != file.size_bytes:
                raise DamagedCheckpoint(
                    f"{name}: the index and the manifest differ on {file.name}."
                )
            path, tell = place_of(part, file.name), _from(seen, total, progress)
            came += _fetch_file(shelf.store, path, found, tell)
            _check(path, file, tell)
            seen += file.size_bytes
        pass_point("mirror-fetched")
        write_atomic(part / MANIFEST, raw)
        sync_folder(part)
    pass_point("mirror-before-publish")
    if not publish_folder(part, final):
        raise _is_here(layout, wanted)
    for leftover in layout.fetching_folders():
        remove_folder(leftover)  # of one that was damaged, or that is older
    seconds = time.monotonic() - began
    return Fetched(name, wanted.step, wanted.attempt, total, came, seconds)


def _is_here(layout: RunLayout, wanted: Kept) -> FolderError:
    return FolderError(f"{layout.folder}: step {wanted.step} is here already.")


@contextlib.contextmanager
def _room_for(layout: RunLayout, step: int, total: int, part: Path) -> Iterator[None]:
    """MirrorError if the disk is full, or is sure to be before the end."""

    def full(free: int) -> MirrorError:
        return MirrorError(
            f"{layout.folder}: there is no room for step {step} here: it has {in_words(total)}, "
            f"and {in_words(free)} are free.\nMake room, and start it again: what has come by "
            "then does not come again."
        )

    came = sum(entry.stat().st_blocks * 512 for entry in part.glob("*"))
    layout.checkpoints.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(layout.checkpoints).free
    if free + came < total:
        raise full(free)
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise full(shutil.disk_usage(layout.checkpoints).free) from error
        raise


def _from(before: int, total: int, progress: Callable[[int, int], None]) -> Callable[[int], None]:
    return lambda done: progress(before + done, total)


def _fetch_file(
    store: Store, path: Path, file: IndexedFile, progress: Callable[[int], None]
) -> int:
    """Fill a file with its pieces; returns how many bytes had to come for it."""
    descriptor = open_plain(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if os.fstat(descriptor).st_size != file.size_bytes:
            os.ftruncate(descriptor, file.size_bytes)
        done = [0]

        def bring(piece: tuple[str, int, int]) -> int:
            key, offset, size = piece
            came = 0
            if digest(read_at(descriptor, offset, size)).hex() != checksum_of(key):
                data = _get(store, key)
                if len(data) != size or digest(data).hex() != checksum_of(key):
                    raise DamagedCheckpoint(f"{store.address}: {key} is damaged.")
                came = len(data)
                _write_at(descriptor, data, offset)
                pass_point("mirror-fetched-piece")
            done[0] += size  # a count for those who look: to lose one does no harm
            progress(done[0])
            return came

        with ThreadPoolExecutor(THREADS) as pool:
            came = sum(pool.map(bring, file.pieces()))
        os.fsync(descriptor)
        return came
    finally:
        os.close(descriptor)


def _get(store: Store, key: str) -> bytes:
    """A piece, in spite of a network that fails now and then."""
    for pause in _PAUSES_SECONDS:
        try:
            return store.get(key)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{store.address}: {key} is missing.") from error
        except PermissionError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a store raises: the last one is told
            print(f"{key}: {why(error)}; trying again in {pause} s", file=sys.stderr)
            time.sleep(pause)  # for the store to come to itself; nobody else is to be heard here
    try:
        return store.get(key)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{store.address}: {key} is missing.") from error


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _check(path: Path, file: StoredFile, progress: Callable[[int], None]) -> None:
    """The file as it is on disk now, against the manifest."""
    check = PartsCheck(file)
    descriptor = open_plain(path)
    try:
        for data in read_stretches(descriptor, file.size_bytes, 8 << 20):
            check.see(data)
            progress(file.size_bytes)  # whoever waits must not take this for a hang
        check.finish()
    finally:
        os.close(descriptor)
