"""A state at one moment: what was found in the live objects, ready to be copied."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast._record.image import TensorSpec, encode_scalars


class Captured:
    """A tree of plain values, and the live tensors that it refers to.

    `specs` is the same list as at the capture before as long as the layout is the same, and
    `addresses` as long as no tensor has moved, so that whoever compares may begin with `is`.
    """

    def __init__(
        self,
        tree: Any,
        specs: list[TensorSpec],
        values: list[Any],
        left_out: int = 0,
        *,
        text: str | None = None,
        addresses: list[int] | None = None,
    ) -> None:
        self._tree = tree
        self._text = text  # the tree as JSON, where that is had without making the tree
        self.specs = specs
        self.values = values
        self.left_out = left_out  # tensors that other ranks store
        # Where the bytes of each value are in this process, in C order; 0 where it has to be asked.
        self.addresses = addresses

    @property
    def tree(self) -> Any:
        if self._tree is None and self._text is not None:
            self._tree = json.loads(self._text)
        return self._tree

    def scalars(self, head: Mapping[str, Any]) -> bytes:
        """The tree behind what stands in `head`, as the bytes that an image takes."""
        if self._text is None:
            return encode_scalars({**head, "tree": self._tree})
        start = encode_scalars(dict(head))[:-1]
        return b"".join((start, b"," if head else b"", b'"tree":', self._text.encode(), b"}"))

    def and_one_more(
        self, name: str, value: Any, specs: list[TensorSpec], addresses: list[int] | None
    ) -> Captured:
        """The same with one tensor at the end of the tree's `extra`, which is its last entry."""
        entry = {"$t": len(self.specs)}
        tree, text = None, None
        if self._text is None:
            tree = {**self._tree, "extra": {**self._tree["extra"], name: entry}}
        else:
            text = f"{self._text[:-2]},{json.dumps(name)}:{json.dumps(entry)}}}}}"
        values = [*self.values, value]
        return Captured(tree, specs, values, self.left_out, text=text, addresses=addresses)
