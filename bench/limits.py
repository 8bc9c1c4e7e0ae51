"""What no library can be quicker than: a copy, a write and a read of the same bytes.

They use every core that there is (2 threads for the disk), memory that is mapped before the clock
starts, and O_DIRECT where the file system allows it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.figures import LIMIT
from bench.machine import cores
from bench.states import State
from bench.ways import Way, seconds_of

DISK_THREADS = 2
_PIECE = 16 << 20
_PAGE = 4096


class Copy(Way):
    """A copy of all tensors into mapped shared memory: by torch's threads and by Python's, of which
    the quicker counts. Torch's meet after every tensor, which costs them much beside other work."""

    name = "limit: copy into shared memory"
    kind = LIMIT

    def open(self, state: State, folder: Path) -> None:
        super().open(state, folder)
        tensors = [t.detach() for t in state.tensors()]
        self._mapped = mmap.mmap(-1, sum(_aligned(_size(t), 64) for t in tensors))
        base = torch.frombuffer(self._mapped, dtype=torch.uint8)
        base.fill_(0)
        self._sources, self._targets, at = tensors, [], 0
        for tensor in tensors:
            raw = base[at : at + _size(tensor)]
            self._targets.append(raw.view(tensor.dtype).view(tensor.shape))
            at += _aligned(_size(tensor), 64)

    def save(self, number: int) -> dict[str, float]:  # noqa: ARG002  nothing is kept
        torch.set_num_threads(cores())
        by_torch = seconds_of(lambda: torch._foreach_copy_(self._targets, self._sources))
        torch.set_num_threads(1)
        by_python = seconds_of(lambda: copy_back(self._sources, self._targets, cores()))
        return {"stall": min(by_torch, by_python)}


class DirectWrite(Way):
    """A write of as many bytes past the page cache, by two threads, and an fsync."""

    name = "limit: O_DIRECT write, 2 threads, fsync"
    kind = LIMIT
    flags = os.O_DIRECT
    threads = DISK_THREADS

    def open(self, state: State, folder: Path) -> None:
        super().open(state, folder)
        self._buffer = mmap.mmap(-1, _aligned(state.size_bytes, _PAGE))
        torch.frombuffer(self._buffer, dtype=torch.uint8).random_()

    def save(self, number: int) -> dict[str, float]:
        path, size = self.kept(number), len(self._buffer)
        view = memoryview(self._buffer)

        def write() -> None:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | self.flags, 0o600)
            in_threads(
                self.threads,
                size,
                lambda at, end: os.pwrite(descriptor, view[at:end], at),
            )
            os.fsync(descriptor)
            os.close(descriptor)

        return {"durable": seconds_of(write)}


class BufferedWrite(DirectWrite):
    """The same through the page cache, as most programs write."""

    name = "limit: buffered write, fsync"
    flags = 0
    threads = 1


class Read:
    """A read of a file: a third of it into memory that is there, as a model's is, and the rest into
    new memory, as an optimizer's is that has no moments yet."""

    def __init__(self, path: Path, *, direct: bool) -> None:
        self._path, self._flags = path, os.O_DIRECT if direct else 0

    def seconds(self) -> float:
        size = _aligned(self._path.stat().st_size, _PAGE)
        memory = mmap.mmap(-1, size)
        for at in range(0, size // 3, _PAGE):
            memory[at] = 1
        view = memoryview(memory)
        began = time.perf_counter()
        descriptor = os.open(self._path, os.O_RDONLY | self._flags)
        in_threads(DISK_THREADS, size, lambda at, end: os.preadv(descriptor, [view[at:end]], at))
        os.close(descriptor)
        return time.perf_counter() - began


def copy_back(stored: list[torch.Tensor], targets: list[torch.Tensor], threads: int) -> None:
    """From tensors into others, by threads: largest first, each to a free thread."""
    pairs = sorted(zip(stored, targets, strict=True), key=lambda pair: pair[0].numel())
    lock = threading.Lock()

    def take() -> None:
        while True:
            with lock:
                if not pairs:
                    return
                source, target = pairs.pop()
            target.copy_(source)

    workers = [threading.Thread(target=take) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def in_threads(count: int, size: int, work: Callable[[int, int], int]) -> None:
    """Go over so many bytes in large pieces, by threads that take turns."""
    failed: list[BaseException] = []

    def go(first: int) -> None:
        try:
            for at in range(first * _PIECE, size, count * _PIECE):
                work(at, min(at + _PIECE, size))
        except OSError as error:
            failed.append(error)

    workers = [threading.Thread(target=go, args=(each,)) for each in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed:
        raise failed[0]


def allows_direct(folder: Path) -> bool:
    """Whether files there may be written past the page cache."""
    path = folder / "direct"
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
        path.unlink()
        return True
    path.unlink(missing_ok=True)
    return False


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to
