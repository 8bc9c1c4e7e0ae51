"""The files of a checkpoint, read at the speed of the disk and checked on the way.

Threads read large pieces, past the page cache if the system allows that and the bytes are not in
it already. Each part is hashed as its bytes arrive, so that checking takes no extra time beside a
disk. Of a linked file of an earlier checkpoint, only the parts that the manifest names are read.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import io
import itertools
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import xxhash

from holdfast._errors import DamagedCheckpoint, UnreadableCheckpoint
from holdfast._store.folder.plain_file import NotPlain, open_plain
from holdfast._store.format.checksum import digest
from holdfast._store.format.image import PAGE
from holdfast._store.format.manifest import DataFile, Part

# -- Pages of memory -------------------------------------------------------------------------

_LOWEST_BIT = bytes(value & 1 for value in range(256))  # the other bits are undefined


def ask_for_large_pages(mapped: mmap.mmap) -> None:
    """Huge pages: a first touch costs a fraction of that of small ones."""
    if hasattr(mmap, "MADV_HUGEPAGE") and len(mapped) >= 4 << 20:
        try:
            mapped.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return  # the kernel has none


def resident_pages(descriptor: int, size_bytes: int) -> bytes:
    """A byte for each page of a file: 1 if it is in the page cache."""
    count = -(-size_bytes // PAGE)
    if sys.platform != "linux" or mmap.PAGESIZE != PAGE or not count:
        return bytes(count)
    found = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        m = mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        return bytes(count)  # not on this file system, or no address space left
    with m:
        view = (ctypes.c_char * size_bytes).from_buffer(m)
        at, size = ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size_bytes)
        is_known = libc.mincore(at, size, found) == 0
        del view  # else the mapping cannot be closed
    return bytes(found).translate(_LOWEST_BIT) if is_known else bytes(count)


_PIECE_BYTES = 8 << 20
_CHUNK_BYTES = 16 << 20
_LEAST_THREADS = 4  # a disk serves several requests at once, on any number of cores
_MOST_THREADS = 8
_WORTH_PASSING_THE_CACHE = 4 << 20


def read_parts(folder: Path, file: DataFile) -> tuple[list[memoryview], list[memoryview]]:
    """The parts of a rank's image in order, checked; and the memory that they are in."""
    parts = [*file.parts] if file.wrapper is None else [*file.parts, file.wrapper]
    places: dict[str, list[int]] = {}
    for index, part in enumerate(parts):
        places.setdefault(part.file, []).append(index)
    views: list[memoryview] = [memoryview(b"")] * len(parts)
    buffers = []
    with contextlib.ExitStack() as stack:
        pieces: list[_FilePiece] = []
        for name, size_bytes in all_files(file):
            path = place_of(folder, name)
            numbers = places.get("" if name == file.name else name, [])
            source = stack.enter_context(_Source(path, size_bytes))
            buffers.append(source.buffer)
            for index in numbers:
                views[index] = source.view(parts[index])
            pieces += source.pieces([(parts[i], views[i]) for i in numbers])
        _read_all(pieces)
    return views[: len(file.parts)], buffers


def all_files(file: DataFile) -> list[tuple[str, int]]:
    """The names and sizes of the files that hold a rank's image."""
    return [(file.name, file.size_bytes), *file.linked]


def place_of(folder: Path, name: str) -> Path:
    """The path of a file of a checkpoint; a manifest may name none outside of its folder."""
    if Path(name).name != name or name in ("", "..") or "\0" in name:
        raise DamagedCheckpoint(f"{folder}: the manifest names a file that is none ({name!r}).")
    return folder / name


def open_file(path: Path, size_bytes: int, flags: int = os.O_RDONLY) -> int:
    """Open a file; DamagedCheckpoint if it is missing or has another size."""
    try:
        descriptor = open_plain(path, flags)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path}: is missing.") from error
    except OSError as error:
        raise cannot_read(path, error) from error
    size = os.fstat(descriptor).st_size
    if size != size_bytes:
        os.close(descriptor)
        raise DamagedCheckpoint(f"{path}: has {size} bytes, the manifest says {size_bytes}.")
    return descriptor


def cannot_read(path: Path, error: OSError) -> DamagedCheckpoint | UnreadableCheckpoint:
    """A bad block is damage; a mount, a permission or a limit may be temporary."""
    if error.errno == errno.EIO or isinstance(error, NotPlain):
        return DamagedCheckpoint(f"{path}: cannot be read ({error.strerror}).")
    return UnreadableCheckpoint(
        f"{path}: cannot be read ({error.strerror}).\nNothing was changed; make it readable first."
    )


def name_part(name: str) -> str:
    """The name of a byte range in messages."""
    return "the header" if name == "header" else f"tensor {name}"


