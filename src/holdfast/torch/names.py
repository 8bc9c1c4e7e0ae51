"""Names for memory: whose parameter, gradient or moment it is, or which variable holds it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import torch

_MOST_ITEMS = 10_000
View = tuple[CodeType, int, dict[str, Any], dict[str, Any]]  # see _run/exit/exception_frames.py
Named = tuple[str, str | None, Any]  # what it is part of, its own name, the tensor


class StorageNames:
    """The storages of one device, each under the first name that it is known by."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: dict[int, tuple[str, str | None]] = {}
        self.tensors: list[torch.Tensor] = []

    def of(self, storage: int) -> tuple[str | None, str | None]:
        """What a storage is part of, and its own name."""
        return self._names.get(storage, (None, None))

    def learn_state(self, state: Mapping[str, Any]) -> None:
        """Learn the names of what the run was given: an optimizer's after the modules'."""
        for name, value in state.items():
            self._learn(_of_value(name, value, ""))

    def learn_frames(self, views: Iterable[View]) -> None:
        """Learn the variables on the way to an exception, the innermost first."""
        for code, line, variables, _ in reversed(list(views)):
            place = f" ({Path(code.co_filename).name}:{line} in {code.co_name})"
            for name, value in variables.items():
                self._learn(_of_value(name, value, place))

    def _learn(self, named: Iterator[Named]) -> None:
        with contextlib.suppress(Exception):  # objects of any kind are looked into
            for group, name, tensor in named:
                with contextlib.suppress(Exception):  # the others have names all the same
                    if tensor.device == self._device:
                        self._names.setdefault(tensor.untyped_storage()._cdata, (group, name))
                        self.tensors.append(tensor)


def _of_value(name: str, value: Any, place: str) -> Iterator[Named]:
    if isinstance(value, torch.Tensor):
        yield f"{name}{place}", f"{name}{place}", value
        if value.is_leaf and value.grad is not None:
            yield f"{name}.grad{place}", f"{name}.grad{place}", value.grad
    elif isinstance(value, torch.nn.Module):
        yield from _of_module(name, value)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _of_optimizer(name, value)
    elif isinstance(value, dict | list | tuple | set | deque):
        items = value.values() if isinstance(value, dict) else value
        for item, _ in zip(list(items), range(_MOST_ITEMS), strict=False):
            if isinstance(item, torch.Tensor):
                yield f"{name}[…]{place}", None, item


def _of_module(name: str, module: torch.nn.Module) -> Iterator[Named]:
    for path, parameter in module.named_parameters():
        yield f"parameters of {name}", f"{name}.{path}", parameter
        if parameter.grad is not None:
            yield f"gradients of {name}", f"{name}.{path}.grad", parameter.grad
    for path, buffer in module.named_buffers():
        yield f"buffers of {name}", f"{name}.{path}", buffer


def _of_optimizer(name: str, optimizer: torch.optim.Optimizer) -> Iterator[Named]:
    for moments in list(optimizer.state.values()):
        for key, value in list(moments.items()) if isinstance(moments, dict) else ():
            if isinstance(value, torch.Tensor):
                yield f"{name} {key}", None, value
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Where the module is not known, its parameters are those that are trained.
            yield f"parameters of {name}", None, parameter
            if parameter.grad is not None:
                yield f"gradients of {name}", None, parameter.grad
