"""Restore a verified state into live objects, and make sure that they took it.

Nothing is changed before everything is known to fit. Afterwards the objects are captured again: an
optimizer that casts its moments, or an object that forgets a tensor, is found here and not three
weeks later.
"""

from __future__ import annotations

import base64
import copy
import ctypes
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any

from holdfast._adapters.registry import adapter_of, adapters
from holdfast._errors import DamagedCheckpoint, HoldfastError, StateMismatch
from holdfast._state.capture import capture, give_state, node_adapter, parts_of
from holdfast._state.compare import compare
from holdfast._state.fit import check_fit
from holdfast._state.placing import kept_by_objects
from holdfast._state.shards import Assembler
from holdfast._store.format.checksum import for_each
from holdfast._store.read.checked_copy import move
from holdfast._store.read.verify import Loaded

_PIECE_BYTES = 16 << 20


def restore_state(state: dict[str, Any], loaded: Loaded) -> list[str]:
    """Restore the stored values into `state`'s objects; returns the scalars that differ after."""
    stored, placement = loaded.head["tree"]["state"], loaded.placement
    if placement is None:
        check_fit(loaded.plan.specs, loaded.head, state)
    loader = _Loader(loaded)
    loader.make_ahead(kept_by_objects(stored, state))
    for name, encoded in stored.items():
        if placement is None or name not in placement.filled:
            state[name] = loader.load(encoded, state[name], name)
    try:
        return compare(state, stored, loaded, loader.sharded)
    finally:
        loaded.sent.clear()


def restore_again(state: dict[str, Any], loaded: Loaded, names: list[str]) -> None:
    """Restore some of the stored values once more."""
    loader = _Loader(loaded)
    for name in names:
        state[name] = loader.load(loaded.head["tree"]["state"][name], state[name], name)


def decode_extra(loaded: Loaded) -> dict[str, Any]:
    """What is stored with the state: the global random generators, and the data's position."""
    encoded = loaded.head["tree"].get("extra", {})
    found = _Loader(loaded).value(encoded, "holdfast", borrowed=False)
    position = found.get("position") if isinstance(found, dict) else ()
    is_known = isinstance(found, dict) and isinstance(found.get("generators", ()), dict | None)
    if not is_known or not isinstance(position, dict | None):
        raise DamagedCheckpoint("the checkpoint has no random generators, or no place in its data.")
    return found  # type: ignore[no-any-return]


def decode_state(loaded: Loaded) -> dict[str, Any]:
    """The stored states as containers, values and new tensors, without any object."""
    loader = _Loader(loaded)
    stored = loaded.head["tree"]["state"]
    return {name: loader.value(item, name, borrowed=False) for name, item in stored.items()}


def fill_ahead(loaded: Loaded, numbers: Collection[int]) -> dict[int, Any]:
    """New tensors for some of the stored ones, filled by several threads.

    The first touch of new memory costs more than the copy into it.
    """
    found: dict[int, Any] = {}
    moves: list[tuple[memoryview, memoryview]] = []
    for number in numbers:
        spec = loaded.plan.specs[number]
        if spec.kind != "torch":
            continue
        receiving = adapter_of("torch").receiving()
        tensor = receiving.fresh(spec)
        if tensor is None:
            continue
        found[number] = tensor
        target, source = receiving.memory_of(tensor)[1], loaded.data(number)
        moves += (
            (target[at : at + _PIECE_BYTES], source[at : at + _PIECE_BYTES])
            for at in range(0, source.nbytes, _PIECE_BYTES)
        )
    for_each(lambda index: move(*moves[index]), [source.nbytes for _, source in moves])
    return found


