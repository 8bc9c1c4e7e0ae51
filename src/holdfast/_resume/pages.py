"""Pages of memory, as the system keeps them: which are there, and how they come to be."""

from __future__ import annotations

import ctypes
import mmap
import sys

from holdfast._record.image import PAGE

_LOWEST_BIT = bytes(value & 1 for value in range(256))  # the others may mean anything


def ask_for_large_pages(mapped: mmap.mmap) -> None:
    """Where the system has them, a first touch costs a fraction of what small ones do."""
    if hasattr(mmap, "MADV_HUGEPAGE") and len(mapped) >= 4 << 20:
        try:
            mapped.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return  # a kernel without them


def resident_pages(descriptor: int, size_bytes: int) -> bytes:
    """A byte for each page of a file: 1 where it is in the page cache already."""
    count = -(-size_bytes // PAGE)
    if sys.platform != "linux" or mmap.PAGESIZE != PAGE or not count:
        return bytes(count)
    found = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        m = mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        return bytes(count)  # not on this file system, or no address space for it
    with m:
        view = (ctypes.c_char * size_bytes).from_buffer(m)
        at, size = ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size_bytes)
        is_known = libc.mincore(at, size, found) == 0
        del view  # else the mapping cannot be closed
    return bytes(found).translate(_LOWEST_BIT) if is_known else bytes(count)
