"""A state that another library stored, as the objects of Run would have given it.

It was stored as it was found: a tree of containers, numbers and tensors under the names of Run.
What a name belongs to is known only now. Objects get it as their state, arrays as their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast._adapters.adapter import Adapter
from holdfast._adapters.registry import adapters
from holdfast._errors import StateMismatch
from holdfast._state.capture import (
    Captured,
    Encoder,
    is_stateful,
    keeps_state,
    node_adapter,
    parts_of,
    state_of,
)
from holdfast._state.fit import name_some


@dataclass(frozen=True)
class _Standing:
    """What stands for an object or a generator, with the state that it will be given."""

    tag: str
    state: Any


class _Stand(Encoder):
    """Captures what stands for objects as if it were these."""

    def __init__(self) -> None:
        super().__init__({}, {})

    def encode(self, value: Any, path: str) -> Any:
        if isinstance(value, _Standing):
            return {value.tag: super().encode(value.state, path)}
        return super().encode(value, path)


@dataclass
class Settled:
    """The captured state, and what is to be said of it."""

    captured: Captured
    fresh: list[str]  # states that begin as the script made them
    unused: list[str]  # names that only the checkpoint has


@dataclass
class _Unfit:
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


def settle(stored: Mapping[str, Any], state: dict[str, Any], adopted: dict[str, Any]) -> Settled:
    """Lay what was stored over the objects of today; StateMismatch if it does not fit."""
    laying = _Laying(state)
    made: dict[str, Any] = {}
    fresh: list[str] = []
    for name, live in state.items():
        if name in adopted["fresh"] or (name not in stored and not _must_be_there(live)):
            made[name] = live
            fresh.append(name)
        elif name not in stored:
            laying.unfit.missing.append(name)
        else:
            made[name] = laying.lay(live, stored[name], name)
    unused = [name for name in stored if name not in state or name in fresh]
    _refuse_foreign(laying.unfit, adopted, unused)
    encoder = _Stand()
    tree = encoder.tree(made, None)
    return Settled(Captured(tree, encoder.specs, encoder.values), fresh, unused)


def _must_be_there(live: Any) -> bool:
    """Whether a training would begin anew without it: an object, a generator, an array."""
    if is_stateful(live) or _array_adapter(live) or _is_generator(live) or node_adapter(live):
        return True
    if isinstance(live, dict):
        return any(_must_be_there(item) for item in live.values())
    return isinstance(live, list | tuple) and any(_must_be_there(item) for item in live)


class _Laying:
    def __init__(self, state: dict[str, Any]) -> None:
        self.unfit = _Unfit()
        self._state = state
        self._known: dict[Any, Any] = {}  # the stored value for each array of today

    def lay(self, live: Any, stored: Any, path: str) -> Any:
        """What stands for a live value, with the stored one in it."""
        if is_stateful(live):
            return self._object(live, stored, path)
        adapter = _array_adapter(live)
        if adapter is not None:
            return self._array(adapter, live, stored, path)
        if _is_generator(live):
            return _Standing("$generator", stored)
        if (node := node_adapter(live)) is not None:
            return _Standing("$node", self._parts(node.node_parts(live), stored, path))
        if isinstance(live, dict) and _must_be_there(live):
            return self._parts(live, stored, path)
        if isinstance(live, list | tuple) and _must_be_there(live):
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
            return _Standing(
                "$state", of_torch.module_state(live, stored, path, self.unfit, self._known)
            )
        if of_torch is not None and of_torch.is_optimizer(live):
            modules = [v for v in _objects(self._state) if of_torch.is_module(v)]
            names = of_torch.names_of_parameters(modules)
            made = of_torch.optimizer_state(live, stored, names, path, self.unfit)
            return _Standing("$state", made)
        if keeps_state(live):
            return _Standing("$state", stored)
        now = state_of(live) if parts_of(live) is None else None
        if not isinstance(now, dict):
            self.unfit.changed.append(f"{path} (a {_type(live)} takes no state of this format)")
            return live
        return _Standing("$state", self._parts(now, stored, path))

    def _parts(self, live: Mapping[Any, Any], stored: Any, path: str) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        found = _by_name(stored)
        for key, item in live.items():
            name = key if key in found else str(key)
            below = found.get(name, _NOTHING)
            if below is _NOTHING:
                below = _below(stored, str(key))
            if below is not _NOTHING and below is not None:
                made[key] = self.lay(item, below, f"{path}.{key}")
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
            made = _from_number(adapter, live, stored)
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
            self.unfit.changed.append(
                f"{path} ({then.dtype} {list(then.shape)} → {now.dtype} {list(now.shape)})"
            )
            return live
        made = stored if now.kind == then.kind and not is_key else adapter.own(now, data)
        return self._one_of(adapter, live, made, path)

    def _one_of(self, adapter: Adapter, live: Any, made: Any, path: str) -> Any:
        """The one value of all names of an array: a file may have it once for each of them."""
        place = adapter.alias_key(live)
        first = made if place is None else self._known.setdefault(place, made)
        if bytes(adapter.bytes_of(first)) != bytes(adapter.bytes_of(made)):
            self.unfit.changed.append(
                f"{path} (is tied to another here, and has values of its own there)"
            )
        return first


_NOTHING = object()


def _by_name(stored: Any) -> dict[Any, Any]:
    if isinstance(stored, Mapping):
        return dict(stored)
    return dict(enumerate(stored)) if isinstance(stored, list | tuple) else {}


def _below(stored: Any, way: str) -> Any:
    """What is at a way of several names, or below a number that was written as one."""
    for sign in ("/", "."):
        first, found, rest = way.partition(sign)
        inner = _by_name(stored)
        key = first if first in inner else int(first) if first.isdigit() else first
        if found and key in inner:
            return _below(inner[key], rest)
        if not found and key in inner:
            return inner[key]
    return _NOTHING


def _plain(live: Any, stored: Any) -> Any:
    """A plain value in the place of another: of an array without dimensions its number."""
    if type(live) in (int, float, bool) and _array_adapter(stored) and stored.ndim == 0:
        value = stored.item()
        return type(live)(value) if type(live)(value) == value else value
    return stored


def _from_number(adapter: Adapter, live: Any, stored: Any) -> Any:
    """An array without dimensions from a number, where a state has one of the two."""
    if type(stored) not in (int, float, bool) or tuple(live.shape) != ():
        return None
    if adapter.kind != "torch":
        return None
    from holdfast.torch.match import number_like

    return number_like(stored, live)


def _holds_arrays(live: Any) -> bool:
    if (node := node_adapter(live)) is not None:
        return any(_holds_arrays(item) for item in node.node_parts(live).values())
    if isinstance(live, dict):
        return any(_holds_arrays(item) for item in live.values())
    if isinstance(live, list | tuple):
        return any(_holds_arrays(item) for item in live)
    return _must_be_there(live)


def _any(stored: Any) -> bool:
    """Whether a stored value has an array in it."""
    if isinstance(stored, Mapping):
        return any(_any(item) for item in stored.values())
    if isinstance(stored, list | tuple):
        return any(_any(item) for item in stored)
    return _array_adapter(stored) is not None


def _array_adapter(value: Any) -> Adapter | None:
    if isinstance(value, bytes | bytearray):
        return None
    return next((each for each in adapters() if each.is_array(value)), None)


def _is_generator(value: Any) -> bool:
    return any(adapter.is_generator(value) for adapter in adapters())


def _objects(state: Any) -> list[Any]:
    """All objects of a state, also those in lists and dicts."""
    if isinstance(state, dict):
        return [each for item in state.values() for each in _objects(item)]
    if isinstance(state, list | tuple):
        return [each for item in state for each in _objects(item)]
    return [state]


def _torch_match(live: Any) -> Any:
    """What knows modules and optimizers, where torch is loaded."""
    if not any(adapter.kind == "torch" for adapter in adapters()):
        return None
    from holdfast.torch import match

    return match if match.is_module(live) or match.is_optimizer(live) else None


def _type(value: Any) -> str:
    return type(value).__name__


def _refuse_foreign(unfit: _Unfit, adopted: dict[str, Any], unused: list[str]) -> None:
    if not (unfit.missing or unfit.unexpected or unfit.changed):
        return
    lines = [f"the adopted checkpoint {adopted['from']} does not fit the state that Run was given."]
    for what, names in (
        ("not in the checkpoint", unfit.missing),
        ("only in the checkpoint", unfit.unexpected),
        ("changed", unfit.changed),
        ("names that Run does not have", unused),
    ):
        if names:
            lines.append(f"  {what}: {name_some(names)}")
    whole = [name for name in unfit.missing if "." not in name]
    anew = " ".join(f"--fresh {name}" for name in whole) or "--fresh NAME"
    lines.append(
        "Nothing was changed. Build the objects as they were, or adopt into a new folder, with "
        f"--name NEW=OLD for another name and {anew} for what is to begin anew."
    )
    raise StateMismatch(
        "\n".join(lines),
        missing=tuple(unfit.missing),
        unexpected=tuple(unfit.unexpected),
        reshaped=tuple(unfit.changed),
    )
