"""A stored state taken in by all cores: into memory made ahead, or onto the device it was on.

Each thread moves pieces into pinned memory of its own and sends them on a stream of its own, one
buffer being filled while the other is on its way. A piece is hashed in the buffer, while it is in
the cache and on its way. Only a very long tensor is sent by all threads, and hashed by one of them
where it lies. Pieces are large, since each costs a few calls for which threads wait for each other.
The bytes stay in one allocation on the device, laid out as they were stored: they are only copied
from.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from holdfast._store.format.image import TensorSpec
from holdfast._store.format.threads import by_threads
from holdfast.torch.adapter import ADAPTER, dtype_of, repeated_axes, typed

_SPARE_BYTES = 256 << 20
_BUFFER_BYTES = 4 << 20  # pinning memory takes as long as sending ten times as much
_MOST_THREADS = 12  # measured with 16 cores: more threads only wait for each other
_LONG_BYTES = 256 << 20  # by all threads: one alone would be the last to end
_ALIGNMENT = 512  # of each run on the device
_PAGE = 4096
_POPULATE_READ = 22
_libc = ctypes.CDLL(None)


class OnDevice:
    """Tensors as they were stored, on their device: only to be copied from."""

    def __init__(self, sent: SentTensors, specs: Sequence[TensorSpec]) -> None:
        self._whole = sent.whole
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


def _typed(raw: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if raw.nbytes and raw.data_ptr() % spec.item_bytes:
        raw = raw.clone()  # in a file of several checkpoints it may be at any byte
    return typed(raw, spec)


def send(
    name: str, specs: Sequence[TensorSpec], views: Sequence[memoryview], *, hashed: bool
) -> OnDevice | None:
    """Send tensors to the device that they were on; None if it is not there, or has no room."""
    device = _device(name)
    size_bytes = sum(spec.size_bytes for spec in specs)
    # There must also be room for those that an optimizer will keep.
    if device is None or _room(device) < 2 * size_bytes + _SPARE_BYTES:
        return None
    try:
        return OnDevice(upload(views, device, hashed=hashed), specs)
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


# -- Sent by several threads, and hashed meanwhile -------------------------------------


class SentTensors(NamedTuple):
    """What was sent to the device."""

    whole: torch.Tensor  # one allocation
    raw: list[torch.Tensor]  # the bytes of each
    digests: list[bytes]  # of the bytes on the host; empty if not asked for


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
) -> SentTensors:
    """Send the bytes of each view to a device; OutOfMemoryError of torch if they do not fit.

    With `hashed` their digests are found meanwhile.
    """
    addresses = [_address(view) if view.nbytes else 0 for view in views]
    spans, places, total = _lay_out(addresses, views)
    pieces, groups, long = _works(spans, addresses, views, places, hashed=hashed)
    count = max(1, min(threads or threads_of_use(), len(pieces) + len(groups) + len(long)))
    whole = torch.empty(total, dtype=torch.uint8, device=device)
    senders = _senders(device, count)
    if device.type == "cuda":
        # Kernels of the caller's stream may still read the reused memory.
        torch.cuda.current_stream(device).synchronize()

    # Of no bytes there is nothing to send.
    digests = [xxhash.xxh3_128_digest(b"")] * (len(views) if hashed else 0)
    lock, errors = threading.Lock(), list[BaseException]()
    sending, hashing, both = iter(pieces), iter(long), iter(groups)

    def send(sender: Any, piece: _HostSpan) -> memoryview:
        target = whole[piece.place : piece.place + piece.size_bytes]
        _populate(piece)
        return sender.send(piece.address, target)  # type: ignore[no-any-return]  # either sender

    def send_and_hash(sender: Any, group: _TensorGroup) -> None:
        if len(group.indices) == 1:
            hasher = xxhash.xxh3_128()
            for piece in _cut(group.span, _BUFFER_BYTES):
                hasher.update(send(sender, piece))
            digests[group.indices[0]] = hasher.digest()
            return
        arrived, at = send(sender, group.span), 0
        for index in group.indices:
            digests[index] = xxhash.xxh3_128_digest(arrived[at : at + views[index].nbytes])
            at += views[index].nbytes

    def work(number: int) -> None:
        for index in _taken(hashing, lock, errors):
            digests[index] = xxhash.xxh3_128_digest(views[index])
        sender = senders[number]
        for piece in _taken(sending, lock, errors):
            send(sender, piece)
        for group in _taken(both, lock, errors):
            send_and_hash(sender, group)
        sender.finish()

    try:
        by_threads(work, count, errors)
    finally:
        senders.clear()
        _unpin(device)
    raw = [whole[place : place + view.nbytes] for place, view in zip(places, views, strict=True)]
    return SentTensors(whole, raw, digests)


def _unpin(device: torch.device) -> None:
    """Free the pinned memory, which torch would keep in a cache."""
    give_back = getattr(torch._C, "_host_emptyCache", None)  # 2.5 and newer
    if device.type == "cuda" and give_back is not None:
        give_back()


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
    """Spans of adjacent views, the place of each view on the device, and the total size."""
    places = [0] * len(views)
    spans: list[_HostSpan] = []
    total = start = end = place = 0
    for index in sorted(range(len(views)), key=lambda i: (addresses[i], views[i].nbytes)):
        address, size = addresses[index], views[index].nbytes
        if not size:
            continue
        if address != end:
            if end:
                spans.append(_HostSpan(start, end - start, place))
            # The same alignment as on the host, so that every tensor is aligned.
            place = -(-total // _ALIGNMENT) * _ALIGNMENT + address % _ALIGNMENT
            start = address
        places[index] = place + address - start
        end = address + size
        total = place + end - start
    if end:
        spans.append(_HostSpan(start, end - start, place))
    return spans, places, total


def _cut(span: _HostSpan, size_bytes: int) -> list[_HostSpan]:
    return [
        _HostSpan(span.address + at, min(size_bytes, span.size_bytes - at), span.place + at)
        for at in range(0, span.size_bytes, size_bytes)
    ]


class _TensorGroup(NamedTuple):
    """One tensor, or small ones that are adjacent: sent and hashed by one thread."""

    indices: list[int]
    span: _HostSpan


def _works(
    spans: Sequence[_HostSpan],
    addresses: list[int],
    views: Sequence[memoryview],
    places: list[int],
    *,
    hashed: bool,
) -> tuple[list[_HostSpan], list[_TensorGroup], list[int]]:
    """Pieces only to be sent, groups to be sent and hashed, and views only to be hashed."""
    if not hashed:
        return [piece for span in spans for piece in _cut(span, _BUFFER_BYTES)], [], []
    pieces: list[_HostSpan] = []
    groups: list[_TensorGroup] = []
    long: list[int] = []
    for index in sorted(range(len(views)), key=lambda i: (addresses[i], views[i].nbytes)):
        span = _HostSpan(addresses[index], views[index].nbytes, places[index])
        last = groups[-1] if groups else None
        if not span.size_bytes:
            continue
        if span.size_bytes >= _LONG_BYTES:
            long.append(index)
            pieces += _cut(span, _BUFFER_BYTES)
        elif last is not None and _may_join(last.span, span):
            joined = last.span._replace(size_bytes=last.span.size_bytes + span.size_bytes)
            groups[-1] = _TensorGroup(last.indices, joined)
            last.indices.append(index)
        else:
            groups.append(_TensorGroup([index], span))
    groups.sort(key=lambda group: -group.span.size_bytes)  # the largest first
    return pieces, groups, long


def _may_join(one: _HostSpan, other: _HostSpan) -> bool:
    is_adjacent = one.address + one.size_bytes == other.address
    is_adjacent &= one.place + one.size_bytes == other.place
    return is_adjacent and one.size_bytes + other.size_bytes <= _BUFFER_BYTES


def _populate(piece: _HostSpan) -> None:
    """Map the pages of a piece; an older kernel refuses, and maps each at its first touch."""
    start = piece.address // _PAGE * _PAGE
    size = ctypes.c_size_t(piece.address + piece.size_bytes - start)
    _libc.madvise(ctypes.c_void_p(start), size, _POPULATE_READ)


def _senders(device: torch.device, count: int) -> list[Any]:
    if device.type != "cuda":
        return [_PlainSender() for _ in range(count)]
    # One allocation: each one waits for the device.
    pinned = torch.empty((count, 2, _BUFFER_BYTES), dtype=torch.uint8, pin_memory=True)
    return [_Sender(device, buffers) for buffers in pinned]


class _Sender:
    """Two pinned buffers of one thread: one is filled while the other is being sent."""

    def __init__(self, device: torch.device, buffers: torch.Tensor) -> None:
        self._stream = torch.cuda.Stream(device)
        self._buffers = list(buffers)
        self._memory = [memory_of(buffer)[1] for buffer in buffers]
        self._sent = [torch.cuda.Event(), torch.cuda.Event()]
        self._turn = 0

    def send(self, address: int, target: torch.Tensor) -> memoryview:
        """Send bytes; returns them in the buffer, where they stay until the next call but one."""
        buffer, sent = self._buffers[self._turn], self._sent[self._turn]
        arrived = self._memory[self._turn][: target.nbytes]
        sent.synchronize()
        ctypes.memmove(buffer.data_ptr(), address, target.nbytes)
        with torch.cuda.stream(self._stream):
            target.copy_(buffer[: target.nbytes], non_blocking=True)
            sent.record(self._stream)
        self._turn = 1 - self._turn
        return arrived

    def finish(self) -> None:
        self._stream.synchronize()


class _PlainSender:
    """The same for the CPU, for tests without a GPU."""

    def send(self, address: int, target: torch.Tensor) -> memoryview:
        ctypes.memmove(target.data_ptr(), address, target.nbytes)
        return memory_of(target)[1]

    def finish(self) -> None:
        """Nothing is pending."""
