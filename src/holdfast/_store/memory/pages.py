"""Memory for a range of an arena: allocated, touched, and given back.

A first touch costs many times the copy itself, so pages are touched before the first copy, by
several threads. A device can register pages that are touched. So both are done piece by piece.

To touch pages locks the memory map of the process, and training may wait for that lock. So the
pieces are small and the threads few. On an H200, a slot of 4.85 GB takes 0.8 s, and delays
training by 0.03 s. With more threads it is no faster.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from holdfast._store.format.threads import run_all
from holdfast._store.memory.backing import NO_ROOM

PIECE_BYTES = 32 << 20
_MOST_THREADS = 4
_PUNCH_HOLE = 3  # and keep the size of the file
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None)

Piece = tuple[int, int]  # offset in the mapping, bytes


def pieces_of(start: int, size_bytes: int, without: Sequence[Piece] = ()) -> list[Piece]:
    """The pieces in which a range gets its memory, without some ranges in it."""
    end = start + size_bytes
    found = [(at, min(PIECE_BYTES, end - at)) for at in range(start, end, PIECE_BYTES)]
    if not without:
        return found
    parts = (part for piece in found for part in split(*piece, without))
    return [(at, size) for at, size, is_within in parts if not is_within]


def split(start: int, size_bytes: int, ranges: Sequence[Piece]) -> Iterator[tuple[int, int, bool]]:
    """The parts of a range, and whether each is within one of `ranges`, which are in order."""
    end = start + size_bytes
    index = max(0, bisect_right(ranges, (start, sys.maxsize)) - 1)
    while index < len(ranges) and ranges[index][0] < end:
        at, length = ranges[index]
        first, last = max(start, at), min(end, at + length)
        if first < last:
            if start < first:
                yield start, first - start, False
            yield first, last - first, True
            start = last
        index += 1
    if start < end:
        yield start, end - start, False


def give_memory(
    descriptor: int,
    mapped: mmap.mmap,
    start: int,
    size_bytes: int,
    then: Callable[[int, int], None] = lambda *_: None,
    without: Sequence[Piece] = (),
) -> bool:
    """Allocate and touch a range, and call `then` with each piece; False if there is no room.

    OSError if the system refuses it for another reason. After any error the range has no memory.
    """

    def give(piece: Piece) -> None:
        if not touch(mapped, *piece):
            # An older kernel, or no room: this says which.
            os.posix_fallocate(descriptor, *piece)
            touch(mapped, *piece)

    try:
        for_pieces(pieces_of(start, size_bytes, without), give, then)
    except BaseException as error:
        take_memory(descriptor, start, size_bytes)
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return False
        raise
    return True


def for_pieces(
    pieces: Sequence[Piece], work: Callable[[Piece], object], then: Callable[[int, int], None]
) -> None:
    """Call `work` with each piece, in several threads, and after it `then`, in one at a time."""
    passing = threading.Lock()

    def both(piece: Piece) -> None:
        work(piece)
        with passing:
            then(*piece)

    threads = min(_MOST_THREADS, max(1, (os.cpu_count() or 1) // 2))
    run_all([functools.partial(both, piece) for piece in pieces], threads)


def touch(mapped: mmap.mmap, start: int, size_bytes: int) -> bool:
    """Map the pages of a range, with new memory where they have none.

    False if there is no room, where an access would be a SIGBUS, or if an older kernel refuses.
    """
    # ctypes releases the interpreter's lock; mmap.madvise does not.
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped)) + start
    how = ctypes.c_int(_MADV_POPULATE_WRITE)
    refused = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), how)
    return not refused


def take_memory(descriptor: int, start: int, size_bytes: int) -> bool:
    """Give the memory of a range of the file back to the system; False if the system refuses."""
    punched = [
        _libc.fallocate(descriptor, _PUNCH_HOLE, ctypes.c_long(at), ctypes.c_long(size)) == 0
        for at, size in pieces_of(start, size_bytes)
    ]
    return all(punched)
