"""A stored state on its way to a device: sent and checked at once, by all cores.

Half of the threads move pieces into pinned memory of their own and send them on a stream of
their own, one buffer being filled while the other is on its way. The other half hash whole
tensors where they lie. Who has no more of the one does the other. Pieces are large, since each
costs a few calls for which threads wait for each other; small tensors are one thread's. The
bytes stay in one allocation on the device, laid out as they were stored: they are there to be
copied from.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

_BUFFER_BYTES = 8 << 20
_MOST_THREADS = 12  # more of them only wait for each other: measured with 16 cores
_MAPPING_THREADS = 4
_MAPPED_AT_ONCE_BYTES = 32 << 20
_SMALL_BYTES = 1 << 16
_ALIGNMENT = 512  # of each run on the device
_PAGE = 4096
_POPULATE_READ = 22


class Sent(NamedTuple):
    """What is on the device now."""

    whole: torch.Tensor  # one allocation
    raw: list[torch.Tensor]  # the bytes of each
    digests: list[bytes]  # of the bytes here; empty if nobody asked


class _Run(NamedTuple):
    """Bytes that lie one behind the other, here and on the device."""

    address: int
    size_bytes: int
    place: int


def threads_of_use() -> int:
    """One for each core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(_MOST_THREADS, cores or 1))


def upload(
    views: Sequence[memoryview],
    device: torch.device,
    *,
    hashed: bool = True,
    threads: int | None = None,
) -> Sent:
    """Send the bytes of each view to a device; OutOfMemoryError of torch if they do not fit.

    With `hashed` their digests are found meanwhile.
    """
    addresses = [_address(view) if view.nbytes else 0 for view in views]
    runs, places, total = _lay_out(addresses, views)
    pieces = [piece for run in runs for piece in _cut(run, _BUFFER_BYTES)]
    count = max(1, min(threads or threads_of_use(), len(pieces) + len(views)))
    # Pinning memory and mapping what this process has not touched yet take their time, each.
    mapping = threading.Thread(target=_populate, args=(runs,), name="holdfast-map", daemon=True)
    mapping.start()
    whole = torch.empty(total, dtype=torch.uint8, device=device)
    senders = _senders(device, min(count, len(pieces)))
    if device.type == "cuda":
        # The memory may be one that kernels of the caller's stream still read.
        torch.cuda.current_stream(device).synchronize()
    mapping.join()

    digests = [b""] * (len(views) if hashed else 0)
    lock, errors = threading.Lock(), list[BaseException]()
    sending = iter(pieces)
    large, small = _by_size(views) if hashed else ([], [])
    hashing = iter([[index] for index in large])
    few = iter([small] if small else [])  # by one thread: others would only wait for it

    def send_all(sender: Any) -> None:
        for piece in _taken(sending, lock, errors):
            sender.send(piece.address, whole[piece.place : piece.place + piece.size_bytes])

    def hash_all(waiting: Iterator[list[int]]) -> None:
        for indices in _taken(waiting, lock, errors):
            for index in indices:
                digests[index] = xxhash.xxh3_128_digest(views[index])

    def work(number: int) -> None:
        if number == 1 or count == 1:
            hash_all(few)
        if number % 2:
            hash_all(hashing)
        if number < len(senders):
            send_all(senders[number])
            senders[number].finish()
        hash_all(hashing)

    try:
        _by_threads(work, count, errors)
    finally:
        senders.clear()
        _unpin(device)
    raw = [whole[place : place + view.nbytes] for place, view in zip(places, views, strict=True)]
    return Sent(whole, raw, digests)


def _unpin(device: torch.device) -> None:
    """Give the pinned memory back, which torch would keep for the next one who asks for some."""
    give_back = getattr(torch._C, "_host_emptyCache", None)  # 2.5 and newer
    if device.type == "cuda" and give_back is not None:
        give_back()


