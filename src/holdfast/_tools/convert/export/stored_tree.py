"""A stored tree, walked: every tensor under its plain name, or all of it as plain containers.

The tags are those of `_state/capture.py`. A tensor that the state has under two names is
stored once; here it has both names.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast._adapters.registry import adapter_of
from holdfast._errors import HoldfastError, StateMismatch
from holdfast._store.format.image import TensorSpec

_ITEMS = ("$tuple", "$set", "$frozenset")
_WRAPPERS = ("$state", "$generator", "$node")
_MOST_BITS = 2032  # what torch.load(…, weights_only=True) can read


@dataclass
class NamedTensors:
    """Names every tensor of some states; `names` refers to the specs by their numbers."""

    specs: Sequence[TensorSpec]
    prefix: str = ""  # dropped from every name
    names: dict[str, int] = field(default_factory=dict)

    def walk(self, encoded: Any, path: str) -> Any:
        """The tree with names in the place of numbers."""
        if isinstance(encoded, list):
            return [self.walk(item, f"{path}.{i}") for i, item in enumerate(encoded)]
        if not isinstance(encoded, dict):
            return encoded
        tag = next(iter(encoded), "")
        inner: Any = encoded.get(tag)
        if tag == "$t":
            return {tag: self._name(inner, path)}
        if tag in ("$dict", "$odict"):
            pairs = [[key, self.walk(item, f"{path}.{_key(key)}")] for key, item in inner]
            return {**encoded, tag: pairs}
        if tag in _WRAPPERS or tag in _ITEMS:
            return {tag: self.walk(inner, path)}
        if tag.startswith("$"):
            return encoded
        return {key: self.walk(item, f"{path}.{key}") for key, item in encoded.items()}

    def _name(self, index: int, path: str) -> str:
        stored = self.specs[index].name
        # Two paths can read alike (`a.b` as a key, and `b` in `a`); the stored name tells them
        # apart. Another path to this tensor gets a name of its own.
        is_own = stored == path or stored.startswith(f"{path}~")
        wanted = (stored if is_own else path).removeprefix(self.prefix)
        name, count = wanted, 1
        while name == "__metadata__" or self.names.get(name, index) != index:
            count += 1
            name = f"{wanted}~{count}"
        self.names[name] = index
        return name


def _key(encoded: Any) -> str:
    if isinstance(encoded, dict) and "$tuple" in encoded:
        return str(tuple(encoded["$tuple"]))
    return str(encoded)


def to_plain(encoded: Any, tensor: Callable[[int], Any]) -> Any:
    """The tree as dicts, lists, tuples, sets and values; `tensor` gives those of a number."""
    if isinstance(encoded, list):
        return [to_plain(item, tensor) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    tag = next(iter(encoded), "")
    if not tag.startswith("$"):
        return {key: to_plain(item, tensor) for key, item in encoded.items()}
    inner = encoded[tag]
    if tag == "$t":
        return tensor(inner)
    if tag in _WRAPPERS:
        return to_plain(inner, tensor)
    if tag in ("$dict", "$odict"):
        pairs = [(_to_key(key, tensor), to_plain(item, tensor)) for key, item in inner]
        if tag == "$dict":
            return dict(pairs)
        ordered = OrderedDict(pairs)
        if "$metadata" in encoded:  # the versions of a module's state
            ordered._metadata = to_plain(encoded["$metadata"], tensor)  # type: ignore[attr-defined]
        return ordered
    if tag in _ITEMS:
        if tag == "$tuple":
            return tuple(to_plain(item, tensor) for item in inner)
        # A frozenset is none of the types that torch loads without running code.
        return {_to_key(item, tensor) for item in inner}
    return _plain_value(tag, inner)


def _to_key(encoded: Any, tensor: Callable[[int], Any]) -> Any:
    """The same of a key, or of an item of a set."""
    found = to_plain(encoded, tensor)
    try:
        hash(found)
    except TypeError as error:
        raise HoldfastError(
            "the state has a frozenset as a key or in a set, and torch loads none.\n"
            "Export to a .safetensors file, which has it as JSON."
        ) from error
    return found


def _plain_value(tag: str, inner: Any) -> Any:
    if tag == "$float":
        return float(inner)
    if tag == "$int":
        return _whole_number(int(inner, 16))
    if tag in ("$bytes", "$bytearray"):
        return {"$bytes": bytes, "$bytearray": bytearray}[tag](base64.b64decode(inner))
    if tag == "$complex":
        return complex(float(inner[0]), float(inner[1]))
    if tag.startswith("$torch."):
        return adapter_of("torch").decode_other(tag, inner)
    raise StateMismatch(
        f"the checkpoint holds a value of kind {tag}, which this holdfast lacks.\n"
        "Use the version of holdfast that wrote it."
    )


def _whole_number(value: int) -> int:
    if value.bit_length() > _MOST_BITS:
        raise HoldfastError(
            f"the state has a number of {value.bit_length()} bits, and torch loads up to "
            f"{_MOST_BITS}.\nExport to a .safetensors file, which has it as JSON."
        )
    return value
