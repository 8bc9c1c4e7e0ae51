"""The files of a checkpoint, read at the speed of the disk and checked on the way.

Threads read large pieces, past the page cache if the system allows that and the bytes are not in
it already. Each part is hashed as its bytes arrive, so that checking takes no extra time beside a
disk. Of a linked file of an earlier checkpoint, only the parts that the manifest names are read.

A part can be read into memory of the caller: no other copy of it is made then. From the page cache
it is copied there by the kernel. A direct read needs whole pages, and goes through a small buffer.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import functools
import io
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from holdfast._errors import DamagedCheckpoint, UnreadableCheckpoint
from holdfast._store.folder.plain_file import NotPlain, open_plain
from holdfast._store.format.checksum import digest
from holdfast._store.format.image import PAGE
from holdfast._store.format.manifest import DataFile, Part
from holdfast._store.format.threads import run_all
from holdfast._store.read.checked_copy import InOrder, move

# -- Pages of memory -------------------------------------------------------------------------

_LOWEST_BIT = bytes(value & 1 for value in range(256))  # the other bits are undefined


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
_WORTH_A_READ_BYTES = 1 << 18  # smaller parts are read together, and then copied


class RankFiles:
    """The files that hold one rank's image; they stay open, so that a part can be read again."""

    def __init__(self, folder: Path, file: DataFile) -> None:
        self._file = file
        self._sources: dict[str, _Source] = {}
        for name, size_bytes in file.all_files:
            path = place_of(folder, name)
            self._sources["" if name == file.name else name] = _Source(path, size_bytes)

    def read(
        self, numbers: Sequence[int], targets: Mapping[int, memoryview] | None = None
    ) -> list[memoryview]:
        """Some parts of the image by their numbers, checked; in their targets, or in new memory.

        DamagedCheckpoint at the first wrong byte: targets may be half filled then.
        """
        parts, found = self._file.parts, dict[int, memoryview]()
        by_source: dict[str, list[_Wanted]] = {}
        for number in numbers:
            part = parts[number]
            source, target = self._sources[part.file], (targets or {}).get(number)
            found[number] = view = source.view(part) if target is None else target
            wanted = _Wanted(source, part, view, is_elsewhere=target is not None)
            by_source.setdefault(part.file, []).append(wanted)
        self._read_all(by_source)
        return [found[number] for number in numbers]

    def read_again(self, number: int) -> memoryview:
        """One part in new memory, checked."""
        part = self._file.parts[number]
        view = memoryview(bytearray(part.size_bytes))
        self.read([number], {number: view})
        return view

    def check_wrapper(self) -> None:
        """Check the header of a file that holds only some of the image."""
        wrapper = self._file.wrapper
        if wrapper is not None:
            source = self._sources[wrapper.file]
            wanted = _Wanted(source, wrapper, source.view(wrapper), is_elsewhere=False)
            self._read_all({wrapper.file: [wanted]})

    @property
    def memory(self) -> list[memoryview]:
        """All memory that contains what was read without a target."""
        return [source.buffer for source in self._sources.values()]

    def _read_all(self, by_source: Mapping[str, list[_Wanted]]) -> None:
        pieces: list[_FilePiece] = []
        for name, wanted in by_source.items():
            pieces += self._sources[name].pieces(wanted)
        rooms = threading.local()
        threads = min(_MOST_THREADS, max(_LEAST_THREADS, os.cpu_count() or 1))
        run_all([functools.partial(piece.read, rooms) for piece in pieces], threads)


def place_of(folder: Path, name: str) -> Path:
    """The path of a file of a checkpoint; a manifest may name none outside of its folder."""
    if Path(name).name != name or name in ("", "..") or "\0" in name:
        raise DamagedCheckpoint(
            f"{folder}: the manifest names something that is not a file ({name!r})."
        )
    return folder / name


