"""Whether a stored state fits the live objects: checked before any of them is changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from holdfast._adapters.adapter import Unfit
from holdfast._adapters.registry import adapter_of, adapters, array_adapter, generators_of
from holdfast._errors import StateMismatch
from holdfast._state.capture import is_stateful, node_adapter, parts_of
from holdfast._store.format.checksum import for_each
from holdfast._store.format.image import ImagePlan, TensorSpec
from holdfast._store.format.tree import tensor_leaves
from holdfast._store.read.verify import ChoosePlaces, Placement


def class_names(state: Mapping[str, Any]) -> dict[str, str]:
    """The class of each optimizer and scheduler of torch in a state, by its path.

    A stored state fits no other class, even of the same form.
    """
    if not hasattr(sys.modules.get("torch"), "__version__"):
        return {}
    return dict(_named(state.items(), ""))


def _named(entries: Iterable[tuple[Any, Any]], path: str) -> Iterable[tuple[str, str]]:
    from holdfast.torch.stepping import class_name

    for key, value in entries:
        name = class_name(value)
        if name is not None:
            yield f"{path}{key}", name
        elif isinstance(value, dict):
            yield from _named(value.items(), f"{path}{key}.")
        elif isinstance(value, list | tuple):
            yield from _named(enumerate(value), f"{path}{key}.")


_NAMED = 8
_LINES = 40


def check_fit(
    specs: Sequence[TensorSpec], head: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """Raise StateMismatch, with all that does not fit, before anything is changed."""
    stored = head["tree"]["state"]
    for spec in {(each.kind, each.dtype, each.item_bytes): each for each in specs}.values():
        _check_type(f"{spec.name}: stored", spec.kind, spec.dtype, spec.item_bytes)
    for name, encoded in stored.items() if _has_shards(stored) else ():
        for path, leaf in tensor_leaves(encoded, name):
            if (parts := leaf.get("$shard")) is not None:
                # Of a sharded tensor this rank may have stored nothing.
                _check_type(f"{path}: stored in parts", parts.get("kind", "torch"), parts["dtype"])
    _FitCheck(specs, head).check(stored, state)


def _has_shards(stored: Any) -> bool:
    """Whether any tensor is sharded; without the paths, which take long for very many tensors."""
    level = [stored]
    while level:
        below: list[Any] = []
        for each in level:
            if type(each) is list:
                below += each
            elif type(each) is dict:
                if "$shard" in each:
                    return True
                below += each.values() if "$t" not in each else ()
        level = below
    return False


def _check_type(what: str, kind: str, dtype: str, item_bytes: int | None = None) -> None:
    """Find a type that this installation lacks now, not when half of the state is loaded."""
    try:
        adapter = adapter_of(kind)
        if item_bytes is None:
            adapter.check_sharded(dtype)
        if item_bytes in (None, adapter.item_bytes(dtype)):
            return
        reason = f"an item of it has another size than {item_bytes} here"
    except ImportError as error:  # it names the command that installs the framework
        reason = str(error)
    except (ValueError, StateMismatch) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
    raise StateMismatch(
        f"{what} as {dtype} of {kind}, and {reason}.\n"
        "The checkpoint is left as it was: resume with the versions it was made with."
    )


def name_some(names: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def name_all(label: str, names: list[str]) -> list[str]:
    """One line for each, grouped by module; for very many only the modules."""
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(name.partition(" ")[0].rpartition(".")[0], []).append(name)
    if len(names) <= _LINES:
        return [f"  {label}: {name}" for group in modules.values() for name in group]
    counted = [f"{module or 'the state'} ({len(group)})" for module, group in modules.items()]
    more = [f"  {label}: and {len(counted) - _LINES} more"] if len(counted) > _LINES else []
    return [f"  {label}: {each}" for each in counted[:_LINES]] + more


def mismatch(
    unfit: Unfit,
    first: str,
    last: str,
    tell: Callable[[str, list[str]], list[str]],
    more: Mapping[str, list[str]] | None = None,
) -> StateMismatch:
    """An error that names all that does not fit, between its first and its last line."""
    groups = {
        "not in the checkpoint": unfit.missing,
        "only in the checkpoint": unfit.unexpected,
        "changed": unfit.changed,
        **(more or {}),
    }
    lines = [line for what, names in groups.items() if names for line in tell(what, names)]
    return StateMismatch(
        "\n".join([first, *lines, last]),
        missing=tuple(unfit.missing),
        unexpected=tuple(unfit.unexpected),
        reshaped=tuple(unfit.changed),
    )


class _FitCheck:
    def __init__(self, specs: Sequence[TensorSpec], head: Mapping[str, Any]) -> None:
        self._specs = specs
        self._head = head
        self._unfit = Unfit()

    def check(self, stored: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        unfit = self._unfit
        self._check_parts(stored, state, "")
        then, now = self._head.get("classes", {}), class_names(state)
        unfit.changed += [
            f"{path} (was a {then[path]}, is a {name})"
            for path, name in now.items()
            if then.get(path, name) != name
        ]
        if unfit.missing or unfit.unexpected or unfit.changed:
            raise mismatch(
                unfit,
                "the checkpoint does not fit the state that Run was given:",
                "The checkpoint is left as it was: go back to the state it was made from, or use a "
                "new folder.\nTo keep what fits: holdfast export FOLDER old.pt, then see "
                'docs/adopt.md, "After a change of the model".',
                name_all,
            )

    def _check(self, encoded: Any, live: Any, path: str) -> None:
        kind = next(iter(encoded), "") if isinstance(encoded, dict) else ""
        if any(a.holds_array(live) for a in adapters()) and (kind == "$t" or copies_of(encoded)):
            self._match(_one_tensor(encoded), _spec(path, live), path, live)
        elif kind == "$state":
            self._check_object(encoded["$state"], live, path)
        elif kind == "$generator":
            if generators_of(live) is None:
                self._unfit.changed.append(f"{path} (was a random generator, is a {_type(live)})")
        elif kind == "$node":
            # A value that is rebuilt must have exactly the parts that it had.
            if (adapter := node_adapter(live)) is None:
                self._unfit.changed.append(f"{path} (was made of parts, is a {_type(live)})")
            else:
                self._check_parts(encoded["$node"], adapter.node_parts(live), path)
        elif is_stateful(live) or generators_of(live) or node_adapter(live) is not None:
            self._unfit.changed.append(f"{path} (was a plain value, is a {_type(live)})")
        elif kind in ("$t", "$shard"):
            if isinstance(live, dict | list | tuple) and live:
                self._unfit.changed.append(f"{path} (was an array, is a {_type(live)})")
            now = None if (adapter := array_adapter(live)) is None else adapter.spec(path, live)
            # Bytes and scalars are replaced as a whole: their length or type may change.
            if now is not None and now.kind != "bytes" and not now.dtype.startswith("scalar "):
                self._match(encoded, now, path)
        elif _is_value_array(live) and list(_entries(encoded)):
            self._unfit.changed.append(f"{path} (was made of parts, is a {_type(live)})")
        elif (
            kind == "$tuple"
            and isinstance(live, tuple)
            and hasattr(type(live), "_fields")
            and len(live) != (was := len(encoded[kind]))
        ):
            of = f"{_type(live)} of {len(live)}"
            self._unfit.changed.append(f"{path} (was made of {was} parts, is a {of})")
        else:
            self._check_container(dict(_entries(encoded)), dict(_live_entries(live)), path)

    def _check_container(self, stored: dict[Any, Any], live: dict[Any, Any], path: str) -> None:
        """Plain values of a container may come and go; an object must exist to be loaded."""
        for key, item in stored.items():
            if key in live:
                self._check(item, live[key], f"{path}.{key}")
            elif _needs_object(item):
                self._unfit.unexpected.append(f"{path}.{key}")
        self._unfit.missing += [
            f"{path}.{key}" for key, item in live.items() if key not in stored and _is_needed(item)
        ]

    def _check_parts(self, stored: Mapping[str, Any], parts: Mapping[str, Any], path: str) -> None:
        """Exactly these parts: those of the state itself, of an object, of a value made again."""
        dot = f"{path}." if path else ""
        self._unfit.unexpected += [f"{dot}{key}" for key in stored if key not in parts]
        self._unfit.missing += [f"{dot}{key}" for key in parts if key not in stored]
        for key, item in stored.items():
            if key in parts:
                self._check(item, parts[key], f"{dot}{key}")

    def _check_object(self, encoded: Any, live: Any, path: str) -> None:
        if not is_stateful(live):
            self._unfit.changed.append(f"{path} (had a state_dict, is a {_type(live)})")
            return
        parts = parts_of(live)
        if parts is not None:
            self._check_parts(_items(encoded), parts, path)
            return
        for adapter in adapters():
            strict = adapter.objects.copied_into(live) or adapter.objects.strict_tensors(live)
            if strict is None:
                continue
            found = {
                key: item if isinstance(item, dict) and "$t" in item else _one_tensor(item)
                for key, item in _items(encoded).items()
            }
            stored = {key: item for key, item in found.items() if item is not None}
            self._unfit.missing += [f"{path}.{key}" for key in strict if key not in stored]
            self._unfit.unexpected += [f"{path}.{key}" for key in stored if key not in strict]
            for key, item in stored.items():
                if key not in strict:
                    continue
                number = item.get("$t")
                if number is None or not adapter.is_alike(strict[key], self._specs[number]):
                    self._match(item, _spec(key, strict[key]), f"{path}.{key}")
            return

    def _match(self, encoded: Any, now: Any, path: str, live: Any = None) -> None:
        """Compare types and sizes; those of the whole where the tensor is sharded."""
        now_dtype, now_size = now.dtype, list(now.shape)
        if "$shard" in encoded:
            dtype, size = encoded["$shard"]["dtype"], encoded["$shard"]["size"]
        else:
            then = self._specs[encoded["$t"]]
            dtype, size = then.dtype, list(then.shape)
            if {then.kind, now.kind} == {"jax", "numpy"}:  # the two name types differently
                dtype, now_dtype = then.stored_as, now.stored_as
            if any(a.takes_size(live, size) for a in adapters()):
                now_size = size
        if (dtype, size) != (now_dtype, now_size):
            self._unfit.changed.append(f"{path} ({dtype} {size} → {now_dtype} {now_size})")


def _spec(name: str, value: Any) -> TensorSpec:
    adapter = next(a for a in adapters() if a.is_array(value) or a.holds_array(value))
    return adapter.spec(name, value)


def copies_of(encoded: Any) -> list[Any]:
    """The values of a variable on each replica of a tf.distribute strategy; empty if it has one."""
    state = encoded.get("$state", encoded) if isinstance(encoded, dict) else None
    if not isinstance(state, dict) or state.keys() != {"replicas"}:
        return []
    found = state["replicas"]
    is_of_tensors = isinstance(found, list) and all(
        isinstance(each, dict) and "$t" in each for each in found
    )
    return found if is_of_tensors else []


def _one_tensor(encoded: Any) -> Any:
    """A stored tensor, or the first of a variable's copies; None for any other value."""
    for each in (encoded, *copies_of(encoded)):
        if isinstance(each, dict) and ("$t" in each or "$shard" in each):
            return each
    return None


