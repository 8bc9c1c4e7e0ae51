"""The first start from a checkpoint of another library that `holdfast adopt` took over.

TensorFlow's has a graph of objects; those of torch, Lightning, Hugging Face and Orbax have names.
Here such a state becomes an ordinary one: that of the live objects, with the stored values in it.
From there on the two are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast._adapters.adapter import Adapter, Unfit
from holdfast._adapters.registry import adapter_of, adapters, array_adapter, generators_of
from holdfast._errors import StateMismatch
from holdfast._state.capture import (
    Captured,
    Encoder,
    capture,
    is_stateful,
    keeps_state,
    node_adapter,
    parts_of,
    state_of,
)
from holdfast._state.capture_cache import OBJECTS
from holdfast._state.fit import mismatch, name_some
from holdfast._state.restore import decode_state
from holdfast._store.format.checksum import digest_all
from holdfast._store.format.image import TensorSpec
from holdfast._store.format.tree import replace_tag
from holdfast._store.read.verify import Loaded, SentAhead


def settle_adopted(loaded: Loaded, state: dict[str, Any]) -> tuple[Loaded, list[str]]:
    """The stored state as if these objects had stored it, and what is to be reported."""
    adopted = loaded.head.get("adopted")
    if adopted is None:
        return loaded, []
    if adopted.get("kind"):
        return _settle_foreign(loaded, state, adopted)
    matched, captured, sources = _match(loaded, state, adopted, builds=False)
    if matched.unbuilt:
        matched, captured, sources = _match(loaded, state, adopted, builds=True)
    by_name = _numbers(loaded)
    tree = dict(captured.tree["state"])
    for name in matched.by_path.keys() & tree.keys():
        tree[name] = _number(loaded, by_name[matched.by_path[name]], name, state[name])
    pairs = zip(captured.specs, captured.values, strict=True)
    # Copies: the live values are about to change, and are compared with these.
    own = [memoryview(bytearray(adapter_of(s.kind).bytes_of(value))) for s, value in pairs]
    views = tuple(
        memoryview(bytearray(view.nbytes))
        if id(value) in matched.zeros
        else (view if source is None else loaded.data(source))
        for view, value, source in zip(own, captured.values, sources, strict=True)
    )
    extra = {k: v for k, v in loaded.head["tree"]["extra"].items() if k != OBJECTS}
    whole = _as_stored(loaded, captured.specs, views, {"state": tree, "extra": extra})
    names = [spec.name for spec in captured.specs]
    made_here = [name for name, source in zip(names, sources, strict=True) if source is None]
    begun = [name for name in matched.fresh if "." not in name]
    begun += [n for n in made_here if n.partition(".")[0] not in begun]
    return whole, _lines(begun, matched.unused)


def _settle_foreign(
    loaded: Loaded, state: dict[str, Any], adopted: dict[str, Any]
) -> tuple[Loaded, list[str]]:
    """A state of torch, Lightning, Hugging Face or Orbax: matched by names."""
    # The tensors of `extra` are numbered behind the others.
    captured, fresh, unused = _overlay(decode_state(loaded), state, adopted)
    extra, numbers = _renumbered(loaded.head["tree"]["extra"], len(captured.specs))
    specs = [*captured.specs, *(loaded.plan.specs[number] for number in numbers)]
    views = [
        # Values of the script are about to change, and are compared with these.
        memoryview(bytearray(view)) if spec.name.partition(".")[0] in fresh else view
        for spec, value in zip(captured.specs, captured.values, strict=True)
        if (view := adapter_of(spec.kind).bytes_of(value)) is not None
    ]
    views += [loaded.data(number) for number in numbers]
    tree = {"state": captured.tree["state"], "extra": extra}
    return _as_stored(loaded, specs, tuple(views), tree), _lines(fresh, unused)


def _renumbered(encoded: Any, first: int) -> tuple[Any, list[int]]:
    """A tree whose tensors are numbered from `first`, and the numbers that they had."""
    numbers: list[int] = []

    def renumber(number: int) -> dict[str, int]:
        numbers.append(number)
        return {"$t": first + len(numbers) - 1}

    return replace_tag(encoded, "$t", renumber), numbers


def _as_stored(
    loaded: Loaded, specs: Sequence[TensorSpec], views: tuple[memoryview, ...], tree: Any
) -> Loaded:
    names = [spec.name for spec in specs]
    return replace(
        loaded,
        plan=replace(loaded.plan, specs=tuple(specs)),
        tensors=views,
        memory=(*loaded.memory, *(view for view in views if view.nbytes)),
        sent=SentAhead(),
        head={**loaded.head, "tree": tree},
        digests=dict(zip(names, digest_all(list(views)), strict=True)),
    )


def _numbers(loaded: Loaded) -> dict[str, int]:
    return {spec.name: number for number, spec in enumerate(loaded.plan.specs)}


def _match(
    loaded: Loaded, state: dict[str, Any], adopted: dict[str, Any], *, builds: bool
) -> tuple[Any, Captured, list[int | None]]:
    """The matching, and for each live tensor the number of the stored one."""
    adapter_of("tensorflow")  # says how to install it
    from holdfast.tensorflow.checkpoints import Graph, match

    encoded = loaded.head["tree"]["extra"][OBJECTS]
    graph = Graph.from_bytes(bytes(loaded.data(encoded["$t"])))
    matched = match(graph, state, adopted["fresh"], builds=builds)
    captured = capture(state)
    by_name = _numbers(loaded)
    sources: list[int | None] = []
    reshaped = []
    for now, value in zip(captured.specs, captured.values, strict=True):
        source = by_name.get(matched.by_key.get(id(value)) or matched.by_path.get(now.name, ""))
        sources.append(source)
        if source is not None:
            then = loaded.plan.specs[source]
            # A copy in NumPy may name its type differently; the bytes are the same.
            is_same_type = now.dtype == then.dtype or now.kind != then.kind
            if not is_same_type or (now.shape, now.item_bytes) != (then.shape, then.item_bytes):
                reshaped.append(_describe_change(now.name, then, now))
    unfit = Unfit(matched.missing, matched.unexpected, reshaped + matched.unlike)
    build = "Build the objects as they were (a Keras model: call it once before Run)"
    _refuse(adopted, unfit, matched.unused, build)
    return matched, captured, sources


def _describe_change(path: str, then: TensorSpec, now: TensorSpec) -> str:
    return f"{path} ({then.dtype} {list(then.shape)} → {now.dtype} {list(now.shape)})"


def _number(loaded: Loaded, source: int, name: str, live: Any) -> Any:
    from holdfast.tensorflow.checkpoints import number_in

    spec = loaded.plan.specs[source]
    try:
        return number_in(adapter_of("tensorflow").new_array(spec, loaded.data(source)), live)
    except ValueError as error:
        raise StateMismatch(
            f"{name}: the adopted checkpoint has {spec.dtype} {list(spec.shape)} for it, and "
            f"{error}.\nGive Run a tf.Variable of that kind, or adopt with --fresh {name}."
        ) from error


def _refuse(
    adopted: dict[str, Any],
    unfit: Unfit,
    unused: list[str],
    build: str = "Build the objects as they were",
    fresh: str = "--fresh NAME",
) -> None:
    if unfit.missing or unfit.unexpected or unfit.changed:
        raise mismatch(
            unfit,
            f"the adopted checkpoint {adopted['from']} does not fit the state that Run was given:",
            f"Nothing was changed. {build}, or adopt into a new folder, with --name NEW=OLD for "
            f"another name and {fresh} for what is to start over.",
            lambda what, names: [f"  {what}: {name_some(names)}"],
            {"names that Run does not have": unused},
        )


def _lines(begun: list[str], unused: list[str]) -> list[str]:
    said = (
        ("begins as the script made it, for the adopted checkpoint does not have it", begun),
        ("in the adopted checkpoint, and not used by this run", unused),
    )
    return [f"{what}: {name_some(names)}." for what, names in said if names]


# -- A state without a graph: a tree of containers, numbers and tensors under the names of Run -----
# Objects get it as their state, arrays as their values.


@dataclass(frozen=True)
class _Placeholder:
    """Stands for an object or a generator, with the state that it will be given."""

    tag: str
    state: Any


class _PlaceholderEncoder(Encoder):
    """Captures placeholders as if they were the objects."""

    def encode(self, value: Any, path: str) -> Any:
        if isinstance(value, _Placeholder):
            return {value.tag: super().encode(value.state, path)}
        return super().encode(value, path)


def _overlay(
    stored: Mapping[str, Any], state: dict[str, Any], adopted: dict[str, Any]
) -> tuple[Captured, list[str], list[str]]:
    """The live state with the stored values in it; StateMismatch if they do not fit.

    Also returns the states that begin as the script made them, and unused names of the checkpoint.
    """
    overlay = _Overlay(state)
    made: dict[str, Any] = {}
    fresh: list[str] = []
    for name, live in state.items():
        if name in adopted["fresh"] or (name not in stored and not _is_required(live)):
            made[name] = live
            fresh.append(name)
        elif name not in stored:
            overlay.unfit.missing.append(name)
        else:
            made[name] = overlay.value(live, stored[name], name)
    unused = [name for name in stored if name not in state or name in fresh]
    unfit = overlay.unfit
    whole = " ".join(f"--fresh {name}" for name in unfit.missing if "." not in name)
    _refuse(adopted, unfit, unused, fresh=whole or "--fresh NAME")
    encoder = _PlaceholderEncoder({}, {})
    tree = encoder.tree(made, None)
    return Captured(tree, encoder.specs, encoder.values), fresh, unused


def _is_required(live: Any) -> bool:
    """Whether training would start from scratch without it: an object, a generator, an array."""
    if is_stateful(live) or _array_adapter(live) or generators_of(live) or node_adapter(live):
        return True
    live = list(live.values()) if isinstance(live, dict) else live
    return isinstance(live, list | tuple) and any(map(_is_required, live))


class _Overlay:
    """Puts stored values in the place of live ones, without changing these."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.unfit = Unfit()
        self._state = state
        self._known: dict[Any, Any] = {}  # the stored value for each live array

    def value(self, live: Any, stored: Any, path: str) -> Any:
        """A placeholder for a live value, with the stored one in it."""
        if is_stateful(live):
            return self._object(live, stored, path)
        adapter = _array_adapter(live)
        if adapter is not None:
            return self._array(adapter, live, stored, path)
        if generators_of(live) is not None:
            return _Placeholder("$generator", stored)
        if (node := node_adapter(live)) is not None:
            return _Placeholder("$node", self._parts(node.node_parts(live), stored, path))
        if isinstance(live, dict) and _is_required(live):
            return self._parts(live, stored, path)
        if isinstance(live, list | tuple) and _is_required(live):
            names = getattr(live, "_fields", range(len(live)))
            parts = self._parts(dict(zip(names, live, strict=True)), stored, path)
            items = [parts.get(name) for name in names]
            return tuple(items) if isinstance(live, tuple) else items
        return _plain(live, stored)

    def _object(self, live: Any, stored: Any, path: str) -> Any:
        if not isinstance(stored, Mapping):
            self.unfit.changed.append(f"{path} (is a {_type(live)}, and no state of one there)")
            return live
        of_torch = _torch_match(live)
        if of_torch is not None and of_torch.is_module(live):
            known = (self.unfit, self._known, self._array)
            return _Placeholder("$state", of_torch.module_state(live, stored, path, *known))
        if of_torch is not None:
            modules = [v for v in _objects(self._state) if of_torch.is_module(v)]
            names = of_torch.names_of_parameters(modules)
            made = of_torch.optimizer_state(live, stored, names, path, self.unfit)
            return _Placeholder("$state", made)
        if keeps_state(live):
            return _Placeholder("$state", stored)
        now = state_of(live) if parts_of(live) is None else None
        if not isinstance(now, dict):
            self.unfit.changed.append(f"{path} (a {_type(live)} takes no state of this format)")
            return live
        return _Placeholder("$state", self._parts(now, stored, path))

    def _parts(self, live: Mapping[Any, Any], stored: Any, path: str) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        found = _by_name(stored)
        for key, item in live.items():
            name = key if key in found else str(key)
            below = found.get(name, _NOTHING)
            if below is _NOTHING:
                below = _below(stored, str(key))
            if below is not _NOTHING and below is not None:
                made[key] = self.value(item, below, f"{path}.{key}")
            elif _holds_arrays(item):
                self.unfit.missing.append(f"{path}.{key}")
            else:
                made[key] = item  # a plain value, or a part without any
        known = {str(key).partition("/")[0].partition(".")[0] for key in live} | {*map(str, live)}
        self.unfit.unexpected += [
            f"{path}.{key}" for key, item in found.items() if str(key) not in known and _any(item)
        ]
        return made

    def _array(self, adapter: Adapter, live: Any, stored: Any, path: str) -> Any:
        then_adapter = _array_adapter(stored)
        now = adapter.spec(path, live)
        if then_adapter is None:
            made = None  # of a number, if it has no dimensions
            if adapter.kind == "torch" and type(stored) in (int, float, bool) and not live.shape:
                from holdfast.torch.match import number_like

                made = number_like(stored, live)
            if made is None:
                self.unfit.changed.append(f"{path} (was a {_type(stored)}, is a {_type(live)})")
            return live if made is None else made
        then = then_adapter.spec(path, stored)
        data = then_adapter.bytes_of(stored)
        is_key = now.dtype.startswith("key<") and data.nbytes == now.size_bytes
        same_type = now.dtype == then.dtype if now.kind == then.kind else (
            now.stored_as == then.stored_as and now.item_bytes == then.item_bytes
        )  # fmt: skip
        if not is_key and not (same_type and now.shape == then.shape):
            self.unfit.changed.append(_describe_change(path, then, now))
            return live
        made = stored if now.kind == then.kind and not is_key else adapter.new_array(now, data)
        return self._one_of(adapter, live, made, path)

    def _one_of(self, adapter: Adapter, live: Any, made: Any, path: str) -> Any:
        """The one value of all names of an array: a file may have one for each name."""
        place = None if adapter.is_sharded(live) else adapter.alias_key(live)
        first = made if place is None else self._known.setdefault(place, made)
        if first is not made and bytes(adapter.bytes_of(first)) != bytes(adapter.bytes_of(made)):
            self.unfit.changed.append(
                f"{path} (is tied to another here, and has values of its own there)"
            )
        return first


