"""The files of a checkpoint as a mirror sees them: stretches of bytes, each with its checksum.

A checkpoint's own parts are checked on the way. So what is damaged in the run folder is not
copied as if it were good, and what comes back is what was written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from holdfast._errors import DamagedCheckpoint, UnreadableCheckpoint
from holdfast._store.format.checksum import digest
from holdfast._store.format.manifest import Manifest, Part
from holdfast._store.mirror import keys
from holdfast._store.read.files import all_files, name_part

FORMAT = 1


@dataclass(frozen=True)
class StoredFile:
    """One file of a checkpoint folder, and what must be in it."""

    name: str
    size_bytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class IndexedFile:
    """One file as the mirror has it."""

    name: str
    size_bytes: int
    piece_bytes: int
    checksums: tuple[str, ...]

    def pieces(self) -> Iterator[tuple[str, int, int]]:
        """For each piece its key, where it begins in the file, and its size."""
        for number, checksum in enumerate(self.checksums):
            offset = number * self.piece_bytes
            size = min(self.piece_bytes, self.size_bytes - offset)
            yield keys.piece(checksum, size), offset, size


def files_of(manifest: Manifest) -> list[StoredFile]:
    """The files in a checkpoint's folder; what is linked is one of them."""
    found = []
    for file in manifest.files:
        parts = [*file.parts] if file.wrapper is None else [file.wrapper, *file.parts]
        for name, size_bytes in all_files(file):
            wanted = "" if name == file.name else name
            own = tuple(part for part in parts if part.file == wanted)
            found.append(StoredFile(name, size_bytes, own))
    return found


class PartsCheck:
    """Checks the parts of a file while its bytes go by, from first to last."""

    def __init__(self, file: StoredFile) -> None:
        self._file = file
        self._at = 0
        ordered = sorted(file.parts, key=lambda part: part.offset, reverse=True)
        self._waiting = [part for part in ordered if part.size_bytes]
        self._open: list[tuple[Part, Any]] = []

    def see(self, data: bytes | memoryview) -> None:
        """The next bytes; DamagedCheckpoint if a part that ends in them is not as written."""
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
                raise DamagedCheckpoint(f"{self._file.name}: {name_part(part.name)} is damaged.")
        self._open = still

    def finish(self) -> None:
        """All bytes have been seen: DamagedCheckpoint if a part has not."""
        if self._waiting or self._open or self._at != self._file.size_bytes:
            raise DamagedCheckpoint(
                f"{self._file.name}: ends after {self._at} bytes, the manifest says "
                f"{self._file.size_bytes}."
            )


def read_stretches(descriptor: int, size_bytes: int, piece_bytes: int) -> Iterator[bytes]:
    """A file from first to last, in pieces; the system need not remember them."""
    for offset in range(0, size_bytes, piece_bytes):
        wanted = min(piece_bytes, size_bytes - offset)
        data = read_at(descriptor, offset, wanted)
        if hasattr(os, "posix_fadvise"):
            # Training's data is worth more in the page cache than what was just copied.
            os.posix_fadvise(descriptor, offset, wanted, os.POSIX_FADV_DONTNEED)
        yield data


def read_at(descriptor: int, offset: int, wanted: int) -> bytes:
    """So many bytes of a file, or fewer where it ends."""
    pieces = []
    while wanted and (data := os.pread(descriptor, wanted, offset)):
        pieces.append(data)
        offset += len(data)
        wanted -= len(data)
    return b"".join(pieces)


def encode_index(files: list[IndexedFile]) -> bytes:
    """The index, with its own checksum in the first line."""
    rows = [
        {
            "name": file.name,
            "size_bytes": file.size_bytes,
            "piece_bytes": file.piece_bytes,
            "pieces": "".join(file.checksums),
        }
        for file in files
    ]
    body = json.dumps({"format": FORMAT, "files": rows}).encode()
    return digest(body).hex().encode() + b"\n" + body


def decode_index(data: bytes, where: str) -> list[IndexedFile]:
    """DamagedCheckpoint if it is none."""
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
