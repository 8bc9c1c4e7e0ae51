"""How long this rank waits for the others, as DistributedDataParallel itself has measured it.

DDP times a step now and then for its own log: when the backward pass was done, and when the
last of the sums over all ranks was there. What lies between is waiting. One wait it does not
log: a module with buffers begins each forward pass with those of rank 0, and whoever is early
waits there. So a clock is put around that call.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

# DDP times the first ten steps, and then one in so many. On a device its log waits for the last
# step to have ended, so a step that is timed cannot be prepared while that one still runs.
_TIMED_ON_CPU = 5
_TIMED_ON_DEVICE = 20
_UNSETTLED = 2  # the first steps wait for whoever was started last


class WaitMeter:
    """Reads how long this rank has waited; costs nothing between two reads but DDP's own log.

    >>> meter = WaitMeter(find_ddp(state))  # doctest: +SKIP
    >>> meter.read()  # at any boundary; None if no step was timed since  # doctest: +SKIP
    (5, 0.0512, 0.0634)
    """

    def __init__(self, modules: Sequence[DistributedDataParallel]) -> None:
        timed = [module for module in modules if getattr(module, "logger", None) is not None]
        self._sources = [_Source(module) for module in timed]
        self._read_at = time.perf_counter()

    def read(self) -> tuple[int, float, float] | None:
        """The steps since the last sample, and of the newest: seconds waited, seconds in all.

        It is one sample and no average, so ask at every boundary, or at every few.
        """
        steps, waited = 0, 0.0
        for source in self._sources:
            new, seconds = source.read()
            steps, waited = max(steps, new), waited + seconds
        if not steps:
            return None
        now = time.perf_counter()
        step_seconds = (now - self._read_at) / steps
        self._read_at = now
        return steps, waited, step_seconds

    def close(self) -> None:
        """Take the clocks away again."""
        for source in self._sources:
            source.close()
        self._sources.clear()


class _Source:
    """One module: what its log says, and the clock around its buffers."""

    def __init__(self, module: DistributedDataParallel) -> None:
        on_cpu = module.device.type == "cpu"
        module._set_ddp_runtime_logging_sample_rate(_TIMED_ON_CPU if on_cpu else _TIMED_ON_DEVICE)
        self._module = weakref.ref(module)
        self._seen = 0
        self._clock = _watch_buffers(module)

    def read(self) -> tuple[int, float]:
        module = self._module()
        if module is None or module.logger is None:
            return 0, 0.0
        log = module.logger._get_ddp_logging_data().ints_map  # the half without long strings
        step, before = log.get("iteration", 0), self._seen
        if step <= before:
            return 0, 0.0
        self._seen = step
        buffers = self._clock.seconds() if self._clock is not None else 0.0
        if step <= _UNSETTLED:
            return 0, 0.0
        exposed = log["backward_comm_time"] - log["backward_compute_comm_overlap_time"]
        return step - before, max(0, exposed) / 1e9 + buffers

    def close(self) -> None:
        module = self._module()
        if module is not None:
            _forget_buffers(module)


class _HostClock:
    """Mean seconds per call."""

    def __init__(self) -> None:
        self._calls, self._total = 0, 0.0

    def time(self, call: Callable[[], None]) -> None:
        begun = time.perf_counter()
        call()
        self._total += time.perf_counter() - begun
        self._calls += 1

    def seconds(self) -> float:
        """Since this was last asked."""
        calls, total = self._calls, self._total
        self._calls, self._total = 0, 0.0
        return total / calls if calls else 0.0


class _DeviceClock:
    """The same where the host only queues the call: two events in the stream, and no waiting."""

    def __init__(self) -> None:
        self._pending: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def time(self, call: Callable[[], None]) -> None:
        if self._pending is not None:
            call()
            return
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        call()
        ended.record()
        self._pending = begun, ended

    def seconds(self) -> float:
        if self._pending is None or not self._pending[1].query():
            return 0.0
        begun, ended = self._pending
        self._pending = None
        return float(begun.elapsed_time(ended)) / 1e3


_clocks: weakref.WeakKeyDictionary[DistributedDataParallel, _HostClock | _DeviceClock] = (
    weakref.WeakKeyDictionary()
)
_untimed: Callable[[Any], None] | None = None  # DDP's own method, while ours stands in its place


def _watch_buffers(module: DistributedDataParallel) -> _HostClock | _DeviceClock | None:
    global _untimed
    device = module.device.type
    has_buffers = next(module.module.buffers(), None) is not None
    if device not in ("cpu", "cuda") or not has_buffers:
        return None
    if not hasattr(DistributedDataParallel, "_sync_buffers"):
        return None
    clock = _clocks[module] = _HostClock() if device == "cpu" else _DeviceClock()
    if _untimed is None:
        _untimed = DistributedDataParallel._sync_buffers
        # In the class: a module that had it in itself could no longer be pickled.
        DistributedDataParallel._sync_buffers = _timed  # type: ignore[method-assign]
    return clock


def _forget_buffers(module: DistributedDataParallel) -> None:
    global _untimed
    _clocks.pop(module, None)
    if not _clocks and _untimed is not None:
        DistributedDataParallel._sync_buffers = _untimed  # type: ignore[method-assign]
        _untimed = None


@torch._disable_dynamo  # torch.compile would look into it, and compile the rest in two halves
def _timed(module: DistributedDataParallel) -> None:
    untimed = _untimed or DistributedDataParallel._sync_buffers
    clock = _clocks.get(module)
    if clock is None or not torch.is_grad_enabled():  # not while it evaluates
        untimed(module)
    else:
        clock.time(lambda: untimed(module))
