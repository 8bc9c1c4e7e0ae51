"""Checksums: xxh3-128, which runs at the speed of memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import xxhash

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
    waiting = sorted(range(len(sizes)), key=sizes.__getitem__)  # the largest is taken first
    lock = threading.Lock()
    errors: list[Exception] = []

    def take() -> list[int]:
        with lock:
            if errors or not waiting:
                return []
            taken = [waiting.pop()]
            # Small ones in batches: taking the lock for each would cost more than its work.
            while waiting and sizes[taken[-1]] < _SMALL_BYTES and len(taken) < _BATCH:
                taken.append(waiting.pop())
            return taken

    def run() -> None:
        try:
            while taken := take():
                for index in taken:
                    work(index)
        except Exception as error:  # noqa: BLE001  raised again in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count - 1)]
    for thread in threads:
        thread.start()
    run()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
