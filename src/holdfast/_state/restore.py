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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast._adapters.adapter import Adapter, StoredArray
from holdfast._adapters.registry import adapter_of, adapters, array_adapter, generators_of
from holdfast._errors import DamagedCheckpoint, HoldfastError, RestoreDiffers, StateMismatch
from holdfast._state.capture import Captured, capture, give_state, node_adapter, parts_of
from holdfast._state.fit import check_fit, copies_of, kept_by_objects, made_ahead
from holdfast._store.format.checksum import digest, digest_all, for_each
from holdfast._store.format.image import STORED_AS, TensorSpec
from holdfast._store.format.tree import tensor_leaves
from holdfast._store.read.checked_copy import move
from holdfast._store.read.verify import Loaded, Placement, StoredShard
from holdfast._text import cut

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
    return found  # type: ignore[no-any-return]  # checked above


def decode_state(loaded: Loaded) -> dict[str, Any]:
    loader = _Loader(loaded)
    stored = loaded.head["tree"]["state"]
    return {name: loader.value(item, name, borrowed=False) for name, item in stored.items()}


class _Loader:
    """Decodes the stored tree, in place where a live value can take it."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._owned: dict[int, Any] = {}
        self._filled: dict[int, tuple[Any, Any]] = {}
        self.sharded = Assembler(loaded)

    def make_ahead(self, numbers: Iterable[int]) -> None:
        """Make the tensors that objects will keep, unless they exist already.

        Several threads fill them: the first touch of new memory costs more than the copy into it.
        """
        loaded, numbers = self._loaded, list(numbers)
        if sent := [loaded.sent.tensors[n] for n in numbers if n in loaded.sent.tensors]:
            adapter_of("torch").receiving().reserve(sent)
        self._owned = {} if loaded.placement is None else dict(loaded.placement.tensors)
        known = loaded.sent.tensors.keys() | self._owned.keys()
        fresh = made_ahead(loaded.plan.specs, [n for n in numbers if n not in known])
        self._owned |= fresh
        moves: list[tuple[memoryview, memoryview]] = []
        for number, tensor in fresh.items():
            source = loaded.data(number)
            target = adapter_of("torch").receiving().memory_of(tensor)[1]
            moves += (
                (target[at : at + _PIECE_BYTES], source[at : at + _PIECE_BYTES])
                for at in range(0, source.nbytes, _PIECE_BYTES)
            )
        for_each(lambda index: move(*moves[index]), [source.nbytes for _, source in moves])

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
            node = node_adapter(live)
            assert node is not None  # it fits: see fit.py
            parts = self._load_parts(encoded[tag], node.node_parts(live), path)
            return node.node_from(live, parts)
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

    def _load_parts(
        self, encoded: dict[Any, Any], live: dict[Any, Any], path: str
    ) -> dict[Any, Any]:
        return {k: self.load(e, live.get(k), f"{path}.{k}") for k, e in encoded.items()}

    def _load_generator(self, encoded: Any, live: Any, path: str) -> None:
        state = self.value(encoded, path, borrowed=False)
        generators = generators_of(live)
        if generators is None:  # fit.py does not look behind keys that are no strings
            raise StateMismatch(
                f"{path} was a random generator, is a {type(live).__name__}.\n"
                "The checkpoint is left as it was: go back to the state it was made from, or use a "
                "new folder."
            )
        try:
            generators.restore_generator(live, state)
        except (ArithmeticError, ValueError, TypeError, KeyError, RuntimeError) as error:
            raise StateMismatch(
                f"{path}: this {type(live).__name__} cannot take the stored state: {error}\n"
                "The checkpoint is left as it was."
            ) from error

    def _load_dict(self, encoded: dict[str, Any], live: dict[Any, Any], path: str) -> Any:
        raw = encoded.get("$dict", encoded.get("$odict"))
        if raw is not None:
            encoded = {self.value(key, path, borrowed=False): item for key, item in raw}
        fresh = self._load_parts(encoded, live, path)
        live.clear()
        live.update(fresh)
        return live

    def _load_object(self, encoded: Any, live: Any, path: str) -> None:
        parts = parts_of(live)
        if parts is not None:
            self.load(encoded, parts, path)  # they belong to the object, and change in place
            return
        borrowed = any(each.objects.copies_what_it_loads(live) for each in adapters())
        try:
            # What is now where the stored state will go, if any of it can be sharded.
            targets = (each.objects.load_targets(live) for each in adapters())
            near = next((each for each in targets if each is not None), None)
            stored = self.value(encoded, path, near, borrowed=borrowed)
            give_state(live, stored)
            if borrowed and self._is_kept(live):
                give_state(live, self.value(encoded, path, near, borrowed=False))
            for each in adapters():
                each.objects.after_load(live, stored)
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
        tensors = capture({"object": live}, replicas=True).values
        addresses = [v.data_ptr() for v in tensors if hasattr(v, "data_ptr")]
        return any(first <= at < last for at in addresses for first, last in ranges)

    def _own(self, index: int) -> Any:
        # One tensor under two names stays one tensor.
        if index not in self._owned:
            spec = self._loaded.plan.specs[index]
            adapter, sent = adapter_of(spec.kind), self._loaded.sent.tensors.get(index)
            self._owned[index] = (
                adapter.new_array(spec, self._loaded.data(index))
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
            return adapter_of(spec.kind).read_array(spec, self._loaded.data(inner))
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
                ordered._metadata = metadata  # type: ignore[attr-defined]  # torch's own
            return ordered
        if tag in ("$tuple", "$set", "$frozenset"):
            items = [inner_value(item, number) for number, item in enumerate(inner)]
            return {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[tag](items)
        if tag in ("$state", "$generator"):  # in an object's own state, which it passes on
            return self.value(inner, path, near, borrowed=borrowed)
        if tag == "$node":  # in an object's own state there is no live value for it
            return {key: inner_value(item, key) for key, item in inner.items()}
        return decode_scalar(tag, inner)


def _part_of(near: Any, key: Any) -> Any:
    if isinstance(near, dict):
        return near.get(key)
    is_there = isinstance(near, list | tuple) and type(key) is int and 0 <= key < len(near)
    return near[key] if is_there else None


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$int": lambda text: int(text, 16),
    "$bytes": base64.b64decode,
    "$bytearray": lambda text: bytearray(base64.b64decode(text)),
    "$complex": lambda parts: complex(float(parts[0]), float(parts[1])),
}


def decode_scalar(tag: str, inner: Any) -> Any:
    """The value of a tag that holds no other values."""
    try:
        if tag in _DECODERS:
            return _DECODERS[tag](inner)
        if tag.startswith(("$torch.", "$tensorflow.")):
            return adapter_of(tag[1:].partition(".")[0]).decode_other(tag, inner)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise StateMismatch(
            f"the checkpoint holds a value of kind {tag} that this holdfast cannot make: {e!r}"
        ) from e
    raise StateMismatch(f"the checkpoint holds a value of kind {tag}, which this holdfast lacks.")


# -- Sharded tensors are restored: from stored parts to what the live objects hold -----------------


@dataclass(frozen=True)
class _Expected:
    """What this rank must hold of a tensor once it is loaded."""

    dtype: str
    shape: tuple[int, ...]
    digest: bytes


def kind_of(description: dict[str, Any]) -> str:
    """The framework of a sharded tensor; those of torch do not name it."""
    return str(description.get("kind", "torch"))


class Assembler:
    """Makes the tensor to be loaded if the stored one, or the live one, is sharded."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._expected: dict[str, _Expected] = {}
        self.numbers: set[int] = set()  # of the stored tensors that went into a sharded one

    def value(self, encoded: Any, near: object, path: str) -> Any:
        """The tensor to be loaded where `near` is now; None if nothing here is sharded."""
        tag = next(iter(encoded), "")
        if tag == "$shard":
            adapter, stored = adapter_of(kind_of(encoded[tag])), self._in_parts(encoded[tag], path)
            return self._assemble(adapter, stored, near, path)
        if tag != "$t":
            return None
        spec = self._loaded.plan.specs[encoded[tag]]
        if spec.kind == "jax":
            placed = adapter_of("jax").made_like(spec, self._loaded.data(encoded[tag]), near)
            if placed is not None:
                return placed
        # The parameter that an entry of an optimizer is for may be sharded too.
        candidates = (near, getattr(near, "parameter", None))
        if not any(adapter.is_sharded(each) for adapter in adapters() for each in candidates):
            return None
        found = self._assemble(*self._whole(encoded[tag]), near, path)
        if found is not None:
            self.numbers.add(encoded[tag])
        return found

    def load_in_place(self, live: object, value: Any) -> bool:
        adapter = array_adapter(value)
        assert adapter is not None
        return adapter.sharding().load_in_place(live, value)

    def _in_parts(self, description: dict[str, Any], path: str) -> StoredArray:
        number = description["t"]
        own = None if number is None else self._own(description, number)
        return StoredArray(description, own, lambda: self._loaded.shards(path), is_whole=False)

    def _whole(self, number: int) -> tuple[Adapter, StoredArray]:
        spec = self._loaded.plan.specs[number]
        shape, corner = list(spec.shape), [0] * len(spec.shape)
        place: dict[str, Any] = {"size": shape, "dtype": spec.dtype}
        if spec.kind == "jax":
            place |= {"boxes": [[corner, shape]], "item_bytes": spec.item_bytes}
            place["where"] = spec.device
        else:
            place |= {"offsets": corner, "sizes": shape}
        own = self._own(place, number)
        adapter = adapter_of("jax" if spec.kind == "jax" else "torch")
        return adapter, StoredArray(place, own, lambda: [own], is_whole=True)

    def _own(self, description: dict[str, Any], number: int) -> StoredShard:
        loaded = self._loaded
        return StoredShard(description, loaded.plan.specs[number], lambda: loaded.data(number))

    def _assemble(self, adapter: Adapter, stored: StoredArray, near: object, path: str) -> Any:
        found = adapter.sharding().assemble(stored, near, path)
        if found is None:
            return None
        value, part = found
        # Now: the object that gets it may change it.
        known = digest(adapter.bytes_of(part))
        self._expected[path] = _Expected(stored.description["dtype"], tuple(part.shape), known)
        return value

    def whole_bytes(self, description: dict[str, Any], path: str) -> tuple[TensorSpec, memoryview]:
        """A whole array of JAX that is stored in parts, without JAX."""
        from holdfast._adapters import numpy as shared  # with NumPy, which is rarely needed here

        parts = self._in_parts(description, path)
        shape = shared.shape_of(parts)
        joined = shared.read_box(parts, shared.whole_box(shape), path)
        kind, dtype = kind_of(description), description["dtype"]
        stored_as, item_bytes = STORED_AS.get(dtype, "U8"), shared.item_bytes_of(parts)
        of = (path, kind, dtype, stored_as, shape, None, item_bytes, joined.nbytes)
        return TensorSpec(*of), shared.as_bytes(joined)

    def differing(self, captured: Captured) -> list[str]:
        """Assembled tensors that are lost, or whose type or values differ now."""
        now = {
            path: leaf.get("$t", leaf.get("$shard", {}).get("t"))
            for name, encoded in captured.tree["state"].items()
            for path, leaf in tensor_leaves(encoded, name)
        }
        found: list[str] = []
        pairs: list[tuple[str, memoryview, bytes]] = []
        for path, then in self._expected.items():
            if path not in now:
                found.append(f"{path} (lost)")
                continue
            number = now[path]
            if number is None and 0 in then.shape:
                continue  # empty then and now
            spec = None if number is None else captured.specs[number]
            if spec is None or (spec.dtype, spec.shape) != (then.dtype, then.shape):
                found.append(f"{path} (stored as {then.dtype}, now of another type or sharding)")
                continue
            pairs.append(
                (path, adapter_of(spec.kind).bytes_of(captured.values[number]), then.digest)
            )
        return found + _unlike(pairs)


