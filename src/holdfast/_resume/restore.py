"""Put a verified state back into live objects, and make sure that they took it.

Nothing is touched before everything is known to fit. Afterwards the objects are
captured again: an optimizer that casts its moments, or an object that forgets a
tensor, is found here and not three weeks later.
"""

from __future__ import annotations

import base64
import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from holdfast._errors import HoldfastError, RestoreDiffers, StateMismatch
from holdfast._record.checksum import digest_all
from holdfast._resume.assemble import Assembler
from holdfast._resume.fit import check_fit, copies_of
from holdfast._resume.verify import Loaded
from holdfast._save.capture import (
    Captured,
    adapter_of,
    adapters,
    capture,
    give_state,
    node_adapter,
    parts_of,
)

_NAMED = 8


def restore_state(state: dict[str, Any], loaded: Loaded) -> list[str]:
    """Put the stored values into `state`'s objects; returns the scalars that did not stay."""
    stored = loaded.head["tree"]["state"]
    check_fit(loaded, state)
    loader = _Loader(loaded)
    for name, encoded in stored.items():
        state[name] = loader.load(encoded, state[name], name)
    return _compare(state, stored, loaded, loader.sharded)


def restore_again(state: dict[str, Any], loaded: Loaded, names: list[str]) -> None:
    """Put some of the stored values back once more."""
    loader = _Loader(loaded)
    for name in names:
        state[name] = loader.load(loaded.head["tree"]["state"][name], state[name], name)


def decode_extra(loaded: Loaded) -> dict[str, Any]:
    """What travels with the state: the global random generators, and where the data stood."""
    found = _Loader(loaded).value(loaded.head["tree"]["extra"], "holdfast", borrowed=False)
    assert isinstance(found, dict)
    return found


class _Loader:
    """Decodes the stored tree, in place where there is something to put it into."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._owned: dict[int, Any] = {}
        self._filled: dict[int, tuple[Any, Any]] = {}
        self.sharded = Assembler(loaded)

    def load(self, encoded: Any, live: Any, path: str) -> Any:
        """Put an encoded value into `live` if that is possible, and return what to use."""
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
            data = self._loaded.data(encoded[tag])
            if adapter_of(spec.kind).load_in_place(live, spec, data):
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
        """A copy of a container that had two names when the run began, and was two when stored."""
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
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
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
            self.load(encoded, parts, path)  # they are the object's own, and change in place
            return
        adapter = next(
            (a for a in adapters() if getattr(a, "copies_what_it_loads", lambda _: False)(live)),
            None,
        )
        borrowed = adapter is not None
        try:
            near = _partners(live)
            stored = self.value(encoded, path, near, borrowed=borrowed)
            give_state(live, stored)
            if borrowed and self._is_kept(live):
                give_state(live, self.value(encoded, path, near, borrowed=False))
            for each in adapters():
                getattr(each, "settle", lambda *_: None)(live, stored)
        except HoldfastError:
            raise
        except Exception as error:
            raise StateMismatch(
                f"{path}: this {type(live).__name__} refused the stored state: "
                f"{type(error).__name__}: {error}\nThe checkpoint is left as it was."
            ) from error

    def _is_kept(self, live: Any) -> bool:
        """Whether an object kept a tensor that only borrows the image's memory."""
        import ctypes

        ranges = []
        for view in self._loaded.memory():
            start = ctypes.addressof(ctypes.c_char.from_buffer(view))
            ranges.append((start, start + view.nbytes))
        captured = capture({"object": live}, replicas=True)
        addresses = [v.data_ptr() for v in captured.values if hasattr(v, "data_ptr")]
        return any(first <= at < last for at in addresses for first, last in ranges)

    def _own(self, index: int) -> Any:
        # One tensor under two names stays one tensor.
        if index not in self._owned:
            spec = self._loaded.plan.specs[index]
            self._owned[index] = adapter_of(spec.kind).own(spec, self._loaded.data(index))
        return self._owned[index]

    def value(self, encoded: Any, path: str, near: Any = None, *, borrowed: bool) -> Any:
        """Decode a value; with `borrowed`, tensors share the image's memory.

        `near` is what is there now: it says how a tensor is to be sharded.
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
                # As torch's modules have it: the versions of their states.
                ordered._metadata = metadata  # type: ignore[attr-defined]
            return ordered
        if tag in ("$tuple", "$set", "$frozenset"):
            items = [inner_value(item, number) for number, item in enumerate(inner)]
            return {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[tag](items)
        if tag in ("$state", "$generator"):  # in an object's own: it gives it to what it holds
            return self.value(inner, path, near, borrowed=borrowed)
        if tag == "$node":  # in an object's own state there is nothing to make it like
            return {key: inner_value(item, key) for key, item in inner.items()}
        return _decode_plain(tag, inner)


def _part_of(near: Any, key: Any) -> Any:
    if isinstance(near, dict):
        return near.get(key)
    is_there = isinstance(near, list | tuple) and type(key) is int and 0 <= key < len(near)
    return near[key] if is_there else None


def _partners(live: Any) -> Any:
    """What is now where an object's stored state will go; None if none of it can be sharded."""
    found = (getattr(each, "partners", lambda _: None)(live) for each in adapters())
    return next((each for each in found if each is not None), None)


