"""A state as a .pt file that torch loads with weights_only=True: on the CPU, and no code in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import IO, Any

import torch

from holdfast import torch as adapter
from holdfast._record.image import STORED_AS, TensorSpec

_TORCH_NAMES = {stored: name for name, stored in STORED_AS.items()}


def write_pt(file: IO[bytes], value: Any) -> None:
    """Write a tree of plain containers and tensors."""
    torch.save(value, file)


def tensor_reader(
    specs: tuple[TensorSpec, ...], data: Callable[[int], memoryview]
) -> Callable[[int], Any]:
    """A function that gives the tensor of a number: one and the same each time it is asked."""
    known: dict[int, Any] = {}

    def read(index: int) -> Any:
        if index not in known:
            known[index] = _read(specs[index], data(index))
        return known[index]

    return read


def _read(spec: TensorSpec, data: memoryview) -> Any:
    if spec.kind == "bytes":
        return bytes(data) if spec.dtype == "bytes" else bytearray(data)
    if spec.kind == "torch":
        on_cpu = replace(spec, device="")
        # A borrowed tensor needs no second copy in memory, but has forgotten its strides.
        return adapter.borrow(on_cpu, data) if spec.strides is None else adapter.own(on_cpu, data)
    # An array of another framework: as the file has it, which is raw bytes where torch has
    # no such dtype.
    dtype = _TORCH_NAMES[spec.stored_as]
    found = adapter.borrow(replace(spec, dtype=dtype, shape=spec.stored_shape), data)
    is_number = spec.dtype.startswith("scalar ") and found.ndim == 0
    return found.item() if is_number else found
