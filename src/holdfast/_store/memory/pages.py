"""Memory for a range of an arena: allocated, touched, and given back.

A first touch costs many times the copy itself, so pages are touched before the first copy. The
system allocates the pages of one file one after another, but several threads can touch them, and
a device can register those that are touched. So all of this is done piece by piece.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable

from holdfast._store.memory.backing import NO_ROOM

PIECE_BYTES = 128 << 20
_MOST_THREADS = 8
_MADV_REMOVE = 9
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None)

Piece = tuple[int, int]  # offset in the mapping, bytes


def pieces_of(start: int, size_bytes: int) -> list[Piece]:
    """The pieces in which a range gets its memory."""
    end = start + size_bytes
    return [(at, min(PIECE_BYTES, end - at)) for at in range(start, end, PIECE_BYTES)]


def give_memory(
    descriptor: int,
    mapped: mmap.mmap,
    start: int,
    size_bytes: int,
    then: Callable[[int, int], None] = lambda *_: None,
) -> bool:
    """Allocate and touch a range, and call `then` with each piece; False if there is no room.

    OSError if the system refuses it for another reason. After any error the range has no memory.
    """
    left = iter(pieces_of(start, size_bytes))
    allocating, passing = threading.Lock(), threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not errors:
                with allocating:
                    piece = next(left, None)
                    if piece is None:
                        return
                    os.posix_fallocate(descriptor, *piece)
                touch(mapped, *piece)
                with passing:
                    then(*piece)
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread
            errors.append(error)

    count = min(_MOST_THREADS, max(1, (os.cpu_count() or 1) // 2), -(-size_bytes // PIECE_BYTES))
    threads = [
        threading.Thread(target=work, name="holdfast-memory", daemon=True) for _ in range(count - 1)
    ]
    with contextlib.suppress(RuntimeError):  # no more threads: this one does it
        for thread in threads:
            thread.start()
    work()
    for thread in threads:
        if thread.is_alive():
            thread.join()
    if not errors:
        return True
    take_memory(mapped, start, size_bytes)
    if isinstance(errors[0], OSError) and errors[0].errno in NO_ROOM:
        return False
    raise errors[0]


def touch(mapped: mmap.mmap, start: int, size_bytes: int) -> None:
    """Map the pages of a range, which have their memory, into this process."""
    # An older kernel refuses, and the first copies then touch the pages.
    _advise(mapped, start, size_bytes, _MADV_POPULATE_WRITE)


def take_memory(mapped: mmap.mmap, start: int, size_bytes: int) -> bool:
    """Give the memory of a range back to the system; False if the system refuses."""
    given = [_advise(mapped, *piece, _MADV_REMOVE) for piece in pieces_of(start, size_bytes)]
    return all(given)


def _advise(mapped: mmap.mmap, start: int, size_bytes: int, advice: int) -> bool:
    # ctypes releases the interpreter's lock; mmap.madvise does not.
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped)) + start
    result = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), advice)
    return bool(result == 0)