def _decode_plain(tag: str, inner: Any) -> Any:
    if tag == "$float":
        return float(inner)
    if tag == "$int":
        return int(inner, 16)
    if tag in ("$bytes", "$bytearray"):
        return {"$bytes": bytes, "$bytearray": bytearray}[tag](base64.b64decode(inner))
    if tag == "$complex":
        return complex(float(inner[0]), float(inner[1]))
    if tag.startswith("$torch."):
        return adapter_of("torch").decode_other(tag, inner)
    if tag.startswith("$tensorflow."):
        return adapter_of("tensorflow").decode_other(tag, inner)
    if tag.startswith("$jax."):
        return adapter_of("jax").decode_other(tag, inner)
    raise StateMismatch(f"the checkpoint holds a value of kind {tag}, which this holdfast lacks.")


def _compare(state: dict[str, Any], stored: Any, loaded: Loaded, sharded: Assembler) -> list[str]:
    """Capture again and compare with what was stored, to the bit; returns what else changed."""
    captured = capture(state, replicas=True)
    unsharded = _tensor_numbers(stored) - sharded.numbers
    unsharded -= _tensors_of_other_replicas(stored, captured.tree["state"])
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


def _compare_tensors(stored: set[int], captured: Captured, loaded: Loaded) -> list[str]:
    """The stored tensors that are lost, of another kind, or of other values now."""
    now = {spec.name: index for index, spec in enumerate(captured.specs)}
    differing: list[str] = []
    views: list[memoryview] = []
    expected: list[tuple[str, bytes]] = []
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
        views.append(adapter_of(new.kind).bytes_of(captured.values[now[old.name]]))
        expected.append((old.name, loaded.digests[old.name]))
    for (name, digest), actual in zip(expected, digest_all(views), strict=True):
        if digest != actual:
            differing.append(f"{name} (other values)")
    return differing


def _tensors_of_other_replicas(then: Any, now: Any) -> set[int]:
    """Of variables with copies for more or fewer replicas than today: they were put together."""
    if len(copies_of(then)) != len(copies_of(now)):
        return _tensor_numbers(then)
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(then, dict) and isinstance(now, dict):
        pairs = ((item, now[key]) for key, item in then.items() if key in now)
    elif isinstance(then, list) and isinstance(now, list):
        pairs = zip(then, now, strict=False)
    return set().union(*(_tensors_of_other_replicas(a, b) for a, b in pairs))


def _tensor_numbers(encoded: Any) -> set[int]:
    """The numbers of all tensors that an encoded value refers to."""
    if isinstance(encoded, dict):
        if "$t" in encoded:
            return {encoded["$t"]}
        encoded = encoded.values()
    elif not isinstance(encoded, list):
        return set()
    return set().union(*map(_tensor_numbers, encoded))


def _compare_plain(then: Any, now: Any, path: str, changed: list[str]) -> None:
    """Collect what differs in the rest of the tree: numbers, strings, keys, lengths."""
    if _is_tensor(then) and _is_tensor(now):
        return  # compared already, and what was sharded need not be so now
    if isinstance(then, dict) and isinstance(now, dict) and then.keys() == now.keys():
        for key in then:
            inner = path if key.startswith("$") else f"{path}.{key}"
            _compare_plain(then[key], now[key], inner, changed)
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for index, (a, b) in enumerate(zip(then, now, strict=True)):
            _compare_plain(a, b, f"{path}.{index}", changed)
    elif then != now:
        changed.append(f"{path} (stored {_short(then)}, now {_short(now)})")


def _is_tensor(encoded: Any) -> bool:
    if not isinstance(encoded, dict):
        return False
    return "$t" in encoded or "$shard" in encoded or bool(copies_of(encoded))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
