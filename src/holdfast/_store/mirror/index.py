"""What a mirror holds: its keys, its checkpoints in chunks, and whose it is.

run.json                               the run's id: a mirror belongs to one run
attempts/0002.9f2c41b07a5d3e68.json    a claim: which run folder copies here, in which attempt
pieces/CHECKSUM-SIZE                   a chunk of a file, named by its content
checkpoints/step-…-a0002/index.json    the chunks that its files are made of
checkpoints/step-…-a0002/manifest.json the same as in the run folder; written last

A run folder knows the claims of its own attempts, and those that were there when it was restored
from here. Any other claim is of a run folder that has gone its own way: then this one copies
nothing and removes nothing any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from holdfast._environment.processes.identity import host_name
from holdfast._errors import CheckpointError, DamagedCheckpoint, MirrorError, UnreadableCheckpoint
from holdfast._store.commit.retention import Kept
from holdfast._store.folder.attempts import known_origins, lives_elsewhere, read_json
from holdfast._store.folder.layout import MANIFEST, RunLayout
from holdfast._store.folder.lineage import Origin, trace_line
from holdfast._store.format import manifest
from holdfast._store.format.checksum import digest
from holdfast._store.format.manifest import Manifest, Part
from holdfast._store.mirror.store import MirrorStore
from holdfast._store.read.files import name_part

FORMAT = 1
IDENTITY = "run.json"
CLAIMS = "attempts/"
CLAIM = CLAIMS + "{:04d}.{}.json"
CHUNKS = "pieces/"
CHECKPOINTS = "checkpoints/"
_CLAIM = re.compile(r"attempts/(\d{4,})\.([0-9a-f]{16})\.json")
_MANIFEST = re.compile(rf"checkpoints/(step-\d{{12}}-a\d{{4,}}(?:-turn)?)/{re.escape(MANIFEST)}")


def chunk_key(checksum: str, size_bytes: int) -> str:
    return f"{CHUNKS}{checksum}-{size_bytes}"


def size_of(key: str) -> int:
    return int(key.rpartition("-")[2])


def checksum_of(key: str) -> str:
    return key.removeprefix(CHUNKS).rpartition("-")[0]


def index_key(checkpoint: str) -> str:
    return f"{CHECKPOINTS}{checkpoint}/index.json"


def manifest_key(checkpoint: str) -> str:
    return f"{CHECKPOINTS}{checkpoint}/{MANIFEST}"


def checkpoint_of(key: str) -> str | None:
    """The checkpoint whose manifest a key names; None for any other key."""
    match = _MANIFEST.fullmatch(key)
    return None if match is None else match[1]


# -- The files of a checkpoint as chunks ---------------------------------------------------
# A checkpoint's own parts are checked on the way: what is damaged in the run folder is not copied,
# and what comes back is what was written.


@dataclass(frozen=True)
class IndexedFile:
    name: str
    size_bytes: int
    piece_bytes: int
    checksums: tuple[str, ...]

    def chunks(self) -> Iterator[tuple[str, int, int]]:
        """The key of each chunk, where it begins in the file, and its size."""
        for number, checksum in enumerate(self.checksums):
            offset = number * self.piece_bytes
            size = min(self.piece_bytes, self.size_bytes - offset)
            yield chunk_key(checksum, size), offset, size


class PartsCheck:
    """Checks the parts of a file while it is read from first to last."""

    def __init__(self, name: str, size_bytes: int, parts: Iterable[Part]) -> None:
        self.name, self.size_bytes = name, size_bytes
        self._at = 0
        ordered = sorted(parts, key=lambda part: part.offset, reverse=True)
        self._waiting = [part for part in ordered if part.size_bytes]
        self._open: list[tuple[Part, Any]] = []

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes; DamagedCheckpoint if a part that ends in them is damaged."""
        view, start = memoryview(data), self._at
        self._at = end = start + len(view)
        while self._waiting and self._waiting[-1].offset < end:
            self._open.append((self._waiting.pop(), xxhash.xxh3_128()))
        still = []
        for part, hasher in self._open:
            last = part.offset + part.size_bytes
            hasher.update(view[max(0, part.offset - start) : last - start])
            if last > end:
                still.append((part, hasher))
            elif hasher.hexdigest() != part.checksum:
                raise DamagedCheckpoint(f"{self.name}: {name_part(part.name)} is damaged.")
        self._open = still

    def finish(self) -> None:
        """After the last byte: DamagedCheckpoint if a part is missing."""
        if self._waiting or self._open or self._at != self.size_bytes:
            raise DamagedCheckpoint(
                f"{self.name}: ends after {self._at} bytes, the manifest says {self.size_bytes}."
            )


def checks_of(manifest: Manifest) -> list[PartsCheck]:
    """One for each file in a checkpoint's folder, linked ones too."""
    return [
        PartsCheck(name, size, [p for p in file.all_parts if (p.file or file.name) == name])
        for file in manifest.files
        for name, size in file.all_files
    ]


