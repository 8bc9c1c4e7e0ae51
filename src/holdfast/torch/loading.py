"""How objects of torch load a state: whether it is only a copy, or code of the script runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase

_EXACT_TYPES = (torch.Tensor, torch.nn.Parameter)
_METHODS = (
    *("state_dict", "_save_to_state_dict", "get_extra_state"),
    *("load_state_dict", "set_extra_state"),
)
# That of normalizations only fills in a counter which states of torch before 0.4.1 lack.
_LOAD_ONE = (Module._load_from_state_dict, _NormBase._load_from_state_dict)
_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_OWN = ("state_dict", "_save_to_state_dict", "load_state_dict", "_load_from_state_dict")


class _LoadsItself(Exception):
    """A module stores or loads in a way of its own, or a tensor is not plain memory."""


def copied_into(value: object) -> dict[str, torch.Tensor] | None:
    """The tensors of a module that load_state_dict() would only copy into, by their keys."""
    if not isinstance(value, Module):
        return None
    found: dict[str, torch.Tensor] = {}
    try:
        _add(value, "", found, set())
    except (_LoadsItself, KeyError, AttributeError, RecursionError):
        return None
    return found


def _add(module: Module, prefix: str, found: dict[str, torch.Tensor], plain: set[type]) -> None:
    kind = type(module)
    if kind not in plain:
        if any(getattr(kind, name, None) is not getattr(Module, name, None) for name in _METHODS):
            raise _LoadsItself
        if kind._load_from_state_dict not in _LOAD_ONE:
            raise _LoadsItself
        plain.add(kind)
    own = module.__dict__
    if any(own[name] for name in _HOOKS) or any(name in own for name in _OWN):
        raise _LoadsItself
    for name, parameter in own["_parameters"].items():
        if parameter is not None:
            found[prefix + name] = _checked(parameter)
    passing = own["_non_persistent_buffers_set"]
    for name, buffer in own["_buffers"].items():
        if buffer is not None and name not in passing:
            found[prefix + name] = _checked(buffer)
    for name, child in own["_modules"].items():
        if child is not None:
            _add(child, f"{prefix}{name}.", found, plain)


def _checked(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in _EXACT_TYPES or tensor.device.type != "cpu":
        raise _LoadsItself
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise _LoadsItself
    if tensor.is_neg() or tensor.is_conj():
        raise _LoadsItself
    return tensor


def loads_exactly(value: Any) -> bool:
    """Whether loading runs only code of torch, which keeps the tensors that it is given."""
    kind = type(value)
    if isinstance(value, Module) or "load_state_dict" in getattr(value, "__dict__", {}):
        return False
    methods = [getattr(kind, name, None) for name in ("load_state_dict", "__setstate__")]
    hooks = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    return (
        methods[0] is not None
        and all(_is_of_torch(method) for method in methods if method is not None)
        and not any(getattr(value, name, None) for name in hooks)
    )


def _is_of_torch(method: Any) -> bool:
    return str(getattr(method, "__module__", "")).partition(".")[0] == "torch"