class _Loader:
    """Decodes the stored tree, in place where a live value can take it."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._owned: dict[int, Any] = {}
        self._filled: dict[int, tuple[Any, Any]] = {}
        self.sharded = Assembler(loaded)

    def make_ahead(self, numbers: Iterable[int]) -> None:
        """Make and fill the tensors that objects will keep, unless they are there already."""
        placement = self._loaded.placement
        known = {} if placement is None else placement.tensors
        sent = self._loaded.sent.tensors
        wanted = [number for number in numbers if number not in sent and number not in known]
        self._owned = {**fill_ahead(self._loaded, wanted), **known}

    def load(self, encoded: Any, live: Any, path: str) -> Any:
        """Restore an encoded value into `live` if possible, and return what to use."""
        live = self._unless_filled(live, encoded)
        if isinstance(encoded, list) and isinstance(live, list):
            former = [*live, *[None] * len(encoded)]
            live[:] = [self.load(e, former[i], f"{path}.{i}") for i, e in enumerate(encoded)]
            return live
        if not isinstance(encoded, dict):
            return self.value(encoded, path, borrowed=False)
        tag = next(iter(encoded), "")
        sharded = self.sharded.value(encoded, live, path)
        if sharded is not None:
            return live if self.sharded.load_in_place(live, sharded) else sharded
        if tag == "$state":
            self._load_object(encoded[tag], live, path)
            return live
        if tag == "$generator":
            self._load_generator(encoded[tag], live, path)
            return live
        if tag == "$t":
            spec = self._loaded.plan.specs[encoded[tag]]
            adapter, sent = adapter_of(spec.kind), self._loaded.sent.tensors.get(encoded[tag])
            if sent is not None and adapter.receiving().copy_in(live, sent):
                return live
            if adapter.load_in_place(live, spec, self._loaded.data(encoded[tag])):
                return live
            return self._own(encoded[tag])
        if isinstance(live, dict) and (tag in ("$dict", "$odict") or not tag.startswith("$")):
            return self._load_dict(encoded, live, path)
        if tag == "$tuple":
            former = [*live] if isinstance(live, tuple) else []
            former += [None] * len(encoded[tag])
            items = [self.load(e, former[i], f"{path}.{i}") for i, e in enumerate(encoded[tag])]
            make = getattr(type(live), "_make", tuple)
            return make(items)
        if tag == "$node":
            return self._load_node(encoded[tag], live, path)
        fresh = self.value(encoded, path, live, borrowed=False)
        if tag == "$set" and isinstance(live, set):
            live.clear()
            live.update(fresh)
            return live
        if tag == "$bytearray" and isinstance(live, bytearray):
            live[:] = fresh
            return live
        return fresh

    def _unless_filled(self, live: Any, encoded: Any) -> Any:
        """A copy of a container that has two names now, and was two containers when stored."""
        if not isinstance(live, dict | list):
            return live
        _, then = self._filled.get(id(live), (live, encoded))
        if then != encoded:
            live = copy.copy(live)
        self._filled[id(live)] = (live, encoded)  # kept alive, so that its id stays its own
        return live

    def _load_node(self, encoded: dict[str, Any], live: Any, path: str) -> Any:
        adapter = node_adapter(live)
        assert adapter is not None  # it fits: see fit.py
        former = adapter.node_parts(live)
        parts = {k: self.load(e, former.get(k), f"{path}.{k}") for k, e in encoded.items()}
        return adapter.node_from(live, parts)

    def _load_generator(self, encoded: Any, live: Any, path: str) -> None:
        state = self.value(encoded, path, borrowed=False)
        adapter = next(a for a in adapters() if a.is_generator(live))
        try:
            adapter.restore_generator(live, state)
        except (ArithmeticError, ValueError, TypeError, KeyError, RuntimeError) as error:
            raise StateMismatch(
                f"{path}: this {type(live).__name__} cannot take the stored state: {error}\n"
                "The checkpoint is left as it was."
            ) from error

    def _load_dict(self, encoded: dict[str, Any], live: dict[Any, Any], path: str) -> Any:
        pairs: list[tuple[Any, Any]]
        if "$dict" in encoded or "$odict" in encoded:
            raw = encoded.get("$dict", encoded.get("$odict"))
            pairs = [(self.value(key, path, borrowed=False), item) for key, item in raw or []]
        else:
            pairs = list(encoded.items())
        fresh = {key: self.load(item, live.get(key), f"{path}.{key}") for key, item in pairs}
        live.clear()
        live.update(fresh)
        return live

    def _load_object(self, encoded: Any, live: Any, path: str) -> None:
        parts = parts_of(live)
        if parts is not None:
            self.load(encoded, parts, path)  # they belong to the object, and change in place
            return
        borrowed = _copies_what_it_loads(live)
        try:
            near = _load_targets(live)
            stored = self.value(encoded, path, near, borrowed=borrowed)
            give_state(live, stored)
            if borrowed and self._is_kept(live):
                give_state(live, self.value(encoded, path, near, borrowed=False))
            for each in adapters():
                each.after_load(live, stored)
        except HoldfastError:
            raise
        except Exception as error:
            raise StateMismatch(
                f"{path}: this {type(live).__name__} refused the stored state: "
                f"{type(error).__name__}: {error}\nThe checkpoint is left as it was."
            ) from error

    def _is_kept(self, live: Any) -> bool:
        """Whether an object kept a tensor that only borrows the memory of the image."""
        ranges = []
        for view in self._loaded.memory:
            start = ctypes.addressof(ctypes.c_char.from_buffer(view))
            ranges.append((start, start + view.nbytes))
        ranges += self._loaded.sent.memory
        tensors = next(filter(None, (each.only_tensors(live) for each in adapters())), None)
        if tensors is None:
            tensors = capture({"object": live}, replicas=True).values
        addresses = [v.data_ptr() for v in tensors if hasattr(v, "data_ptr")]
        return any(first <= at < last for at in addresses for first, last in ranges)

    def _own(self, index: int) -> Any:
        # One tensor under two names stays one tensor.
        if index not in self._owned:
            spec = self._loaded.plan.specs[index]
            adapter, sent = adapter_of(spec.kind), self._loaded.sent.tensors.get(index)
            self._owned[index] = (
                adapter.own(spec, self._loaded.data(index))
                if sent is None
                else adapter.receiving().own_of(sent, spec)
            )
        return self._owned[index]

    def value(self, encoded: Any, path: str, near: Any = None, *, borrowed: bool) -> Any:
        """Decode a value; with `borrowed`, tensors share the image's memory.

        `near` is the live value in its place: it says how a tensor is to be sharded.
        """

        def inner_value(item: Any, key: Any) -> Any:
            return self.value(item, f"{path}.{key}", _part_of(near, key), borrowed=borrowed)

        if isinstance(encoded, list):
            return [inner_value(item, number) for number, item in enumerate(encoded)]
        if not isinstance(encoded, dict):
            return encoded
        tag = next(iter(encoded), "")
        if not tag.startswith("$"):
            return {key: inner_value(item, key) for key, item in encoded.items()}
        inner = encoded[tag]
        sharded = self.sharded.value(encoded, near, path)
        if sharded is not None:
            return sharded
        if tag == "$t":
            if not borrowed:
                return self._own(inner)
            if inner in self._loaded.sent.tensors:
                return self._loaded.sent.tensors[inner]
            spec = self._loaded.plan.specs[inner]
            return adapter_of(spec.kind).borrow(spec, self._loaded.data(inner))
        if tag in ("$dict", "$odict"):
            keys = [self.value(key, path, borrowed=False) for key, _ in inner]
            pairs = [
                (key, inner_value(item, key)) for key, (_, item) in zip(keys, inner, strict=True)
            ]
            if tag == "$dict":
                return dict(pairs)
            ordered = OrderedDict(pairs)
            if "$metadata" in encoded:
                metadata = self.value(encoded["$metadata"], path, borrowed=False)
                # The versions of a torch module's states.
                ordered._metadata = metadata  # type: ignore[attr-defined]
            return ordered
        if tag in ("$tuple", "$set", "$frozenset"):
            items = [inner_value(item, number) for number, item in enumerate(inner)]
            return {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[tag](items)
        if tag in ("$state", "$generator"):  # in an object's own state, which it passes on
            return self.value(inner, path, near, borrowed=borrowed)
        if tag == "$node":  # in an object's own state there is no live value for it
            return {key: inner_value(item, key) for key, item in inner.items()}
        return _decode_plain(tag, inner)


def _copies_what_it_loads(live: object) -> bool:
    return any(each.copies_what_it_loads(live) for each in adapters())


def _part_of(near: Any, key: Any) -> Any:
    if isinstance(near, dict):
        return near.get(key)
    is_there = isinstance(near, list | tuple) and type(key) is int and 0 <= key < len(near)
    return near[key] if is_there else None


def _load_targets(live: Any) -> Any:
    """What is now where an object's stored state will go; None if none of it can be sharded."""
    found = (each.load_targets(live) for each in adapters())
    return next((each for each in found if each is not None), None)


def _decode_plain(tag: str, inner: Any) -> Any:
    try:
        return _decoded(tag, inner)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise StateMismatch(
            f"the checkpoint holds a value of kind {tag} that this holdfast cannot make: {error!r}"
        ) from error


def _decoded(tag: str, inner: Any) -> Any:
    if tag == "$float":
        return float(inner)
    if tag == "$int":
        return int(inner, 16)
    if tag in ("$bytes", "$bytearray"):
        return {"$bytes": bytes, "$bytearray": bytearray}[tag](base64.b64decode(inner))
    if tag == "$complex":
        return complex(float(inner[0]), float(inner[1]))
    if tag.startswith(("$torch.", "$tensorflow.")):
        return adapter_of(tag[1:].partition(".")[0]).decode_other(tag, inner)
    raise StateMismatch(f"the checkpoint holds a value of kind {tag}, which this holdfast lacks.")
