"""The tensors of a module in the order of its state_dict(), without making one.

For 100,000 tensors a state_dict() takes half a second, most of it to detach each of them. Modules
that change what it does, by a method or a hook of their own, are left to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

# What a state_dict() is made by.
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
_EXACT_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_BUFFERS, _MODULES, _END = ("buffers",), ("modules",), ("end",)


class _OfItsOwn(Exception):
    """A module does it in another way."""


def flat_state(module: object) -> tuple[list[Any], list[torch.Tensor]] | None:
    """All that a module's state_dict() depends on but for values, and its tensors.

    None if there is a module in it whose state_dict() is not the plain one.
    """
    if not isinstance(module, Module):
        return None
    form: list[Any] = []
    tensors: list[torch.Tensor] = []
    try:
        _add(module, form, tensors, set())
    except (_OfItsOwn, KeyError, AttributeError, RecursionError):
        return None
    is_plain = _EXACT_TYPES.issuperset(map(type, tensors))
    return (form, tensors) if is_plain else None


def _add(module: Module, form: list[Any], tensors: list[torch.Tensor], plain: set[type]) -> None:
    kind = type(module)
    if kind not in plain:
        if any(getattr(kind, name, None) is not getattr(Module, name, None) for name in _METHODS):
            raise _OfItsOwn
        plain.add(kind)
    own = module.__dict__
    if own["_state_dict_hooks"] or own["_state_dict_pre_hooks"]:
        raise _OfItsOwn
    version = module._version
    if "state_dict" in own or "_save_to_state_dict" in own or type(version) is not int:
        raise _OfItsOwn
    form.append(version)
    for name, parameter in own["_parameters"].items():
        form.append(name)
        if parameter is None:
            form.append(None)
        else:
            tensors.append(parameter)
    buffers = own["_buffers"]
    if buffers:
        form.append(_BUFFERS)
        passing = own["_non_persistent_buffers_set"]
        for name, buffer in buffers.items():
            if buffer is not None and name not in passing:
                form.append(name)
                tensors.append(buffer)
    modules = own["_modules"]
    if modules:
        form.append(_MODULES)
        for name, child in modules.items():
            if child is not None:
                form.append(name)
                _add(child, form, tensors, plain)
    form.append(_END)
