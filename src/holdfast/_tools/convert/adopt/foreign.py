"""A checkpoint of another library as it was read: its parts under the names of a run, captured."""

from __future__ import annotations

import argparse
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from holdfast._adapters.registry import adapters
from holdfast._errors import HoldfastError, SettingsError, UnstorableState
from holdfast._run.data.course import Position
from holdfast._state.capture import Captured, capture
from holdfast._store.format.tree import tensor_leaves

ROOT = "."  # the checkpoint itself, where it is that of one object
COUNTERS = ("step", "global_step", "steps", "iteration", "iterations")
_EPOCHS = ("epoch", "epochs", "current_epoch")
# How other libraries name a state: the object's name, then one of these.
_ENDINGS = ("_state_dict", "_state", "_states")
_NOTHING = object()


@dataclass(frozen=True)
class Adoption:
    """The request to adopt a checkpoint."""

    source: Path
    step: int | None = None
    epoch: int | None = None  # as the checkpoint says
    names: tuple[tuple[str, str], ...] = ()  # the name in the run, and that in the checkpoint
    fresh: tuple[str, ...] = ()


@dataclass
class Foreign:
    """A checkpoint as it was read."""

    source: str
    kind: str  # in words
    whole: Any
    parts: dict[str, str]  # the name in a run, and the path in the whole
    counted: tuple[str, int] | None = None  # what says at which step it was saved
    epochs: float | None = None  # those that are over
    generators: dict[str, Any] | None = None
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Prepared:
    """A checkpoint of another library, ready to be stored."""

    source: str
    kind: str  # whose it is, in words; empty for TensorFlow, whose objects have a graph
    captured: Captured
    step: int
    step_from: str  # what said so
    states: dict[str, int]  # names, each with its number of tensors
    left_out: list[str]
    notes: list[str] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return sum(spec.size_bytes for spec in self.captured.specs)


def position_of(epoch: int) -> Any:
    """The position in the data after so many epochs: at the top of one."""
    return None if not epoch else Position(epoch).to_tree()


def find(whole: Any, path: str) -> Any:
    """The value at a path: by keys, by numbers, or all names that begin with it; else KeyError."""
    if path in (ROOT, ""):
        return whole
    if isinstance(whole, Mapping):
        if path in whole:
            return whole[path]
        for at in (at for at, sign in enumerate(path) if sign == "."):
            key, rest = path[:at], path[at + 1 :]
            if key in whole:
                return find(whole[key], rest)
        below = {
            key.removeprefix(f"{path}."): value
            for key, value in whole.items()
            if isinstance(key, str) and key.startswith(f"{path}.")
        }
        if below:
            return below
    elif isinstance(whole, list | tuple):
        first, _, rest = path.partition(".")
        if first.isdigit() and int(first) < len(whole):
            return find(whole[int(first)], rest)
    raise KeyError(path)


def guess_parts(whole: Any, is_tensor: Callable[[Any], bool]) -> dict[str, str]:
    """The names of a dict's parts in a run."""
    if not isinstance(whole, Mapping) or (whole and all(map(is_tensor, whole.values()))):
        return {"model": ROOT}  # the state_dict of one module
    found: dict[str, str] = {}
    for key in whole:
        if isinstance(key, str):
            name = _plain_name(key)
            found[key if name in found or (name != key and name in whole) else name] = key
    return found


def _plain_name(key: str) -> str:
    if key == "state_dict":
        return "model"
    for ending in _ENDINGS:
        if key.endswith(ending) and key != ending:
            return key.removesuffix(ending)
    return key


def _find_steps(values: Mapping[str, Any]) -> dict[str, int]:
    """The counters of steps in these states: of optimizers, else numbers of that name."""
    counted: dict[str, int] = {}
    for name, value in values.items():
        entries = value.get("state") if isinstance(value, Mapping) else None
        if isinstance(entries, Mapping) and "param_groups" in value:
            found = {number_of(e.get("step")) for e in entries.values() if isinstance(e, Mapping)}
            if len(found) == 1 and (steps := found.pop()) is not None:
                counted[f"{name}.state"] = steps
    if counted:
        return counted
    for name, value in values.items():
        if name in COUNTERS and (steps := number_of(value)) is not None:
            counted[name] = steps
    return counted


def prepare_foreign(foreign: Foreign, wanted: Adoption) -> Prepared:
    """Name the parts, find the step and the epoch, and capture all as a run would."""
    paths = _named(foreign, wanted)
    left_out = list(foreign.left_out)
    states = {n: _storable(find(foreign.whole, path), n, left_out) for n, path in paths.items()}
    states = {name: value for name, value in states.items() if value is not _NOTHING}
    step, step_from = _find_step(foreign, states, wanted)
    epoch, notes = _find_epoch(foreign, wanted)
    extra = {"generators": foreign.generators, "position": None}
    captured = capture(states, extra)
    captured.tree["extra"]["position"] = position_of(epoch)
    if not captured.specs:
        raise HoldfastError(
            f"{foreign.source}: holds no tensor.\nName a checkpoint that holds a model."
        )
    counts = {n: len(list(tensor_leaves(captured.tree["state"][n], n))) for n in states}
    return Prepared(
        source=foreign.source,
        kind=foreign.kind,
        captured=captured,
        step=step,
        step_from=step_from,
        states=counts,
        left_out=left_out,
        notes=notes,
    )


