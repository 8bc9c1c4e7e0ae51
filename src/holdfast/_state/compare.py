"""Whether objects hold what they were given: captured again, and compared bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast._adapters.registry import adapter_of
from holdfast._errors import RestoreDiffers
from holdfast._state.capture import Captured, capture
from holdfast._state.fit import copies_of
from holdfast._state.shards import Assembler
from holdfast._store.format.checksum import digest_all
from holdfast._store.read.verify import Loaded, Placement

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
    views: list[memoryview] = []
    expected: list[tuple[str, bytes]] = []
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
        views.append(adapter_of(new.kind).bytes_of(live))
        expected.append((old.name, loaded.digests[old.name]))
    for (name, digest), actual in zip(expected, digest_all(views), strict=True):
        if digest != actual:
            differing.append(f"{name} (other values)")
    if pairs:
        unlike = adapter_of("torch").receiving().differing([pair[1:] for pair in pairs])
        names = (name for name, _, _ in pairs)
        differing += [
            f"{name} (other values)" for name, is_so in zip(names, unlike, strict=True) if is_so
        ]
    return differing


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
    if isinstance(encoded, dict):
        if "$t" in encoded:
            yield encoded["$t"]
            return
        encoded = encoded.values()
    elif not isinstance(encoded, list):
        return
    for item in encoded:
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
        changed.append(f"{path} (stored {_short(then)}, now {_short(now)})")


def _is_tensor(encoded: Any) -> bool:
    if not isinstance(encoded, dict):
        return False
    return "$t" in encoded or "$shard" in encoded or bool(copies_of(encoded))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
