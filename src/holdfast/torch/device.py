"""From a CUDA device into a slot, without keeping training waiting.

With room on the device: all tensors are copied into a spare buffer there, at the speed of its
memory; the work that training queues from then on waits for that and for nothing else. The
buffer goes home behind the next steps, on a stream of its own, into memory that is registered
with the driver. Without room, see held_back.py.

A slot is whole only when its last byte has come (see _run/saving/slots.py).
"""

from __future__ import annotations

import ctypes
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast._store.format.image import TensorSpec
from holdfast.torch.held_back import HeldBack

_ALIGNMENT = 512  # as the allocator has it: a kernel copies aligned memory faster
_LEAST_ROOM_BYTES = 1 << 30
_ROOM_SHARE = 16  # of the device's memory, one part in so many stays free for training
_POOL_STREAMS = 32  # torch hands out so many of each priority, in turn
_PORTABLE = 1  # registered for every device
_BESIDE_SHARE = 0.02  # of its time, a copy home slows what the device does meanwhile
_BYTES_PER_SECOND = 1e12  # of a copy on the device, until one was measured
_REMEMBERED = 8


@dataclass
class _Run:
    """Tensors that follow one another in the image: they come home in one copy."""

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
        # Blocking: whoever waits for it sleeps, where it would else burn a core.
        return cls(*(torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(3)))


class Devices:
    """Copies the tensors of all devices of one process into the slots of an arena."""

    def __init__(
        self, mapped: Any, places: Sequence[tuple[TensorSpec, int]], slots: Sequence[int]
    ) -> None:
        self._slots = list(slots)
        self._host = torch.frombuffer(mapped, dtype=torch.uint8)
        by_device: dict[str, list[int]] = {}
        for index, (spec, _) in enumerate(places):
            by_device.setdefault(spec.device, []).append(index)
        self._indices = list(by_device.values())
        size_bytes = sum(spec.size_bytes for spec, _ in places)
        self._costs: deque[float] = deque([2 * size_bytes / _BYTES_PER_SECOND], _REMEMBERED)
        self._is_measured = False
        self.stall_seconds = 0.0  # for which the last copy kept training waiting
        self.is_ahead = False  # the processor, of devices that still had work at the last copy
        with torch.cuda.device(next(iter(by_device))):
            self._is_registered = _register(mapped)
        self._parts = [
            _OneDevice(torch.device(name), [places[i] for i in ones], self._is_registered)
            for name, ones in by_device.items()
        ]

    @property
    def cost_seconds(self) -> float:
        return statistics.median(self._costs)

    def begin(self, slot: int, values: list[torch.Tensor], *, careful: bool) -> _Flight:
        self.is_ahead = any(not part.is_idle() for part in self._parts)
        home = self._host[self._slots[slot] :]
        flights = [
            part.begin(home, [values[i] for i in indices], careful=careful)
            for indices, part in zip(self._indices, self._parts, strict=True)
        ]
        return _Flight(self, flights)

    def note_cost(self, seconds: float) -> None:
        if not self._is_measured:
            self._is_measured = True
            self._costs.clear()  # what was guessed
        self._costs.append(seconds)

    def close(self) -> None:
        if self._is_registered:
            torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr())
        for part in self._parts:
            part.close()
        self._parts = []
        del self._host


class _Flight:
    """The copies of all devices for one slot."""

    def __init__(self, devices: Devices, parts: Sequence[Any]) -> None:
        self._devices = devices
        self._parts = parts

    def wait(self) -> bool:
        landed = [part.wait() for part in self._parts]
        good = all(landed)
        if good:
            self._devices.note_cost(max(part.cost_seconds for part in self._parts))
            self._devices.stall_seconds = max(part.stall_seconds for part in self._parts)
        return good


