"""The graph of TensorFlow's objects, stored with a state so that it can be exported.

It depends on the objects and not on their values: it is made when the tensors of the state change,
and goes into every snapshot unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from holdfast._adapters.plain import ADAPTER as PLAIN
from holdfast._state.capture import Captured, capture
from holdfast._store.format.image import TensorSpec
from holdfast._text import say

OBJECTS = "objects"  # of a state's extra: the graph of TensorFlow's objects
_NAME = f"holdfast.{OBJECTS}"


class ObjectGraphCache:
    """Keeps the graph from one capture to the next."""

    def __init__(self) -> None:
        self._specs: list[TensorSpec] = []
        self._data: bytes | None = None
        # Including the graph: the same lists as long as those of the state are.
        self._all_specs: list[TensorSpec] = []
        self._addresses: tuple[list[int] | None, list[int] | None] = (None, None)

    def add_to(self, captured: Captured, state: Mapping[str, Any]) -> Captured:
        """Add the graph to a captured state."""
        if captured.specs is not self._specs:
            if captured.specs != self._specs:
                self._data = _describe(captured, state)
            self._specs = captured.specs
            if self._data is not None:
                self._all_specs = [*captured.specs, PLAIN.spec(_NAME, self._data)]
        if self._data is None:
            return captured
        if captured.addresses is not self._addresses[0] and captured.addresses is not None:
            self._addresses = (captured.addresses, [*captured.addresses, 0])
        addresses = None if captured.addresses is None else self._addresses[1]
        return captured.and_one_more(OBJECTS, self._data, self._all_specs, addresses)


def _describe(captured: Captured, state: Mapping[str, Any]) -> bytes | None:
    if "tensorflow" not in sys.modules or all(s.kind != "tensorflow" for s in captured.specs):
        return None
    from holdfast.tensorflow.graph import describe

    try:
        if captured.left_out:  # other ranks store a part: the graph needs all tensors
            captured = capture(state)
        return describe(state, [spec.name for spec in captured.specs], captured.values)
    except Exception as error:  # noqa: BLE001  it calls the user's objects, and no snapshot may fail for it
        say(
            "what TensorFlow's objects are made of could not be written down "
            f"({type(error).__name__}: {error}): `holdfast export --to tensorflow` will refuse the "
            "checkpoints of this run. Everything else in them is whole."
        )
        return None
