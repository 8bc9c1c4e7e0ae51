"""The uploader: waits for checkpoints, copies the newest whenever it is free, removes older ones.

It is a child of the keeper, which notifies it through its standard input. When that closes (the run
has ended, or the keeper was killed) it copies the newest checkpoint and exits. A failure of network
or store is reported once, and it tries again until that is over.

The order is the invariant of one copy: send the chunks that are missing, compare them with what the
store has, write the index, write the manifest. A copy that is cut at any stage is not a checkpoint,
and the next try finds the chunks that are there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from holdfast._environment import variables
from holdfast._errors import DamagedCheckpoint, MirrorError
from holdfast._store.commit.fault_points import fault_point
from holdfast._store.commit.retention import Kept, choose_kept, list_checkpoints
from holdfast._store.folder import journal
from holdfast._store.folder.attempts import write_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import is_on_line, is_void, void_steps
from holdfast._store.folder.plain_file import open_plain
from holdfast._store.format import manifest
from holdfast._store.format.checksum import digest
from holdfast._store.mirror.child import NO_ROOM, Service, describe_trouble
from holdfast._store.mirror.index import (
    CHECKPOINTS,
    CHUNKS,
    Followed,
    Holder,
    IndexedFile,
    MirrorIndex,
    PartsCheck,
    checkpoint_of,
    checks_of,
    checksum_of,
    chunk_key,
    encode_index,
    index_key,
    manifest_key,
    read_chunks,
    size_of,
)
from holdfast._store.mirror.store import StoredObject, open_store
from holdfast._store.read.files import open_file, place_of

_POLL_SECONDS = 10.0  # in case a notification of the keeper was lost
_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
_ALONE_SECONDS = 120.0  # without any progress, once the run has ended
_TELL_SECONDS = 2.0


class Uploader:
    """Copies the checkpoints of one run folder, one at a time."""

    def __init__(
        self, service: Service, tell: Callable[..., None], *, is_known: bool = True
    ) -> None:
        self._service = service
        self._tell = tell
        self._is_known = is_known  # as the run's mirror, which `status` shows
        self._layout = RunLayout(Path(service.folder))
        self._holder = Holder.of(self._layout, service.run_id, service.attempt)
        self._index: MirrorIndex | None = None
        self.is_kept_waiting = False  # by another process that copies from this folder
        self._verified: set[str] = set()
        self._broken: set[str] = set()  # checkpoints that are damaged in the run folder
        self._settled: object = None  # the state of the folder when everything was copied
        self._trouble = ""
        self._moved_at = time.monotonic()
        self._told_at = 0.0
        self.record: dict[str, Any] = {
            "address": service.address,
            "pid": os.getpid(),
            "attempt": service.attempt,
            "keep_last": service.keep_last,
            "best": service.best,
        }

    # -- The keeper's child ------------------------------------------------------------

    def serve(self) -> None:
        """Copy until the run has ended and all is copied, or cannot be."""
        failures, is_alone = 0, False
        while True:
            is_done = True
            try:
                is_done = self.copy_newest()
                failures = 0
                self._report_recovery()
            except Followed:
                return  # the later attempt reports on the mirror
            except MirrorError as error:
                self._report_trouble(str(error))
                return  # it belongs to another run folder, for good
            except Exception as error:  # noqa: BLE001  a store may raise anything: it is tried again
                failures += 1
                text = describe_trouble(self._service.address, error)
                if text != self._trouble:  # a store may be unreachable for days
                    traceback.print_exc()
                self._report_trouble(text)
            if failures or not is_done:
                pause = _PAUSES_SECONDS[min(failures, len(_PAUSES_SECONDS)) - 1] if failures else 0
                stalls = time.monotonic() - self._moved_at > _ALONE_SECONDS
                if is_alone and (stalls or self._layout.is_followed(self._service.attempt)):
                    return
            elif is_alone:
                return
            else:
                pause = _POLL_SECONDS
            is_alone = _wait_for_notification(pause, is_alone) or is_alone

    def copy_newest(self) -> bool:
        """Copy the newest checkpoint, or the best one; True if there is nothing left to do."""
        with locked(self._layout) as is_ours:
            self.is_kept_waiting = not is_ours
            if not is_ours:
                time.sleep(1.0)  # an earlier attempt, or a person, copies now
                return False
            here = [path.name for _, _, path in self._layout.checkpoint_folders()]
            if (state := (here, void_steps(self._layout))) == self._settled:
                return True  # ask no store needlessly: some charge for each request
            index = self._index
            if index is None:
                index = MirrorIndex(open_store(self._service.address))
                index.enter(self._holder)
                self._index = index
            if (wanted := self._next(index)) is not None:
                self._copy(index, wanted)
            # Not earlier: the chunks of a cut upload belong to no checkpoint yet.
            self._prune(index)
            if wanted is None:
                self._settled = state
            return wanted is None or self._next(index) is None

    # -- One checkpoint ---------------------------------------------------------------

    def _next(self, index: MirrorIndex) -> Kept | None:
        """The checkpoint to copy now: the newest before the best."""
        line = index.line(self._layout, self._service.attempt)
        own = [
            each
            for each in list_checkpoints(self._layout)
            if is_on_line(line, each.attempt, each.step) and each.path.name not in self._broken
        ]
        chosen = choose_kept(own, line, 1, self._service.best)
        there = {each.path.name for each in index.checkpoints()}
        wanted = (each for each in reversed(own) if each.path in chosen)
        return next((each for each in wanted if each.path.name not in there), None)

    def _copy(self, index: MirrorIndex, wanted: Kept) -> None:
        folder = wanted.path
        self._moved_at = began = time.monotonic()

        def progress(done: int, total: int) -> None:
            self._moved_at = now = time.monotonic()
            if now - self._told_at > _TELL_SECONDS:
                self._told_at = now
                step = wanted.step
                self._write_record({"step": step, "done_bytes": done, "total_bytes": total})

        def may_commit() -> None:
            index.enter(self._holder)  # again: the mirror may have been emptied by hand
            if is_void(void_steps(self._layout), wanted.attempt, wanted.step):
                # A rule has called it bad, and it was set aside.
                raise FileNotFoundError(str(folder))

        try:
            figures = Upload(index, folder, self._verified, progress).run(may_commit)
        except DamagedCheckpoint as error:
            if folder.exists():
                self._broken.add(folder.name)
                text = f"{error} It is not copied to {self._service.address}."
                journal.append(self._layout.journal, "mirror-trouble", why=text)
                self._tell("damaged", text=text)
            return
        except FileNotFoundError:
            if folder.exists():
                raise
            return  # the run has removed it: there is a newer one
        except OSError as error:
            if error.errno in NO_ROOM:
                # Else the chunks of repeated tries would keep it full.
                self._prune(index)
            raise
        figures["seconds"] = round(time.monotonic() - began, 3)
        journal.append(self._layout.journal, "mirrored", address=self._service.address, **figures)
        self._publish(index)
        self._tell("mirrored", **figures)

    def _prune(self, index: MirrorIndex) -> None:
        service = self._service
        gone = prune(index, self._holder, self._layout, service.keep_last, service.best)
        if gone:
            journal.append(self._layout.journal, "mirror-removed", names=sorted(gone))
        self._publish(index)

    # -- The record for `holdfast status` -------------------------------------------------

    def _publish(self, index: MirrorIndex) -> None:
        """Write what the mirror has; `holdfast status` reads it and asks no store."""
        held = index.checkpoints()
        self.record["checkpoints"] = [
            {
                "name": each.path.name,
                "step": each.step,
                "attempt": each.attempt,
                "size": index.size_bytes(each.path.name) or 0,
            }
            for each in held
        ]
        newest = index.head(held[-1].path.name).saved_at if held else None
        self.record["newest_saved_at"] = newest
        self._write_record()

    def _write_record(self, under_way: dict[str, int] | None = None) -> None:
        self.record |= {"time": time.time(), "under_way": under_way, "trouble": self._trouble}
        if self._is_known:
            with contextlib.suppress(OSError):
                write_json(self._layout.mirror, self.record, durable=False)

    def _report_trouble(self, text: str) -> None:
        if text == self._trouble:
            return
        self._trouble = text
        journal.append(self._layout.journal, "mirror-trouble", why=text)
        self._write_record()
        self._tell("trouble", text=text)

    def _report_recovery(self) -> None:
        if self._trouble:
            self._trouble = ""
            journal.append(self._layout.journal, "mirror-goes-on")
            self._write_record()
            self._tell("well")


@contextlib.contextmanager
def locked(layout: RunLayout, *, waits: bool = False) -> Iterator[bool]:
    """Whether no other process copies from this folder or fetches into it.

    With `waits` it waits until that is so. The lock ends with its process.
    """
    try:
        import fcntl
    except ImportError:  # Windows, where there is no keeper either
        yield True
        return
    descriptor = open_plain(layout.mirror_lock, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def tell(kind: str, **fields: Any) -> None:
    """Send a message to the parent; if it is gone, the journal has it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(json.dumps({"kind": kind, **fields}) + "\n")
        sys.stdout.flush()


