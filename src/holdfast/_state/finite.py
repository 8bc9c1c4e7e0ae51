"""Which tensors of a state are not finite: searched when a rule has called it bad."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from holdfast._adapters.registry import adapter_of
from holdfast._state.capture import capture
from holdfast._store.format.image import TensorSpec

# Bytes of an item, and the bits of its exponent: if all are set, it is NaN or infinite.
_EXPONENTS = {
    "F64": (8, 0x7FF0_0000_0000_0000),
    "F32": (4, 0x7F80_0000),
    "F16": (2, 0x7C00),
    "BF16": (2, 0x7F80),
    "C64": (4, 0x7F80_0000),  # of its two parts
}
_FORMATS = {8: "Q", 4: "I", 2: "H"}
_CHUNK_BYTES = 16 << 20


def not_finite(state: Mapping[str, Any]) -> list[str]:
    """The names of tensors in a state, and of gradients, that hold a NaN or an infinity."""
    captured = capture(dict(state))
    found = [
        spec.name
        for spec, value in zip(captured.specs, captured.values, strict=True)
        if spec.stored_as in _EXPONENTS
        and has_not_finite(adapter_of(spec.kind).bytes_of(value), spec.stored_as)
    ]
    return [*found, *_gradients(state)]


def has_not_finite(data: Any, stored_as: str, *, only_nan: bool = False) -> bool:
    """Whether the bytes of a tensor hold a NaN or an infinity, or a NaN at least."""
    size, mask = _EXPONENTS.get(stored_as, (0, 0))
    if not size:
        return False
    view = memoryview(data).cast("B")
    return any(
        _any_set(view[start : start + _CHUNK_BYTES], size, mask, only_nan)
        for start in range(0, view.nbytes, _CHUNK_BYTES)
    )


def _any_set(view: memoryview, size: int, mask: int, only_nan: bool) -> bool:
    # Without its sign, an infinity is the exponent alone, and a NaN is more than that.
    unsigned, least = (1 << (8 * size - 1)) - 1, mask + only_nan
    try:
        import numpy as np
    except ImportError:  # slow, but it runs once
        read = struct.unpack(f"={view.nbytes // size}{_FORMATS[size]}", view)
        return any(item & unsigned >= least for item in read)
    items = np.frombuffer(view, dtype=f"u{size}")
    return bool(((items & items.dtype.type(unsigned)) >= least).any())


def nan_at_start(state: Mapping[str, Any]) -> list[str]:
    """The names of arrays that hold a NaN before anything is trained, so by intention.

    Tensors of torch are left out: a module says which of them are trained.
    """
    return sorted(
        name
        for name, spec, value in _arrays(state)
        if has_not_finite(adapter_of(spec.kind).bytes_of(value), spec.stored_as, only_nan=True)
    )


def _arrays(state: Mapping[str, Any]) -> Iterator[tuple[str, TensorSpec, Any]]:
    captured = capture(dict(state))
    for spec, value in zip(captured.specs, captured.values, strict=True):
        if spec.kind != "torch" and spec.stored_as in _EXPONENTS:
            yield spec.name, spec, value


def trained(state: Mapping[str, Any], meant: Collection[str] | None = None) -> frozenset[str]:
    """The names of parameters that are trained: a NaN there is never intended.

    `meant` are the arrays that held one at the start, if that is known.
    """
    names = {
        name for name, parameter in _parameters(state) if getattr(parameter, "requires_grad", False)
    }
    if meant is not None:
        names.update(name for name, _, _ in _arrays(state) if name not in meant)
    return frozenset(names)


def _gradients(state: Mapping[str, Any]) -> list[str]:
    found = []
    for name, parameter in _parameters(state):
        gradient = getattr(parameter, "grad", None)
        if gradient is not None and not bool(gradient.detach().isfinite().all()):
            found.append(f"{name}.grad")
    return found


def _parameters(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, module in state.items():
        named = getattr(module, "named_parameters", None)
        for path, parameter in named() if callable(named) else ():
            yield f"{name}.{path}", parameter
