"""A capture that reuses the previous one: for most snapshots only the values have changed.

Describing 100,000 tensors takes longer than copying them. So the state is first walked without
describing anything, which gives its form (containers, keys, classes), its tensors and its plain
values, each as one flat list. If form and tensors are those of last time, to the address, then so
are the descriptions and the text of the tree, except for the plain values, which are always new.

The walk gives up at anything it does not know. Then, and if the form has changed, the state is
captured in full.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from holdfast._adapters.adapter import Adapter
from holdfast._adapters.registry import PLAIN, adapter_of, adapters, exact_types
from holdfast._state.capture import (
    PLAIN_TYPES,
    Captured,
    Encoder,
    SpecCache,
    capture,
    encode_plain,
    encode_uncommon,
    in_order,
    is_flat,
    is_stateful,
    keeps_state,
    node_adapter,
    state_of,
    without_collector,
)
from holdfast._store.format.image import TensorSpec
from holdfast._text import say

# -- The walk: the form of a state, its tensors and its plain values ---------------------------
# The form is a flat list of marks, keys and classes from which the containers could be rebuilt:
# two states have equal forms only if they differ in nothing but tensors and plain values.

_DEPTH = 150  # less than a full capture allows
_WIDE = 8


class UnknownForm(Exception):
    """Part of the state is of a kind that needs a full capture each time."""


# Marks: each is equal to nothing else.
_PLAIN, _LEAF, _LEAVES, _ROWS = (object() for _ in range(4))
_DICT, _ORDERED, _LIST, _TUPLE, _SET, _FROZENSET = (object() for _ in range(6))
_STATE, _NODE, _GENERATOR, _VERSIONS, _EXTRA = (object() for _ in range(5))


class Walk:
    """One walk through a state, in the order of a capture."""

    def __init__(self) -> None:
        self.form: list[Any] = []
        self.leaves: list[Any] = []  # tensors; a shared one appears several times
        self.adapters: dict[int, Adapter] = {}  # of leaves that are not of an exact type
        self.plain_values: list[Any] = []  # as they are encoded
        self.states: dict[int, tuple[Any, Any]] = {}  # of objects and generators, by their id
        self.of_state = 0  # this many of the leaves; the others are in `extra`
        self.is_whole = False
        self._adapters = adapters()
        self._depth = 0
        self.exact_types = frozenset(exact_types(self._adapters))

    def begin(self, state: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Walk all of it; UnknownForm if that is not possible."""
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
                    if adapter.is_sharded(value):
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
            if adapter.generators.is_generator(value):
                self.form.append(_GENERATOR)
                self._visit(self._once(value, adapter.generators.generator_state))
                return
        if isinstance(value, set | frozenset):
            self._items(_SET if isinstance(value, set) else _FROZENSET, in_order(value))
            return
        encoded = encode_uncommon(value)
        if encoded is None:
            raise UnknownForm
        self._plain(encoded)

    def _items(self, mark: object, items: Any) -> None:
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
        self.form.extend(value)  # += would call the __radd__ of TensorFlow's wrapped dicts

    def _rows(self, rows: list[dict[Any, Any]]) -> bool:
        """Many dicts with the same keys and only tensors, as in an optimizer's state."""
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
        """The versions that torch keeps with the state of a module, one for each submodule."""
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
                # The same as state_dict(), without a new object for each tensor.
                found = adapter.objects.flat_state(value)
                if found is not None:
                    form, tensors = found
                    self.form += form
                    self.leaves += tensors
                    return
        self._visit(self._once(value, state_of))

    def _once(self, value: Any, ask: Callable[[Any], Any]) -> Any:
        """The state of an object, asked for once: a second answer may differ."""
        known = self.states.get(id(value))
        if known is None:
            known = self.states[id(value)] = (value, ask(value))
        return known[1]


