"""One checkpoint goes to the mirror: what is missing of it, and the manifest last.

The order is the invariant: pieces, a look at what the store has of them, index, manifest. What
was cut at any stage is not a checkpoint, and the next try finds the pieces that are there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from holdfast._store.commit.fault_points import pass_point
from holdfast._store.format import manifest
from holdfast._store.format.checksum import digest
from holdfast._store.mirror import keys
from holdfast._store.mirror.chunks import (
    IndexedFile,
    PartsCheck,
    StoredFile,
    encode_index,
    files_of,
    read_stretches,
)
from holdfast._store.mirror.index import Shelf
from holdfast._store.mirror.store import Held, Store
from holdfast._store.read.files import open_file, place_of

THREADS = 4  # a store answers several requests at once; each holds a piece in memory


class StoreDiffers(OSError):
    """What the store gives back is not what it was given."""


@dataclass(frozen=True)
class Uploaded:
    """What it took to copy a checkpoint."""

    step: int
    attempt: int
    size_bytes: int
    sent_bytes: int
    there_bytes: int  # of pieces that the mirror had already


class Upload:
    """The copying of one checkpoint folder."""

    def __init__(
        self,
        shelf: Shelf,
        folder: Path,
        piece_bytes: int,
        verified: set[str],
        progress: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        self._shelf = shelf
        self._store: Store = shelf.store
        self._folder = folder
        self._piece_bytes = piece_bytes
        self._verified = verified  # pieces that this process has seen to be whole there
        self._progress = progress
        self._sent: dict[str, str] = {}  # by key, the MD5 of what was sent
        self._done = self._there = 0
        self._lock = threading.Lock()

    def run(self, may_commit: Callable[[], None]) -> Uploaded:
        """Copy it; `may_commit` raises if by now it should not count any more.

        FileNotFoundError if the run has removed it before all of its files were open.
        """
        raw = manifest.read_raw(self._folder)
        found = manifest.parse(raw, str(self._folder))
        files = files_of(found)
        total = sum(file.size_bytes for file in files)
        # Open before anything else: the run may remove the folder while this takes its time.
        with _opened(self._folder, files) as descriptors:
            held = self._store.list(keys.PIECES)
            with _Senders() as senders:
                indexed = [
                    self._send_file(file, descriptor, held, senders, total)
                    for file, descriptor in zip(files, descriptors, strict=True)
                ]
        pass_point("mirror-sent")
        self._look_at_sent(total)
        self._store.put(keys.index(self._folder.name), encode_index(indexed))
        pass_point("mirror-indexed")
        may_commit()
        self._store.put(keys.manifest(self._folder.name), raw)
        if self._store.get(keys.manifest(self._folder.name)) != raw:
            raise StoreDiffers(f"{self._store.address} gives back another manifest")
        pass_point("mirror-committed")
        self._shelf.remember(self._folder.name, found, indexed)
        sent = sum(size_of(key) for key in self._sent)
        return Uploaded(found.step, found.attempt, total, sent, self._there)

    def _send_file(
        self,
        file: StoredFile,
        descriptor: int,
        held: dict[str, Held],
        senders: _Senders,
        total: int,
    ) -> IndexedFile:
        check = PartsCheck(file)
        checksums = []
        for data in read_stretches(descriptor, file.size_bytes, self._piece_bytes):
            check.see(data)
            checksum = digest(data).hex()
            checksums.append(checksum)
            key = keys.piece(checksum, len(data))
            senders.submit(self._send_piece, key, data, held.get(key), total)
        check.finish()
        return IndexedFile(file.name, file.size_bytes, self._piece_bytes, tuple(checksums))

    def _send_piece(self, key: str, data: bytes, held: Held | None, total: int) -> None:
        with self._lock:
            is_known = key in self._sent or key in self._verified
        if is_known and (held is not None or key in self._sent):
            self._count(len(data), total, is_there=True)
            return
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        if held is not None and self._is_whole(key, held, md5, data):
            self._count(len(data), total, is_there=True)
            return
        self._store.put(key, data)
        with self._lock:
            self._sent[key] = md5
        self._count(len(data), total)
        pass_point("mirror-piece")

    def _is_whole(self, key: str, held: Held, md5: str, data: bytes | None = None) -> bool:
        """Whether the store has the bytes that belong to a key: by its own word, or read back."""
        if held.size_bytes != size_of(key):
            return False
        # Tags of encrypted objects look like an MD5, and are none: then it is read back too.
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

    def _look_at_sent(self, total: int) -> None:
        """Compare all that was sent with what the store says, or gives back."""
        if not self._sent:
            return
        held = self._store.list(keys.PIECES)
        with _Senders() as senders:
            for key, md5 in self._sent.items():
                senders.submit(self._refuse_other, key, held.get(key), md5)
                self._progress(self._done, total)  # to read all back may take minutes

    def _refuse_other(self, key: str, held: Held | None, md5: str) -> None:
        if held is None or not self._is_whole(key, held, md5):
            self._store.remove([key])  # so that the next try sends it again
            raise StoreDiffers(f"{self._store.address} has other bytes for {key} than it was sent")

    def _count(self, size: int, total: int, *, is_there: bool = False) -> None:
        with self._lock:
            self._done += size
            self._there += size if is_there else 0
            done = self._done
        self._progress(done, total)


class _Senders:
    """A few threads; whoever hands them work waits while all are busy, as memory is not endless."""

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
        """The error of what has failed so far; what has succeeded is forgotten."""
        done = [future for future in self._futures if future.done()]
        self._futures = [future for future in self._futures if future not in done]
        for future in done:
            future.result()


@contextlib.contextmanager
def _opened(folder: Path, files: list[StoredFile]) -> Iterator[list[int]]:
    with contextlib.ExitStack() as stack:
        found = []
        for file in files:
            path = place_of(folder, file.name)
            if not folder.exists():
                raise FileNotFoundError(str(folder))
            found.append(open_file(path, file.size_bytes))
            stack.callback(os.close, found[-1])
        yield found


def size_of(key: str) -> int:
    """The size of a piece, by its key."""
    return int(key.rpartition("-")[2])


def checksum_of(key: str) -> str:
    """The checksum of a piece, by its key."""
    return key.removeprefix(keys.PIECES).rpartition("-")[0]
