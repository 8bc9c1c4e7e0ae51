"""Memory of live objects that a stored state is read into while it is checked.

Two kinds of tensors can be filled at once. Those of a module whose loading does nothing but copy:
the bytes go into its parameters. And those that an object will keep, like an optimizer's moments:
they are made ahead. All others are read into memory of their own, checked, and loaded after that.

Nothing is chosen unless the whole state fits. A module has exactly the stored names then, so that
any other state that fits overwrites each byte of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from holdfast._adapters.registry import adapter_of, adapters
from holdfast._errors import StateMismatch
from holdfast._state.capture import is_stateful, node_adapter, parts_of
from holdfast._state.fit import check_fit
from holdfast._store.format.checksum import for_each
from holdfast._store.format.image import ImagePlan, TensorSpec
from holdfast._store.format.tree import tensor_leaves
from holdfast._store.read.verify import ChoosePlaces, Placement


def places_in(state: Mapping[str, Any]) -> ChoosePlaces:
    """Chooses the memory of these objects."""

    def choose(plan: ImagePlan, head: dict[str, Any]) -> Placement | None:
        if head.get("adopted") is not None:
            return None  # it is matched with the objects first
        try:
            check_fit(plan.specs, head, state)
        except StateMismatch:
            return None  # raised when the state is known to be intact
        return _choose(plan.specs, head["tree"]["state"], state)

    return choose


def _choose(
    specs: tuple[TensorSpec, ...], stored: Mapping[str, Any], state: Mapping[str, Any]
) -> Placement | None:
    places: dict[int, tuple[int, memoryview]] = {}
    filled = []
    for name, encoded in stored.items():
        found = _filled_by_copying(specs, encoded, state[name])
        if found is not None:
            filled.append(name)
            places.update(found)
    if not _is_apart([(address, view.nbytes) for address, view in places.values()]):
        places, filled = {}, []
    tensors = _made_ahead(specs, set(kept_by_objects(stored, state)) - places.keys())
    for number, tensor in tensors.items():
        places[number] = adapter_of(specs[number].kind).receiving().memory_of(tensor)
    return Placement(
        views={number: view for number, (_, view) in places.items()},
        addresses={number: address for number, (address, _) in places.items()},
        tensors=tensors,
        filled=frozenset(filled),
        is_exact=all(name in filled or _is_exact(live) for name, live in state.items()),
    )


def _filled_by_copying(
    specs: tuple[TensorSpec, ...], encoded: Any, live: Any
) -> dict[int, tuple[int, memoryview]] | None:
    """The memory of an object's tensors by their numbers; None if it is not all of its state."""
    state = encoded.get("$state") if isinstance(encoded, dict) else None
    pairs = state.get("$odict") if isinstance(state, dict) else None
    if not isinstance(pairs, list):
        return None
    for adapter in adapters():
        tensors = adapter.copied_into(live)
        if tensors is None or len(pairs) != len(tensors):
            continue
        memory_of = adapter.receiving().memory_of
        found: dict[int, tuple[int, memoryview]] = {}
        for key, leaf in pairs:
            number = leaf.get("$t") if isinstance(leaf, dict) else None
            tensor = tensors.get(key) if type(key) is str else None
            if number is None or tensor is None or specs[number].device:
                return None
            if specs[number].size_bytes:
                place = memory_of(tensor)
                # Tied when it was stored, and two tensors now: both are loaded by the object.
                if found.setdefault(number, place)[0] != place[0]:
                    return None
        return found
    return None


def _is_apart(spans: list[tuple[int, int]]) -> bool:
    """Whether each of these tensors has memory of its own.

    Tensors that share memory now and did not when they were stored are loaded by their objects,
    and then compared.
    """
    end = 0
    for start, size in sorted(spans):
        if start < end:
            return False
        end = start + size
    return True


def kept_by_objects(stored: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[int]:
    """The numbers of the tensors that objects will keep as they are given."""
    for name, encoded in stored.items():
        live = state.get(name)
        if not isinstance(encoded, dict) or "$state" not in encoded or not is_stateful(live):
            continue
        if parts_of(live) is not None or any(a.copies_what_it_loads(live) for a in adapters()):
            continue
        leaves = [leaf for _, leaf in tensor_leaves(encoded["$state"], name)]
        if any("$shard" in leaf for leaf in leaves):
            continue
        yield from {leaf["$t"]: None for leaf in leaves}


def _made_ahead(specs: tuple[TensorSpec, ...], numbers: Collection[int]) -> dict[int, Any]:
    """New tensors; several threads make them, since an allocator may touch the memory."""
    wanted = [number for number in numbers if specs[number].kind == "torch"]
    found: dict[int, Any] = {}
    if wanted:
        fresh = adapter_of("torch").receiving().fresh

        def make(index: int) -> None:
            found[wanted[index]] = fresh(specs[wanted[index]])

        for_each(make, [specs[number].size_bytes for number in wanted])
    return {number: tensor for number, tensor in found.items() if tensor is not None}


def _is_exact(live: Any) -> bool:
    """Whether loading this value runs no code of the script."""
    if is_stateful(live):
        return any(each.loads_exactly(live) for each in adapters())
    if node_adapter(live) is not None:
        return False
    if isinstance(live, dict):
        return all(map(_is_exact, live.values()))
    return not isinstance(live, list | tuple) or all(map(_is_exact, live))
