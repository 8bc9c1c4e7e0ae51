"""The image: a state as one safetensors file, planned before a byte is copied.

    8 bytes   length of the header
    header    JSON, padded so that the data starts on a page
    data      the tensors, whole cache lines first, then the largest item first,
              without gaps (safetensors allows none, and so every tensor stays
              aligned to its own item)
    scalars   the tree with everything that is not a tensor, JSON padded with blanks;
              its capacity fills the last page, so that the image can be written to
              the disk in aligned writes

Any safetensors reader opens it. Standard library only: the keeper uses it too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

PAGE = 4096
_LINE_BYTES = 64
SCALARS = "holdfast.scalars"
HEADER = "holdfast.header"  # the image's header in a file with only some of its tensors
_FORMAT = "holdfast-1"
_PART_FORMAT = "holdfast-part-1"
# A tensor in a header as written here: all before its offsets, the name in that, the offsets.
_ENTRY = re.compile(
    rb'("((?:[^"\\]|\\.)*)":\{"dtype":"\w+","shape":\[[\d,]*\],"data_offsets":\[)(\d+),(\d+)\]\}'
)
_END_OF_METADATA = b']"},'  # within a string a quotation mark never follows a bracket
_TREE = b',"tree":'

# The names of dtypes in safetensors, by the name that the frameworks share.
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
_ITEM_BYTES = {
    name: int("".join(filter(str.isdigit, name.partition("_")[0])) or 8) // 8
    for name in STORED_AS.values()
}


@dataclass(frozen=True)
class TensorSpec:
    name: str
    kind: str  # a key of `_adapters/registry.py`, or "bytes"
    dtype: str  # the framework's own name
    stored_as: str  # safetensors' name; "U8" where it has none
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # only where the tensor is not in C order
    item_bytes: int
    size_bytes: int
    device: str = ""  # if the framework has devices

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the safetensors header: raw bytes have a dimension of their own."""
        raw = self.stored_as == "U8" and self.item_bytes > 1
        return (*self.shape, self.item_bytes) if raw else self.shape


class Extent(NamedTuple):
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
        """Header, tensors and scalars in the order of the file: together they are all of it."""
        return list(self._extents)

    def in_file_order(self) -> list[tuple[TensorSpec, int]]:
        return [(self.specs[number], self.offsets[number]) for number in self.order]

    # Cached: a state may have a hundred thousand tensors.

    @cached_property
    def _extents(self) -> list[Extent]:
        tensors = (Extent(s.name, o, s.size_bytes) for s, o in self.in_file_order())
        return [Extent("header", 0, len(self.header)), *tensors, self.scalars]

    @cached_property
    def order(self) -> list[int]:
        """The numbers of the tensors in the order in which they are stored."""
        places = [(at, spec.size_bytes) for at, spec in zip(self.offsets, self.specs, strict=True)]
        return sorted(range(len(places)), key=places.__getitem__)


def plan_image(specs: Sequence[TensorSpec], scalars_bytes: int) -> ImagePlan:
    """Lay out tensors and at least `scalars_bytes` of scalars, with room to grow."""
    # Multiples of a cache line come first, so that all of them are aligned: small counters between
    # large tensors would shift them. Those of one device stay together, for one copy.
    order = sorted(range(len(specs)), key=lambda index: _place_of(specs[index]))
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


def _place_of(spec: TensorSpec) -> tuple[bool, int, str]:
    if not spec.size_bytes:
        return (False, 0, "")  # all at one offset: only the order of the specs distinguishes them
    alignment = spec.item_bytes if spec.item_bytes in (1, 2, 4, 8, 16) else 1
    return spec.size_bytes % _LINE_BYTES != 0, -alignment, spec.device


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
    """The plan that a stored header was made from; ValueError if it is invalid."""
    try:
        table = json.loads(header[8:])
        metadata = table.pop("__metadata__")
        if metadata["format"] != _FORMAT:
            raise ValueError("not written by this version of holdfast")
        specs = []
        offsets = []
        for name, kind, dtype, shape, strides, item_bytes, device in json.loads(metadata["specs"]):
            entry = table[name]
            first, last = entry["data_offsets"]
            if type(first) is not int or type(last) is not int:
                raise ValueError(f"{name} has no place")
            spec = object.__new__(TensorSpec)
            # Bypass the setters of a frozen class, which take longer than all the rest of this.
            vars(spec).update(
                name=name,
                kind=kind,
                dtype=dtype,
                stored_as=entry["dtype"],
                shape=tuple(shape),
                strides=None if strides is None else tuple(strides),
                item_bytes=item_bytes,
                size_bytes=last - first,
                device=str(device),
            )
            specs.append(spec)
            offsets.append(len(header) + first)
        first, last = table[SCALARS]["data_offsets"]
        if type(first) is not int or type(last) is not int:
            raise ValueError("the scalars have no place")
        scalars = Extent(SCALARS, len(header) + first, last - first)
        plan = ImagePlan(tuple(specs), tuple(offsets), header, scalars, len(header) + last)
        _check_plan(plan)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not an image of holdfast: {error!r}") from error
    return plan