def _entries(encoded: Any) -> Iterable[tuple[Any, Any]]:
    """The items of an encoded container, by key or number; none for any other value."""
    if isinstance(encoded, list):
        return enumerate(encoded)
    if not isinstance(encoded, dict):
        return []
    tag = next(iter(encoded), "")
    if tag == "$tuple":
        return enumerate(encoded[tag])
    if tag == "$node":
        return list(encoded[tag].items())
    if tag in ("$dict", "$odict"):
        # A key that is itself encoded can hold no object.
        return [(key, item) for key, item in encoded[tag] if not isinstance(key, dict)]
    return [] if tag.startswith("$") else encoded.items()


def _live_entries(live: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(live, dict):
        return live.items()
    if (adapter := node_adapter(live)) is not None:
        return list(adapter.node_parts(live).items())
    return enumerate(live) if isinstance(live, list | tuple) else []


def _needs_object(encoded: Any) -> bool:
    if isinstance(encoded, dict) and ("$state" in encoded or "$generator" in encoded):
        return True
    return any(_needs_object(item) for _, item in _entries(encoded))


def _is_needed(live: Any) -> bool:
    if is_stateful(live) or generators_of(live) or _is_value_array(live):
        return True
    return any(_is_needed(item) for _, item in _live_entries(live))


def _is_value_array(live: Any) -> bool:
    """An array that is a value, never changed in place: the state of a JAX training."""
    return any(a.arrays_are_values and a.is_array(live) for a in adapters())


def _type(value: Any) -> str:
    return type(value).__name__


def _items(encoded: Any) -> dict[str, Any]:
    """The parts by name of an object's encoded state."""
    return {key: item for key, item in _entries(encoded) if isinstance(key, str)}


# -- Memory of live objects that a stored state is read into while it is checked -------------------
# Two kinds of tensors can be filled at once. Those of a module whose loading does nothing but copy:
# the bytes go into its parameters. And those that an object will keep, like an optimizer's moments:
# they are made ahead. All others are read into memory of their own, checked, and loaded after that.
#
# Nothing is chosen unless the whole state fits. A module has exactly the stored names then, so that
# any other state that fits overwrites each byte of it.


def places_in(state: Mapping[str, Any]) -> ChoosePlaces:
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
    tensors = made_ahead(specs, set(kept_by_objects(stored, state)) - places.keys())
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
        tensors = adapter.objects.copied_into(live)
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
        if parts_of(live) is not None or any(
            a.objects.copies_what_it_loads(live) for a in adapters()
        ):
            continue
        leaves = [leaf for _, leaf in tensor_leaves(encoded["$state"], name)]
        if any("$shard" in leaf for leaf in leaves):
            continue
        yield from {leaf["$t"]: None for leaf in leaves}


def made_ahead(specs: tuple[TensorSpec, ...], numbers: Collection[int]) -> dict[int, Any]:
    """New tensors; several threads make them, since an allocator may touch the memory."""
    wanted = [n for n in numbers if specs[n].kind == "torch" and not specs[n].device]
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
        return any(each.objects.loads_exactly(live) for each in adapters())
    if node_adapter(live) is not None:
        return False
    if isinstance(live, dict):
        return all(map(_is_exact, live.values()))
    return not isinstance(live, list | tuple) or all(map(_is_exact, live))