def read_chunks(descriptor: int, size_bytes: int, piece_bytes: int) -> Iterator[bytes]:
    """A file from first to last, without leaving it in the page cache."""
    for offset in range(0, size_bytes, piece_bytes):
        wanted = min(piece_bytes, size_bytes - offset)
        data = read_at(descriptor, offset, wanted)
        if hasattr(os, "posix_fadvise"):
            # The training's data is worth more in the page cache than this copy.
            os.posix_fadvise(descriptor, offset, wanted, os.POSIX_FADV_DONTNEED)
        yield data


def read_at(descriptor: int, offset: int, wanted: int) -> bytes:
    """So many bytes of a file, fewer at its end."""
    pieces = []
    while wanted and (data := os.pread(descriptor, wanted, offset)):
        pieces.append(data)
        offset += len(data)
        wanted -= len(data)
    return b"".join(pieces)


def encode_index(files: list[IndexedFile]) -> bytes:
    """The index, with its own checksum in the first line."""
    names = ("name", "size_bytes", "piece_bytes")
    rows = [
        {**{name: getattr(file, name) for name in names}, "pieces": "".join(file.checksums)}
        for file in files
    ]
    body = json.dumps({"format": FORMAT, "files": rows}).encode()
    return digest(body).hex().encode() + b"\n" + body


