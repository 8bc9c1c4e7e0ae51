"""Checksums: xxh3-128, which runs at the speed of memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

import xxhash

from holdfast._store.format.threads import run_all

_WORTH_A_THREAD_BYTES = 8 << 20
SMALL_BYTES = 64 << 10
_BATCH = 256
_MOST_THREADS = 8


def digest(data: memoryview | bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def digest_all(views: Sequence[memoryview]) -> list[bytes]:
    """The digest of each view, by several threads: hashing releases the GIL."""
    found: list[bytes] = [b""] * len(views)

    def work(index: int) -> None:
        found[index] = digest(views[index])

    for_each(work, [view.nbytes for view in views])
    return found


def for_each(work: Callable[[int], None], sizes: Sequence[int]) -> None:
    """Call `work(i)` for every size, spread over threads; the first error is raised here."""
    count = min(os.cpu_count() or 1, max(1, sum(sizes) // _WORTH_A_THREAD_BYTES), _MOST_THREADS)
    run_all([functools.partial(_each, work, taken) for taken in portions(sizes)], count)


def _each(work: Callable[[int], None], numbers: Sequence[int]) -> None:
    for number in numbers:
        work(number)


def portions(sizes: Sequence[int]) -> list[Sequence[int]]:
    """The ranges in the order of their work: the largest first, then small ones in batches.

    To take turns for each small range would cost more than its work.
    """
    small = [index for index, size in enumerate(sizes) if size < SMALL_BYTES]
    rest = [index for index, size in enumerate(sizes) if size >= SMALL_BYTES]
    rest.sort(key=sizes.__getitem__, reverse=True)
    batches = [small[at : at + _BATCH] for at in range(0, len(small), _BATCH)]
    return [*((index,) for index in rest), *batches]