def _named(foreign: Foreign, wanted: Adoption) -> dict[str, str]:
    plain, given = dict(foreign.parts), dict[str, str]()
    for new, old in wanted.names:
        try:
            find(foreign.whole, old)
        except KeyError:
            old = _path_of(foreign, new, old)
        refuse_second(new, old, given)
        given[new] = old
        plain = {} if old == ROOT else {n: w for n, w in plain.items() if w != old}
        above = plain.get(new, "")
        if above and (above == ROOT or old.startswith(f"{above}.")):
            del plain[new]  # a part of what had the name
    refuse_lost(foreign.source, given, plain)
    return {**plain, **given}


def refuse_second(new: str, old: str, given: Collection[str]) -> None:
    if new in given:
        raise SettingsError(
            f"--name {new}={old}: {new} was given to another part of the checkpoint already.\n"
            "Each part has a name of its own."
        )


def refuse_lost(source: str, given: Collection[str], plain: Mapping[str, str]) -> None:
    """Refuse a name that another part of the checkpoint has; `plain` has the path of each."""
    if taken := [name for name in given if name in plain]:
        raise SettingsError(
            f"--name {taken[0]}=…: {source} has a {taken[0]} itself, which would be lost.\n"
            f"Give that one another name too: --name NEW={plain[taken[0]]}."
        )


def _path_of(foreign: Foreign, new: str, old: str) -> str:
    """A part by the name that was guessed for it, or by a path that begins with that."""
    first, dot, rest = old.partition(".")
    if first in foreign.parts:
        path = foreign.parts[first]
        found = f"{path}{dot}{rest}" if path != ROOT else rest or ROOT
        with contextlib.suppress(KeyError):
            find(foreign.whole, found)
            return found
    raise SettingsError(
        f"--name {new}={old}: {foreign.source} has no {old}.\n"
        f"It has: {', '.join(dict.fromkeys(foreign.parts.values())) or 'nothing'}."
    )


def _storable(value: Any, path: str, left_out: list[str]) -> Any:
    """The value without what cannot be stored; the paths of that go to `left_out`."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        pairs = [(key, _storable(item, f"{path}.{key}", left_out)) for key, item in value.items()]
        kept = [(key, item) for key, item in pairs if item is not _NOTHING]
        if not isinstance(value, OrderedDict):
            return dict(kept)
        ordered = OrderedDict(kept)
        if hasattr(value, "_metadata"):  # the versions of a module's state
            ordered._metadata = value._metadata  # type: ignore[attr-defined]  # torch's
        return ordered
    if isinstance(value, list | tuple):
        items = [_storable(item, f"{path}.{at}", left_out) for at, item in enumerate(value)]
        # A list keeps its length: its items are found by their number.
        items = [None if item is _NOTHING else item for item in items]
        return items if isinstance(value, list) else tuple(items)
    try:
        capture({"value": value})
    except UnstorableState:
        left_out.append(path)
        return _NOTHING
    return value


def number_of(value: Any) -> int | None:
    """A whole number, also of an array without dimensions; else None."""
    if isinstance(value, bool):
        return None
    if any(adapter.is_array(value) for adapter in adapters()) and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value < 2**53 else None


def _find_step(foreign: Foreign, states: Mapping[str, Any], wanted: Adoption) -> tuple[int, str]:
    if wanted.step is not None:
        return wanted.step, "--step"
    if foreign.counted is not None:
        return foreign.counted[1], foreign.counted[0]
    counted = _find_steps(states)
    if not counted:
        raise SettingsError(
            f"{foreign.source}: has no optimizer and no number `step` that would say at which "
            "step it was saved.\nSay it: --step N, the optimizer steps that were made; "
            "--step 0 begins with these weights."
        )
    return agree_on_step(foreign.source, counted)


def agree_on_step(source: str, *counters: Mapping[str, int]) -> tuple[int, str]:
    """The step, and what says so: of the first group of counters that agree."""
    for counted in counters:
        if len(set(counted.values())) == 1:
            name, value = next(iter(counted.items()))
            return value, name
    told = ", ".join(f"{name} {value}" for name, value in counters[-1].items())
    raise SettingsError(
        f"{source}: what counts steps in it does not agree ({told}).\n"
        "Say at which step the run is to go on: --step N."
    )


def _find_epoch(foreign: Foreign, wanted: Adoption) -> tuple[int, list[str]]:
    """The epoch to begin with, and notes about it."""
    if wanted.epoch is not None:
        return wanted.epoch, []
    if foreign.epochs is not None:
        over = int(foreign.epochs)
        if foreign.epochs == over:
            return over, []
        return over, [
            f"It was saved in the middle of epoch {over}: the data begins at the top of it. "
            "To leave the rest of it out: --epoch N."
        ]
    whole = foreign.whole if isinstance(foreign.whole, Mapping) else {}
    for name in _EPOCHS:
        if (found := number_of(whole.get(name))) is not None:
            return found, [
                f"The data begins at the top of epoch {found} (by {name}). "
                f"If that one is over, say so: --epoch {found + 1}."
            ]
    return 0, ["The data begins at epoch 0: the file names no epoch. For another: --epoch N."]
