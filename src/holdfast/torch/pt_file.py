"""A .pt file that torch loads with weights_only=True: written and read without running code."""

from __future__ import annotations

import argparse
import contextlib
import enum
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path, PosixPath, PurePosixPath
from typing import IO, Any

import numpy as np
import torch

from holdfast._store.format.image import STORED_AS, TensorSpec
from holdfast.torch.adapter import ADAPTER

_TORCH_NAMES = {stored: name for name, stored in STORED_AS.items()}


def write_pt(file: IO[bytes], value: Any) -> None:
    torch.save(value, file)


def tensor_reader(
    specs: tuple[TensorSpec, ...], data: Callable[[int], memoryview]
) -> Callable[[int], Any]:
    """A function that returns the tensor of a number, the same object each time."""
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
        # `read_array` makes no second copy in memory, but loses the strides.
        make = ADAPTER.read_array if spec.strides is None else ADAPTER.new_array
        return make(on_cpu, data)
    # An array of another framework: raw bytes if torch lacks its dtype.
    dtype = _TORCH_NAMES[spec.stored_as]
    found = ADAPTER.read_array(replace(spec, dtype=dtype, shape=spec.stored_shape), data)
    is_number = spec.dtype.startswith("scalar ") and found.ndim == 0
    return found.item() if is_number else found


# -- Files of other programs --------------------------------------------------------

_MAPPED_BYTES = 1 << 30
_STRANGER = r"(?:GLOBAL|global|function|class) `?([A-Za-z_][\w.]*\.[\w.]*\w)"


class Refused(Exception):
    """The file holds objects that could run code when they are loaded."""

    def __init__(self, reason: str, stranger: str = "") -> None:
        super().__init__(reason)
        self.stranger = stranger  # the type that is not allowed


def read_pt(path: Path, tensor: Callable[[str, tuple[int, ...], memoryview], Any]) -> Any:
    """The tree that torch.save wrote, with `tensor(dtype, shape, bytes)` for every tensor.

    Refused if it cannot be read without running code; torch's own errors if it is damaged.
    """
    # A mapping needs no memory, but a SIGBUS ends the process if the file shrinks.
    mapped = path.stat().st_size > _MAPPED_BYTES and zipfile.is_zipfile(path)
    return _replaced(load_pt(path, mapped=mapped), tensor)


def load_pt(source: Path | IO[bytes], *, mapped: bool = False) -> Any:
    """What torch.save wrote, on the CPU; Refused if that needs running code."""
    try:
        allow = getattr(torch.serialization, "safe_globals", contextlib.nullcontext)  # since 2.5
        with allow(_harmless()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old files
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        # One line, without torch's advice to load it unsafely.
        reason = str(error).partition("\n")[0]
        if "weights_only" in reason:
            reason = "torch does not know a type in it"
        # Torch may name the first type that is not allowed.
        found = re.search(_STRANGER, str(error))
        raise Refused(reason, "" if found is None else found[1]) from error


def read_known(file: IO[bytes], allowed: Container[tuple[str, str]]) -> Any:
    """Unpickle only these types, each a module and a name in it."""

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) in allowed:
                return super().find_class(module, name)
            if (module, name) == ("builtins", "getattr"):  # how Python 3.11.2 pickles an enum
                return _member
            raise Refused(f"it holds a {module}.{name}", f"{module}.{name}")

    return Reader(file).load()


def _member(kind: Any, name: str) -> enum.Enum:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[name]
    raise Refused("it holds a builtins.getattr", "builtins.getattr")


def _harmless() -> list[Any]:
    """Types in checkpoints of scripts that only hold values."""
    core = np._core if hasattr(np, "_core") else np.core
    numpy_types = [kind for kind in vars(np.dtypes).values() if isinstance(kind, type)]
    holders = [argparse.Namespace, PosixPath, PurePosixPath, np.ndarray, np.dtype, *numpy_types]
    return [*holders, core.multiarray.scalar, core.multiarray._reconstruct]


def _replaced(value: Any, tensor: Callable[[str, tuple[int, ...], memoryview], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            dense = value.dequantize() if value.is_quantized else value.to_dense()
            return _replaced(dense, tensor)
        dtype = str(value.dtype).removeprefix("torch.")
        return tensor(dtype, tuple(value.shape), ADAPTER.bytes_of(value))
    if isinstance(value, dict):
        return {key: _replaced(item, tensor) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, tensor) for item in value]
    if isinstance(value, argparse.Namespace):
        return _replaced(vars(value), tensor)
    if isinstance(value, torch.dtype | torch.device | PurePosixPath):
        return str(value)
    return value
