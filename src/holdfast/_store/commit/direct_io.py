"""Bytes to a file, by several threads, past the page cache where the file system allows it.

Direct writes are several times faster than a plain write and its flush, but need memory and
offsets that are aligned to blocks: other data goes through a small aligned buffer.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from holdfast._store.commit.chunks import CommitThreads, WorkQueue
from holdfast._store.commit.fault_points import fault_point
from holdfast._store.folder.plain_file import open_plain
from holdfast._store.format.image import PAGE

_CHUNK_BYTES = 8 << 20
_BUFFER_BYTES = 4 << 20
_WRITING_THREADS = 2  # measured: one does not saturate a disk, more than two do not help
_DIRECT = getattr(os, "O_DIRECT", 0)


def write_file(
    path: Path,
    views: Sequence[memoryview],
    threads: CommitThreads,
    unsynced: list[int] | None = None,
) -> int:
    """Make a new file of the views, one after another, and flush it; returns its size.

    With `unsynced` it is left open there, and the caller flushes it.
    """
    descriptor = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    is_left_open = False
    try:
        size = sum(view.nbytes for view in views)
        writing = _Writing(descriptor, views, size)
        if hasattr(os, "pwrite"):
            threads.put_to(writing, _WRITING_THREADS if size > _CHUNK_BYTES else 1)
        else:  # Windows: one position for all
            writing.work()
        writing.finish()
        fault_point("half-written")  # also if it was one chunk
        writing.cut_padding()
        fault_point("written")
        if unsynced is None:
            os.fsync(descriptor)
        else:
            unsynced.append(descriptor)
            is_left_open = True
    finally:
        if not is_left_open:
            os.close(descriptor)
    return size


class _Writing(WorkQueue[tuple[int, int]]):
    """One file; its pieces are (offset, size)."""

    def __init__(self, descriptor: int, views: Sequence[memoryview], size: int) -> None:
        self._descriptor = descriptor
        self._views = views
        self._starts = list(accumulate((view.nbytes for view in views), initial=0))
        self._size = size
        self._is_plain = len(views) == 1 and _is_aligned(views[0])
        self._buffers = threading.local()
        self._written = 0
        # If it began with direct writes, chunks stay whole blocks even after it falls back.
        self._in_blocks = bool(_DIRECT) and size >= PAGE and _set_direct(descriptor, on=True)
        self._is_direct = self._in_blocks
        step = _CHUNK_BYTES if self._is_plain or not self._in_blocks else _BUFFER_BYTES
        if self._in_blocks and size > _CHUNK_BYTES:
            _allocate(descriptor, size)
        super().__init__((at, min(step, size - at)) for at in range(0, size, step))

    def do(self, piece: tuple[int, int]) -> None:
        offset, size = piece
        if self._is_plain:
            self._put(self._views[0][offset : offset + size], offset)
        elif self._in_blocks:
            self._put(self._gathered(offset, size), offset)
        else:
            for view in self._cut(offset, size):
                self._put(view, offset)
                offset += view.nbytes
        with self._change:
            self._written += size
            is_half = self._written * 2 >= self._size
        if is_half:
            fault_point("half-written")

    def cut_padding(self) -> None:
        """Cut the file to its size: the last block was written whole."""
        if self._in_blocks and self._size % PAGE:
            os.ftruncate(self._descriptor, self._size)

    def _put(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < view.nbytes:
            is_direct = self._is_direct
            try:
                if hasattr(os, "pwrite"):
                    count = os.pwrite(self._descriptor, view[done:], offset + done)
                else:
                    os.lseek(self._descriptor, offset + done, os.SEEK_SET)
                    count = os.write(self._descriptor, view[done:])
            except OSError as error:
                # Refused here (tmpfs accepts the flag and not the write), or not aligned any more.
                if error.errno != errno.EINVAL or not is_direct:
                    raise
                self._leave_direct()
                continue
            done += count
            if count % PAGE and done < view.nbytes:
                self._leave_direct()

    def _leave_direct(self) -> None:
        with self._change:
            _set_direct(self._descriptor, on=False)
            self._is_direct = False

    def _gathered(self, offset: int, size: int) -> memoryview:
        """A chunk in an aligned buffer, padded to the end of its last block."""
        buffer = getattr(self._buffers, "mapped", None)
        if buffer is None:
            buffer = self._buffers.mapped = memoryview(mmap.mmap(-1, _BUFFER_BYTES))
        at = 0
        for view in self._cut(offset, size):
            buffer[at : at + view.nbytes] = view
            at += view.nbytes
        whole = -(-size // PAGE) * PAGE
        buffer[size:whole] = bytes(whole - size)
        return buffer[:whole]

    def _cut(self, offset: int, size: int) -> list[memoryview]:
        found = []
        index = bisect_right(self._starts, offset) - 1
        while size > 0:
            start = offset - self._starts[index]
            view = self._views[index][start : start + size]
            found.append(view)
            offset += view.nbytes
            size -= view.nbytes
            index += 1
        return found


def _is_aligned(view: memoryview) -> bool:
    if view.nbytes % PAGE or view.readonly:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE == 0


def _set_direct(descriptor: int, *, on: bool) -> bool:
    """Switch direct writes; False if the flag could not be changed."""
    if not _DIRECT:
        return False
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if bool(flags & _DIRECT) == on:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
    except OSError:  # not on this file system
        return False
    return True


def _allocate(descriptor: int, size: int) -> None:
    """Allocate the file at once, so that threads do not wait for each other to lengthen it.

    Not by posix_fallocate, which writes zeros if the file system has no better way.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        return
    length = ctypes.c_int64(size)
    if fallocate(descriptor, 0, ctypes.c_int64(0), length) and ctypes.get_errno() == errno.ENOSPC:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
