"""Values that JSON has, or that it can be told in a few words: what a tree has beside tensors."""

from __future__ import annotations

import base64
import math
from typing import Any

_INT_BITS = 1024  # Python refuses to make decimal text of a few thousand digits
PLAIN_TYPES = frozenset({type(None), bool, str, int, float})


def encode_plain(value: Any) -> Any:
    """A value of one of PLAIN_TYPES, as JSON has it."""
    if type(value) is int:
        return value if value.bit_length() <= _INT_BITS else {"$int": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    return value


def is_flat(value: list[Any]) -> bool:
    """Whether JSON has this list as it is: an optimizer numbers its parameters, by thousands."""
    kinds = set(map(type, value))
    if kinds == {int}:
        return int(max(max(value), -min(value))).bit_length() <= _INT_BITS
    return kinds == {str}


def encode_uncommon(value: Any) -> Any:
    """Plain values of other types; None if it is none."""
    if isinstance(value, bytes | bytearray):
        tag = "$bytes" if isinstance(value, bytes) else "$bytearray"
        return {tag: base64.b64encode(value).decode("ascii")}
    if isinstance(value, complex):
        return {"$complex": [repr(value.real), repr(value.imag)]}
    for plain_type in (bool, int, float, str):  # an IntEnum, a str of a class of its own
        if isinstance(value, plain_type):
            return encode_plain(plain_type(value))
    return None


def in_order(value: set[Any] | frozenset[Any]) -> list[Any]:
    """The items of a set, in the order in which they are stored."""
    return sorted(value, key=lambda item: (type(item).__name__, repr(item)))
