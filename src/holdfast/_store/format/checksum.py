"""Checksums: xxh3-128, which runs at the speed of memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

import xxhash

from holdfast._store.format.threads import run_all

_WORTH_A_THREAD_BYTES = 8 << 20
_SMALL_BYTES = 1 << 16
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
    works: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        # Small ones in batches: taking turns for each would cost more than its work.
        if works and sizes[works[-1][0]] < _SMALL_BYTES and len(works[-1]) < _BATCH:
            works[-1].append(index)
        else:
            works.append([index])
    run_all([functools.partial(_each, work, taken) for taken in works], count)


def _each(work: Callable[[int], None], numbers: list[int]) -> None:
    for number in numbers:
        work(number)