# -- Whether objects hold what they were given: captured again, and compared bit by bit ------------


_NAMED = 8


def compare(state: dict[str, Any], stored: Any, loaded: Loaded, sharded: Assembler) -> list[str]:
    """Capture again and compare tensors bit by bit; returns which plain values differ.

    Memory that was filled and checked, and that no code but the framework's could change since,
    is not read once more.
    """
    placement = loaded.placement
    if placement is not None and placement.is_exact:
        done = _shared_with_none(stored, placement)
        state = {name: value for name, value in state.items() if name not in done}
        stored = {name: encoded for name, encoded in stored.items() if name not in done}
    captured = capture(state, replicas=True)
    unsharded = set(_tensor_numbers(stored)) - sharded.numbers
    unsharded.difference_update(_tensors_of_other_replicas(stored, captured.tree["state"]))
    differing = _compare_tensors(unsharded, captured, loaded) + sharded.differing(captured)
    if differing:
        raise RestoreDiffers(
            "after loading, some of the state is not what was stored: "
            f"{', '.join(differing[:_NAMED])}.\n"
            "Its load_state_dict changes what it is given, so the run would not go on exactly.",
            paths=tuple(differing),
        )
    changed: list[str] = []
    _compare_plain(stored, captured.tree["state"], "", changed)
    return [item.lstrip(".") for item in changed]