def _by_threads(work: Callable[[int], None], count: int, errors: list[BaseException]) -> None:
    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001  raised again in the caller's thread
            errors.append(error)

    threads = [
        threading.Thread(target=guarded, args=(number,), name="holdfast-upload", daemon=True)
        for number in range(1, count)
    ]
    for thread in threads:
        thread.start()
    guarded(0)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _taken(waiting: Iterator[Any], lock: threading.Lock, errors: list[BaseException]) -> Any:
    """What this thread takes of what all of them share; nothing more once one has failed."""
    while not errors:
        with lock:
            found = next(waiting, None)
        if found is None:
            return
        yield found


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _lay_out(
    addresses: list[int], views: Sequence[memoryview]
) -> tuple[list[_Run], list[int], int]:
    """Runs of views that touch each other, the place of each view on the device, and all bytes."""
    places = [0] * len(views)
    runs: list[_Run] = []
    total = start = end = place = 0
    for index in sorted(range(len(views)), key=lambda i: (addresses[i], views[i].nbytes)):
        address, size = addresses[index], views[index].nbytes
        if not size:
            continue
        if address != end:
            if end:
                runs.append(_Run(start, end - start, place))
            # Aligned as it is here, so that every tensor is.
            place = -(-total // _ALIGNMENT) * _ALIGNMENT + address % _ALIGNMENT
            start = address
        places[index] = place + address - start
        end = address + size
        total = place + end - start
    if end:
        runs.append(_Run(start, end - start, place))
    return runs, places, total


def _cut(run: _Run, size_bytes: int) -> list[_Run]:
    return [
        _Run(run.address + at, min(size_bytes, run.size_bytes - at), run.place + at)
        for at in range(0, run.size_bytes, size_bytes)
    ]


def _by_size(views: Sequence[memoryview]) -> tuple[list[int], list[int]]:
    """The numbers of the large views, the largest first, and of the small ones."""
    order = sorted(range(len(views)), key=lambda index: -views[index].nbytes)
    large = [index for index in order if views[index].nbytes >= _SMALL_BYTES]
    return large, order[len(large) :]


def _populate(runs: Sequence[_Run]) -> None:
    """Map all pages. A kernel that has no call for that maps each when it is touched."""
    pieces = iter([piece for run in runs for piece in _cut(run, _MAPPED_AT_ONCE_BYTES)])
    lock, errors = threading.Lock(), list[BaseException]()
    libc = ctypes.CDLL(None)

    def work(_number: int) -> None:
        for piece in _taken(pieces, lock, errors):
            start = piece.address // _PAGE * _PAGE
            size = ctypes.c_size_t(piece.address + piece.size_bytes - start)
            libc.madvise(ctypes.c_void_p(start), size, _POPULATE_READ)

    _by_threads(work, _MAPPING_THREADS, errors)


def _senders(device: torch.device, count: int) -> list[Any]:
    if device.type != "cuda":
        return [_PlainSender() for _ in range(count)]
    # One allocation: each would wait for the device.
    pinned = torch.empty((count, 2, _BUFFER_BYTES), dtype=torch.uint8, pin_memory=True)
    return [_Sender(device, buffers) for buffers in pinned]


class _Sender:
    """Two pinned buffers of one thread: one is filled while the other is on its way."""

    def __init__(self, device: torch.device, buffers: torch.Tensor) -> None:
        self._stream = torch.cuda.Stream(device)
        self._buffers = list(buffers)
        self._sent = [torch.cuda.Event(), torch.cuda.Event()]
        self._turn = 0

    def send(self, address: int, target: torch.Tensor) -> None:
        buffer, sent = self._buffers[self._turn], self._sent[self._turn]
        sent.synchronize()
        ctypes.memmove(buffer.data_ptr(), address, target.nbytes)
        with torch.cuda.stream(self._stream):
            target.copy_(buffer[: target.nbytes], non_blocking=True)
            sent.record(self._stream)
        self._turn = 1 - self._turn

    def finish(self) -> None:
        self._stream.synchronize()


class _PlainSender:
    """Where there is no such device: it shows that the rest is right."""

    def send(self, address: int, target: torch.Tensor) -> None:
        ctypes.memmove(target.data_ptr(), address, target.nbytes)

    def finish(self) -> None:
        """Nothing is on its way."""
