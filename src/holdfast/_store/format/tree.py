"""Visitors of the stored tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def tensor_leaves(encoded: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every `$t` and `$shard` of an encoded value, with the path that it was captured under."""
    if isinstance(encoded, list):
        for number, item in enumerate(encoded):
            yield from tensor_leaves(item, f"{path}.{number}")
    if not isinstance(encoded, dict):
        return
    tag = next(iter(encoded), "")
    if tag in ("$t", "$shard"):
        yield path, encoded
    elif tag in ("$dict", "$odict"):
        for key, item in encoded[tag]:
            yield from tensor_leaves(item, f"{path}.{_key(key)}")
    elif tag in ("$state", "$generator", "$tuple", "$set", "$frozenset", "$node"):
        yield from tensor_leaves(encoded[tag], path)
    elif not tag.startswith("$"):
        for key, item in encoded.items():
            yield from tensor_leaves(item, f"{path}.{key}")


def _key(encoded: Any) -> str:
    if isinstance(encoded, dict) and "$tuple" in encoded:
        return str(tuple(encoded["$tuple"]))
    return str(encoded)
