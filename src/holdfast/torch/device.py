"""Copies from a CUDA device into a slot while training goes on.

With room on the device, all tensors are copied into a spare buffer there, at the speed of its
memory; only that delays the work that training queues next. The buffer is then copied to the host
during the next steps, on a stream of its own, into memory that is registered with the driver.
Without room, `HeldBack` copies straight into the slot.

A slot is registered piece by piece, while the rest of it is still being touched, or when the first
copy needs it. No copy crosses the edge between two pieces: the driver takes one only within one
registered range.

A slot is whole only when its last byte has arrived (see _run/saving/arena_builder.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import statistics
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast._store.format.image import TensorSpec
from holdfast._store.memory.pages import PIECE_BYTES, Piece, pieces_of, split
from holdfast._text import say
from holdfast.torch.receive import differ, left_registered, register

_ALIGNMENT = 512  # like the allocator: a kernel copies aligned memory faster
_LEAST_ROOM_BYTES = 1 << 30
_ROOM_SHARE = 16  # this fraction of the device's memory stays free for training
_POOL_STREAMS = 32  # torch has this many of each priority, and uses them in turn
_BESIDE_SHARE = 0.0125  # of its time: how much a copy to the host slows the device
_BYTES_PER_SECOND = 2e12  # of a copy on the device, until one is measured
_MOST_QUEUED = 2  # bursts on their way to the host; a piece takes 0.6 ms
_LONGEST_BURST = 16  # pieces
_REMEMBERED = 8
_Piece = TypeVar("_Piece")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class _ImageSpan:
    """Tensors that are adjacent in the image: one copy to the host."""

    offset: int  # in the image
    size_bytes: int
    staged: int  # where it begins in the spare buffer


@dataclass
class Timing:
    """When a copy began, when training could go on, and when all was in the slot."""

    began: torch.cuda.Event
    freed: torch.cuda.Event
    landed: torch.cuda.Event

    @classmethod
    def new(cls) -> Timing:
        # Blocking: the waiting thread sleeps instead of spinning.
        return cls(*(torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(3)))


class Devices:
    """Copies the tensors of all devices of one process into the slots of an arena."""

    def __init__(
        self, mapped: Any, places: Sequence[tuple[TensorSpec, int]], slots: Sequence[int]
    ) -> None:
        self._slots = list(slots)
        self._slot_bytes = len(mapped) - self._slots[-1]
        self._host = torch.frombuffer(mapped, dtype=torch.uint8)
        self._registered = self._take_registered()  # by slot: bytes by address
        self._registering = threading.Lock()
        by_device: dict[str, list[int]] = {}
        for index, (spec, _) in enumerate(places):
            by_device.setdefault(spec.device, []).append(index)
        self._indices = list(by_device.values())
        size_bytes = sum(spec.size_bytes for spec, _ in places)
        self._costs: deque[float] = deque([2 * size_bytes / _BYTES_PER_SECOND], _REMEMBERED)
        self._landed = 0  # copies
        self.found_change = False
        self.stall_seconds = 0.0  # how long the last copy delayed training
        self._was_ahead = False  # True if the device still had queued work at the last copy
        self._parts = [
            _OneDevice(torch.device(name), [places[i] for i in ones])
            for name, ones in by_device.items()
        ]

    def _take_registered(self) -> dict[int, dict[int, int]]:
        """The pieces that an upload from this arena has left registered."""
        found: dict[int, dict[int, int]] = {}
        for slot, start in enumerate(self._slots) if left_registered else ():
            for at, size_bytes in pieces_of(start, self._slot_bytes):
                address = self._host.data_ptr() + at
                if left_registered.get(address) == size_bytes:
                    found.setdefault(slot, {})[address] = left_registered.pop(address)
        return found

    @property
    def cost_seconds(self) -> float:
        return statistics.median(self._costs)

    @property
    def is_ahead(self) -> bool:
        """True if the device has had work since before the last copy was begun.

        If it is idle by now, it has waited for the processor.
        """
        return self._was_ahead and self._has_work()

    def begin(
        self, slot: int, values: list[torch.Tensor], *, careful: bool, shared: Sequence[Piece] = ()
    ) -> _AllCopies:
        """Start a copy. A careful one cannot fail.

        Memory ranges that the slots share are compared with the last copy, not written.
        """
        self._was_ahead = self._has_work()
        self.found_change = False
        home = self._host[self._slots[slot] :]
        elsewhere = [(self._slots[slot] + at, size) for at, size in shared] if slot else []
        own_bytes = self._slot_bytes - sum(size for _, size in elsewhere)
        with self._registering:
            registered = sum(self._registered.get(slot, {}).values()) == own_bytes
        register = None if registered else functools.partial(self._register_all, slot, elsewhere)
        copies = [
            part.begin(home, [values[i] for i in indices], register, shared, careful=careful)
            for indices, part in zip(self._indices, self._parts, strict=True)
        ]
        return _AllCopies(self, copies)

    def can_compare(self) -> bool:
        return all(part.has_stage() for part in self._parts)

    def has_changed(self, values: list[torch.Tensor], shared: Sequence[Piece]) -> bool:
        return any(
            bool(flag)
            for indices, part in zip(self._indices, self._parts, strict=True)
            if (flag := part.changed([values[i] for i in indices], shared)) is not None
        )

    def _has_work(self) -> bool:
        return any(not part.is_idle() for part in self._parts)

    def register(self, slot: int, start: int, size_bytes: int) -> None:
        """Register a piece with the driver, so that the device copies there by DMA."""
        address = self._host.data_ptr() + start
        with self._registering, torch.cuda.device(self._parts[0].device):
            pieces = self._registered.setdefault(slot, {})
            if address in pieces:
                return
            if register(address, size_bytes):
                pieces[address] = size_bytes

    def _register_all(self, slot: int, without: Sequence[Piece]) -> None:
        for piece in pieces_of(self._slots[slot], self._slot_bytes, without):
            self.register(slot, *piece)

    def forget(self, slot: int) -> None:
        with self._registering:
            for address in self._registered.pop(slot, {}):
                torch.cuda.cudart().cudaHostUnregister(address)

    def note_cost(self, seconds: float) -> None:
        # During the first copy the driver loads its kernels: that predicts nothing.
        self._landed += 1
        if self._landed == 2:
            self._costs.clear()  # the estimate
        if self._landed >= 2:
            self._costs.append(seconds)

    def close(self) -> None:
        for slot in list(self._registered):
            self.forget(slot)
        for part in self._parts:
            part.close()
        self._parts = []
        del self._host


class _AllCopies:
    def __init__(self, devices: Devices, parts: Sequence[Any]) -> None:
        self._devices = devices
        self._parts = parts

    def wait(self) -> bool:
        _let_captures_be()
        sending = [part.send() for part in self._parts]
        while sending:  # in turns: each device has a link of its own
            sending = [each for each in sending if next(each, self) is None]
        landed = [part.wait() for part in self._parts]
        good = all(landed)
        self._devices.found_change = any(part.found_change for part in self._parts)
        if good:
            self._devices.note_cost(max(part.cost_seconds for part in self._parts))
            self._devices.stall_seconds = max(part.stall_seconds for part in self._parts)
        return good


class _OneDevice:
    def __init__(self, device: torch.device, places: Sequence[tuple[TensorSpec, int]]) -> None:
        self.device = device
        self._places = places
        self._stream = torch.cuda.Stream(device)
        self._others = _pool_streams(device, self._stream)
        self._spans, self._staged_at, self._stage_bytes = _find_spans(places)
        self._stage: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._groups: list[list[int]] = []
        self._may_stage = True
        self._held_back: HeldBack | None = None
        self._shared: tuple[Sequence[Piece], frozenset[int]] | None = None

    def begin(
        self,
        home: torch.Tensor,
        values: list[torch.Tensor],
        register: Callable[[], None] | None,
        shared: Sequence[Piece],
        *,
        careful: bool,
    ) -> Any:
        """Begin to copy into the slot that `home` is the beginning of.

        `register` registers the slot, if it is not registered yet.
        """
        if self.has_stage():
            return self._by_stage(home, values, register, shared)
        if self._held_back is None:
            self._held_back = HeldBack(self.device, self._stream, self._places)
        careful = careful or register is not None
        busy = self._busy_streams()
        return self._held_back.begin(home, values, busy, [busy[0], *self._others], careful=careful)

    def is_idle(self) -> bool:
        """Whether the device has done all queued work of training."""
        return torch.cuda.current_stream(self.device).query()

    def close(self) -> None:
        self._stage, self._views = None, []
        if self._held_back is not None:
            self._held_back.close()

    def _by_stage(
        self,
        home: torch.Tensor,
        values: list[torch.Tensor],
        register: Callable[[], None] | None,
        shared: Sequence[Piece],
    ) -> _StagedCopy:
        assert self._stage is not None
        timing = Timing.new()
        busy = self._busy_streams()
        for stream in busy:
            self._stream.wait_stream(stream)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            timing.began.record()
            changed = self.changed(values, shared)
            within = self._within(shared)
            for group in self._groups:
                left = [i for i in group if i not in within]
                torch._foreach_copy_([self._views[i] for i in left], [values[i] for i in left])
            timing.freed.record()
        # The next work of any stream may change what is being copied, even of one that is idle now.
        for stream in (busy[0], *self._others):
            stream.wait_event(timing.freed)
        pieces = self._pieces(home, self._stage, shared)
        return _StagedCopy(timing, self._stream, pieces, register, changed)

    def _pieces(
        self, home: torch.Tensor, stage: torch.Tensor, shared: Sequence[Piece]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The targets on the host and their sources in the spare buffer."""
        for span in self._spans:
            for start, length, is_within in split(span.offset, span.size_bytes, shared):
                for at, size in () if is_within else _between_edges(start, length):
                    source = span.staged + at - span.offset
                    yield home[at : at + size], stage[source : source + size]

    def _busy_streams(self) -> list[torch.cuda.Stream]:
        """The current stream, and every other stream of torch that has queued work.

        An update may still run on a stream of the user.
        """
        current = torch.cuda.current_stream(self.device)
        return [current, *(each for each in self._others if not each.query() and each != current)]

    def _within(self, shared: Sequence[Piece]) -> frozenset[int]:
        """The tensors of which a part is in a shared range."""
        if not shared:
            return frozenset()
        if self._shared is None or self._shared[0] is not shared:
            found = (
                index
                for index, (spec, at) in enumerate(self._places)
                if any(is_within for *_, is_within in split(at, spec.size_bytes, shared))
            )
            self._shared = (shared, frozenset(found))
        return self._shared[1]

    @torch.no_grad()
    def changed(self, values: list[torch.Tensor], shared: Sequence[Piece]) -> torch.Tensor | None:
        """On the device: whether a tensor in a shared range differs from the last copy."""
        found = [differ(values[i], self._views[i]) for i in self._within(shared)]
        return torch.stack(found).any() if found else None

    def has_stage(self) -> bool:
        """Whether there is a spare buffer: made once, and freed when memory runs short."""
        if not self._may_stage:
            return False
        free, total = torch.cuda.mem_get_info(self.device)
        room = max(_LEAST_ROOM_BYTES, total // _ROOM_SHARE)
        if self._stage is None:
            if free - self._stage_bytes >= room:
                self._make_stage()
            self._may_stage = self._stage is not None
        elif free < room // 4:
            self._stage, self._views, self._may_stage = None, [], False
        return self._may_stage

    def _make_stage(self) -> None:
        try:
            with torch.cuda.device(self.device):
                stage = torch.empty(self._stage_bytes, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError:
            return
        self._stage = stage
        self._views = [
            _typed(stage, at, spec)
            for at, (spec, _) in zip(self._staged_at, self._places, strict=True)
        ]
        # One kernel copies many tensors if they have one dtype and one memory order.
        groups: dict[Any, list[int]] = {}
        for index, (spec, _) in enumerate(self._places):
            if spec.size_bytes:
                key = (spec.dtype, spec.strides is None)
                groups.setdefault(key, []).append(index)
        self._groups = list(groups.values())


@dataclass(eq=False)
class _StagedCopy:
    """A copy that is in the spare buffer, or on its way there."""

    _timing: Timing
    _stream: torch.cuda.Stream
    _pieces: Iterator[tuple[torch.Tensor, torch.Tensor]]
    _register: Callable[[], None] | None
    _changed: torch.Tensor | None
    found_change: bool = False
    stall_seconds: float = 0.0
    cost_seconds: float = 0.0

    def send(self) -> Iterator[None]:
        """Copy to the host, a burst for each item."""
        self._timing.freed.synchronize()
        if self._register is not None:
            self._register()
        yield from queue_in_bursts(self._pieces, self._queue)
        self._timing.landed.record(self._stream)

    def _queue(self, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            targets, sources = zip(*pieces, strict=True)
            torch._foreach_copy_(targets, sources, non_blocking=True)
        done = torch.cuda.Event(blocking=True)
        done.record(self._stream)
        return done

    def wait(self) -> bool:
        timing = self._timing
        timing.landed.synchronize()
        self.stall_seconds = timing.began.elapsed_time(timing.freed) / 1e3
        beside_seconds = timing.freed.elapsed_time(timing.landed) / 1e3
        self.cost_seconds = self.stall_seconds + _BESIDE_SHARE * beside_seconds
        if self._changed is not None:
            with torch.cuda.stream(self._stream):
                self.found_change = bool(self._changed)
        return not self.found_change


def queue_in_bursts(
    pieces: Iterable[_Piece], queue: Callable[[Sequence[_Piece]], Any]
) -> Iterator[None]:
    """Queue few pieces ahead of the device: a script that waits for it waits for them, too.

    If the device is idle already, this thread has waited for the interpreter. More pieces go at a
    time then, since each call waits so. `queue` returns the event of their end.
    """
    left, queued, length = iter(pieces), deque[Any](), 1
    while burst := list(itertools.islice(left, length)):
        queued.append(queue(burst))
        yield
        if len(queued) > _MOST_QUEUED:
            queued.popleft().synchronize()
        length = min(2 * length, _LONGEST_BURST) if queued[-1].query() else max(1, length // 2)


def _let_captures_be() -> None:
    """Let calls of this thread not end the capture of a CUDA graph in another one."""
    relaxed = ctypes.c_int(2)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


def _typed(base: torch.Tensor, at: int, spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if spec.size_bytes == 0:
        return torch.empty(spec.shape, dtype=dtype, device=base.device)
    return base[at : at + spec.size_bytes].view(dtype).view(spec.shape)


def _find_spans(
    places: Sequence[tuple[TensorSpec, int]],
) -> tuple[list[_ImageSpan], list[int], int]:
    """The spans in the image, the place of each tensor in the spare buffer, and its size."""
    order = sorted(range(len(places)), key=lambda i: (places[i][1], places[i][0].size_bytes))
    spans: list[_ImageSpan] = []
    staged_at = [0] * len(places)
    size = 0
    for index in order:
        spec, offset = places[index]
        if not spans or spans[-1].offset + spans[-1].size_bytes != offset:
            start = -(-size // _ALIGNMENT) * _ALIGNMENT + offset % _ALIGNMENT
            spans.append(_ImageSpan(offset, 0, start))
        span = spans[-1]
        staged_at[index] = span.staged + span.size_bytes
        span.size_bytes += spec.size_bytes
        size = span.staged + span.size_bytes
    return spans, staged_at, max(1, size)


def _pool_streams(device: torch.device, own: torch.cuda.Stream) -> list[torch.cuda.Stream]:
    """Every stream that torch may have given to the script: it uses the same few in turn."""
    found = {}
    for priority in (0, -1):
        for _ in range(_POOL_STREAMS):
            stream = torch.cuda.Stream(device, priority=priority)
            found[stream.cuda_stream] = stream
    found[torch.cuda.default_stream(device).cuda_stream] = torch.cuda.default_stream(device)
    found.pop(own.cuda_stream, None)
    return list(found.values())


def _between_edges(start: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Parts of a range of the image, none of which crosses the edge of a registered piece."""
    end = start + size_bytes
    while start < end:
        size = min(end - start, PIECE_BYTES - start % PIECE_BYTES)
        yield start, size
        start += size


# -- Without room on the device: straight into the slot --------------------------------
# Tensors that only an optimizer changes are copied to the host during the next forward and backward
# pass, and the optimizer's next step waits for that. Everything else (running means, a scaler) is
# copied before training goes on.
#
# It is checked that only the optimizer changes those tensors: their sums are computed on the device
# before training goes on, and again of the copies. If they differ (weights that were swapped for an
# evaluation, say), the slot is not used, and from then on training waits for each copy.


@dataclass
class _Watch:
    """What the hook of all optimizers observes."""

    steps: int = 0
    in_graph: bool = False  # a step was captured in a CUDA graph: its replays are not observed
    optimizers: weakref.WeakSet[torch.optim.Optimizer] = field(default_factory=weakref.WeakSet)
    copies: list[weakref.ref[_HeldBackCopy]] = field(default_factory=list)


_watch = _Watch()
_hook: Any = None


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.cuda.is_current_stream_capturing():
        _watch.in_graph = True
        return
    _watch.steps += 1
    _watch.optimizers.add(optimizer)
    for reference in list(_watch.copies):
        copy = reference()
        if copy is None or copy.landed.query():
            _watch.copies.remove(reference)
        else:
            copy.hold_back()


def _find_cuts(places: Sequence[tuple[TensorSpec, int]]) -> dict[int, list[tuple[int, int]]]:
    """By index, the parts of each tensor that crosses an edge."""
    return {
        index: cuts
        for index, (spec, at) in enumerate(places)
        if len(cuts := list(_between_edges(at, spec.size_bytes))) > 1
    }


@dataclass(eq=False)
class HeldBack:
    """Copies the tensors of one device."""

    _device: torch.device
    _stream: torch.cuda.Stream
    _places: Sequence[tuple[TensorSpec, int]]

    def __post_init__(self) -> None:
        global _hook
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(_before_step)
        self._cuts = _find_cuts(self._places)
        self._steps = _watch.steps
        self._may_hold_back = True

    def begin(
        self,
        home: torch.Tensor,
        values: list[torch.Tensor],
        busy: Sequence[torch.cuda.Stream],
        everyone: Sequence[torch.cuda.Stream],
        *,
        careful: bool,
    ) -> _HeldBackCopy:
        """Begin to copy when the busy streams have done their queued work.

        A careful copy delays everything that training does next.
        """
        has_stepped, self._steps = _watch.steps > self._steps, _watch.steps
        holds_back = self._may_hold_back and has_stepped and not _watch.in_graph and not careful
        later = _of_optimizers(values) if holds_back else []
        at_once = sorted(set(range(len(values))) - set(later))
        targets = [_typed(home, at, spec) for spec, at in self._places]
        for stream in busy:
            self._stream.wait_stream(stream)
        copy = _HeldBackCopy(self, [targets[i] for i in later])
        with torch.no_grad(), torch.cuda.stream(self._stream):
            copy.began.record()
            if later:
                copy.expect(torch.stack([_sum(values[i]) for i in later]))
            self._copy(at_once, targets, values)
            copy.freed.record()
            for stream in everyone:
                stream.wait_event(copy.freed)
            self._copy(later, targets, values)
            copy.landed.record()
        if later:
            _watch.copies.append(weakref.ref(copy))
        return copy

    def _copy(
        self, indices: list[int], targets: list[torch.Tensor], values: list[torch.Tensor]
    ) -> None:
        for index in indices:
            target, value = targets[index], values[index]
            if index not in self._cuts:
                target.copy_(value, non_blocking=True)
                continue
            # An edge is never within an item: items are aligned, and edges lie between pages.
            target, value = target.view(-1), value.reshape(-1)
            spec, offset = self._places[index]
            for start, size in self._cuts[index]:
                first = (start - offset) // spec.item_bytes
                part = slice(first, first + size // spec.item_bytes)
                target[part].copy_(value[part], non_blocking=True)

    def distrust(self) -> None:
        """Something other than an optimizer changes these tensors."""
        if self._may_hold_back:
            self._may_hold_back = False
            say(
                "the parameters were changed outside of the optimizer's step while they were "
                "copied: that snapshot is not used, and training waits for the next ones."
            )

    def close(self) -> None:
        self._places = ()


class _HeldBackCopy:
    """A copy to the host that the optimizer waits for."""

    found_change = False  # it has nothing to compare with

    def __init__(self, owner: HeldBack, later: list[torch.Tensor]) -> None:
        self._owner = owner
        self._later = later
        events = [torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(3)]
        self.began, self.freed, self.landed = events
        self._sums: torch.Tensor | None = None
        self._held: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.stall_seconds = self.cost_seconds = 0.0

    def expect(self, sums: torch.Tensor) -> None:
        """Record, on this stream, the sums of the tensors now."""
        self._sums = torch.empty_like(sums, device="cpu", pin_memory=True)
        self._sums.copy_(sums, non_blocking=True)

    def hold_back(self) -> None:
        """An optimizer is about to step: let it wait for the copy."""
        stream = torch.cuda.current_stream(self._owner._device)
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(self.landed)
        after.record(stream)
        self._held.append((before, after))

    def send(self) -> Iterator[None]:
        return iter(())  # all is queued

    def wait(self) -> bool:
        self.landed.synchronize()
        self.stall_seconds = self.cost_seconds = self.began.elapsed_time(self.freed) / 1e3
        for before, after in list(self._held):
            if after.query():  # else the optimizer has not reached it yet
                self.cost_seconds += before.elapsed_time(after) / 1e3
        if self._sums is None:
            return True
        if torch.equal(torch.stack([_sum(target) for target in self._later]), self._sums):
            return True
        self._owner.distrust()
        return False


def _of_optimizers(values: Sequence[torch.Tensor]) -> list[int]:
    """Which tensors are an optimizer's moments or parameters: only its step changes them."""
    memory: set[int] = set()
    for optimizer in list(_watch.optimizers):
        for group in optimizer.param_groups:
            memory.update(parameter.data_ptr() for parameter in group["params"])
        for held in optimizer.state.values():
            tensors = held.values() if isinstance(held, dict) else ()
            memory.update(t.data_ptr() for t in tensors if isinstance(t, torch.Tensor))
    return [
        i
        for i, value in enumerate(values)
        if value.data_ptr() in memory and value.numel() and not value.is_complex()
    ]


def _sum(value: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's words: the same in any order and on any device."""
    return value.view(_WORDS[value.element_size()]).sum(dtype=torch.int64)