_HOLE = f"hole-{secrets.token_hex(8)}-"
_MOST_FAILURES = 3  # in a row, until the walk is no longer tried
_MOST_MOVES = 2  # of most tensors at once, until they are expected to move always
_dump = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class CaptureCache:
    print = ""  # as of Shares: there is nothing that ranks must agree on

    def __init__(self) -> None:
        self._specs: SpecCache = {}
        self._plan: _CapturePlan | None = None
        self._failures = 0
        self._moves = 0

    def capture(
        self,
        state: Mapping[str, Any],
        extra: Mapping[str, Any],
        elsewhere: Mapping[Hashable, str] | None = None,
    ) -> Captured:
        """The same as `capture`, using what is known from the previous one."""
        if self._failures >= _MOST_FAILURES:
            return capture(state, extra, self._specs, elsewhere=elsewhere)
        walk = Walk()
        try:
            walk.begin(state, extra)
        except UnknownForm:
            self._failures += 1
        if walk.is_whole and self._plan is not None:
            if self._plan.knows(walk, elsewhere):
                return self._plan.captured(walk)
            self._moves += self._plan.has_moved
        with without_collector():
            recorder, self._plan = _Recorder(self._specs, elsewhere or {}, walk), None
            template = _cut(_dump(recorder.tree(state, extra)))
            if walk.is_whole and recorder.agrees():
                self._failures = 0
                always_move = self._moves >= _MOST_MOVES
                self._plan = _CapturePlan(walk, recorder, template, elsewhere, always_move)
                return self._plan.captured(walk)
            self._failures += walk.is_whole
            left_out, text = len(recorder.left_out), _fill(template, recorder.plain_values)
            return Captured(None, recorder.specs, recorder.values, left_out, text=text)


class _Recorder(Encoder):
    """Makes the tree with a hole for every plain value, and records its tensors."""

    def __init__(self, cache: SpecCache, elsewhere: Mapping[Hashable, str], walk: Walk) -> None:
        super().__init__(cache, elsewhere)
        self._walk = walk
        self._solid = 0
        self.plain_values: list[Any] = []
        self.adapters: list[Adapter] = []
        self.keys: list[Hashable | None] = []
        self.numbers: list[int | None] = []

    def agrees(self) -> bool:
        """Whether the walk has found the same, in the same order."""
        walk = self._walk
        return (
            len(walk.leaves) == len(self.keys)
            and all(self.adapters[leaf] is each for leaf, each in walk.adapters.items())
            and len(walk.plain_values) == len(self.plain_values)
            and all(map(_is_same, walk.plain_values, self.plain_values))
            and all(
                key is None or adapter.alias_key(leaf) == key
                for adapter, leaf, key in zip(self.adapters, walk.leaves, self.keys, strict=True)
            )
        )

    def plain(self, encoded: Any) -> Any:
        if self._solid:
            return encoded
        self.plain_values.append(encoded)
        return f"{_HOLE}{len(self.plain_values) - 1}"

    def key(self, value: Any, path: str) -> Any:
        self._solid += 1
        encoded = super().key(value, path)
        self._solid -= 1
        return encoded

    def ask(self, value: Any, state_of: Callable[[Any], Any]) -> Any:
        known = self._walk.states.get(id(value))
        return state_of(value) if known is None else known[1]

    def on_tensor(self, adapter: Adapter, key: Hashable | None, number: int | None) -> None:
        self.adapters.append(adapter)
        self.keys.append(key)
        self.numbers.append(number)


def _is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _cut(text: str) -> tuple[list[str], list[int]]:
    """The text between the holes, and which value goes into each."""
    parts = re.split(f'"{_HOLE}(\\d+)"', text)
    return parts[::2], list(map(int, parts[1::2]))


def _fill(template: tuple[list[str], list[int]], plain_values: list[Any]) -> str:
    pieces, holes = template
    filled = [pieces[0]]
    for piece, hole in zip(pieces[1:], holes, strict=True):
        filled.append(_dump(plain_values[hole]))
        filled.append(piece)
    return "".join(filled)


