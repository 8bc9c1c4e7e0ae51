"""A checkpoint is fetched from a mirror: every chunk is checked, and the name comes last.

After a cut only the missing chunks are fetched: the folder in which a checkpoint is put together
stays, and a chunk in it that fits its checksum is complete.
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
from holdfast._store.commit.fault_points import fault_point
from holdfast._store.commit.retention import Kept
from holdfast._store.folder.atomic import publish_folder, remove_folder, sync_folder, write_atomic
from holdfast._store.folder.layout import MANIFEST, RunLayout
from holdfast._store.folder.lineage import is_on_line
from holdfast._store.folder.plain_file import open_plain
from holdfast._store.format.checksum import digest
from holdfast._store.mirror.child import NO_ROOM, why
from holdfast._store.mirror.index import (
    IndexedFile,
    MirrorIndex,
    PartsCheck,
    StoredFile,
    checksum_of,
    files_of,
    read_at,
    read_chunks,
)
from holdfast._store.mirror.store import MirrorStore
from holdfast._store.mirror.uploader import THREADS
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
    came_bytes: int  # the rest was there from an earlier try
    seconds: float


def candidates(index: MirrorIndex) -> list[Kept]:
    """The checkpoints that lead to the newest attempt known here, the newest first."""
    held = index.checkpoints()
    newest = max((each.attempt for each in held), default=0)
    line = index.line(None, newest)
    return [each for each in reversed(held) if is_on_line(line, each.attempt, each.step)]


def fetch_newest(
    index: MirrorIndex,
    layout: RunLayout,
    tell_damage: Callable[[str, str], None],
    progress: Callable[[int, int], None] = lambda *_: None,
    step: int | None = None,
) -> Fetched | None:
    """Fetch the newest intact checkpoint, or that of a step; None if there is none."""
    tried: set[str] = set()
    while True:
        # List again each time: the old machine may still copy and remove older ones.
        wanted = [
            each
            for each in candidates(index)
            if each.path.name not in tried and step in (None, each.step)
        ]
        if not wanted:
            return None
        name = wanted[0].path.name
        tried.add(name)
        try:
            return _fetch(index, layout, wanted[0], progress)
        except DamagedCheckpoint as error:
            if name in {each.path.name for each in index.checkpoints()}:
                tell_damage(name, str(error))


def _fetch(
    index: MirrorIndex, layout: RunLayout, wanted: Kept, progress: Callable[[int, int], None]
) -> Fetched:
    began = time.monotonic()
    name = wanted.path.name
    final = layout.checkpoints / name
    is_here = FolderError(f"{layout.folder}: step {wanted.step} is here already.")
    if final.exists():
        raise is_here
    raw, manifest = index.whole(name)
    indexed = {file.name: file for file in index.files(name)}
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
            path = place_of(part, file.name)

            def report(done: int, before: int = seen) -> None:
                progress(before + done, total)

            came += _fetch_file(index.store, path, found, report)
            _check(path, file, report)
            seen += file.size_bytes
        fault_point("mirror-fetched")
        write_atomic(part / MANIFEST, raw)
        sync_folder(part)
    fault_point("mirror-before-publish")
    if not publish_folder(part, final):
        raise is_here
    for leftover in layout.fetching_folders():
        remove_folder(leftover)  # of a checkpoint that was damaged, or that is older
    seconds = time.monotonic() - began
    return Fetched(name, wanted.step, wanted.attempt, total, came, seconds)


@contextlib.contextmanager
def _room_for(layout: RunLayout, step: int, total: int, part: Path) -> Iterator[None]:
    """MirrorError if the disk is full, or will be before the end."""

    def full(free: int) -> MirrorError:
        return MirrorError(
            f"{layout.folder}: there is no room for step {step} here: it has {in_words(total)}, "
            f"and {in_words(free)} are free.\nMake room, and start it again: what has "
            "arrived is not fetched again."
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


def _fetch_file(
    store: MirrorStore, path: Path, file: IndexedFile, progress: Callable[[int], None]
) -> int:
    """Fill a file with its chunks; returns how many bytes were fetched."""
    descriptor = open_plain(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if os.fstat(descriptor).st_size != file.size_bytes:
            os.ftruncate(descriptor, file.size_bytes)
        done = [0]

        def fetch_chunk(chunk: tuple[str, int, int]) -> int:
            key, offset, size = chunk
            came = 0
            if digest(read_at(descriptor, offset, size)).hex() != checksum_of(key):
                data = _get(store, key)
                if len(data) != size or digest(data).hex() != checksum_of(key):
                    raise DamagedCheckpoint(f"{store.address}: {key} is damaged.")
                came = len(data)
                _write_at(descriptor, data, offset)
                fault_point("mirror-fetched-piece")
            done[0] += size  # without a lock: a lost update only delays the display
            progress(done[0])
            return came

        with ThreadPoolExecutor(THREADS) as pool:
            came = sum(pool.map(fetch_chunk, file.chunks()))
        os.fsync(descriptor)
        return came
    finally:
        os.close(descriptor)


def _get(store: MirrorStore, key: str) -> bytes:
    """A chunk, in spite of a network that fails now and then."""
    pauses = list(_PAUSES_SECONDS)
    while True:
        try:
            return store.get(key)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{store.address}: {key} is missing.") from error
        except PermissionError:
            raise
        except Exception as error:
            if not pauses:
                raise
            pause = pauses.pop(0)
            print(f"{key}: {why(error)}; trying again in {pause} s", file=sys.stderr)
            time.sleep(pause)


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _check(path: Path, file: StoredFile, progress: Callable[[int], None]) -> None:
    check = PartsCheck(file)
    descriptor = open_plain(path)
    try:
        for data in read_chunks(descriptor, file.size_bytes, 8 << 20):
            check.update(data)
            progress(file.size_bytes)  # else the waiting process takes this for a hang
        check.finish()
    finally:
        os.close(descriptor)
