"""Visitors of the stored tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def replace_tag(encoded: Any, tag: str, replace: Callable[[Any], Any]) -> Any:
    """The same tree with `replace(inner)` in place of every `{tag: inner}`."""
    if isinstance(encoded, list):
        return [replace_tag(item, tag, replace) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if len(encoded) == 1 and tag in encoded:
        return replace(encoded[tag])
    return {key: replace_tag(item, tag, replace) for key, item in encoded.items()}


def _key(encoded: Any) -> str:
    if isinstance(encoded, dict) and "$tuple" in encoded:
        return str(tuple(encoded["$tuple"]))
    return str(encoded)