def _shared_with_none(stored: Any, placement: Placement) -> frozenset[str]:
    """The filled objects, if no other one has a tensor of theirs: it is stored under one name."""
    theirs = placement.views.keys() - placement.tensors.keys()
    for name, encoded in stored.items():
        if name not in placement.filled and not theirs.isdisjoint(_tensor_numbers(encoded)):
            return frozenset()
    return placement.filled


def _compare_tensors(stored: set[int], captured: Captured, loaded: Loaded) -> list[str]:
    """The stored tensors that are lost, or whose type or values differ now."""
    now = {spec.name: index for index, spec in enumerate(captured.specs)}
    differing: list[str] = []
    expected: list[tuple[str, memoryview, bytes]] = []
    pairs: list[tuple[str, Any, Any]] = []
    sent = loaded.sent.tensors if loaded.sent.is_untouched else {}
    placement = loaded.placement
    known = placement if placement is not None and placement.is_exact else None
    for then in sorted(stored):
        old = loaded.plan.specs[then]
        if old.name not in now:
            differing.append(f"{old.name} (lost)")
            continue
        new = captured.specs[now[old.name]]
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            differing.append(
                f"{old.name} (stored as {old.dtype} {list(old.shape)}, "
                f"now {new.dtype} {list(new.shape)})"
            )
            continue
        live = captured.values[now[old.name]]
        place = None if known is None else known.addresses.get(then)
        if place is not None and adapter_of(new.kind).raw_address(live) == place:
            continue
        if then in sent and adapter_of(old.kind).receiving().is_comparable(live, sent[then]):
            pairs.append((old.name, live, sent[then]))
            continue
        view = adapter_of(new.kind).bytes_of(live)
        expected.append((old.name, view, loaded.digests[old.name]))
    differing += _unlike(expected)
    if pairs:
        unlike = adapter_of("torch").receiving().differing([pair[1:] for pair in pairs])
        names = (name for name, _, _ in pairs)
        differing += [
            f"{name} (other values)" for name, is_so in zip(names, unlike, strict=True) if is_so
        ]
    return differing


