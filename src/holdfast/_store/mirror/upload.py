"""One checkpoint is copied to a mirror, and older ones are removed.

The order is the invariant: send the chunks that are missing, compare them with what the store has,
write the index, write the manifest. An upload that is cut at any stage is not a checkpoint, and the
next try finds the chunks that are there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from holdfast._environment import variables
from holdfast._errors import DamagedCheckpoint
from holdfast._store.commit.fault_points import pass_point
from holdfast._store.commit.retention import choose_kept
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import is_on_line, is_void, void_steps
from holdfast._store.format import manifest
from holdfast._store.format.checksum import digest
from holdfast._store.mirror.index import (
    CHECKPOINTS,
    CHUNKS,
    Holder,
    IndexedFile,
    MirrorIndex,
    PartsCheck,
    StoredFile,
    checkpoint_of,
    checksum_of,
    chunk_key,
    encode_index,
    files_of,
    index_key,
    manifest_key,
    read_chunks,
    size_of,
)
from holdfast._store.mirror.store import StoredObject
from holdfast._store.read.files import open_file, place_of

_CHUNK_BYTES = 16 << 20
THREADS = 4  # a store answers several requests at once; each holds a chunk in memory


class StoreDiffers(OSError):
    """The store does not return what it was given."""


class Upload:
    """The copying of one checkpoint folder."""

    def __init__(
        self,
        index: MirrorIndex,
        folder: Path,
        verified: set[str],
        progress: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        self._index = index
        self._store = index.store
        self._folder = folder
        self._chunk_bytes = variables.mirror_piece_bytes() or _CHUNK_BYTES
        self._verified = verified  # chunks that this process knows to be complete there
        self._progress = progress
        self._sent: dict[str, str] = {}  # by key, the MD5 of what was sent
        self._done = 0
        self._lock = threading.Lock()

    def run(self, may_commit: Callable[[], None]) -> dict[str, Any]:
        """Copy it; `may_commit` raises if it must not count any more. Returns what it took.

        FileNotFoundError if the run has removed it before all of its files were open.
        """
        raw = manifest.read_raw(self._folder)
        found = manifest.parse(raw, str(self._folder))
        files = files_of(found)
        total = sum(file.size_bytes for file in files)
        with contextlib.ExitStack() as stack:
            # Open all files first: the run may remove the folder during the upload.
            opened = []
            for file in files:
                path = place_of(self._folder, file.name)
                if not self._folder.exists():
                    raise FileNotFoundError(str(self._folder))
                opened.append((file, open_file(path, file.size_bytes)))
                stack.callback(os.close, opened[-1][1])
            held = self._store.list(CHUNKS)
            senders = stack.enter_context(_Senders())
            indexed = [self._send_file(*each, held, senders, total) for each in opened]
        pass_point("mirror-sent")
        self._verify_sent(total)
        self._store.put(index_key(self._folder.name), encode_index(indexed))
        pass_point("mirror-indexed")
        may_commit()
        self._store.put(manifest_key(self._folder.name), raw)
        if self._store.get(manifest_key(self._folder.name)) != raw:
            raise StoreDiffers(f"{self._store.address} gives back another manifest")
        pass_point("mirror-committed")
        self._index.remember(self._folder.name, found, indexed)
        return {
            "step": found.step,
            "attempt": found.attempt,
            "name": self._folder.name,
            "size_bytes": total,
            "sent_bytes": sum(size_of(key) for key in self._sent),
        }

    def _send_file(
        self,
        file: StoredFile,
        descriptor: int,
        held: dict[str, StoredObject],
        senders: _Senders,
        total: int,
    ) -> IndexedFile:
        check = PartsCheck(file)
        checksums = []
        for data in read_chunks(descriptor, file.size_bytes, self._chunk_bytes):
            check.update(data)
            checksum = digest(data).hex()
            checksums.append(checksum)
            key = chunk_key(checksum, len(data))
            senders.submit(self._send_chunk, key, data, held.get(key), total)
        check.finish()
        return IndexedFile(file.name, file.size_bytes, self._chunk_bytes, tuple(checksums))

    def _send_chunk(self, key: str, data: bytes, held: StoredObject | None, total: int) -> None:
        with self._lock:
            is_there = key in self._sent or (held is not None and key in self._verified)
        if not is_there:
            md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
            is_there = held is not None and self._is_whole(key, held, md5, data)
            if not is_there:
                self._store.put(key, data)
                with self._lock:
                    self._sent[key] = md5
        with self._lock:
            self._done += len(data)
            done = self._done
        self._progress(done, total)
        if not is_there:
            pass_point("mirror-piece")

    def _is_whole(self, key: str, held: StoredObject, md5: str, data: bytes | None = None) -> bool:
        """Whether the store has the right bytes for a key: by its own MD5, or read back."""
        if held.size_bytes != size_of(key):
            return False
        # Tags of encrypted objects look like an MD5 but are not: then it is read back too.
        if held.md5 != md5:
            try:
                found = self._store.get(key)
            except FileNotFoundError:
                return False
            if (found != data) if data is not None else (checksum_of(key) != digest(found).hex()):
                return False
        with self._lock:
            self._verified.add(key)
        return True

    def _verify_sent(self, total: int) -> None:
        """Compare all that was sent with what the store reports, or returns."""
        if not self._sent:
            return
        held = self._store.list(CHUNKS)
        with _Senders() as senders:
            for key, md5 in self._sent.items():
                senders.submit(self._verify_chunk, key, held.get(key), md5)
                self._progress(self._done, total)  # reading it all back may take minutes

    def _verify_chunk(self, key: str, held: StoredObject | None, md5: str) -> None:
        if held is None or not self._is_whole(key, held, md5):
            self._store.remove([key])  # so that the next try sends it again
            raise StoreDiffers(f"{self._store.address} has other bytes for {key} than it was sent")


class _Senders:
    """A few threads; `submit` waits while all are busy, which bounds the memory."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS)
        self._room = threading.Semaphore(THREADS + 1)
        self._futures: list[Future[None]] = []

    def __enter__(self) -> _Senders:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            self._raise_first()

    def submit(self, work: Callable[..., None], *arguments: object) -> None:
        self._raise_first()
        self._room.acquire()
        future = self._pool.submit(work, *arguments)
        future.add_done_callback(lambda _: self._room.release())
        self._futures.append(future)

    def _raise_first(self) -> None:
        done = [future for future in self._futures if future.done()]
        self._futures = [future for future in self._futures if future not in done]
        for future in done:
            future.result()


