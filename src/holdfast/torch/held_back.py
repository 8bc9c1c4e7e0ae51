"""From a CUDA device straight into a slot, where the device has no room for a spare buffer.

What only an optimizer changes goes home behind the next forward and backward pass, and the
optimizer's next step waits for it if it comes first. Everything else (running means, a scaler)
is copied before training goes on.

Whether really nothing but the optimizer touched those tensors is not left to hope: their sums
are taken on the device before training goes on, and again of what came home. If they differ
(weights that were swapped for an evaluation, say), the slot is not used, and from then on
training waits for each copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast._store.format.image import TensorSpec
from holdfast._text import say

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class _Watch:
    """What optimizers do, as their hook sees it."""

    steps: int = 0
    in_graph: bool = False  # a step was captured, and is replayed without being seen
    optimizers: weakref.WeakSet[torch.optim.Optimizer] = field(default_factory=weakref.WeakSet)
    flights: list[weakref.ref[_Flight]] = field(default_factory=list)


_watch = _Watch()
_hook: Any = None


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Called before every step of every optimizer."""
    if torch.cuda.is_current_stream_capturing():
        _watch.in_graph = True
        return
    _watch.steps += 1
    _watch.optimizers.add(optimizer)
    for reference in list(_watch.flights):
        flight = reference()
        if flight is None or flight.landed.query():
            _watch.flights.remove(reference)
        else:
            flight.hold_back()


class HeldBack:
    """Copies the tensors of one device."""

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream,
        places: Sequence[tuple[TensorSpec, int]],
    ) -> None:
        global _hook
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(_before_step)
        self._device = device
        self._stream = stream
        self._places = places
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
    ) -> _Flight:
        """Begin to copy when the busy streams are done with what they have; all wait for it.

        A careful copy holds back everything that training does next.
        """
        has_stepped, self._steps = _watch.steps > self._steps, _watch.steps
        holds_back = self._may_hold_back and has_stepped and not _watch.in_graph and not careful
        later = _of_optimizers(values) if holds_back else []
        at_once = sorted(set(range(len(values))) - set(later))
        targets = [_home(home, at, spec) for spec, at in self._places]
        for stream in busy:
            self._stream.wait_stream(stream)
        flight = _Flight(self, [targets[i] for i in later])
        with torch.no_grad(), torch.cuda.stream(self._stream):
            flight.began.record()
            if later:
                flight.expect(torch.stack([_sum(values[i]) for i in later]))
            self._copy([targets[i] for i in at_once], [values[i] for i in at_once])
            flight.freed.record()
            for stream in everyone:
                stream.wait_event(flight.freed)
            self._copy([targets[i] for i in later], [values[i] for i in later])
            flight.landed.record()
        if later:
            _watch.flights.append(weakref.ref(flight))
        return flight

    def _copy(self, targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        for target, value in zip(targets, values, strict=True):
            target.copy_(value, non_blocking=True)

    def distrust(self) -> None:
        """Something else than an optimizer changes these tensors."""
        if self._may_hold_back:
            self._may_hold_back = False
            say(
                "the parameters were changed outside of the optimizer's step while they were "
                "copied: that snapshot is not used, and training waits for the next ones."
            )

    def close(self) -> None:
        self._places = ()


class _Flight:
    """Tensors on their way home."""

    def __init__(self, owner: HeldBack, later: list[torch.Tensor]) -> None:
        self._owner = owner
        self._later = later
        events = [torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(3)]
        self.began, self.freed, self.landed = events
        self._sums: torch.Tensor | None = None
        self._held: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.stall_seconds = self.cost_seconds = 0.0

    def expect(self, sums: torch.Tensor) -> None:
        """Take down, on this stream, what the tensors add up to now."""
        self._sums = torch.empty_like(sums, device="cpu", pin_memory=True)
        self._sums.copy_(sums, non_blocking=True)

    def hold_back(self) -> None:
        """An optimizer is about to step: not before all is home."""
        stream = torch.cuda.current_stream(self._owner._device)
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(self.landed)
        after.record(stream)
        self._held.append((before, after))

    def wait(self) -> bool:
        self.landed.synchronize()
        self.stall_seconds = self.cost_seconds = self.began.elapsed_time(self.freed) / 1e3
        for before, after in list(self._held):
            if after.query():  # else the optimizer has not come to it yet, and need not wait
                self.cost_seconds += before.elapsed_time(after) / 1e3
        if self._sums is None:
            return True
        if torch.equal(torch.stack([_sum(target) for target in self._later]), self._sums):
            return True
        self._owner.distrust()
        return False


def _of_optimizers(values: Sequence[torch.Tensor]) -> list[int]:
    """Which of the tensors are an optimizer's own, or parameters: only its step changes them."""
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
    """All words of a tensor as one number: the same in any order, and on any device."""
    return value.view(_WORDS[value.element_size()]).sum(dtype=torch.int64)


def _home(base: torch.Tensor, at: int, spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if spec.size_bytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    return base[at : at + spec.size_bytes].view(dtype).view(spec.shape)
