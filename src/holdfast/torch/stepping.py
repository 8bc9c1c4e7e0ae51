"""The steps of torch's optimizers, and whether an optimizer is part of a state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast.torch.adapter import ADAPTER

_DEPTH = 5
_MOST_OBJECTS = 2000
# They may hold an optimizer, but do not save it.
_SAVES_NO_OTHER = (torch.nn.Module, torch.Tensor, torch.optim.lr_scheduler.LRScheduler)


def hear_steps(hear: Callable[[Any], None]) -> Callable[[], None]:
    """Call `hear` with every optimizer that has stepped; returns a function that ends that."""
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: hear(optimizer))
    return handle.remove


def class_name(value: object) -> str | None:
    if isinstance(value, torch.optim.Optimizer):
        inner = getattr(value, "optimizer", value)  # Accelerate wraps it
        return type(inner if isinstance(inner, torch.optim.Optimizer) else value).__name__
    is_scheduler = isinstance(value, torch.optim.lr_scheduler.LRScheduler)
    return type(value).__name__ if is_scheduler else None


def is_forgotten(optimizer: Any, state: Mapping[str, Any], tensors: Iterable[Any]) -> bool:
    """Whether an optimizer has state that is not in the run's state, whose tensors are given."""
    own = [
        ADAPTER.part_here(value).data_ptr()
        for entry in optimizer.state.values()
        if isinstance(entry, Mapping)
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    ]
    if own:
        stored = {
            ADAPTER.part_here(value).data_ptr()
            for value in tensors
            if isinstance(value, torch.Tensor)
        }
        if not stored.isdisjoint(own):
            return False
    elif not any("initial_lr" in group for group in optimizer.param_groups):
        return False  # without a scheduler, it has no state that changes
    return not _is_within(optimizer, list(state.values()))


def _is_within(wanted: Any, values: list[Any]) -> bool:
    """Whether one of the values contains an object: a wrapper of an optimizer saves it."""
    seen: set[int] = set()
    for _ in range(_DEPTH):
        inner: list[Any] = []
        for value in values:
            if value is wanted:
                return True
            if id(value) in seen or isinstance(value, _SAVES_NO_OTHER):
                continue
            seen.add(id(value))
            if isinstance(value, Mapping):
                inner += value.values()
            elif isinstance(value, list | tuple | set):
                inner += value
            else:
                inner += getattr(value, "__dict__", {}).values()
        values = inner[:_MOST_OBJECTS]
    return False