_NOTHING = object()


def _by_name(stored: Any) -> dict[Any, Any]:
    if isinstance(stored, Mapping):
        return dict(stored)
    return dict(enumerate(stored)) if isinstance(stored, list | tuple) else {}


def _below(stored: Any, path: str) -> Any:
    """What is at a path of several names, or under a number that is stored as a string."""
    inner = _by_name(stored)
    for sign in ("/", "."):
        first, found, rest = path.partition(sign)
        key = first if first in inner else int(first) if first.isdigit() else first
        if key in inner:
            return _below(inner[key], rest) if found else inner[key]
    return _NOTHING


def _plain(live: Any, stored: Any) -> Any:
    if type(live) in (int, float, bool) and _array_adapter(stored) and stored.ndim == 0:
        value = stored.item()
        return type(live)(value) if type(live)(value) == value else value
    return stored


def _holds_arrays(live: Any) -> bool:
    if (node := node_adapter(live)) is not None:
        live = node.node_parts(live)
    if isinstance(live, dict | list | tuple):
        return any(map(_holds_arrays, live.values() if isinstance(live, dict) else live))
    return _is_required(live)


def _any(stored: Any) -> bool:
    if isinstance(stored, Mapping | list | tuple):
        return any(map(_any, stored.values() if isinstance(stored, Mapping) else stored))
    return _array_adapter(stored) is not None


def _array_adapter(value: Any) -> Adapter | None:
    if isinstance(value, bytes | bytearray):
        return None
    return array_adapter(value)


def _objects(state: Any) -> list[Any]:
    if not isinstance(state, dict | list | tuple):
        return [state]
    items = state.values() if isinstance(state, dict) else state
    return [each for item in items for each in _objects(item)]


def _torch_match(live: Any) -> Any:
    """Matches modules and optimizers by name, if torch is loaded."""
    if not any(adapter.kind == "torch" for adapter in adapters()):
        return None
    from holdfast.torch import match

    return match if match.is_known(live) else None


def _type(value: Any) -> str:
    return type(value).__name__