class _CapturePlan:
    """What a walk must find for the previous capture to be reusable."""

    def __init__(
        self,
        walk: Walk,
        recorder: _Recorder,
        template: tuple[list[str], list[int]],
        elsewhere: Mapping[Hashable, str] | None,
        always_move: bool,
    ) -> None:
        self._template = template
        self._form = walk.form
        self._met = walk.adapters
        self._types = list(map(type, walk.leaves))
        self._elsewhere = elsewhere
        self._left_out = len(recorder.left_out)
        self._specs = recorder.specs
        self._adapters = recorder.adapters
        self._keys = recorder.keys
        self._numbers = recorder.numbers
        self.has_moved = False
        firsts: dict[int, int] = {}
        for leaf, number in enumerate(self._numbers):
            if number is not None:
                firsts.setdefault(number, leaf)
        self._firsts = [firsts[number] for number in range(len(self._specs))]
        self._takes_all = self._firsts == list(range(len(walk.leaves)))
        self._shared = {
            number
            for leaf, number in enumerate(self._numbers)
            if number is not None and leaf != firsts[number]
        }
        # Each tensor once; those behind the state belong to generators, which are always new.
        places: dict[int, int] = {}
        for place, leaf in enumerate(walk.leaves[: walk.of_state]):
            places.setdefault(id(leaf), place)
        kinds = frozenset() if always_move else walk.exact_types
        keys, types = self._keys, self._types
        stable = [at for at in places.values() if keys[at] is not None and types[at] in kinds]
        self._guard_stable(stable, walk.leaves)

    def _guard_stable(self, stable: list[int], leaves: list[Any]) -> None:
        self._stable = stable
        self._guard: Any = None
        self._addresses = addresses = [0] * len(self._specs)
        here = set(stable)
        self._loose = [leaf for leaf in range(len(leaves)) if leaf not in here]
        self._stable_keys = {self._keys[leaf] for leaf in stable}
        if not stable:
            return
        adapter = self._adapters[stable[0]]  # one framework has such tensors
        tensors = [leaves[leaf] for leaf in stable]
        self._guard = adapter.placement_guard(tensors)
        for leaf, tensor in zip(stable, tensors, strict=True):
            number = self._numbers[leaf]
            if number is not None and self._firsts[number] == leaf:
                addresses[number] = adapter.raw_address(tensor)

    def knows(self, walk: Walk, elsewhere: Mapping[Hashable, str] | None) -> bool:
        """Whether all is the same, except for plain values and tensors without a fixed place."""
        self.has_moved = False
        return (
            elsewhere is self._elsewhere
            and walk.form == self._form
            and list(map(type, walk.leaves)) == self._types
            and (elsewhere is None or self._same_elsewhere(elsewhere))
            and self._stable_unmoved(walk.leaves)
            and walk.adapters == self._met
            and self._loose_are_alike(walk.leaves)
        )

    def _same_elsewhere(self, elsewhere: Mapping[Hashable, str]) -> bool:
        pairs = zip(self._keys, self._numbers, strict=True)
        return all(
            (number is None) == (key is not None and elsewhere.get(key) is not None)
            for key, number in pairs
        )

    def _stable_unmoved(self, leaves: list[Any]) -> bool:
        if self._guard is None:
            return True
        tensors = [leaves[leaf] for leaf in self._stable] if self._loose else leaves
        moved = self._guard.moved(tensors)
        if not moved:
            return moved is not None
        if 2 * len(moved) > len(self._stable) > 8:
            self.has_moved = True
            return False
        gone = {self._stable[index] for index in moved}
        stay = [leaf for leaf in self._stable if leaf not in gone]
        if any(self._adapters[leaf].alias_key(leaves[leaf]) != self._keys[leaf] for leaf in stay):
            return False
        self._guard_stable(stay, leaves)
        return True

    def _loose_are_alike(self, leaves: list[Any]) -> bool:
        """Tensors that are new in each capture: same specs, and no two share memory."""
        seen: dict[Hashable, int | None] = {}
        for leaf in self._loose:
            adapter, known, number = self._adapters[leaf], self._keys[leaf], self._numbers[leaf]
            key = adapter.alias_key(leaves[leaf])
            if key is not None and seen.setdefault(key, number) != number:
                return False  # two share memory now
            if key is not None and key == known:
                continue
            if number is None or key in self._stable_keys or number in self._shared:
                return False
            if self._elsewhere is not None and self._elsewhere.get(key) is not None:
                return False
            spec = self._specs[number]
            try:
                if adapter.spec(spec.name, leaves[leaf]) != spec:
                    return False
            except ValueError:
                return False
            self._keys[leaf] = key
        return True

    def captured(self, walk: Walk) -> Captured:
        leaves = walk.leaves
        values = leaves if self._takes_all else [leaves[leaf] for leaf in self._firsts]
        text, addresses = _fill(self._template, walk.plain_values), self._addresses
        return Captured(None, self._specs, values, self._left_out, text=text, addresses=addresses)