def read_extents(header: bytes) -> list[Extent]:
    """The extents of the stored plan, without parsing its specs, which takes long."""
    start = len(header)
    found = [Extent("header", 0, start)]
    position = 0
    for entry in _entries(header):
        first, last = int(entry[3]), int(entry[4])
        if first != position or last < first:
            break
        name = json.loads(b'"' + entry[2] + b'"') if b"\\" in entry[2] else entry[2].decode()
        found.append(Extent(name, start + first, last - first))
        position = last
    if found[-1].name != SCALARS or header_bytes(header) != start:
        return parse_header(header).extents()  # of another writer; or it raises
    return found


def _entries(header: bytes) -> Iterator[re.Match[bytes]]:
    at = header.find(_END_OF_METADATA) + len(_END_OF_METADATA)
    while (entry := _ENTRY.match(header, at)) is not None:
        yield entry
        at = entry.end() + 1  # a comma, or the end


def wrap_header(header: bytes, wanted: Iterable[str]) -> bytes:
    """The header of a file with an image's header and some of its tensors, in their order.

    The scalars are one of them. ValueError if any is missing.
    """
    size = len(header)
    first = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    table = {"__metadata__": {"format": _PART_FORMAT}, HEADER: first}
    rows = [json.dumps(table, separators=(",", ":")).encode()[:-1]]
    at = 0
    for name in wanted:
        # Without parsing all of it: few tensors of very many may have changed.
        at = header.find(b"," + json.dumps(name).encode() + b':{"dtype":', at) + 1
        entry = _ENTRY.match(header, at) if at else None
        if entry is None:
            raise ValueError(f"the header does not have {name}")
        length = int(entry[4]) - int(entry[3])
        rows.append(b"%s%d,%d]}" % (entry[1], size, size + length))
        size += length
    text = b",".join(rows) + b"}"
    padded = -(-(8 + len(text)) // PAGE) * PAGE - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def _check_plan(plan: ImagePlan) -> None:
    """A header may come from anywhere: its sizes must add up before they are used."""
    position = 0
    for name, offset, size in plan.extents():
        if type(size) is not int or size < 0:
            raise ValueError(f"{name} has no size")
        if offset != position:
            raise ValueError(f"{name} does not begin where the part before it ends")
        position += size
    for spec in plan.specs:
        sides = (*spec.shape, spec.item_bytes)
        texts = (spec.name, spec.kind, spec.dtype, spec.stored_as)
        numbers = sides if spec.strides is None else (*sides, *spec.strides)
        if set(map(type, numbers)) != {int} or set(map(type, texts)) != {str}:
            raise ValueError("a tensor has values that are neither numbers nor names")
        if spec.stored_as != "U8" and _ITEM_BYTES.get(spec.stored_as) != spec.item_bytes:
            raise ValueError(
                f"{spec.name} is stored as {spec.stored_as!r}, which does not fit its items"
            )
        if spec.strides is not None and len(spec.strides) != len(spec.shape):
            raise ValueError(f"{spec.name} has strides of another tensor")
        if min(sides) < 0 or math.prod(sides) != spec.size_bytes:
            raise ValueError(f"{spec.name} has another size than its shape")


def encode_scalars(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def decode_scalars(data: bytes | memoryview) -> dict[str, Any]:
    try:
        value = json.loads(bytes(data))
    except RecursionError as error:
        raise ValueError("the scalars are nested without end") from error
    if not isinstance(value, dict):
        raise ValueError("the scalars are not an object")
    return value


def decode_head(data: bytes | memoryview) -> dict[str, Any]:
    """The scalars without the tree, which comes last and may be large."""
    data = bytes(data)
    cut = data.find(_TREE)
    if cut >= 0:
        try:
            value = json.loads(data[:cut] + b"}")
        except ValueError:  # the name occurs elsewhere
            pass
        else:
            if isinstance(value, dict):
                return value
    value = decode_scalars(data)
    value.pop("tree", None)
    return value
