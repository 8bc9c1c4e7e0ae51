"""From live objects to a tree of plain values and a list of tensors.

The tree is JSON, so nothing is ever pickled and loading runs no code. What JSON
lacks is tagged:

    {"$t": 3}                tensor number 3          {"$state": …}      an object's state_dict()
    {"$tuple": […]}          a tuple                  {"$generator": …}  a random generator
    {"$dict": [[key, …]]}    keys that are no strings {"$bytes": "…"}    short bytes, base64
    {"$odict": …}            an OrderedDict           {"$float": "nan"}  not in JSON
    {"$set": […]}            a set, or "$frozenset"   {"$int": "0x…"}    a very large number
    {"$shard": {"t": 3, …}}  this rank's part of a sharded tensor, and which part that is
    {"$r": "model.weight"}   a tensor that is the same on all ranks, and another rank stores
    {"$node": {…}}           the parts of a value that cannot change in place (a JAX pytree)

A tensor that appears twice (tied weights) is stored once, and both places refer to it. If several
ranks hold the same part of a sharded tensor, one rank has the number and the others have None; so
has an empty part.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import math
import random
import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast._adapters.adapter import Adapter, has_state
from holdfast._adapters.registry import adapter_of, adapters, exact_types
from holdfast._errors import StateMismatch, UnstorableState
from holdfast._store.format.image import SCALARS, TensorSpec, encode_scalars

# -- Values that JSON has, or can express in a few words -------------------------------------

_INT_BITS = 1024  # Python refuses to print a few thousand decimal digits
PLAIN_TYPES = frozenset({type(None), bool, str, int, float})


def encode_plain(value: Any) -> Any:
    """A value of one of PLAIN_TYPES, as JSON has it."""
    if type(value) is int:
        return value if value.bit_length() <= _INT_BITS else {"$int": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    return value


def is_flat(value: list[Any]) -> bool:
    """Whether a list is plain JSON: an optimizer numbers its parameters, by thousands."""
    kinds = set(map(type, value))
    if kinds == {int}:
        return int(max(max(value), -min(value))).bit_length() <= _INT_BITS
    return kinds == {str}


def encode_uncommon(value: Any) -> Any:
    """Plain values of other types; None for anything else."""
    if isinstance(value, bytes | bytearray):
        tag = "$bytes" if isinstance(value, bytes) else "$bytearray"
        return {tag: base64.b64encode(value).decode("ascii")}
    if isinstance(value, complex):
        return {"$complex": [repr(value.real), repr(value.imag)]}
    for plain_type in (bool, int, float, str):  # an IntEnum, a subclass of str
        if isinstance(value, plain_type):
            return encode_plain(plain_type(value))
    return None


def in_order(value: set[Any] | frozenset[Any]) -> list[Any]:
    return sorted(value, key=lambda item: (type(item).__name__, repr(item)))


# -- A captured state, ready to be copied -----------------------------------------------------


@dataclass(eq=False)
class Captured:
    """A tree of plain values, and the live tensors that it refers to.

    As long as the layout is the same, `specs` is the same list as at the previous capture; as long
    as no tensor has moved, so is `addresses`. Comparisons can begin with `is`.
    """

    _tree: Any
    specs: list[TensorSpec]
    values: list[Any]
    left_out: int = 0  # tensors that other ranks store
    text: str | None = None  # the tree as JSON, if that is known without the tree
    # Where the bytes of each value are in this process, in C order; 0 if that is not known.
    addresses: list[int] | None = None

    @property
    def tree(self) -> Any:
        if self._tree is None and self.text is not None:
            self._tree = json.loads(self.text)
        return self._tree

    def scalars(self, head: Mapping[str, Any]) -> bytes:
        if self.text is None:
            return encode_scalars({**head, "tree": self._tree})
        start = encode_scalars(dict(head))[:-1]
        return b"".join((start, b"," if head else b"", b'"tree":', self.text.encode(), b"}"))

    def and_one_more(
        self, name: str, value: Any, specs: list[TensorSpec], addresses: list[int] | None
    ) -> Captured:
        """The same with one more tensor, at the end of the tree's `extra`."""
        entry = {"$t": len(self.specs)}
        tree, text = None, None
        if self.text is None:
            tree = {**self._tree, "extra": {**self._tree["extra"], name: entry}}
        else:
            text = f"{self.text[:-2]},{json.dumps(name)}:{json.dumps(entry)}}}}}"
        values = [*self.values, value]
        return Captured(tree, specs, values, self.left_out, text=text, addresses=addresses)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """For work that makes many objects, none of them garbage: collections would find nothing."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


_BAD_STATE = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, struct.error)
_DEPTH = 200
# Other entries of the header and the manifest.
_TAKEN_NAMES = frozenset({SCALARS, "__metadata__", "header"})
STORABLE = (
    "objects with state_dict and load_state_dict, Keras models and optimizers, tf.Modules, JAX "
    "pytrees, tensors and arrays, random generators, numbers, strings, bytes, None, and lists, "
    "tuples, dicts and sets of these"
)


def is_stateful(value: object) -> bool:
    """Whether an object has a state that can be restored, by itself or by its adapter."""
    if isinstance(value, type):
        return False
    return keeps_state(value) or _adapter_for(value) is not None


def parts_of(value: object) -> dict[str, Any] | None:
    """The parts of an object whose state is theirs, each loaded by itself; else None."""
    adapter = None if keeps_state(value) else _adapter_for(value)
    return None if adapter is None else adapter.objects.object_parts(value)


def keeps_state(value: Any) -> bool:
    """Whether an object has a state_dict, and no adapter overrides it."""
    if any(each.objects.overrides_state_dict(value) for each in adapters()):
        return False
    return has_state(value)


def _adapter_for(value: object) -> Adapter | None:
    return next((each for each in adapters() if each.objects.is_object(value)), None)


def state_of(value: Any) -> Any:
    if keeps_state(value):
        return value.state_dict()
    adapter = _adapter_for(value)
    assert adapter is not None
    return adapter.objects.object_state(value)


def give_state(value: Any, state: Any) -> None:
    if keeps_state(value):
        value.load_state_dict(state)
        return
    adapter = _adapter_for(value)
    assert adapter is not None
    adapter.objects.load_object(value, state)


def node_adapter(value: object) -> Adapter | None:
    """The adapter of a value that cannot change in place and is made of parts."""
    return next((each for each in adapters() if each.is_node(value)), None)


SpecCache = dict[str, tuple[Hashable, TensorSpec]]


def capture(
    state: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
    cache: SpecCache | None = None,
    *,
    replicas: bool = False,
    elsewhere: Mapping[Hashable, str] | None = None,
) -> Captured:
    """Capture the user's state, and `extra` (the generators).

    Raises UnstorableState with the path and the type of the first value that cannot be stored.
    A `cache` that is kept for the next capture saves describing every tensor again. With
    `replicas`, parts of sharded tensors that another rank stores are included. Tensors in
    `elsewhere` are only named.
    """
    encoder = Encoder({} if cache is None else cache, elsewhere or {}, replicas=replicas)
    tree = encoder.tree(state, extra)
    return Captured(tree, encoder.specs, encoder.values, len(encoder.left_out))


def refuse_unstorable(state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        for adapter in adapters():
            reason = adapter.objects.refuse(value)
            if reason is not None:
                raise UnstorableState(f"{name}: {reason}", path=name)
    with without_collector():
        capture(state)


def capture_generators(*, devices: bool = True) -> dict[str, Any]:
    """The states of all global random generators in use; those of devices if `devices`."""
    version, words, gauss = random.getstate()
    packed = struct.pack(f"<{len(words)}I", *words)
    states: dict[str, Any] = {"python": (version, packed, gauss)}
    for adapter in adapters():
        states.update(adapter.generators.states(devices=devices))
    return states


def restore_generators(states: Mapping[str, Any]) -> list[str]:
    """Restore the global random generators; returns what could not be restored."""
    lost: list[str] = []
    try:
        version, packed, gauss = states["python"]
        words = struct.unpack(f"<{len(packed) // 4}I", packed)
        random.setstate((version, words, gauss))
        for kind in {name.partition(".")[0]: None for name in states if name != "python"}:
            lost += adapter_of(kind).generators.restore_states(states)
    except _BAD_STATE as error:
        raise StateMismatch(f"the stored generators cannot be restored: {error!r}") from error
    return lost


class Encoder:
    """Makes the tree of a state and the list of its tensors; subclasses observe it."""

    def __init__(
        self, cache: SpecCache, elsewhere: Mapping[Hashable, str], *, replicas: bool = False
    ) -> None:
        self._cache = cache
        self._elsewhere = elsewhere
        self.left_out: set[str] = set()
        self._replicas = replicas
        self.specs: list[TensorSpec] = []
        self.values: list[Any] = []
        self._seen: dict[Hashable, int] = {}
        self._names: set[str] = set(_TAKEN_NAMES)
        self._adapters = adapters()
        self._exact = exact_types(self._adapters)
        self._depth = 0

    def tree(self, state: Mapping[str, Any], extra: Mapping[str, Any] | None) -> dict[str, Any]:
        tree = {"state": {name: self.encode(value, name) for name, value in state.items()}}
        if extra is not None:
            tree["extra"] = self.encode(dict(extra), "holdfast")
        return tree

    def plain(self, encoded: Any) -> Any:
        """Called with every value that contains no tensor."""
        return encoded

    def ask(self, value: Any, state_of: Callable[[Any], Any]) -> Any:
        return state_of(value)

    def encode(self, value: Any, path: str) -> Any:
        if type(value) in PLAIN_TYPES:
            return self.plain(encode_plain(value))
        exact = self._exact.get(type(value))
        if exact is not None:
            return self._array(exact, value, path)
        if type(value) is not dict:
            for adapter in self._adapters:
                if adapter.is_array(value):
                    if adapter.is_sharded(value):
                        return self._shard(adapter, value, path)
                    return self._array(adapter, value, path)
        self._depth += 1
        if self._depth > _DEPTH:
            raise UnstorableState(
                f"{path[:80]}…: nested more than {_DEPTH} deep; does it contain itself?", path=path
            )
        encoded = self._encode_compound(value, path)
        self._depth -= 1
        return encoded

    def _array(self, adapter: Adapter, value: Any, path: str) -> dict[str, Any]:
        key = adapter.alias_key(value) if self._elsewhere else None
        name = self._elsewhere.get(key)
        if name is None:
            return {"$t": self._tensor(adapter, value, path)}
        self.left_out.add(name)
        self.on_tensor(adapter, key, None)
        return {"$r": name}

    def _encode_compound(self, value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return self._mapping(value, path)
        if isinstance(value, list):
            if is_flat(value):
                return self.plain([*value])
            return self._items(value, path)
        if isinstance(value, tuple):
            return {"$tuple": self._items(value, path)}
        if is_stateful(value):
            return {"$state": self.encode(self.ask(value, state_of), path)}
        if (adapter := node_adapter(value)) is not None:
            parts = adapter.node_parts(value)
            return {"$node": {k: self.encode(item, f"{path}.{k}") for k, item in parts.items()}}
        for adapter in self._adapters:
            found = adapter.encode_other(value)
            if found is not None:
                return self.plain(found)
            if adapter.generators.is_generator(value):
                state = self.ask(value, adapter.generators.generator_state)
                return {"$generator": self.encode(state, path)}
        if isinstance(value, set | frozenset):
            tag = "$set" if isinstance(value, set) else "$frozenset"
            return {tag: self._items(in_order(value), path)}
        encoded = encode_uncommon(value)
        if encoded is not None:
            return self.plain(encoded)
        raise UnstorableState(
            f"{path}: a {type(value).__module__}.{type(value).__qualname__} cannot be stored.\n"
            f"State may be {STORABLE}.",
            path=path,
        )

    def _items(self, items: Iterable[Any], path: str) -> list[Any]:
        return [self.encode(item, f"{path}.{number}") for number, item in enumerate(items)]

    def _mapping(self, value: dict[Any, Any], path: str) -> Any:
        plain_keys = all(type(key) is str and not key.startswith("$") for key in value)
        if not isinstance(value, OrderedDict) and plain_keys:
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        pairs = [
            [self.key(key, f"{path} (a key)"), self.encode(item, f"{path}.{key}")]
            for key, item in value.items()
        ]
        if not isinstance(value, OrderedDict):
            return {"$dict": pairs}
        encoded: dict[str, Any] = {"$odict": pairs}
        # torch keeps the versions of a module's state here, and load_state_dict reads them.
        metadata = getattr(value, "_metadata", None)
        if metadata is not None:
            encoded["$metadata"] = self.key(dict(metadata), f"{path} (versions)")
        return encoded

    def key(self, value: Any, path: str) -> Any:
        """Encode what belongs to the form of the tree, not to its values."""
        return self.encode(value, path)

    def on_tensor(self, adapter: Adapter, key: Hashable | None, number: int | None) -> None:
        """Called for every tensor in order."""

    def _shard(self, adapter: Adapter, value: Any, path: str) -> Any:
        try:
            description, part = adapter.sharding().shard_of(value, replicas=self._replicas)
        except ValueError as error:
            raise UnstorableState(f"{path}: {error}", path=path) from error
        number = None if part is None else self._tensor(adapter, part, path)
        return {"$shard": {"t": number, **description}}

    def _tensor(self, adapter: Adapter, value: Any, path: str) -> int:
        # The key contains everything that the spec depends on, and the address.
        key = adapter.alias_key(value)
        if key is not None and key in self._seen:
            self.on_tensor(adapter, key, self._seen[key])
            return self._seen[key]
        name, count = path, 1
        while name in self._names:
            count += 1
            name = f"{path}~{count}"
        known = self._cache.get(name)
        if known is not None and key is not None and known[0] == key:
            spec = known[1]
        else:
            try:
                spec = adapter.spec(name, value)
            except ValueError as error:
                raise UnstorableState(f"{path}: {error}", path=path) from error
            self._cache[name] = (key, spec)
        index = len(self.specs)
        self._names.add(name)
        self.specs.append(spec)
        self.values.append(value)
        if key is not None:
            self._seen[key] = index
        self.on_tensor(adapter, key, index)
        return index
