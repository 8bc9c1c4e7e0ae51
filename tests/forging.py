"""Changed copies of JSON documents, and of anything that is made of dicts and lists."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

NUMBERS = st.sampled_from([0, -1, 1, 2**31, 2**53, 2**63, 2**70, -(2**70), 10**400])
FLOATS = st.sampled_from([0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan")])
TAGS = st.sampled_from(
    [
        *("$t", "$r", "$shard", "$dict", "$odict", "$metadata", "$tuple", "$set", "$frozenset"),
        *("$state", "$generator", "$node", "$float", "$int", "$bytes", "$bytearray", "$complex"),
        *("$torch.dtype", "$torch.device", "$numpy.x", "$strange", "t", "size", "kind", "boxes"),
    ]
)
TEXTS = st.text(max_size=6) | TAGS | st.sampled_from(["..", "/etc/passwd", "\0", "\x1b[2J", "step"])
LEAVES = st.none() | st.booleans() | NUMBERS | FLOATS | TEXTS | st.integers()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(TEXTS, inner, max_size=2)
        | st.dictionaries(TAGS, inner, min_size=1, max_size=1)
    ),
    max_leaves=6,
) | st.sampled_from([300, 900, 5000]).map(lambda depth: Nested(depth))


class Nested:
    """So many lists in each other: written out, since json.dumps would not."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def __repr__(self) -> str:
        return f"Nested({self.depth})"


def dumps(value: Any) -> bytes:
    """JSON with what is nested too deep for Python's own writer."""
    depths: list[int] = []

    def keep(found: Any) -> str:
        depths.append(found.depth)
        return f"<nested {len(depths) - 1}>"

    text = json.dumps(value, default=keep)
    for number, depth in enumerate(depths):
        text = text.replace(f'"<nested {number}>"', "[" * depth + "]" * depth)
    return text.encode()


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything within."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in list(items):
        found.append((value, key))
        if isinstance(item, dict | list):
            found += places(item)
    return found


@st.composite
def forged(draw: st.DrawFn, original: Any) -> Any:
    """The original with a few changes: other values, entries removed or added."""
    value = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        known = places(value)
        if not known:
            break
        container, key = known[draw(st.integers(0, len(known) - 1))]
        what = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if what == "remove":
            del container[key]
        elif what == "replace":
            container[key] = draw(VALUES)
        elif isinstance(container, dict):
            container[draw(TEXTS)] = draw(VALUES)
        else:
            container.append(draw(VALUES))
    return value
