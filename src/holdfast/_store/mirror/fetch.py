"""A checkpoint is fetched from a mirror: every chunk is checked, and the name comes last.

After a cut only the missing chunks are fetched: the folder in which a checkpoint is put together
stays, and a chunk in it that fits its checksum is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast._errors import DamagedCheckpoint, FolderError, HoldfastError, MirrorError
from holdfast._store.commit.fault_points import fault_point
from holdfast._store.commit.retention import Kept
from holdfast._store.folder.atomic import publish_folder, remove_folder, sync_folder, write_atomic
from holdfast._store.folder.layout import MANIFEST, RunLayout
from holdfast._store.folder.lineage import is_on_line
from holdfast._store.folder.plain_file import open_plain
from holdfast._store.format import manifest
from holdfast._store.format.checksum import digest
from holdfast._store.mirror.child import NO_ROOM, Service, describe_trouble, why
from holdfast._store.mirror.index import (
    IndexedFile,
    MirrorIndex,
    checksum_of,
    manifest_key,
    read_at,
)
from holdfast._store.mirror.store import MirrorStore, open_store
from holdfast._store.mirror.uploader import THREADS, Uploader, locked, tell
from holdfast._store.read.files import place_of
from holdfast._store.read.verify import check_file
from holdfast._text import size as in_words

_PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 0.0)


@dataclass(frozen=True)
class Fetched:
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
    try:
        raw = index.store.get(manifest_key(name))
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{name}: the manifest is missing.") from error
    files = manifest.parse(raw, f"{index.store.address}: {name}").files
    sizes = dict(pair for file in files for pair in file.all_files)
    indexed = [file for file in index.files(name) if file.name in sizes]
    if {file.name: file.size_bytes for file in indexed} != sizes:
        raise DamagedCheckpoint(f"{name}: the index and the manifest differ.")
    total = sum(sizes.values())
    part = layout.fetching(final)
    came = done = 0

    def arrived(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes  # without a lock: a lost update only delays the display
        progress(done, total)

    with _room_for(layout, wanted.step, total, part):
        part.mkdir(parents=True, exist_ok=True)
        for found in indexed:
            came += _fetch_file(index.store, place_of(part, found.name), found, arrived)
        for file in files:
            # The waiting process would take silence for a hang.
            if damage := check_file(part, file, lambda: progress(total, total)):
                raise DamagedCheckpoint(f"{name}/{file.name}: {damage[0]}.")
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
    store: MirrorStore, path: Path, file: IndexedFile, arrived: Callable[[int], None]
) -> int:
    """Fill a file with its chunks; returns how many bytes were fetched."""
    descriptor = open_plain(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if os.fstat(descriptor).st_size != file.size_bytes:
            os.ftruncate(descriptor, file.size_bytes)

        def fetch_chunk(chunk: tuple[str, int, int]) -> int:
            key, offset, size = chunk
            came = 0
            if digest(read_at(descriptor, offset, size)).hex() != checksum_of(key):
                data = _get(store, key)
                if len(data) != size or digest(data).hex() != checksum_of(key):
                    raise DamagedCheckpoint(f"{store.address}: {key} is damaged.")
                while came < size:
                    came += os.pwrite(descriptor, memoryview(data)[came:], offset + came)
                fault_point("mirror-fetched-piece")
            arrived(size)
            return came

        with ThreadPoolExecutor(THREADS) as pool:
            came = sum(pool.map(fetch_chunk, file.chunks()))
        os.fsync(descriptor)
        return came
    finally:
        os.close(descriptor)


def _get(store: MirrorStore, key: str) -> bytes:
    """A chunk, in spite of a network that fails now and then."""
    for pause in _PAUSES_SECONDS:
        try:
            return store.get(key)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{store.address}: {key} is missing.") from error
        except PermissionError:
            raise
        except Exception as error:
            if not pause:
                raise
            print(f"{key}: {why(error)}; trying again in {pause} s", file=sys.stderr)
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


# -- The process that uses a store; `child.py` starts it ---------------------------------------
# It sends messages as lines of JSON on its standard output; all else goes into a log.

_TELL_SECONDS = 1.0
# When memory runs out, the copy must be killed before the training.
_OOM_SCORE = 300
# Less than a worker of a data loader, but still progress where all cores are busy.
_NICE = 5


def main(config_text: str) -> None:
    config = json.loads(config_text)
    os.chdir("/")
    with contextlib.suppress(OSError, ValueError):
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(min(1000, int(score.read_text()) + _OOM_SCORE)))
    if config["task"] == "serve":
        os.nice(_NICE)  # not where a start waits for it
        Uploader(Service(**config["service"]), tell).serve()
        return
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _look_or_fetch(config)
    except HoldfastError as error:
        tell("failed", text=str(error))
    except Exception as error:  # noqa: BLE001  a store may raise anything: the parent is told
        traceback.print_exc()
        tell("failed", text=describe_trouble(config["address"], error))


def _end_with_parent() -> None:
    """The parent is gone, perhaps by a signal: the next start must not find this process."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(1)


def _look_or_fetch(config: dict[str, Any]) -> None:
    index = MirrorIndex(open_store(config["address"]))
    run_id = index.identity()
    if run_id is None:
        tell("empty")
        return
    if config.get("run_id") not in (None, run_id):
        tell("other")  # the uploader will say so
        return
    found = candidates(index)
    newest = found[0].step if found else None
    tell("held", run_id=run_id, attempts=index.newest_attempt(), newest=newest)
    if config["task"] == "look":
        return
    told_at = 0.0
    damaged = []

    def progress(done: int, total: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at > _TELL_SECONDS:
            told_at = time.monotonic()
            tell("under-way", done_bytes=done, total_bytes=total)

    def tell_damage(name: str, text: str) -> None:
        damaged.append(name)
        tell("damaged", name=name, text=text)

    layout = RunLayout(Path(config["folder"]))
    with locked(layout, waits=True):
        done = fetch_newest(index, layout, tell_damage, progress)
    if done is not None:
        tell("fetched", **vars(done))
    else:
        # Checkpoints that cannot be read still show that the run has begun.
        tell("nothing", damaged=len({*damaged, *index.damaged}), strange=len(index.strange))