def decode_index(data: bytes, where: str) -> list[IndexedFile]:
    """The files in an index; DamagedCheckpoint if it is damaged."""
    try:
        checksum, _, body = data.partition(b"\n")
        if digest(body).hex().encode() != checksum:
            raise ValueError("its own checksum does not fit")
        found = json.loads(body)
        if found["format"] != FORMAT:
            raise UnreadableCheckpoint(
                f"{where}: was copied by another version of holdfast.\n"
                "Use that version; nothing was changed."
            )
        return [_indexed(row) for row in found["files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{where}: the index is damaged ({error}).") from error


def _indexed(row: dict[str, Any]) -> IndexedFile:
    name, size, step = str(row["name"]), int(row["size_bytes"]), int(row["piece_bytes"])
    text = str(row["pieces"])
    checksums = tuple(text[at : at + 32] for at in range(0, len(text), 32))
    if size < 0 or step < 1 or len(checksums) != -(-size // step):
        raise ValueError(f"{name} has {len(checksums)} pieces")
    return IndexedFile(name, size, step, checksums)


# -- Claims and checkpoints ----------------------------------------------------------------


class TakenOver(MirrorError):
    """Another run folder copies to this mirror now."""


class Followed(MirrorError):
    """A later attempt of the same run folder copies now."""


@dataclass(frozen=True)
class Holder:
    """One run folder in one attempt, which copies to a mirror."""

    run_id: str
    attempt: int
    folder: str  # identifies this run folder among those of the same run
    known_before: int = 0  # the attempts that were known when it was restored from a mirror

    @classmethod
    def of(cls, layout: RunLayout, run_id: str, attempt: int) -> Holder:
        mark = f"{run_id} {read_json(layout.identity).get('created')}".encode()
        folder = hashlib.blake2b(mark, digest_size=8).hexdigest()
        return cls(run_id, attempt, folder, lives_elsewhere(layout))

    def knows(self, attempt: int, folder: str) -> bool:
        return folder == self.folder or attempt <= self.known_before


class MirrorIndex:
    """The checkpoints of a mirror; nothing is read twice."""

    def __init__(self, store: MirrorStore) -> None:
        self.store = store
        self._heads: dict[str, Manifest] = {}  # without their files
        self._indexes: dict[str, list[IndexedFile]] = {}
        # As of the last listing: checkpoints with a damaged manifest, and of another version.
        self.damaged: list[str] = []
        self.strange: list[str] = []

    def identity(self) -> str | None:
        """The id of the run whose mirror this is; None if it is empty."""
        try:
            found = json.loads(self.store.get(IDENTITY))
            return str(found["run_id"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise MirrorError(
                f"{self.store.address}: {IDENTITY} is not one of holdfast.\n"
                "Choose an address where nothing else is."
            ) from error

    def claims(self) -> dict[int, set[str]]:
        """Which run folders have copied here, by attempt."""
        found: dict[int, set[str]] = {}
        for key in self.store.list(CLAIMS):
            if (claim := _CLAIM.fullmatch(key)) is not None:
                found.setdefault(int(claim[1]), set()).add(claim[2])
        return found

    def newest_attempt(self) -> int:
        attempts = [each.attempt for each in self.checkpoints()]
        return max([0, *self.claims(), *attempts])

    # -- Who may copy here --------------------------------------------------------

    def enter(self, holder: Holder) -> None:
        """Begin to copy; MirrorError if the mirror belongs to another run or another folder."""
        if self.identity() is None:
            text = json.dumps({"run_id": holder.run_id, "created": time.time()}) + "\n"
            self.store.put(IDENTITY, text.encode())
        if holder.folder not in self.claims().get(holder.attempt, ()):
            self.check(holder, is_new=True)
            told = json.dumps({"host": host_name(), "time": time.time()}) + "\n"
            self.store.put(CLAIM.format(holder.attempt, holder.folder), told.encode())
        self.check(holder)

    def check(self, holder: Holder, *, is_new: bool = False) -> None:
        """TakenOver if another folder copies here by now; checked before each step of no return.

        A folder that `is_new` here must know all the others.
        """
        claims = self.claims()
        # Two runs may have started at an empty address in the same moment: one of them owns it.
        owner = self.identity()
        if owner is None:  # perhaps emptied by hand: the next copy claims it again
            raise OSError(f"{IDENTITY} has gone from it")
        if owner != holder.run_id:
            raise MirrorError(
                f"{self.store.address}: this is the mirror of another run.\n"
                "Give every run an address of its own."
            )
        # File locks may not work across machines: two attempts of one folder could both copy.
        own = [number for number, folders in claims.items() if holder.folder in folders]
        if max(own, default=0) > holder.attempt:
            raise Followed(f"{self.store.address}: attempt {max(own)} copies there now.")
        for attempt, folders in sorted(claims.items(), reverse=True):
            for folder in folders - {holder.folder}:
                # Of two that started in the same moment one goes on; both compute the same one.
                is_later = (attempt, holder.folder) > (holder.attempt, folder)
                is_rival = is_new or (attempt >= holder.attempt and is_later)
                if is_rival and not holder.knows(attempt, folder):
                    raise self._taken_over(attempt, folder)

    def drop_old_claims(self, holder: Holder) -> None:
        """Remove the claims of earlier attempts of the same folder."""
        self.store.remove(
            CLAIM.format(attempt, folder)
            for attempt, folders in self.claims().items()
            for folder in folders
            if attempt < holder.attempt and holder.knows(attempt, folder)
        )

    def _taken_over(self, attempt: int, folder: str) -> TakenOver:
        host = "another machine"
        # The name only improves the message.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            host = str(json.loads(self.store.get(CLAIM.format(attempt, folder)))["host"])
        return TakenOver(
            f"{self.store.address}: attempt {attempt} of this run, in a folder of {host}, has "
            "taken this mirror over; nothing is copied from here any more.\n"
            "To go on from what it has copied, start with an empty folder."
        )

    # -- What is there --------------------------------------------------------------

    def checkpoints(self) -> list[Kept]:
        """The complete checkpoints, oldest first; `path` is only the name."""
        found = []
        self.damaged, self.strange = [], []
        for key in self.store.list(CHECKPOINTS):
            name = checkpoint_of(key)
            if name is None:
                continue
            try:
                head = self.head(name)
            except FileNotFoundError:
                continue  # removed in between
            except DamagedCheckpoint:
                self.damaged.append(name)
            except CheckpointError:
                self.strange.append(name)
            else:
                path = Path(name)
                found.append(Kept(head.step, head.attempt, path, head.metrics, head.reason))
        for name in {*self._heads, *self._indexes} - {each.path.name for each in found}:
            self._heads.pop(name, None)
            self._indexes.pop(name, None)
        return sorted(found, key=lambda each: (each.attempt, each.step, each.path.name))

    def head(self, name: str) -> Manifest:
        """A checkpoint's manifest without its files."""
        if name not in self._heads:
            found = manifest.parse_head(self.store.get(manifest_key(name)), name)
            if not name.startswith(f"step-{found.step:012d}-a{found.attempt:04d}"):
                raise DamagedCheckpoint(f"{name}: the manifest is that of another step.")
            self._heads[name] = found
        return self._heads[name]

    def files(self, name: str) -> list[IndexedFile]:
        """The files of a checkpoint and their chunks; DamagedCheckpoint if that is not known."""
        if name not in self._indexes:
            where = f"{self.store.address}: {name}"
            try:
                data = self.store.get(index_key(name))
            except FileNotFoundError as error:
                raise DamagedCheckpoint(f"{where}: the index is missing.") from error
            self._indexes[name] = decode_index(data, where)
        return self._indexes[name]

    def size_bytes(self, name: str) -> int | None:
        try:
            return sum(file.size_bytes for file in self.files(name))
        except CheckpointError:
            return None

    def line(self, layout: RunLayout | None, newest: int) -> dict[int, int | None]:
        """Which (attempt, step) states lead to the newest attempt."""
        origins: dict[int, Origin] = {}
        for each in self.checkpoints():
            origins[each.attempt] = self._heads[each.path.name].origin
        if layout is not None:
            origins |= known_origins(layout)
        return trace_line(origins, newest)
