"""The image: a state as one safetensors file, planned before a byte is copied.

    8 bytes   length of the header
    header    JSON, padded so that the data starts on a page
    data      the tensors, largest item first, without gaps (safetensors allows
              none, and so every tensor stays aligned to its own item)
    scalars   the tree with all that is no tensor, JSON padded with blanks; its
              capacity fills the last page, so that the whole can go to the disk
              in aligned writes

Any safetensors reader opens it. Standard library only: the keeper uses it too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PAGE = 4096
SCALARS = "holdfast.scalars"
_FORMAT = "holdfast-1"


# What safetensors calls the dtypes it has; the frameworks share their names.
STORED_AS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as it will be stored."""

    name: str
    kind: str  # which adapter made it: "torch", "numpy", "bytes"
    dtype: str  # the framework's own name
    stored_as: str  # safetensors' name; "U8" where it has none
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # only where the tensor is not in C order
    item_bytes: int
    size_bytes: int
    device: str = ""  # where it was, if the framework has devices

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that safetensors sees: raw bytes get a dimension of their own."""
        raw = self.stored_as == "U8" and self.item_bytes > 1
        return (*self.shape, self.item_bytes) if raw else self.shape


@dataclass(frozen=True)
class Extent:
    """A named byte range of the image."""

    name: str
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class ImagePlan:
    """Where each tensor of a state stands in the image."""

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]  # of each spec, from the start of the image
    header: bytes
    scalars: Extent
    size_bytes: int

    def extents(self) -> list[Extent]:
        """Header, tensors and scalars in the order of the file: they cover it whole."""
        tensors = (Extent(s.name, o, s.size_bytes) for s, o in self.in_file_order())
        return [Extent("header", 0, len(self.header)), *tensors, self.scalars]

    def in_file_order(self) -> list[tuple[TensorSpec, int]]:
        pairs = zip(self.specs, self.offsets, strict=True)
        return sorted(pairs, key=lambda pair: (pair[1], pair[0].size_bytes))


def plan_image(specs: Sequence[TensorSpec], scalars_bytes: int) -> ImagePlan:
    """Lay out tensors and at least `scalars_bytes` of scalars, with room for them to grow."""
    order = sorted(range(len(specs)), key=lambda index: -_alignment(specs[index].item_bytes))
    relative = [0] * len(specs)
    position = 0
    for index in order:
        relative[index] = position
        position += specs[index].size_bytes
    wanted = position + max(2 * scalars_bytes, PAGE)
    data_bytes = -(-wanted // PAGE) * PAGE
    capacity = data_bytes - position
    header = _header(specs, relative, order, position, capacity)
    start = len(header)
    return ImagePlan(
        specs=tuple(specs),
        offsets=tuple(start + offset for offset in relative),
        header=header,
        scalars=Extent(SCALARS, start + position, capacity),
        size_bytes=start + data_bytes,
    )


def _alignment(item_bytes: int) -> int:
    return item_bytes if item_bytes in (1, 2, 4, 8, 16) else 1


def _header(
    specs: Sequence[TensorSpec], relative: list[int], order: list[int], end: int, capacity: int
) -> bytes:
    own = [[s.name, s.kind, s.dtype, s.shape, s.strides, s.item_bytes, s.device] for s in specs]
    table: dict[str, Any] = {"__metadata__": {"format": _FORMAT, "specs": json.dumps(own)}}
    for index in order:
        spec = specs[index]
        table[spec.name] = {
            "dtype": spec.stored_as,
            "shape": spec.stored_shape,
            "data_offsets": [relative[index], relative[index] + spec.size_bytes],
        }
    table[SCALARS] = {"dtype": "U8", "shape": [capacity], "data_offsets": [end, end + capacity]}
    text = json.dumps(table, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // PAGE) * PAGE - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def header_bytes(first: bytes | memoryview) -> int:
    """The length of the header of the image that begins with these bytes."""
    return 8 + int.from_bytes(first[:8], "little")


def parse_header(header: bytes) -> ImagePlan:
    """The plan that a stored header was made from; ValueError if it is none of ours."""
    try:
        table = json.loads(header[8:])
        metadata = table.pop("__metadata__")
        if metadata["format"] != _FORMAT:
            raise ValueError("not written by this version of holdfast")
        specs = []
        offsets = []
        for name, kind, dtype, shape, strides, item_bytes, device in json.loads(metadata["specs"]):
            first, last = table[name]["data_offsets"]
            specs.append(
                TensorSpec(
                    name=name,
                    kind=kind,
                    dtype=dtype,
                    stored_as=table[name]["dtype"],
                    shape=tuple(shape),
                    strides=None if strides is None else tuple(strides),
                    item_bytes=item_bytes,
                    size_bytes=last - first,
                    device=str(device),
                )
            )
            offsets.append(len(header) + first)
        first, last = table[SCALARS]["data_offsets"]
        scalars = Extent(SCALARS, len(header) + first, last - first)
        plan = ImagePlan(tuple(specs), tuple(offsets), header, scalars, len(header) + last)
        _check_plan(plan)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not an image of holdfast: {error!r}") from error
    return plan


def _check_plan(plan: ImagePlan) -> None:
    """A header from anywhere may claim any size: what it says must add up before it is used."""
    position = 0
    for extent in plan.extents():
        if type(extent.size_bytes) is not int or extent.size_bytes < 0:
            raise ValueError(f"{extent.name} has no size")
        if extent.offset != position:
            raise ValueError(f"{extent.name} does not follow on what is before it")
        position += extent.size_bytes
    for spec in plan.specs:
        numbers = (*spec.shape, *(spec.strides or ()), spec.item_bytes)
        texts = (spec.name, spec.kind, spec.dtype, spec.stored_as)
        if not all(type(n) is int for n in numbers) or not all(type(t) is str for t in texts):
            raise ValueError("a tensor is described by something else than numbers and names")
        if min((*spec.shape, spec.item_bytes)) < 0 or (
            math.prod(spec.shape) * spec.item_bytes != spec.size_bytes
        ):
            raise ValueError(f"{spec.name} has another size than its shape")


def encode_scalars(value: dict[str, Any]) -> bytes:
    """What is no tensor, as the bytes that the scalars' range begins with."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def decode_scalars(data: bytes | memoryview) -> dict[str, Any]:
    """The scalars in their range of the image."""
    try:
        value = json.loads(bytes(data))
    except RecursionError as error:
        raise ValueError("the scalars are nested without end") from error
    if not isinstance(value, dict):
        raise ValueError("the scalars are not an object")
    return value
