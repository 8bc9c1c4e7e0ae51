"""What modules store and load, found without a state_dict(); and whether tensors have moved.

For 100,000 tensors a state_dict() takes half a second, most of it to detach each of them, and
asking each for its address, type, shape and strides takes a quarter of a second. `TensorPlaces`
compares them all at once, as torch's compiler does before every call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase

_Tensor = torch.Tensor
_EXACT_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
# The methods that make a state_dict(), and those that load one.
_STORE = ("state_dict", "_save_to_state_dict", "get_extra_state")
_LOAD = ("load_state_dict", "set_extra_state")
# That of normalizations only fills in a counter which states of torch before 0.4.1 lack.
_LOAD_ONE = (Module._load_from_state_dict, _NormBase._load_from_state_dict)
_BUFFERS, _MODULES, _END = ("buffers",), ("modules",), ("end",)


class _Custom(Exception):
    """A module stores or loads in a way of its own."""


@dataclass
class _Walk:
    """All that a module's state_dict() depends on except for values, and its tensors in order.

    With `loads`, the keys of the tensors, if load_state_dict() only copies into them.
    """

    loads: bool
    form: list[Any] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    _plain: set[type] = field(default_factory=set)

    def is_done(self, value: object) -> bool:
        """Walk through it; False if a module in it has a method or a hook of its own."""
        try:
            if isinstance(value, Module):
                self._add(value, "")
        except (_Custom, KeyError, AttributeError, RecursionError):
            return False
        return isinstance(value, Module) and _EXACT_TYPES.issuperset(map(type, self.tensors))

    def _add(self, module: Module, prefix: str) -> None:
        form, loads, kind = self.form, self.loads, type(module)
        if kind not in self._plain:
            methods = _STORE + _LOAD if loads else _STORE
            if any(
                getattr(kind, name, None) is not getattr(Module, name, None) for name in methods
            ):
                raise _Custom
            if loads and kind._load_from_state_dict not in _LOAD_ONE:
                raise _Custom
            self._plain.add(kind)
        own = module.__dict__
        if own["_state_dict_hooks"] or own["_state_dict_pre_hooks"]:
            raise _Custom
        version = module._version
        if "state_dict" in own or "_save_to_state_dict" in own or type(version) is not int:
            raise _Custom
        if loads and (
            own["_load_state_dict_pre_hooks"]
            or own["_load_state_dict_post_hooks"]
            or "load_state_dict" in own
            or "_load_from_state_dict" in own
        ):
            raise _Custom
        form.append(version)
        for name, parameter in own["_parameters"].items():
            form.append(name)
            if parameter is None:
                form.append(None)
            else:
                self._add_tensor(parameter, prefix, name)
        if own["_buffers"]:
            form.append(_BUFFERS)
            passing = own["_non_persistent_buffers_set"]
            for name, buffer in own["_buffers"].items():
                if buffer is not None and name not in passing:
                    form.append(name)
                    self._add_tensor(buffer, prefix, name)
        if own["_modules"]:
            form.append(_MODULES)
            for name, child in own["_modules"].items():
                if child is not None:
                    form.append(name)
                    self._add(child, f"{prefix}{name}." if loads else "")
        form.append(_END)

    def _add_tensor(self, tensor: torch.Tensor, prefix: str, name: str) -> None:
        self.tensors.append(tensor)
        if self.loads:
            self.keys.append(prefix + name)


def flat_state(value: object) -> tuple[list[Any], list[torch.Tensor]] | None:
    """The form of a module's state_dict() and its tensors; None if the module makes its own."""
    walk = _Walk(loads=False)
    return (walk.form, walk.tensors) if walk.is_done(value) else None


def copied_into(value: object) -> dict[str, torch.Tensor] | None:
    """The tensors of a module that load_state_dict() would only copy into, by their keys.

    None if any of them is more than bytes in C order in the memory of the host.
    """
    walk = _Walk(loads=True)
    if not walk.is_done(value):
        return None
    for tensor in walk.tensors:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return None
        if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            return None
    return dict(zip(walk.keys, walk.tensors, strict=True))


def loads_exactly(value: Any) -> bool:
    """Whether loading runs only code of torch, which keeps the tensors that it is given."""
    if isinstance(value, Module) or "load_state_dict" in getattr(value, "__dict__", {}):
        return False
    load, restore = (
        getattr(type(value), each, None) for each in ("load_state_dict", "__setstate__")
    )
    hooks = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    return (
        load is not None
        and all(
            str(getattr(method, "__module__", "")).partition(".")[0] == "torch"
            for method in (load, restore)
            if method is not None
        )
        and not any(getattr(value, name, None) for name in hooks)
    )


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
