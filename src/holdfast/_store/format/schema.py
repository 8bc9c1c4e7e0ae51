"""What a manifest, a state's tree and a line of the journal may contain: the one validation.

A checksum shows that bytes are as they were written. It does not show which program wrote them. So
everything is validated here once, before it is used, and anything invalid is a ValueError: no
reader after it meets a number that is a list, a tensor that does not exist, or a tree that is
deeper than Python can walk.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast._store.format.image import TensorSpec
    from holdfast._store.format.manifest import DataFile, Manifest

MOST = 1 << 53  # steps, attempts, bytes and moments stay below it
_DEEPEST_RECORD = 64
_DEEPEST_KEY = 32
_DEEPEST_TREE = 210  # a capture allows 200, and every walker of a tree can go this deep
_MOST_RANKS = 1 << 20
_HEX = frozenset("0123456789abcdef")
_ITEMS = ("$tuple", "$set", "$frozenset")
_WRAPPED = ("$state", "$generator")
_HASHABLE = ("$float", "$int", "$bytes", "$complex")


def is_whole(value: object) -> bool:
    """Whether it is a count: a whole number that is not negative."""
    return type(value) is int and 0 <= value < MOST


def _is_int(value: object) -> bool:
    return type(value) is int and -MOST < value < MOST  # -1 means none so far


def is_real(value: object) -> bool:
    """Whether it is a finite number of a reasonable size."""
    return type(value) in (int, float) and -MOST < value < MOST  # type: ignore[operator]  # by type


def _require(fact: bool, what: str) -> None:
    if not fact:
        raise ValueError(what)


# -- the journal and its like ---------------------------------------------------


def parse_record(data: bytes) -> dict[str, Any]:
    """The JSON object in a line of a journal or in a small file; ValueError if it is invalid."""
    try:
        found = json.loads(data.decode("utf-8", errors="replace"))
    except RecursionError as error:
        raise ValueError("nested without end") from error
    _require(isinstance(found, dict), "not an object")
    if data.count(b"[") + data.count(b"{") > _DEEPEST_RECORD:
        _check_depth(found)
    return found  # type: ignore[no-any-return]  # checked above


def _check_depth(found: Any) -> None:
    level = [found]
    for _ in range(_DEEPEST_RECORD):
        level = [
            item
            for each in level
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"nested more than {_DEEPEST_RECORD} deep")


# -- the manifest ---------------------------------------------------------------


def check_manifest(found: Manifest) -> None:
    """ValueError if a manifest is not valid."""
    texts = (found.run_id, found.reason, found.holdfast)
    _require({*map(type, texts)} == {str}, "its run, reason or version is not a text")
    is_numbered = is_whole(found.attempt) and is_whole(found.step)
    _require(is_numbered, "its step or attempt is not a number")
    _require(is_real(found.saved_at), "its time is not a number")
    _check_metrics(found.metrics)
    _require(all(map(is_whole, found.origin or ())), "its origin is not an attempt and a step")
    names = [file.name for file in found.files]
    _require(len({*names}) == len(names), "two ranks have one file")


def _check_metrics(metrics: object) -> None:
    _require(
        isinstance(metrics, dict)
        and all(type(name) is str for name in metrics)
        and all(value is None or is_number(value) for value in metrics.values()),
        "its metrics are not numbers by name",
    )


def is_number(value: object) -> bool:
    """Whether it is a number that fits into a float."""
    return type(value) is float or (type(value) is int and value.bit_length() < 1024)


def check_file(file: DataFile) -> None:
    """ValueError if one rank's part of a manifest is not valid."""
    parts, files = file.all_parts, file.all_files
    names, offsets, sizes, checksums, places = zip(*parts, strict=True) if parts else [()] * 5
    texts = [*names, *checksums, *places, *(name for name, _ in files)]
    numbers = [*offsets, *sizes, *(size for _, size in files)]
    _require(
        {*map(type, texts)} == {str} and {*map(type, numbers)} == {int},
        "it has values that are neither numbers nor names",
    )
    _require(min(numbers) >= 0 and max(numbers) < MOST, "a number in it is out of range")
    _require(
        all(len(each) == 32 for each in checksums) and _HEX.issuperset("".join({*checksums})),
        "a checksum in it is not valid",
    )
    known = dict(files)
    is_known = "" not in known and len(known) == len(files)
    _require(
        is_known and {*places} <= {"", *known} - {file.name}, "two of its files have the same name"
    )
    _require(len({part.name for part in file.parts}) == len(file.parts), "a part is in it twice")
    end = 0
    for _, offset, size, _, place in sorted(parts, key=lambda part: (part[1], part[2])):
        if place:
            _require(offset + size <= known[place], "a part reaches beyond its file")
        else:
            _require(offset == end, "its parts leave a gap")
            end += size
    _require(end == file.size_bytes or not parts, "its file is larger than its parts")


# -- the scalars and the tree ---------------------------------------------------


def check_head(head: dict[str, Any], specs: Sequence[TensorSpec]) -> None:
    """ValueError if the scalars of an image with these tensors are not valid."""
    _require(is_whole(head.get("step")), "its step is not a number")
    _require(is_whole(head.get("attempt", 0)), "its attempt is not a number")
    world = head.get("world", 1)
    _require(is_whole(world) and 1 <= world <= _MOST_RANKS, "its number of ranks is not valid")
    loop, phases = head.get("loop", 0), head.get("phases") or [None, None]
    _require(_is_int(loop), "its loop is not a number")
    _check_metrics(head.get("metrics", {}))
    for name in ("best", "rules"):
        _require(isinstance(head.get(name), dict | None), f"its {name} are not an object")
    _require(
        type(phases) is list and len(phases) == 2 and all(p is None or _is_int(p) for p in phases),
        "its phases are not two numbers",
    )
    tree = head.get("tree")
    _require(
        isinstance(tree, dict) and isinstance(tree.get("state"), dict), "its tree is not an object"
    )
    assert isinstance(tree, dict)
    _require(isinstance(tree.get("extra", {}), dict), "its tree is not an object")
    _TreeCheck(specs).check([*tree["state"].values(), tree.get("extra", {})])


