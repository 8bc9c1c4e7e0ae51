"""Shortcuts for states of very many tensors.

For 100,000 tensors a state_dict() takes half a second, most of it to detach each of them, and
asking each for its address, type, shape and strides takes a quarter of a second. `flat_state`
finds the tensors of a module without making a state_dict(), and `TensorPlaces` compares them all
at once, as torch's compiler does before every call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Module

_Tensor = torch.Tensor
# The methods that make a state_dict().
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
_EXACT_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_BUFFERS, _MODULES, _END = ("buffers",), ("modules",), ("end",)


class _Custom(Exception):
    """A module makes its state_dict() in a way of its own."""


def flat_state(module: object) -> tuple[list[Any], list[torch.Tensor]] | None:
    """All that a module's state_dict() depends on except for values, and its tensors in order.

    None if a module in it changes its state_dict(), by a method or a hook of its own.
    """
    if not isinstance(module, Module):
        return None
    form: list[Any] = []
    tensors: list[torch.Tensor] = []
    try:
        _add(module, form, tensors, set())
    except (_Custom, KeyError, AttributeError, RecursionError):
        return None
    is_plain = _EXACT_TYPES.issuperset(map(type, tensors))
    return (form, tensors) if is_plain else None


def _add(module: Module, form: list[Any], tensors: list[torch.Tensor], plain: set[type]) -> None:
    kind = type(module)
    if kind not in plain:
        if any(getattr(kind, name, None) is not getattr(Module, name, None) for name in _METHODS):
            raise _Custom
        plain.add(kind)
    own = module.__dict__
    if own["_state_dict_hooks"] or own["_state_dict_pre_hooks"]:
        raise _Custom
    version = module._version
    if "state_dict" in own or "_save_to_state_dict" in own or type(version) is not int:
        raise _Custom
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


class TensorPlaces:
    """Remembers where tensors are, and their forms, without holding them."""

    @torch.no_grad()  # else torch's guards compare requires_grad too
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._addresses = list(map(_Tensor.data_ptr, tensors))
        self._guards = _guards(tensors) if _guards_work() else None
        self._forms = _forms(tensors) if self._guards is None else []

    @torch.no_grad()
    def moved(self, tensors: Sequence[torch.Tensor]) -> list[int] | None:
        """Which have moved, or None if the forms have changed; not both are known at once."""
        try:
            addresses = list(map(_Tensor.data_ptr, tensors))
        except RuntimeError:  # one has no memory of its own any more, like a sparse tensor
            return None
        if addresses != self._addresses:
            if len(addresses) != len(self._addresses):
                return None
            pairs = enumerate(zip(addresses, self._addresses, strict=True))
            return [index for index, (now, then) in pairs if now != then]
        if self._guards is not None:
            return [] if self._guards.check(*tensors) else None
        return [] if _forms(tensors) == self._forms else None


def _guards(tensors: Sequence[torch.Tensor]) -> Any:
    from torch._C._dynamo import guards

    return guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _forms(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [
        (t.dtype, t.size(), t.stride(), t.is_neg(), t.is_conj(), t.device, t.layout)
        for t in tensors
    ]


@functools.cache
@torch.no_grad()
def _guards_work() -> bool:
    """Whether this torch has the guards, and they distinguish everything that counts."""
    like = torch.zeros(2, 3)
    # All the ways in which a tensor can differ from `like`.
    others = [
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(3, 2),
        torch.zeros(6),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 3, device="meta"),
        torch._neg_view(torch.zeros(2, 3)),
    ]
    wave = torch.zeros(2, dtype=torch.complex64)
    try:
        known = _guards([like, wave])
        return bool(known.check(torch.ones(2, 3), wave)) and not any(
            known.check(*pair)
            for pair in [*((other, wave) for other in others), (like, wave.conj())]
        )
    except Exception:  # noqa: BLE001  private to torch, which may change it in any version
        return False