class _OneDevice:
    """The tensors of one device."""

    def __init__(
        self,
        device: torch.device,
        places: Sequence[tuple[TensorSpec, int]],
        is_registered: bool,
    ) -> None:
        self.device = device
        self._is_registered = is_registered
        self._places = places
        self._stream = torch.cuda.Stream(device)
        self._others = _pool_streams(device, self._stream)
        self._runs, self._staged_at, self._stage_bytes = _find_runs(places)
        self._stage: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._groups: list[list[int]] = []
        self._may_stage = True
        self._held_back: HeldBack | None = None

    def begin(self, home: torch.Tensor, values: list[torch.Tensor], *, careful: bool) -> Any:
        """Begin to copy into the slot that `home` is the beginning of."""
        if self._has_stage():
            return self._by_stage(home, values)
        if self._held_back is None:
            self._held_back = HeldBack(self.device, self._stream, self._places)
        careful = careful or not self._is_registered
        busy = self._busy_streams()
        return self._held_back.begin(home, values, busy, [busy[0], *self._others], careful=careful)

    def is_idle(self) -> bool:
        """Whether the device has done all that training has asked of it."""
        return torch.cuda.current_stream(self.device).query()

    def close(self) -> None:
        self._stage, self._views = None, []
        if self._held_back is not None:
            self._held_back.close()

    def _by_stage(self, home: torch.Tensor, values: list[torch.Tensor]) -> _StagedFlight:
        assert self._stage is not None
        timing = Timing.new()
        busy = self._busy_streams()
        for stream in busy:
            self._stream.wait_stream(stream)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            timing.began.record()
            for group in self._groups:
                torch._foreach_copy_([self._views[i] for i in group], [values[i] for i in group])
            timing.freed.record()
        # What any of them does next may change what is being copied: also one that is idle now.
        for stream in (busy[0], *self._others):
            stream.wait_event(timing.freed)
        pieces = [
            (
                home[run.offset : run.offset + run.size_bytes],
                self._stage[run.staged : run.staged + run.size_bytes],
            )
            for run in self._runs
        ]
        flight = _StagedFlight(timing, self._stream, pieces)
        if self._is_registered:
            flight.send_home()
        return flight

    def _busy_streams(self) -> list[torch.cuda.Stream]:
        """The current stream, and whichever other of torch's has not done all its work.

        An update on a stream of the user's own may still be under way.
        """
        current = torch.cuda.current_stream(self.device)
        return [current, *(each for each in self._others if not each.query() and each != current)]

    def _has_stage(self) -> bool:
        """Whether there is a spare buffer: made once, and given up when memory runs short."""
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
        # One kernel copies many tensors if they are of one type and in the same order.
        groups: dict[Any, list[int]] = {}
        for index, (spec, _) in enumerate(self._places):
            if spec.size_bytes:
                key = (spec.dtype, spec.strides is None)
                groups.setdefault(key, []).append(index)
        self._groups = list(groups.values())


class _StagedFlight:
    """A copy from the spare buffer into a slot."""

    def __init__(
        self,
        timing: Timing,
        stream: torch.cuda.Stream,
        pieces: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._timing = timing
        self._stream = stream
        self._pieces = pieces
        self._is_sent = False
        self.stall_seconds = self.cost_seconds = 0.0

    def send_home(self) -> None:
        """Queue the copies; into memory that is not registered, this waits for them."""
        self._is_sent = True
        with torch.cuda.stream(self._stream):
            for target, source in self._pieces:
                target.copy_(source, non_blocking=True)
            self._timing.landed.record()

    def wait(self) -> bool:
        timing = self._timing
        if not self._is_sent:
            timing.freed.synchronize()
            self.send_home()
        timing.landed.synchronize()
        self.stall_seconds = timing.began.elapsed_time(timing.freed) / 1e3
        beside_seconds = timing.freed.elapsed_time(timing.landed) / 1e3
        self.cost_seconds = self.stall_seconds + _BESIDE_SHARE * beside_seconds
        return True


def _typed(base: torch.Tensor, at: int, spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if spec.size_bytes == 0:
        return torch.empty(spec.shape, dtype=dtype, device=base.device)
    return base[at : at + spec.size_bytes].view(dtype).view(spec.shape)


def _find_runs(
    places: Sequence[tuple[TensorSpec, int]],
) -> tuple[list[_Run], list[int], int]:
    """The runs in the image, where each tensor stands in the spare buffer, and its size."""
    order = sorted(range(len(places)), key=lambda i: (places[i][1], places[i][0].size_bytes))
    runs: list[_Run] = []
    staged_at = [0] * len(places)
    size = 0
    for index in order:
        spec, offset = places[index]
        if not runs or runs[-1].offset + runs[-1].size_bytes != offset:
            start = -(-size // _ALIGNMENT) * _ALIGNMENT + offset % _ALIGNMENT
            runs.append(_Run(offset, 0, start))
        run = runs[-1]
        staged_at[index] = run.staged + run.size_bytes
        run.size_bytes += spec.size_bytes
        size = run.staged + run.size_bytes
    return runs, staged_at, max(1, size)


def _pool_streams(device: torch.device, own: torch.cuda.Stream) -> list[torch.cuda.Stream]:
    """Every stream that torch may have given to anybody: it hands out the same few in turn."""
    found = {}
    for priority in (0, -1):
        for _ in range(_POOL_STREAMS):
            stream = torch.cuda.Stream(device, priority=priority)
            found[stream.cuda_stream] = stream
    found[torch.cuda.default_stream(device).cuda_stream] = torch.cuda.default_stream(device)
    found.pop(own.cuda_stream, None)
    return list(found.values())


def _register(mapped: Any) -> bool:
    """Tell the driver of the arena, so that it copies there without the processor's help."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    result = torch.cuda.cudart().cudaHostRegister(address, len(mapped), _PORTABLE)
    return int(result) == 0
