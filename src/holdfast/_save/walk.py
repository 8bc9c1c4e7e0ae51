"""The way through a state that describes nothing: its form, its tensors and its plain values.

The form is a flat list of marks, keys and classes from which the containers could be made again:
two states have equal ones only if they differ in tensors and plain values alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from holdfast._save.capture import (
    adapters,
    exact_types,
    is_stateful,
    keeps_state,
    node_adapter,
    state_of,
)
from holdfast._save.plain_values import (
    PLAIN_TYPES,
    encode_plain,
    encode_uncommon,
    in_order,
    is_flat,
)

_DEPTH = 150  # less than a capture allows: whoever is deeper is left to it
_WIDE = 8


class UnknownForm(Exception):
    """Part of the state is of a kind that has to be captured anew each time."""


class _Mark:
    """Equal to nothing else."""


_PLAIN, _LEAF, _LEAVES, _ROWS = _Mark(), _Mark(), _Mark(), _Mark()
_DICT, _ORDERED, _LIST, _TUPLE, _SET, _FROZENSET = (_Mark() for _ in range(6))
_STATE, _NODE, _GENERATOR, _VERSIONS, _EXTRA = (_Mark() for _ in range(5))


class Walk:
    """One way through a state, in the order in which a capture meets things."""

    def __init__(self) -> None:
        self.form: list[Any] = []
        self.leaves: list[Any] = []  # tensors, and each as often as it is met
        self.adapters: dict[int, ModuleType] = {}  # of leaves that are not of an exact type
        self.plain_values: list[Any] = []  # as they are encoded
        self.states: dict[int, tuple[Any, Any]] = {}  # of objects and generators, by their id
        self.of_state = 0  # so many of the leaves: the others stand beside it
        self.is_whole = False
        self._adapters = adapters()
        self._depth = 0
        self.exact_types = frozenset(exact_types(self._adapters))

    def begin(self, state: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Go through all of it; UnknownForm if it cannot be."""
        self._mapping(dict(state), is_ordered=False)
        self.form.append(_EXTRA)
        self.of_state = len(self.leaves)
        self._mapping(dict(extra), is_ordered=False)
        self.is_whole = True

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind in PLAIN_TYPES:
            self._plain(encode_plain(value))
            return
        if kind in self.exact_types:
            self.form.append(_LEAF)
            self.leaves.append(value)
            return
        if kind is not dict:
            for adapter in self._adapters:
                if adapter.is_array(value):
                    if getattr(adapter, "is_sharded", lambda _: False)(value):
                        raise UnknownForm
                    self.form.append(_LEAF)
                    self.adapters[len(self.leaves)] = adapter
                    self.leaves.append(value)
                    return
        self._depth += 1
        if self._depth > _DEPTH:
            raise UnknownForm
        self._compound(value)
        self._depth -= 1

    def _plain(self, encoded: Any) -> None:
        self.form.append(_PLAIN)
        self.plain_values.append(encoded)

    def _compound(self, value: Any) -> None:
        if isinstance(value, dict):
            self._mapping(value, is_ordered=isinstance(value, OrderedDict))
        elif isinstance(value, list):
            if is_flat(value):
                self._plain([*value])
            else:
                self._items(_LIST, value)
        elif isinstance(value, tuple):
            self._items(_TUPLE, value)
        elif is_stateful(value):
            self._object(value)
        elif (adapter := node_adapter(value)) is not None:
            self.form.append(_NODE)
            self._mapping(adapter.node_parts(value), is_ordered=False)
        else:
            self._uncommon(value)

    def _uncommon(self, value: Any) -> None:
        for adapter in self._adapters:
            found = adapter.encode_other(value)
            if found is not None:
                self._plain(found)
                return
            if adapter.is_generator(value):
                self.form.append(_GENERATOR)
                self._visit(self._once(value, adapter.generator_state))
                return
        if isinstance(value, set | frozenset):
            self._items(_SET if isinstance(value, set) else _FROZENSET, in_order(value))
            return
        encoded = encode_uncommon(value)
        if encoded is None:
            raise UnknownForm
        self._plain(encoded)

    def _items(self, mark: _Mark, items: Any) -> None:
        self.form += (mark, len(items))
        if self.exact_types.issuperset(map(type, items)):
            self.form.append(_LEAVES)
            self.leaves += items
            return
        for item in items:
            self._visit(item)

    def _mapping(self, value: Mapping[Any, Any], *, is_ordered: bool) -> None:
        self.form += (_ORDERED if is_ordered else _DICT, len(value))
        self._keys(value)
        items = list(value.values())
        kinds = set(map(type, items))
        if kinds <= self.exact_types:
            self.form.append(_LEAVES)
            self.leaves += items
        elif kinds != {dict} or len(items) < _WIDE or not self._rows(items):
            for item in items:
                self._visit(item)
        if is_ordered:
            self._versions(getattr(value, "_metadata", None))

    def _keys(self, value: Mapping[Any, Any]) -> None:
        kinds = set(map(type, value))
        if kinds == {int}:
            self.form.append(int)  # 1 is equal to True, and to 1.0
        elif kinds and kinds != {str}:
            raise UnknownForm
        self.form.extend(value)  # += would ask TensorFlow's wrapped dicts to add

    def _rows(self, rows: list[dict[Any, Any]]) -> bool:
        """Many dicts with the same keys and only tensors: what an optimizer has for parameters."""
        first = list(rows[0])
        keys: list[Any] = []
        tensors: list[Any] = []
        for row in rows:
            keys += row
            tensors += row.values()
        if keys != first * len(rows) or {str} != set(map(type, keys)):
            return False
        if not self.exact_types.issuperset(map(type, tensors)):
            return False
        self.form += (_ROWS, len(first), *first)
        self.leaves += tensors
        return True

    def _versions(self, metadata: Any) -> None:
        """What torch keeps beside the state of a module: a number for each module in it."""
        self.form.append(_VERSIONS)
        if metadata is None:
            return
        versions = [each.get("version") for each in metadata.values() if type(each) is dict]
        is_known = len(versions) == len(metadata) and not set(map(type, versions)) - {int}
        if not is_known or any(len(each) != 1 for each in metadata.values()):
            raise UnknownForm
        self.form.append(len(metadata))
        self._keys(metadata)
        self.form += versions

    def _object(self, value: Any) -> None:
        self.form.append(_STATE)
        if keeps_state(value):
            for adapter in self._adapters:
                # The same as by its state_dict(), without a new object for each tensor.
                found = getattr(adapter, "flat_state", lambda _: None)(value)
                if found is not None:
                    form, tensors = found
                    self.form += form
                    self.leaves += tensors
                    return
        self._visit(self._once(value, state_of))

    def _once(self, value: Any, ask: Callable[[Any], Any]) -> Any:
        """The answer of an object: to ask twice may give two."""
        known = self.states.get(id(value))
        if known is None:
            known = self.states[id(value)] = (value, ask(value))
        return known[1]