# -- Retention --------------------------------------------------------------------------------


def prune(
    index: MirrorIndex,
    holder: Holder,
    layout: RunLayout,
    keep_last: int,
    best: tuple[str, str] | None,
) -> list[str]:
    """Remove checkpoints that are not kept or are void; returns their names.

    StoreDiffers, after that, if one that is kept has lost chunks: it does not count any more.
    """
    held = index.checkpoints()
    line = index.line(layout, holder.attempt)
    voids = void_steps(layout)
    good = [each for each in held if not is_void(voids, each.attempt, each.step)]
    chosen = choose_kept(good, line, keep_last, best)
    own = [each for each in good if is_on_line(line, each.attempt, each.step)]
    oldest = min((each.attempt for each in own[-keep_last:]), default=0)
    is_full = len(own) >= keep_last
    # What an earlier attempt copied after this one had begun is on no lineage. Keep it only while
    # there is little else.
    kept = {
        each.path.name
        for each in good
        if each.path in chosen and (each in own or not is_full or each.attempt >= oldest)
    }
    gone = [each.path.name for each in held if each.path.name not in kept] + index.damaged
    there = index.store.list(CHUNKS)
    needed: set[str] = set()
    lost = []
    for name in sorted(kept):
        try:
            keys = {key for file in index.files(name) for key, _, _ in file.chunks()}
        except DamagedCheckpoint:
            lost.append(name)  # it cannot be fetched; if the run still has it, it is sent again
            continue
        if all(key in there and there[key].size_bytes == size_of(key) for key in keys):
            needed |= keys
        else:
            lost.append(name)
    index.check(holder)
    for name in [*gone, *lost]:
        # The manifest first: half a checkpoint must not look complete.
        index.store.remove([manifest_key(name)])
        pass_point("mirror-half-removed")
        index.store.remove([index_key(name)])
        index.forget(name)
    if not index.strange:  # else the chunks that those need are unknown
        _sweep(index, needed)
    index.drop_old_claims(holder)
    if lost:
        raise StoreDiffers(f"{index.store.address} has lost pieces of {', '.join(lost)}")
    return gone


def _sweep(index: MirrorIndex, needed: set[str]) -> None:
    """Remove chunks that no checkpoint needs, of removed checkpoints and unfinished uploads."""
    keys = index.store.list(CHECKPOINTS)
    present = {checkpoint_of(key) for key in keys}
    stray = [key for key in keys if key.split("/")[1] not in present]
    idle = [key for key in index.store.list(CHUNKS) if key not in needed]
    with contextlib.suppress(FileNotFoundError):
        index.store.remove([*stray, *idle])
    index.store.tidy(CHUNKS)
