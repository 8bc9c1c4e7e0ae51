"""torch's DistributedDataParallel (DDP).

Which modules it wraps, which tensors it keeps equal on all ranks, and in which order it sums
gradients: a sum in another order differs in its last bits.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holdfast.torch.adapter import ADAPTER

_DEPTH = 20  # of containers in containers, in the user's state
_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
_ZERO_CLASS = f"{_ZERO}.ZeroRedundancyOptimizer"
_AVERAGERS = "torch.distributed.algorithms.model_averaging.averagers"
# Hooks of torch whose result is the same on all ranks. noop_hook and post_localSGD_hook are not
# among them, and hooks of users are unknown.
_EQUALIZING_HOOKS = tuple(
    f"torch.distributed.algorithms.ddp_comm_hooks.{name}"
    for name in ("default_hooks", "powerSGD_hook", "quantization_hooks", "mixed_precision_hooks")
)
# States of torch's hooks that last from step to step and cannot be stored.
_HOOK_MEMORIES = ("PowerSGDState", "PostLocalSGDState")


def find_ddp(state: Mapping[str, Any]) -> list[DistributedDataParallel]:
    """The DDP modules that wrap anything of the state, in the same order on every rank.

    People pass `model.module`, or the bare model, or only the optimizer. So every live DDP module
    is examined, and returned if one of its parameters is in the state: 0.1 s in a process with a
    million objects. (A module that `gc.freeze` hides is found only if it is in the state.) Empty
    without a process group, or in a world of one.
    """
    if not _has_others():
        return []
    found = _wrappers(state)
    parameters = [id(p) for module in found for p in module.parameters()]
    if len(parameters) > len(set(parameters)):
        # A discarded wrapper that is not collected yet. On other ranks it may be.
        del found
        gc.collect()
        found = _wrappers(state)
    return found


def _has_others() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _wrappers(state: Mapping[str, Any]) -> list[DistributedDataParallel]:
    places: dict[int, int] = {}
    inside: list[DistributedDataParallel] = []
    for part in _parts(state):
        if isinstance(part, torch.nn.Module):
            inside += [m for m in part.modules() if isinstance(m, DistributedDataParallel)]
            parameters = list(part.parameters())
        else:
            parameters = [p for group in part.param_groups for p in group["params"]]
        for parameter in parameters:
            places.setdefault(id(parameter), len(places))
    candidates = {id(m): m for m in [*inside, *_alive(DistributedDataParallel)]}
    found = []
    for module in candidates.values():
        seen = [places[id(p)] for p in module.parameters() if id(p) in places]
        if seen:
            # gc gives objects in any order; this order is the same on all ranks.
            found.append((min(seen), _reducer_size(module), module))
    return [module for *_, module in sorted(found, key=lambda each: each[:2])]


def _parts(value: Any, depth: int = 0) -> Iterator[torch.nn.Module | Optimizer]:
    if isinstance(value, torch.nn.Module | Optimizer):
        yield value
    elif depth < _DEPTH and isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _parts(item, depth + 1)


def _alive(kind: type) -> list[Any]:
    """Every live instance: torch keeps no list of them."""
    objects = gc.get_objects()
    kinds = {each for each in set(map(type, objects)) if kind in each.__mro__}
    return [each for each in objects if type(each) in kinds] if kinds else []


def _reducer(module: DistributedDataParallel) -> Any:
    """The C++ reducer that sums its gradients; None if something else does."""
    if getattr(module, "_use_python_reducer", False):  # under a compiler
        return None
    return getattr(module, "reducer", None)


def _reducer_size(module: DistributedDataParallel) -> int:
    reducer = _reducer(module)
    return 0 if reducer is None else len(reducer.get_backward_stats())


class Replicated:
    """The tensors that are the same on all ranks at every boundary, by their `alias_key`.

    Freed memory may be reused for a tensor that is not replicated. So a key counts only while its
    tensor lives and has not moved.
    """

    def __init__(
        self, state: Mapping[str, Any], modules: Sequence[DistributedDataParallel]
    ) -> None:
        firsts = ((module, next(module.parameters())) for module in modules)
        self._modules = [
            (weakref.ref(m), _is_joining(m), first, first.data_ptr()) for m, first in firsts
        ]
        self._optimizers = [
            (part, part.state, len(part.state), len(part.param_groups))
            for part in _parts(state)
            if isinstance(part, Optimizer)
        ]
        self._tensors: dict[Hashable, weakref.ref[torch.Tensor]] = {}
        averagers = sys.modules.get(_AVERAGERS)
        if averagers is not None and _alive(averagers.ModelAverager):
            modules = []  # the ranks train apart, and are averaged from time to time
        equal = [m for m in modules if _keeps_ranks_equal(m)]
        parameters = {id(p): p for module in equal for p in module._module_parameters}
        for parameter in parameters.values():
            self._add(parameter)
        zero = sys.modules.get(_ZERO)
        # Those inside a ZeroRedundancyOptimizer have this rank's part only.
        partial = [] if zero is None else [z.optim for z in _alive(zero.ZeroRedundancyOptimizer)]
        for optimizer, *_ in self._optimizers:
            if _updates_equally(optimizer) and not any(optimizer is each for each in partial):
                for parameter, entries in optimizer.state.items():
                    if id(parameter) in parameters:
                        self._add_all(entries)

    def __contains__(self, key: object) -> bool:
        reference = self._tensors.get(key)
        tensor = reference() if reference is not None else None
        return tensor is not None and tensor.data_ptr() == key[0]  # type: ignore[index]  # it is ours

    def __len__(self) -> int:
        return len(self._tensors)

    def is_current(self) -> bool:
        """Whether they are still the same; takes a few microseconds.

        They are not when an optimizer has stepped for the first time or got other parameters or
        another state, when a model was moved, and once a `join` for uneven inputs has begun.
        """
        return all(
            part.state is entries and len(entries) == count and len(part.param_groups) == groups
            for part, entries, count, groups in self._optimizers
        ) and all(
            (module := reference()) is not None
            and _is_joining(module) == joining
            and first.data_ptr() == address
            for reference, joining, first, address in self._modules
        )

    def _add(self, tensor: torch.Tensor) -> None:
        key = ADAPTER.alias_key(tensor)
        if key is not None:
            self._tensors[key] = weakref.ref(tensor)

    def _add_all(self, entries: Any) -> None:
        if isinstance(entries, torch.Tensor):
            self._add(entries)
        elif isinstance(entries, dict | list | tuple):
            for each in entries.values() if isinstance(entries, dict) else entries:
                self._add_all(each)


def replicated_keys(
    state: Mapping[str, Any], modules: Sequence[DistributedDataParallel]
) -> Replicated:
    """What the ranks need to store only once: `alias_key(tensor) in replicated_keys(…)`.

    The parameters of modules that are summed over the whole world, and what torch's own optimizers
    keep for them. Not buffers: running statistics differ between ranks. It does not contain what is
    new since: make a new one after a restore, after `run.update`, and if not `is_current()`.

    Not detectable from one rank: a frozen parameter that is changed from the rank's own batches, or
    a learning rate that follows its own loss.
    """
    return Replicated(state, modules if _has_others() else [])


def _is_joining(module: DistributedDataParallel) -> bool:
    """Whether ranks without inputs may be steps behind."""
    return bool(module._join_config.enable)


def _keeps_ranks_equal(module: DistributedDataParallel) -> bool:
    parameters = module._module_parameters
    return (
        set(dist.get_process_group_ranks(module.process_group)) == set(range(dist.get_world_size()))
        and not _is_joining(module)
        and all(_equalizes(hook) for hook, _ in getattr(module, "_comm_hooks", ()))
        # A parameter that was frozen when it was wrapped, and is not now, is not summed.
        and sum(p.requires_grad for p in parameters) <= _reducer_size(module)
    )


def _equalizes(hook: Any) -> bool:
    """Whether a communication hook, and the hooks inside it, gives all ranks the same result."""
    cells = getattr(hook, "__closure__", None) or ()
    inner = [cell.cell_contents for cell in cells]
    return getattr(hook, "__module__", "") in _EQUALIZING_HOOKS and all(
        _equalizes(each) for each in inner if callable(each)
    )


def _updates_equally(optimizer: Optimizer) -> bool:
    """Whether equal gradients make equal states: true for torch's own, unknown for others.

    LBFGS uses the loss, which differs between ranks.
    """
    own = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))
    return own.__module__.startswith("torch.optim.") and own is not torch.optim.LBFGS


def refuse(value: object) -> str | None:
    """Why a run of several ranks cannot store an object; None if it can."""
    kinds = map(type, value.modules() if isinstance(value, torch.nn.Module) else ())
    if any(
        kind.__name__ == "FullyShardedDataParallel" and "torch.distributed" in kind.__module__
        for kind in kinds
    ):
        return (
            "a FullyShardedDataParallel module cannot be stored: all ranks must meet to give its "
            "state, and a run that is stopped or killed cannot wait for that.\n"
            "Shard the model with torch.distributed.fsdp.fully_shard instead (FSDP2)."
        )
    if not any(f"{kind.__module__}.{kind.__name__}" == _ZERO_CLASS for kind in type(value).__mro__):
        return None
    return (
        "a ZeroRedundancyOptimizer cannot be stored: each rank holds a part of its state, and it "
        "gives none away before consolidate_state_dict() has sent all parts to one rank.\n"
        "Shard the model with torch.distributed.fsdp.fully_shard instead, whose optimizer is "
        "stored in parts; or use the optimizer without ZeroRedundancyOptimizer."
    )


def settle_buckets(modules: Sequence[DistributedDataParallel]) -> list[str]:
    """Fix the order in which gradients are summed; returns what stays different, in sentences.

    All ranks must call it at the start of every attempt, new or resumed, before the first forward
    pass. DDP sums the first step in one bucket, learns in which order gradients come, and sums all
    later steps in other buckets: so the first step of a resumed attempt would differ from the same
    step of an undisturbed one (with more than two ranks; two make the same sum in any order). Here
    every attempt begins with buckets in the reverse order of registration, which is what DDP would
    learn of a model that uses its layers in order.

    Modules that have trained already keep what they have learned, and `find_unused_parameters`
    keeps its first buckets anyway. One difference stays and cannot be detected here: with
    `gradient_as_bucket_view`, `zero_grad(set_to_none=False)` and a number of ranks that is not a
    power of two, DDP divides by another operation in the first step of an attempt.
    """
    return [sentence for module in modules for sentence in _settle(module)]


def _settle(module: DistributedDataParallel) -> Iterator[str]:
    name = type(module.module).__name__
    reducer = _reducer(module)
    if reducer is not None and not any(reducer.get_backward_stats()):
        try:
            if _rebuild(reducer, module.process_group):
                module._has_rebuilt_buckets = True  # ZeroRedundancyOptimizer's hooks wait for it
        except (AttributeError, TypeError):
            yield (
                f"DistributedDataParallel({name}): torch {torch.__version__} does not let the "
                "order of its sums be fixed.\nThe first step after each resume may differ in the "
                "last bits from the same step of an undisturbed run."
            )
    for hook, memory in getattr(module, "_comm_hooks", ()):
        kind = type(memory).__name__
        if kind in _HOOK_MEMORIES:
            yield (
                f"DistributedDataParallel({name}): {hook.__qualname__} remembers earlier steps in "
                f"a {kind}, which no checkpoint has.\nAfter a resume it starts over, so the run "
                "will not be the same to the bit."
            )


def _rebuild(reducer: Any, group: dist.ProcessGroup) -> bool:
    """Let DDP build its final buckets now; all ranks of the group take part."""
    between = _Reversing(group)  # the reducer does not keep the Python object alive
    update: Callable[[dist.ProcessGroup], None] = reducer._update_process_group
    reducer._push_all_rebuilt_params()
    update(between)
    try:
        return bool(reducer._rebuild_buckets())
    finally:
        update(group)


class _Reversing(dist.ProcessGroup):
    """Sits between a reducer and its group while rank 0 sends the new buckets to the others.

    By default the reducer would take the parameters as they were registered. The last layer's
    gradients come first, so no bucket could be sent before the end of the backward pass, and
    communication would not overlap with computing (measured: 16 ms became 0.5).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # has two ways
        self._group = group
        self._calls = 0

    # torch's stub has each way to call it.
    def broadcast(self, tensors: list[torch.Tensor], *options: Any) -> Any:  # type: ignore[override]
        self._calls += 1
        (told,) = tensors
        if self._calls == 1:  # the parameters of all buckets in a row, and their number
            told[:-1] = told[:-1].flip(0)
        elif self._calls == 2:  # the size of each bucket
            told.copy_(told.flip(0))
        return self._group.broadcast(tensors, *options)