class _TreeCheck:
    """A tree of `_state/capture.py`, checked level by level: a forged one may be deep."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs

    def check(self, values: Sequence[Any]) -> None:
        level: list[Any] = list(values)
        for _ in range(_DEEPEST_TREE):
            below: list[Any] = []
            for each in level:
                kind = type(each)
                if kind is dict:
                    below += self._inside(each)
                elif kind is list:
                    below += each
            if not below:
                return
            level = [each for each in below if type(each) in (dict, list)]
        raise ValueError("its tree is nested without end")

    def _inside(self, encoded: dict[str, Any]) -> Iterable[Any]:
        """The values inside an encoded one, still to be checked; ValueError if it is invalid."""
        tag = next(iter(encoded), "")
        if not tag.startswith("$"):
            _require(not any(key.startswith("$") for key in encoded), "a value has two kinds")
            return encoded.values()
        inner = encoded[tag]
        others = encoded.keys() - {tag}
        _require(not others or (tag, others) == ("$odict", {"$metadata"}), "a value has two kinds")
        if tag == "$t":
            self._check_number(inner)
        elif tag == "$r":
            _require(type(inner) is str, "a tensor of another rank has no name")
        elif tag == "$shard":
            self._check_shard(inner)
        elif tag in ("$dict", "$odict"):
            return [*self._pairs(inner), *(encoded[key] for key in others)]
        elif tag in _ITEMS:
            _require(type(inner) is list, f"a {tag[1:]} in it is not a list")
            if tag != "$tuple":
                _require(
                    all(map(self._is_hashable, inner)),
                    "a set in it has an impossible value",
                )
            return inner  # type: ignore[no-any-return]  # checked above
        elif tag in _WRAPPED:
            return [inner]
        elif tag == "$node":
            _require(type(inner) is dict, "a value made of parts is not an object")
            _require(not any(name.startswith("$") for name in inner), "a part has no name")
            return inner.values()  # type: ignore[no-any-return]  # checked above
        else:
            _check_plain(tag, inner)
        return ()

    def _check_number(self, number: object) -> None:
        is_there = type(number) is int and 0 <= number < len(self._specs)
        _require(is_there, "it refers to a tensor that is not there")

    def _is_hashable(self, encoded: Any, depth: int = 0) -> bool:
        """Whether it can be a key or in a set: NumPy scalars and long bytes are tensors here."""
        if type(encoded) is not dict:
            return type(encoded) is not list
        tag = next(iter(encoded), "")
        inner: Any = encoded.get(tag)
        if tag in ("$tuple", "$frozenset"):
            is_shallow = depth < _DEEPEST_KEY and type(inner) is list
            return is_shallow and all(self._is_hashable(each, depth + 1) for each in inner)
        if tag == "$t":
            self._check_number(inner)
            spec: TensorSpec = self._specs[inner]
            return spec.kind == "torch" or spec.dtype == "bytes" or spec.dtype[:7] == "scalar "
        return tag in _HASHABLE or (tag.startswith("$") and "." in tag)

    def _pairs(self, pairs: Any) -> Iterable[Any]:
        is_made_of_pairs = type(pairs) is list and all(
            type(pair) is list and len(pair) == 2 for pair in pairs
        )
        _require(is_made_of_pairs, "a dict in it is not a list of pairs")
        _require(
            all(self._is_hashable(key) for key, _ in pairs),
            "a dict in it has an impossible key",
        )
        return (each for pair in pairs for each in pair)

    def _check_shard(self, shard: Any) -> None:
        _require(type(shard) is dict, "a sharded tensor in it is not an object")
        if shard.get("t") is not None:
            self._check_number(shard["t"])
        kind, size = shard.get("kind", "torch"), shard.get("size")
        texts = (kind, shard.get("dtype"))
        _require(
            kind in ("torch", "jax") and {*map(type, texts)} == {str} and _is_shape(size),
            "a sharded tensor in it has no kind, type or size",
        )
        boxes = (
            shard.get("boxes") if kind == "jax" else [[shard.get("offsets"), shard.get("sizes")]]
        )
        _require(
            type(boxes) is list and all(_is_box(box, size) for box in boxes),
            "a part of a sharded tensor is outside of it",
        )
        _require(
            kind == "torch" or is_whole(shard.get("item_bytes")),
            "a sharded tensor in it has no item size",
        )


def _is_shape(value: Any) -> bool:
    return type(value) is list and all(map(is_whole, value)) and math.prod(value) < MOST


def _is_box(box: Any, size: list[int]) -> bool:
    if type(box) is not list or len(box) != 2 or not all(map(_is_shape, box)):
        return False
    corner, sides = box
    return len(corner) == len(sides) == len(size) and all(
        at + side <= whole for at, side, whole in zip(corner, sides, size, strict=True)
    )


def _check_plain(tag: str, inner: Any) -> None:
    """Check a value that JSON lacks; the adapter checks one of a framework."""
    try:
        if tag == "$float":
            float(inner)
        elif tag == "$int":
            int(inner, 16)
        elif tag in ("$bytes", "$bytearray"):
            base64.b64decode(inner, validate=True)
        elif tag == "$complex":
            real, imaginary = inner
            complex(float(real), float(imaginary))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"a value of kind {tag[1:]} in it is not valid") from error