# -- The graph of TensorFlow's objects, stored with a state so that it can be exported -------------
# It depends on the objects and not on their values: it is made when the tensors of the state
# change, and goes into every snapshot unchanged.


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
    from holdfast.tensorflow.checkpoints import describe

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


# -- Tensors that are the same on all ranks are stored once: each rank stores a share of them ------
# The parameters of a data-parallel model and the optimizer's moments for them are equal on every
# rank at every boundary. They are divided by size, so that memory holds them once and all ranks
# write at the same time. The division follows from names and sizes alone, without communication.


class Shares:
    """Captures the share of one rank."""

    def __init__(self, rank: int, size: int, state: Mapping[str, Any]) -> None:
        self._rank = rank
        self._size = size
        self._state = state
        self._elsewhere = _StoredElsewhere({}, None)  # what other ranks store, by alias key
        self._cache = CaptureCache()
        self._count = -1  # of tensors, when the shares were last computed
        self._replicated: Any = None  # what is the same on all ranks
        self.print = ""  # of their names and sizes: must be equal on all ranks

    def capture(self, state: Mapping[str, Any], extra: Mapping[str, Any]) -> Captured:
        """This rank's own state and its share of the common one."""
        if self._replicated is None or self._replicated.is_current():
            captured = self._cache.capture(state, extra, self._elsewhere)
            count = len(captured.specs) + captured.left_out
            if count == self._count and captured.left_out == len(self._elsewhere):
                return captured
        self._assign_owners(capture(state, extra))
        captured = self._cache.capture(state, extra, self._elsewhere)
        self._count = len(captured.specs) + captured.left_out
        return captured

    def _assign_owners(self, captured: Captured) -> None:
        common = self._common_tensors(captured)
        owners = assign_owners([spec for spec, _ in common], self._size)
        text = json.dumps(sorted((spec.name, spec.size_bytes) for spec, _ in common))
        self.print = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        names = {key: spec.name for spec, key in common if owners[spec.name] != self._rank}
        self._elsewhere = _StoredElsewhere(names, self._replicated)

    def _common_tensors(self, captured: Captured) -> list[tuple[TensorSpec, Hashable]]:
        if "torch.nn.parallel.distributed" not in sys.modules:
            return []
        from holdfast.torch import ddp

        self._replicated = keys = ddp.replicated_keys(self._state, ddp.find_ddp(self._state))
        found = []
        for spec, value in zip(captured.specs, captured.values, strict=True):
            if spec.kind == "torch":
                key = adapter_of("torch").alias_key(value)
                if key in keys:
                    found.append((spec, key))
        return found


class _StoredElsewhere(dict[Hashable, str]):
    """Names by alias key, valid as long as the tensors with these keys live."""

    def __init__(self, names: dict[Hashable, str], replicated: Any) -> None:
        super().__init__(names)
        self._replicated = replicated

    def get(self, key: Hashable, default: Any = None) -> Any:
        if self._replicated is None or key not in self._replicated:
            return default
        return super().get(key, default)


def assign_owners(specs: Sequence[TensorSpec], size: int) -> dict[str, int]:
    """The rank that stores each tensor: the largest first, to the rank that has least."""
    loads = [0] * size
    owners = {}
    for spec in sorted(specs, key=lambda spec: (-spec.size_bytes, spec.name)):
        rank = min(range(size), key=lambda each: (loads[each], each))
        owners[spec.name] = rank
        loads[rank] += spec.size_bytes
    return owners