def open_file(path: Path, size_bytes: int) -> int:
    """Open a file; DamagedCheckpoint if it is missing or has another size."""
    try:
        descriptor = open_plain(path)
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
        self._buffered = -1
        self._buffered = open_file(path, size_bytes)

    def __del__(self) -> None:
        for descriptor in (self._buffered, self._direct):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    @functools.cached_property
    def pages(self) -> memoryview:
        mapped = mmap.mmap(-1, max(1, -(-self.size_bytes // PAGE)) * PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE") and len(mapped) >= 4 << 20:
            # A first touch of huge pages costs a fraction of that of small ones.
            with contextlib.suppress(OSError):  # the kernel has none
                mapped.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(mapped)

    @property
    def buffer(self) -> memoryview:
        return self.pages[: self.size_bytes]

    def view(self, part: Part) -> memoryview:
        return self.buffer[part.offset : self._end_of(part)]

    def _end_of(self, part: Part) -> int:
        end = part.offset + part.size_bytes
        if not 0 <= part.offset <= end <= self.size_bytes:
            raise DamagedCheckpoint(f"{self.path}: {name_part(part.name)} is not in it.")
        return end

    def pieces(self, wanted: list[_Wanted]) -> list[_FilePiece]:
        """The pieces to read for these parts; each knows the parts that are in it."""
        wanted = sorted((each for each in wanted if each.size_bytes), key=lambda each: each.start)
        for each in wanted:
            self._end_of(each.part)
        pieces = [_FilePiece(self, *span) for span in _spans([each.part for each in wanted])]
        starts = [piece.start for piece in pieces]
        for each in wanted:
            first = bisect.bisect_right(starts, each.start) - 1
            last = bisect.bisect_left(starts, each.end) - 1
            if first != last:  # it arrives in several pieces in any order
                each.in_order = InOrder(each.view, each.compare)
            for piece in pieces[first : last + 1]:
                piece.wanted.append(each)
        self._choose_how(pieces)
        return pieces

    def _choose_how(self, pieces: list[_FilePiece]) -> None:
        """Read directly what is not in the page cache, if the file system allows it."""
        if not hasattr(os, "O_DIRECT") or self.size_bytes < _WORTH_PASSING_THE_CACHE:
            return
        pages = resident_pages(self._buffered, self.size_bytes)
        if self._direct < 0:
            with contextlib.suppress(OSError):  # refused by this file system
                self._direct = open_plain(self.path, os.O_RDONLY | os.O_DIRECT)
        for piece in pieces:
            held = pages[piece.start // PAGE : -(-piece.end // PAGE)]
            piece.is_direct = self._direct >= 0 and sum(held) * 2 < len(held)

    def fill(self, room: memoryview, piece: _FilePiece) -> None:
        """Fill memory of whole pages with a piece."""
        done = self._fill_directly(room, piece) if piece.is_direct else piece.start
        end = min(piece.end, self.size_bytes)
        if done < end:
            self.read_into(room[done - piece.start : end - piece.start], done)

    def read_into(self, view: memoryview, offset: int) -> None:
        read_range(self._buffered, view, offset, self.path)

    def _fill_directly(self, room: memoryview, piece: _FilePiece) -> int:
        """Read in whole pages; returns how far that went: the rest is read through the cache."""
        done = piece.start
        while done < min(piece.end, self.size_bytes):
            try:
                count = os.preadv(self._direct, [room[done - piece.start :]], done)
            except OSError as error:
                if error.errno == errno.EIO:
                    raise cannot_read(self.path, error) from error
                return done  # another alignment, or no direct reads here
            done += count
            if count == 0 or done % PAGE:
                return done
        return done


class _Wanted:
    """A part that is to be read, and the memory for it."""

    def __init__(
        self, source: _Source, part: Part, view: memoryview, *, is_elsewhere: bool
    ) -> None:
        self.part = part
        self.view = view
        self.is_elsewhere = is_elsewhere  # not in the mapping of its file
        self.start, self.size_bytes = part.offset, part.size_bytes
        self.end = part.offset + part.size_bytes
        self._source = source
        self.in_order: InOrder | None = None

    def arrived(self, start: int, end: int) -> None:
        """These bytes of the file are in `view`."""
        if self.in_order is None:
            self.compare(digest(self.view))
        else:
            self.in_order.arrived(start - self.start, end - self.start)

    def compare(self, actual: bytes) -> None:
        if actual.hex() != self.part.checksum:
            raise DamagedCheckpoint(
                f"{self._source.path}: {name_part(self.part.name)} has checksum "
                f"{actual.hex()[:8]}…, the manifest says {self.part.checksum[:8]}…."
            )


class _FilePiece:
    """A range of whole pages of a file, and the parts of which some bytes are in it."""

    def __init__(self, source: _Source, start: int, end: int) -> None:
        self.source = source
        self.start = start
        self.end = end
        self.is_direct = False
        self.wanted: list[_Wanted] = []  # in the order of the file

    def read(self, rooms: threading.local) -> None:
        if not any(each.is_elsewhere for each in self.wanted):
            self.source.fill(self.source.pages[self.start : self.end], self)
        elif (
            self.is_direct or len(self.wanted) > 1 + (self.end - self.start) // _WORTH_A_READ_BYTES
        ):
            self._read_and_copy(rooms)
        else:
            for each in self.wanted:
                start, end = self._range_of(each)
                self.source.read_into(each.view[start - each.start : end - each.start], start)
        for each in self.wanted:
            each.arrived(*self._range_of(each))

    def _read_and_copy(self, rooms: threading.local) -> None:
        room = getattr(rooms, "room", None)
        if room is None:
            room = rooms.room = memoryview(mmap.mmap(-1, _PIECE_BYTES))
        self.source.fill(room[: self.end - self.start], self)
        for each in self.wanted:
            start, end = self._range_of(each)
            target = each.view[start - each.start : end - each.start]
            move(target, room[start - self.start : end - self.start])

    def _range_of(self, wanted: _Wanted) -> tuple[int, int]:
        return max(self.start, wanted.start), min(self.end, wanted.end)


def _spans(parts: list[Part]) -> Iterator[tuple[int, int]]:
    """The pages of these parts, in pieces; gaps between parts are not read."""
    runs: list[tuple[int, int]] = []
    for part in parts:
        first, last = part.offset // PAGE * PAGE, -(-(part.offset + part.size_bytes) // PAGE) * PAGE
        if runs and first <= runs[-1][1]:
            first, before = runs.pop()
            last = max(before, last)
        runs.append((first, last))
    for start, end in runs:
        for at in range(start, end, _PIECE_BYTES):
            yield at, min(at + _PIECE_BYTES, end)