def _unlike(pairs: list[tuple[str, memoryview, bytes]]) -> list[str]:
    """Those whose bytes have another digest now."""
    now = digest_all([view for _, view, _ in pairs])
    found = zip(pairs, now, strict=True)
    return [f"{name} (other values)" for (name, _, then), actual in found if actual != then]


def _tensors_of_other_replicas(then: Any, now: Any) -> Iterator[int]:
    """The tensors of variables that had another number of replicas: they were merged."""
    if isinstance(then, dict) and isinstance(now, dict):
        if "$t" in then and "$t" in now:
            return
        if len(copies_of(then)) != len(copies_of(now)):
            yield from _tensor_numbers(then)
            return
        for key, item in then.items():
            if key in now and isinstance(item, dict | list):
                yield from _tensors_of_other_replicas(item, now[key])
    elif isinstance(then, list) and isinstance(now, list):
        for one, other in zip(then, now, strict=False):
            if isinstance(one, dict | list):
                yield from _tensors_of_other_replicas(one, other)
    elif copies_of(then) or copies_of(now):
        yield from _tensor_numbers(then)


def _tensor_numbers(encoded: Any) -> Iterator[int]:
    if isinstance(encoded, dict) and "$t" in encoded:
        yield encoded["$t"]
    elif isinstance(encoded, dict | list):
        for item in encoded.values() if isinstance(encoded, dict) else encoded:
            if isinstance(item, dict | list):
                yield from _tensor_numbers(item)


def _compare_plain(then: Any, now: Any, path: str, changed: list[str]) -> None:
    """Collect what differs in the rest of the tree: numbers, strings, keys, lengths."""
    if _is_tensor(then) and _is_tensor(now):
        return  # compared already; what was sharded may be whole now
    if isinstance(then, dict) and isinstance(now, dict) and then.keys() == now.keys():
        for key in then:
            inner = path if key.startswith("$") else f"{path}.{key}"
            _compare_plain(then[key], now[key], inner, changed)
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for index, (a, b) in enumerate(zip(then, now, strict=True)):
            _compare_plain(a, b, f"{path}.{index}", changed)
    elif then != now:
        changed.append(f"{path} (stored {cut(repr(then), 40)}, now {cut(repr(now), 40)})")


def _is_tensor(encoded: Any) -> bool:
    if not isinstance(encoded, dict):
        return False
    return "$t" in encoded or "$shard" in encoded or bool(copies_of(encoded))
