"""A stored state sent to the device that it was on, by all cores.

Two threads register the memory of the host with the driver, piece by piece, and queue a copy of
each piece, which the device does by itself. The other threads hash the tensors meanwhile. Memory
that cannot be registered is copied through buffers of the driver. The bytes stay in one allocation
on the device, laid out as on the host: they are only copied from.

A slot of an arena stays registered, in the pieces in which it is written to: the next attempt
takes its first snapshot there (see _run/saving/arena_builder.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from holdfast._store.format.image import TensorSpec
from holdfast._store.format.threads import by_threads
from holdfast._store.memory.pages import PIECE_BYTES
from holdfast.torch.adapter import ADAPTER, dtype_of, repeated_axes, typed

_SPARE_BYTES = 256 << 20
_MOST_THREADS = 12  # measured with 16 cores: more threads only wait for each other
_SENDERS = 2  # measured: the driver registers one piece at a time
_TAKEN_BYTES = 4 << 20  # of small tensors, which one thread hashes before it takes more
_ALIGNMENT = 512  # of each span on the device
_COMPARED_BYTES = 256 << 20  # at once: the result takes an eighth of it
_PAGE = 4096
_PORTABLE = 1  # registered for every device
_POPULATE_READ = 22
_LEAST_RESERVED_BYTES = 1 << 20  # the allocator takes smaller tensors from other blocks
_libc = ctypes.CDLL(None)

#: Pieces of slots that an upload has left registered with the driver: bytes by address.
left_registered: dict[int, int] = {}


class OnDevice:
    """Tensors as they were stored, on their device: only to be copied from."""

    def __init__(self, sent: SentTensors, specs: Sequence[TensorSpec]) -> None:
        self._whole = sent.whole
        self._host = sent.host
        self.digests = sent.digests
        self.tensors = [_typed(raw, spec) for raw, spec in zip(sent.raw, specs, strict=True)]
        # A write into one of them increments its version.
        self._versions = [(each, each._version) for each in (sent.whole, *self.tensors)]

    @property
    def is_untouched(self) -> bool:
        """Whether the tensors, which are only copied from, have not been changed."""
        return all(each._version == version for each, version in self._versions)

    @property
    def memory(self) -> tuple[int, int]:
        """The addresses on the device where they begin and end."""
        return self._whole.data_ptr(), self._whole.data_ptr() + self._whole.nbytes

    def leave_host(self) -> HostMemory:
        """Return when the memory that they were sent from may be closed, except for a slot.

        A slot may be closed when the returned object is gone.
        """
        if not self._host.is_slot:
            self._host.unregister()
        return self._host


def _typed(raw: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if raw.nbytes and raw.data_ptr() % spec.item_bytes:
        raw = raw.clone()  # in a file of several checkpoints it may be at any byte
    return typed(raw, spec)


def send(
    name: str,
    specs: Sequence[TensorSpec],
    views: Sequence[memoryview],
    *,
    hashed: bool,
    slot: memoryview | None = None,
) -> OnDevice | None:
    """Send tensors to the device that they were on; None if it is not there, or has no room.

    `slot`: all views are of this slot, which stays registered.
    """
    device = _device(name)
    size_bytes = sum(spec.size_bytes for spec in specs)
    # There must also be room for those that an optimizer will keep.
    if device is None or _room(device) < 2 * size_bytes + _SPARE_BYTES:
        return None
    try:
        return OnDevice(upload(views, device, hashed=hashed, slot=slot), specs)
    except torch.cuda.OutOfMemoryError:
        return None


def _device(name: str) -> torch.device | None:
    if not name.startswith("cuda") or not torch.cuda.is_available():
        return None
    device = torch.device(name)
    return device if (device.index or 0) < torch.cuda.device_count() else None


def _room(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached)


def reserve(tensors: Iterable[torch.Tensor]) -> None:
    """Take memory of the device for copies of these tensors at once: it is slow in parts."""
    sizes: dict[torch.device, int] = {}
    for tensor in tensors:
        if tensor.nbytes >= _LEAST_RESERVED_BYTES:
            size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            sizes[tensor.device] = sizes.get(tensor.device, 0) + size
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        for device, size in sizes.items():
            torch.empty(size, dtype=torch.uint8, device=device)  # the allocator keeps it


def own_of(stored: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A new tensor with the values and the layout of one that was sent."""
    if spec.strides is None:
        return stored.clone()
    for axis in repeated_axes(spec.shape, spec.strides):
        stored = stored.narrow(axis, 0, 1)
    fresh = torch.empty_strided(
        stored.shape, spec.strides, dtype=stored.dtype, device=stored.device
    )
    return fresh.copy_(stored).expand(spec.shape)