# -- How long this rank waits for the others ---------------------------------------------
# DDP times a step now and then for its own log: when the backward pass was done, and when the
# last of the sums over all ranks was there. The time between is waiting. One wait it does not
# log: a module with buffers begins each forward pass with those of rank 0, and a rank that is
# early waits there. So a clock is put around that call.


# DDP times the first ten steps, and then one in so many. On a device its log waits for the end of
# the last step, so a timed step cannot be queued while that one still runs.
_TIMED_ON_CPU = 5
_TIMED_ON_DEVICE = 20
_UNSETTLED = 2  # the first steps wait for the rank that was started last


class WaitMeter:
    """Reads how long this rank has waited; between two reads it costs only DDP's own log."""

    def __init__(self, modules: Sequence[DistributedDataParallel]) -> None:
        timed = [module for module in modules if getattr(module, "logger", None) is not None]
        self._sources = [_ModuleWaits(module) for module in timed]
        self._read_at = time.perf_counter()

    def read(self) -> tuple[int, float, float] | None:
        """The steps since the last sample; of the newest: seconds waited, and in all.

        None if no step was timed since.
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
        for source in self._sources:
            source.close()
        self._sources.clear()


class _ModuleWaits:
    """One module: its log, and the mean seconds of its calls for the buffers of rank 0.

    A device only queues such a call: there it is the time between two events of one call, and
    reading it does not wait.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self._on_device = module.device.type != "cpu"
        rate = _TIMED_ON_DEVICE if self._on_device else _TIMED_ON_CPU
        module._set_ddp_runtime_logging_sample_rate(rate)
        self._module = weakref.ref(module)
        self._seen = 0
        self._calls, self._total = 0, 0.0
        self._pending: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        has_buffers = next(module.module.buffers(), None) is not None
        if (
            has_buffers
            and module.device.type in ("cpu", "cuda")
            and hasattr(module, "_sync_buffers")
        ):
            _watch_buffers(module, self)

    def read(self) -> tuple[int, float]:
        module = self._module()
        if module is None or module.logger is None:
            return 0, 0.0
        log = module.logger._get_ddp_logging_data().ints_map  # without the long strings
        step, before = log.get("iteration", 0), self._seen
        if step <= before:
            return 0, 0.0
        self._seen = step
        buffers = self._seconds_of_buffers()
        if step <= _UNSETTLED:
            return 0, 0.0
        exposed = log["backward_comm_time"] - log["backward_compute_comm_overlap_time"]
        return step - before, max(0, exposed) / 1e9 + buffers

    def time(self, call: Callable[[], None]) -> None:
        if not self._on_device:
            began = time.perf_counter()
            call()
            self._total += time.perf_counter() - began
            self._calls += 1
        elif self._pending is not None:
            call()
        else:
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            call()
            ended.record()
            self._pending = begun, ended

    def _seconds_of_buffers(self) -> float:
        if self._pending is not None and self._pending[1].query():
            begun, ended = self._pending
            self._pending = None
            return float(begun.elapsed_time(ended)) / 1e3
        calls, total = self._calls, self._total
        self._calls, self._total = 0, 0.0
        return total / calls if calls else 0.0

    def close(self) -> None:
        global _untimed
        module = self._module()
        if module is not None:
            _timed_modules.pop(module, None)
        if not _timed_modules and _untimed is not None:
            DistributedDataParallel._sync_buffers = _untimed  # type: ignore[method-assign]  # wrapped
            _untimed = None


_timed_modules: weakref.WeakKeyDictionary[DistributedDataParallel, _ModuleWaits] = (
    weakref.WeakKeyDictionary()
)
_untimed: Callable[[Any], None] | None = None  # DDP's own method, while ours replaces it


def _watch_buffers(module: DistributedDataParallel, waits: _ModuleWaits) -> None:
    global _untimed
    _timed_modules[module] = waits
    if _untimed is None:
        _untimed = DistributedDataParallel._sync_buffers
        # In the class: in an instance it could not be pickled.
        DistributedDataParallel._sync_buffers = _timed  # type: ignore[method-assign]  # wrapped


@torch._disable_dynamo  # torch.compile would trace it and break the graph
def _timed(module: DistributedDataParallel) -> None:
    untimed = _untimed or DistributedDataParallel._sync_buffers
    waits = _timed_modules.get(module)
    if waits is None or not torch.is_grad_enabled():  # not while it evaluates
        untimed(module)
    else:
        waits.time(lambda: untimed(module))