def read_range(descriptor: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill a view with the bytes from an offset on."""
    done = 0
    while done < view.nbytes:
        piece = view[done : done + _CHUNK_BYTES]
        try:
            if hasattr(os, "preadv"):
                count = os.preadv(descriptor, [piece], offset + done)
            else:  # Windows
                with io.FileIO(open_plain(path)) as file:
                    file.seek(offset + done)
                    count = file.readinto(piece) or 0
        except OSError as error:
            raise cannot_read(path, error) from error
        if count == 0:
            raise DamagedCheckpoint(f"{path}: ends early.")
        done += count


class _Source:
    """One file, and a mapping of its size, of which only what is read uses memory."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._direct = -1
        self._buffered = open_file(path, size_bytes)
        mapped = mmap.mmap(-1, max(1, -(-size_bytes // PAGE)) * PAGE)
        ask_for_large_pages(mapped)
        self._whole = memoryview(mapped)
        self.buffer = self._whole[:size_bytes]

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._buffered)
        if self._direct >= 0:
            os.close(self._direct)

    def view(self, part: Part) -> memoryview:
        end = part.offset + part.size_bytes
        if not 0 <= part.offset <= end <= self.size_bytes:
            raise DamagedCheckpoint(f"{self.path}: {name_part(part.name)} is not in it.")
        return self.buffer[part.offset : end]

    def pieces(self, wanted: list[tuple[Part, memoryview]]) -> list[_FilePiece]:
        """The pieces to read for these parts; each knows the parts that it completes."""
        wanted = sorted(
            (pair for pair in wanted if pair[0].size_bytes), key=lambda pair: pair[0].offset
        )
        pieces = [_FilePiece(self, *span) for span in _spans([part for part, _ in wanted])]
        starts = [piece.start for piece in pieces]
        for part, view in wanted:
            first = bisect.bisect_right(starts, part.offset) - 1
            if part.offset + part.size_bytes <= pieces[first].end:
                pieces[first].whole.append((part, view))
                continue
            last = bisect.bisect_left(starts, part.offset + part.size_bytes) - 1
            long = _LongPart(self, part, view)
            for piece in pieces[first : last + 1]:
                piece.long.append(long)
        self._choose_how(pieces)
        return pieces

    def _choose_how(self, pieces: list[_FilePiece]) -> None:
        """Read directly what is not in the page cache, if the file system allows it."""
        if not hasattr(os, "O_DIRECT") or self.size_bytes < _WORTH_PASSING_THE_CACHE:
            return
        pages = resident_pages(self._buffered, self.size_bytes)
        with contextlib.suppress(OSError):  # refused by this file system
            self._direct = open_plain(self.path, os.O_RDONLY | os.O_DIRECT)
        for piece in pieces:
            held = pages[piece.start // PAGE : -(-piece.end // PAGE)]
            piece.is_direct = self._direct >= 0 and sum(held) * 2 < len(held)

    def fill(self, piece: _FilePiece) -> None:
        done = self._fill_directly(piece) if piece.is_direct else piece.start
        end = min(piece.end, self.size_bytes)
        if done < end:
            read_range(self._buffered, self._whole[done:end], done, self.path)

    def _fill_directly(self, piece: _FilePiece) -> int:
        """Read in whole pages; returns how far that went: the rest is read through the cache."""
        done = piece.start
        while done < min(piece.end, self.size_bytes):
            try:
                count = os.preadv(self._direct, [self._whole[done : piece.end]], done)
            except OSError as error:
                if error.errno == errno.EIO:
                    raise cannot_read(self.path, error) from error
                return done  # another alignment, or no direct reads here
            done += count
            if count == 0 or done % PAGE:
                return done
        return done


class _FilePiece:
    """A range of whole pages of a file, and the parts that begin and end in it."""

    def __init__(self, source: _Source, start: int, end: int) -> None:
        self.source = source
        self.start = start
        self.end = end
        self.is_direct = False
        self.whole: list[tuple[Part, memoryview]] = []
        self.long: list[_LongPart] = []

    def read(self) -> None:
        self.source.fill(self)
        for part, view in self.whole:
            _compare(self.source.path, part, digest(view))
        for long in self.long:
            long.arrived(max(self.start, long.start), min(self.end, long.end))


class _LongPart:
    """A part that arrives in several pieces in any order, and is hashed in the right order."""

    def __init__(self, source: _Source, part: Part, view: memoryview) -> None:
        self.start, self.end = part.offset, part.offset + part.size_bytes
        self._source = source
        self._part = part
        self._view = view
        self._hasher = xxhash.xxh3_128()
        self._at = self.start
        self._arrived: dict[int, int] = {}
        self._hashing = threading.Lock()

    def arrived(self, start: int, end: int) -> None:
        self._arrived[start] = end
        # One thread hashes; the others go on reading. Check again after releasing the lock: what
        # arrived in between found it taken.
        while self._at in self._arrived and self._hashing.acquire(blocking=False):
            try:
                while (last := self._arrived.pop(self._at, None)) is not None:
                    self._hasher.update(self._view[self._at - self.start : last - self.start])
                    self._at = last
                    if last == self.end:
                        _compare(self._source.path, self._part, self._hasher.digest())
            finally:
                self._hashing.release()


def _spans(parts: list[Part]) -> Iterator[tuple[int, int]]:
    """The pages of these parts, in pieces; gaps between parts are not read."""
    start = end = 0
    for part in parts:
        first, last = part.offset // PAGE * PAGE, -(-(part.offset + part.size_bytes) // PAGE) * PAGE
        if first > end:
            yield from _cut(start, end)
            start = first
        end = max(end, last)
    yield from _cut(start, end)


def _cut(start: int, end: int) -> Iterator[tuple[int, int]]:
    for at in range(start, end, _PIECE_BYTES):
        yield at, min(at + _PIECE_BYTES, end)


def _compare(path: Path, part: Part, actual: bytes) -> None:
    if actual.hex() != part.checksum:
        raise DamagedCheckpoint(
            f"{path}: {name_part(part.name)} has checksum {actual.hex()[:8]}…, "
            f"the manifest says {part.checksum[:8]}…."
        )


def _read_all(pieces: list[_FilePiece]) -> None:
    """Read and check every piece, by several threads; the first error is raised here."""
    numbers = itertools.count()
    errors: list[Exception] = []

    def work() -> None:
        try:
            while not errors and (number := next(numbers)) < len(pieces):
                pieces[number].read()
        except Exception as error:  # noqa: BLE001  raised again in the caller's thread
            errors.append(error)

    most = min(_MOST_THREADS, max(_LEAST_THREADS, os.cpu_count() or 1), len(pieces))
    threads = [threading.Thread(target=work, daemon=True) for _ in range(most - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