@torch.no_grad()
def copy_in(live: Any, stored: torch.Tensor) -> bool:
    """Copy into a live tensor, if it is alike and on the same device."""
    if not is_comparable(live, stored) or repeated_axes(live.shape, live.stride()):
        return False
    live.detach().copy_(stored)
    return True


def fresh(spec: TensorSpec) -> torch.Tensor | None:
    """Memory for a stored tensor; None if it is more than bytes in C order."""
    if spec.device or spec.strides is not None or not spec.size_bytes:
        return None
    return torch.empty(spec.shape, dtype=dtype_of(spec.dtype))


def memory_of(tensor: torch.Tensor) -> tuple[int, memoryview]:
    """The bytes of a contiguous tensor of the CPU, and their address."""
    address = tensor.data_ptr()
    array = (ctypes.c_char * tensor.nbytes).from_address(address)
    array.owner = tensor  # type: ignore[attr-defined]  # the view lives as long as its tensor
    return address, memoryview(array).cast("B")


def is_comparable(live: Any, stored: torch.Tensor) -> bool:
    """Whether the two can be compared where they are."""
    return (
        isinstance(live, torch.Tensor)
        and not ADAPTER.is_sharded(live)
        and live.device == stored.device
        and (live.dtype, live.shape) == (stored.dtype, stored.shape)
    )