def _wait_for_notification(seconds: float, is_alone: bool) -> bool:
    """Wait for a new checkpoint; True when the keeper is gone."""
    if is_alone:
        time.sleep(seconds)
        return True
    readable, _, _ = select.select([0], [], [], seconds)
    return bool(readable) and not os.read(0, 4096)


# -- One checkpoint --------------------------------------------------------------------------------


_CHUNK_BYTES = 16 << 20
THREADS = 4  # a store answers several requests at once; each holds a chunk in memory


class StoreDiffers(OSError):
    """The store does not return what it was given."""


class Upload:
    def __init__(
        self,
        index: MirrorIndex,
        folder: Path,
        verified: set[str],
        progress: Callable[[int, int], None],
    ) -> None:
        self._store = index.store
        self._folder = folder
        self._verified = verified  # chunks that this process knows to be complete there
        self._progress = progress
        self._chunk_bytes = variables.whole_number("HOLDFAST_MIRROR_PIECE_BYTES") or _CHUNK_BYTES
        self._sent: dict[str, str] = {}  # by key, the MD5 of what was sent
        self._done = self._total = 0  # bytes; without a lock, since they are only for display

    def run(self, may_commit: Callable[[], None]) -> dict[str, Any]:
        """Copy it; `may_commit` raises if it must not count any more. Returns what it took.

        FileNotFoundError if the run has removed it before all of its files were open.
        """
        raw = manifest.read_raw(self._folder)
        found = manifest.parse(raw, str(self._folder))
        checks = checks_of(found)
        self._total = sum(check.size_bytes for check in checks)
        indexed: list[IndexedFile] = []
        with contextlib.ExitStack() as stack:
            # Open all files first: the run may remove the folder during the upload.
            opened = []
            for check in checks:
                path = place_of(self._folder, check.name)
                if not self._folder.exists():
                    raise FileNotFoundError(str(self._folder))
                opened.append((check, open_file(path, check.size_bytes)))
                stack.callback(os.close, opened[-1][1])
            chunks = self._chunks(opened, self._store.list(CHUNKS), indexed)
            _in_threads(self._send_chunk, chunks)
        fault_point("mirror-sent")
        if self._sent:  # compare it with what the store reports, or returns
            held = self._store.list(CHUNKS)
            sent = ((key, held.get(key), md5) for key, md5 in self._sent.items())
            _in_threads(self._verify_chunk, sent)
        self._store.put(index_key(self._folder.name), encode_index(indexed))
        fault_point("mirror-indexed")
        may_commit()
        self._store.put(manifest_key(self._folder.name), raw)
        if self._store.get(manifest_key(self._folder.name)) != raw:
            raise StoreDiffers(f"{self._store.address} gives back another manifest")
        fault_point("mirror-committed")
        return {
            "step": found.step,
            "attempt": found.attempt,
            "name": self._folder.name,
            "size_bytes": self._total,
            "sent_bytes": sum(size_of(key) for key in self._sent),
        }

    def _chunks(
        self,
        opened: list[tuple[PartsCheck, int]],
        held: dict[str, StoredObject],
        indexed: list[IndexedFile],
    ) -> Iterator[tuple[str, bytes, StoredObject | None]]:
        """The chunks of all files, each checked; `indexed` gets what the files consist of."""
        size = self._chunk_bytes
        for check, descriptor in opened:
            checksums = []
            for data in read_chunks(descriptor, check.size_bytes, size):
                check.update(data)
                checksums.append(digest(data).hex())
                key = chunk_key(checksums[-1], len(data))
                yield key, data, held.get(key)
            check.finish()
            indexed.append(IndexedFile(check.name, check.size_bytes, size, tuple(checksums)))

    def _send_chunk(self, key: str, data: bytes, held: StoredObject | None) -> None:
        is_there = key in self._sent or (held is not None and key in self._verified)
        if not is_there:
            md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
            is_there = held is not None and self._is_whole(key, held, md5)
            if not is_there:
                self._store.put(key, data)
                self._sent[key] = md5
        self._done += len(data)
        self._progress(self._done, self._total)
        if not is_there:
            fault_point("mirror-piece")

    def _is_whole(self, key: str, held: StoredObject, md5: str) -> bool:
        """Whether the store has the right bytes for a key: by its own MD5, or read back."""
        if held.size_bytes != size_of(key):
            return False
        # Tags of encrypted objects look like an MD5 but are not: then it is read back too.
        if held.md5 != md5:
            try:
                found = self._store.get(key)
            except FileNotFoundError:
                return False
            if digest(found).hex() != checksum_of(key):
                return False
        self._verified.add(key)
        return True

    def _verify_chunk(self, key: str, held: StoredObject | None, md5: str) -> None:
        if held is None or not self._is_whole(key, held, md5):
            self._store.remove([key])  # so that the next try sends it again
            raise StoreDiffers(f"{self._store.address} has other bytes for {key} than it was sent")
        self._progress(self._done, self._total)  # reading it all back may take minutes


def _in_threads(work: Callable[..., None], calls: Iterable[tuple[Any, ...]]) -> None:
    """Make the calls in a few threads, a few ahead at a time, which bounds the memory."""
    with ThreadPoolExecutor(THREADS) as pool:
        begun: deque[Future[None]] = deque()
        for arguments in calls:
            if len(begun) > THREADS:
                begun.popleft().result()
            begun.append(pool.submit(work, *arguments))
        for each in begun:
            each.result()


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
        fault_point("mirror-half-removed")
        index.store.remove([index_key(name)])
    if not index.strange:  # else the chunks that those need are unknown
        # Chunks that no checkpoint needs, of removed checkpoints and unfinished uploads.
        listed = index.store.list(CHECKPOINTS)
        complete = {checkpoint_of(key) for key in listed}
        stray = [key for key in listed if key.split("/")[1] not in complete]
        idle = [key for key in index.store.list(CHUNKS) if key not in needed]
        with contextlib.suppress(FileNotFoundError):
            index.store.remove([*stray, *idle])
    index.drop_old_claims(holder)
    if lost:
        raise StoreDiffers(f"{index.store.address} has lost pieces of {', '.join(lost)}")
    return gone
