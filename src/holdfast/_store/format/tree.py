"""The stored tree: one visitor of its grammar, and the tensors that it refers to.

The tags are drawn at the top of `_state/capture.py`. A path names a value as it was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

MAPPINGS = ("$dict", "$odict")  # lists of [key, value]
CONTAINERS = ("$state", "$generator", "$tuple", "$set", "$frozenset", "$node")  # of one value each

Pairs = list[tuple[Any, Any]]  # an encoded key, and a visited value


class TreeVisitor:
    """Visits each value once, children first, and gives the same tree; a subclass overrides."""

    def visit(self, encoded: Any, path: str) -> Any:
        if isinstance(encoded, list):
            return [self.visit(item, f"{path}.{number}") for number, item in enumerate(encoded)]
        if not isinstance(encoded, dict):
            return encoded
        tag = next(iter(encoded), "")
        if not tag.startswith("$"):
            return {key: self.visit(item, f"{path}.{key}") for key, item in encoded.items()}
        inner = encoded[tag]
        if tag == "$t":
            return self.tensor(inner, path)
        if tag == "$shard":
            return self.shard(inner, path)
        if tag in MAPPINGS:
            pairs = [(key, self.visit(item, f"{path}.{key_text(key)}")) for key, item in inner]
            return self.mapping(encoded, pairs)
        if tag in CONTAINERS:
            return self.container(tag, self.visit(inner, path))
        return self.scalar(tag, inner)

    def tensor(self, number: int, path: str) -> Any:  # noqa: ARG002  for those that override it
        return {"$t": number}

    def shard(self, shard: dict[str, Any], path: str) -> Any:  # noqa: ARG002  as above
        return {"$shard": shard}

    def mapping(self, encoded: dict[str, Any], pairs: Pairs) -> Any:
        """A dict whose keys are not all texts; `encoded` may also have `$metadata`."""
        return {**encoded, next(iter(encoded)): [[key, item] for key, item in pairs]}

    def container(self, tag: str, inner: Any) -> Any:
        return {tag: inner}

    def scalar(self, tag: str, inner: Any) -> Any:
        return {tag: inner}


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
    elif tag in MAPPINGS:
        for key, item in encoded[tag]:
            yield from tensor_leaves(item, f"{path}.{key_text(key)}")
    elif tag in CONTAINERS:
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


def key_text(encoded: Any) -> str:
    """A key as it stands in a path."""
    if isinstance(encoded, dict) and "$tuple" in encoded:
        return str(tuple(encoded["$tuple"]))
    return str(encoded)