@torch.no_grad()
def differing(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """For each pair, whether any bit differs; computed on the device, and read once."""
    if _are_equal(pairs):
        return [False] * len(pairs)
    found = [differ(live, stored) for live, stored in pairs]
    by_device: dict[torch.device, list[int]] = {}
    for number, flag in enumerate(found):
        by_device.setdefault(flag.device, []).append(number)
    answers = [False] * len(found)
    for numbers in by_device.values():
        flags = torch.stack([found[number] for number in numbers]).tolist()
        for number, flag in zip(numbers, flags, strict=True):
            answers[number] = flag
    return answers


def _are_equal(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether all are equal, found with few kernels; False also if it cannot be found so.

    All that was sent is one allocation. The live tensors are copied into a copy of it.
    """
    sent, device = pairs[0][1].untyped_storage(), pairs[0][1].device
    for _, stored in pairs:
        if stored.untyped_storage().data_ptr() != sent.data_ptr():
            return False  # it was not aligned
        if repeated_axes(stored.shape, stored.stride()):
            return False
    if device.type == "cuda" and _room(device) < 2 * sent.nbytes():
        return False
    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(sent)
    copy = whole.clone()
    targets = [
        torch.empty(0, dtype=stored.dtype, device=device).set_(
            copy.untyped_storage(), stored.storage_offset(), stored.size(), stored.stride()
        )
        for _, stored in pairs
    ]
    torch._foreach_copy_(targets, [live for live, _ in pairs])
    chunks = zip(copy.split(_COMPARED_BYTES), whole.split(_COMPARED_BYTES), strict=True)
    return not bool(torch.stack([differ(one, other) for one, other in chunks]).any())


def _bits(value: torch.Tensor) -> torch.Tensor:
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    return (
        plain.view(-1).view(torch.uint8) if plain.numel() else plain.new_empty(0).view(torch.uint8)
    )


def differ(live: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Whether any bit differs, as a tensor on the device of both."""
    one, other = _bits(live), _bits(stored)
    for wide in (torch.int64, torch.int32):
        size = wide.itemsize
        if not (one.nbytes % size or one.data_ptr() % size or other.data_ptr() % size):
            return torch.ne(one.view(wide), other.view(wide)).any()
    return torch.ne(one, other).any()


# -- Sent by some threads, and hashed by the others ------------------------------------


class SentTensors(NamedTuple):
    whole: torch.Tensor  # one allocation
    raw: list[torch.Tensor]  # the bytes of each
    digests: list[bytes]  # of the bytes on the host; empty if not asked for
    host: HostMemory  # what they were sent from


class _HostSpan(NamedTuple):
    """Bytes that are contiguous on the host and on the device."""

    address: int
    size_bytes: int
    place: int


def threads_of_use() -> int:
    """The number of threads: one for each core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(_MOST_THREADS, cores or 1))


def upload(
    views: Sequence[memoryview],
    device: torch.device,
    *,
    hashed: bool = True,
    threads: int | None = None,
    slot: memoryview | None = None,
) -> SentTensors:
    """Send the bytes of each view to a device; OutOfMemoryError of torch if they do not fit.

    With `hashed` their digests are found meanwhile. `slot`: see `send`.
    """
    addresses = [_address(view) if view.nbytes else 0 for view in views]
    spans, places, total = _lay_out(addresses, views)
    start = 0 if slot is None else _address(slot)
    pieces = [piece for span in spans for piece in _cut(span, start)]
    groups = _groups(views) if hashed else []
    whole = torch.empty(total, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        # Kernels of the caller's stream may still read the reused memory.
        torch.cuda.current_stream(device).synchronize()

    # Of no bytes there is nothing to send.
    digests = [xxhash.xxh3_128_digest(b"")] * (len(views) if hashed else 0)
    lock, errors = threading.Lock(), list[BaseException]()
    sending, hashing = iter(pieces), iter(groups)
    host = HostMemory(device, None if slot is None else (start, start + slot.nbytes))

    def work(number: int) -> None:
        if number < _SENDERS:
            with host.copying() as copy:
                for piece in _taken(sending, lock, errors):
                    copy(piece, whole[piece.place : piece.place + piece.size_bytes])
        for group in _taken(hashing, lock, errors):
            for index in group:
                digests[index] = xxhash.xxh3_128_digest(views[index])

    try:
        by_threads(work, min(threads or threads_of_use(), len(pieces) + len(groups)), errors)
    except BaseException:
        host.unregister()
        raise
    if slot is None:
        host.begin_unregister()
    raw = [whole[place : place + view.nbytes] for place, view in zip(places, views, strict=True)]
    return SentTensors(whole, raw, digests, host)


def _taken(waiting: Iterator[Any], lock: threading.Lock, errors: list[BaseException]) -> Any:
    """The items that this thread takes from a shared iterator; none after a failure."""
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
) -> tuple[list[_HostSpan], list[int], int]:
    """Spans of views, the place of each view on the device, and the total size.

    Less than a page between two views is sent with them: it lies in their own pages.
    """
    places = [0] * len(views)
    spans: list[_HostSpan] = []
    total = start = end = place = 0
    for index in sorted(range(len(views)), key=lambda i: (addresses[i], views[i].nbytes)):
        address, size = addresses[index], views[index].nbytes
        if not size:
            continue
        if not end or address - end >= _PAGE:
            if end:
                spans.append(_HostSpan(start, end - start, place))
            # The same alignment as on the host, so that every tensor is aligned.
            place = -(-total // _ALIGNMENT) * _ALIGNMENT + address % _ALIGNMENT
            start = address
        places[index] = place + address - start
        end = max(end, address + size)
        total = place + end - start
    if end:
        spans.append(_HostSpan(start, end - start, place))
    return spans, places, total


def _cut(span: _HostSpan, start: int) -> Iterator[_HostSpan]:
    """The pieces of a span, none of which shares a page with another.

    Their edges are whole pieces away from `start`, or from the first page of the span if that is 0.
    """
    at, end = span.address, span.address + span.size_bytes
    start = start or at // _PAGE * _PAGE
    while at < end:
        following = min(end, at + PIECE_BYTES - (at - start) % PIECE_BYTES)
        yield _HostSpan(at, following - at, span.place + at - span.address)
        at = following


def _groups(views: Sequence[memoryview]) -> list[list[int]]:
    """The views in groups that a thread takes at once, the largest first."""
    groups: list[list[int]] = []
    left = 0
    for index in sorted(range(len(views)), key=lambda i: -views[i].nbytes):
        if not views[index].nbytes:
            break
        if left <= 0:
            groups.append([])
            left = _TAKEN_BYTES
        groups[-1].append(index)
        left -= views[index].nbytes
    return groups


class HostMemory:
    """Registers memory of the host with the driver: for an upload, or a slot for longer."""

    def __init__(self, device: torch.device, slot: tuple[int, int] | None = None) -> None:
        self._device = device
        self._slot = slot  # the addresses where it begins and ends
        self._registered: list[int] = []  # addresses
        self._registering = threading.Lock()
        self._thread: threading.Thread | None = None

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.unregister()

    @property
    def is_slot(self) -> bool:
        return self._slot is not None

    @contextlib.contextmanager
    def copying(self) -> Iterator[Callable[[_HostSpan, torch.Tensor], None]]:
        """A function that queues the copy of a piece; all are done at the end of the block."""
        if self._device.type != "cuda":
            yield _copy_now
            return
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            yield self._queue_copy
        stream.synchronize()

    def _queue_copy(self, piece: _HostSpan, target: torch.Tensor) -> None:
        start = piece.address // _PAGE * _PAGE
        end = -(-(piece.address + piece.size_bytes) // _PAGE) * _PAGE
        if self._slot is not None:
            start -= (start - self._slot[0]) % PIECE_BYTES
            end = min(start + PIECE_BYTES, self._slot[1])
        # Without this, the driver would map each page by itself. An older kernel refuses.
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _POPULATE_READ)
        self._register(start, end - start)
        target.copy_(_tensor_at(piece.address, piece.size_bytes), non_blocking=True)

    def _register(self, start: int, size_bytes: int) -> None:
        with self._registering:
            if self._slot is not None and start in left_registered:
                return  # by another span
            if register(start, size_bytes):
                self._registered.append(start)
                if self._slot is not None:
                    left_registered[start] = size_bytes

    def begin_unregister(self) -> None:
        """Unregister in a thread: it takes a third as long as the upload."""
        if self._registered:
            self._thread = threading.Thread(target=self.unregister, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads
                self._thread = None
                self.unregister()

    def unregister(self) -> None:
        """End the registration; also the end of one that has begun.

        That of a slot's piece may have another owner by now.
        """
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        while self._registered:
            address = self._registered.pop()
            if self._slot is None or left_registered.pop(address, None) is not None:
                with torch.cuda.device(self._device):
                    torch.cuda.cudart().cudaHostUnregister(address)


def register(address: int, size_bytes: int) -> bool:
    """Register memory of the host with the driver, so that devices copy from and to it directly."""
    if int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE)) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # else the next kernel would fail with this error
        torch.zeros(1, device="cuda")
    return False


def _copy_now(piece: _HostSpan, target: torch.Tensor) -> None:
    """The same for the CPU, for tests without a GPU."""
    target.copy_(_tensor_at(piece.address, piece.size_bytes))


def _tensor_at(address: int, size_bytes: int) -> torch.Tensor:
    memory = (ctypes.c_char * size_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)
