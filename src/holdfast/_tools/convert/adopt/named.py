"""The parts of a checkpoint under the names of a run, captured as a run would."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from holdfast._adapters.registry import adapters
from holdfast._errors import HoldfastError, SettingsError, UnstorableState
from holdfast._state.capture import capture
from holdfast._store.format.tree import tensor_leaves
from holdfast._tools.convert.adopt.foreign import (
    ROOT,
    Adoption,
    Foreign,
    Prepared,
    find,
    find_steps,
    position_of,
)


def prepare_foreign(foreign: Foreign, wanted: Adoption) -> Prepared:
    """Name, count and capture it."""
    ways = _named(foreign, wanted)
    left_out = list(foreign.left_out)
    states = {n: _storable(find(foreign.whole, way), n, left_out) for n, way in ways.items()}
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
        epoch=epoch,
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
            old = _way_of(foreign, new, old)
        if new in given:
            raise SettingsError(
                f"--name {new}={old}: {new} was given to another part of the checkpoint already.\n"
                "Each part has a name of its own."
            )
        given[new] = old
        plain = {} if old == ROOT else {n: w for n, w in plain.items() if w != old}
        if _is_within(old, plain.get(new, "")):
            del plain[new]  # a part of what had the name
    if taken := [name for name in given if name in plain]:
        raise SettingsError(
            f"--name {taken[0]}=…: {foreign.source} has a {taken[0]} itself, which would be lost.\n"
            f"Give that one another name too: --name NEW={plain[taken[0]]}."
        )
    return {**plain, **given}


def _way_of(foreign: Foreign, new: str, old: str) -> str:
    """A part by the name that was guessed for it, or by a way that begins with that."""
    first, dot, rest = old.partition(".")
    if first in foreign.parts:
        way = foreign.parts[first]
        found = f"{way}{dot}{rest}" if way != ROOT else rest or ROOT
        try:
            find(foreign.whole, found)
        except KeyError:
            pass
        else:
            return found
    raise SettingsError(
        f"--name {new}={old}: {foreign.source} has no {old}.\n"
        f"It has: {', '.join(dict.fromkeys(foreign.parts.values())) or 'nothing'}."
    )


def _is_within(way: str, above: str) -> bool:
    return bool(above) and (above == ROOT or way.startswith(f"{above}."))


_NOTHING = object()
_EPOCHS = ("epoch", "epochs", "current_epoch")


def _storable(value: Any, path: str, left_out: list[str]) -> Any:
    """The value without what cannot be stored, which is noted."""
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
        # What has a place keeps it: a list with a gap would be another list.
        items = [None if item is _NOTHING else item for item in items]
        return items if isinstance(value, list) else tuple(items)
    try:
        capture({"value": value})
    except UnstorableState:
        left_out.append(path)
        return _NOTHING
    return value


def number_of(value: Any) -> int | None:
    """A whole number, or the one of an array without dimensions."""
    if isinstance(value, bool):
        return None
    if any(adapter.is_array(value) for adapter in adapters()) and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value < 2**53 else None


def _find_step(foreign: Foreign, states: Mapping[str, Any], wanted: Adoption) -> tuple[int, str]:
    """How many steps the checkpoint is away from the beginning."""
    if wanted.step is not None:
        return wanted.step, "--step"
    if foreign.counted is not None:
        return foreign.counted[1], foreign.counted[0]
    counted = find_steps(states, number_of)
    if not counted:
        raise SettingsError(
            f"{foreign.source}: has no optimizer and no number `step` that would say at which "
            "step it was saved.\nSay it: --step N, the optimizer steps that were made; "
            "--step 0 begins with these weights."
        )
    if len(set(counted.values())) == 1:
        name, value = next(iter(counted.items()))
        return value, name
    told = ", ".join(f"{way} {value}" for way, value in counted.items())
    raise SettingsError(
        f"{foreign.source}: what counts steps in it does not agree ({told}).\n"
        "Say at which step the run is to go on: --step N."
    )


def _value(whole: Any, name: str) -> Any:
    return whole.get(name) if isinstance(whole, Mapping) else None


def _find_epoch(foreign: Foreign, wanted: Adoption) -> tuple[int, list[str]]:
    if wanted.epoch is not None:
        return wanted.epoch, []
    if foreign.epochs is None:
        name = next((n for n in _EPOCHS if number_of(_value(foreign.whole, n)) is not None), None)
        if name is None:
            return 0, ["The data begins at epoch 0: it does not say another. To say it: --epoch N."]
        found = number_of(_value(foreign.whole, name)) or 0
        return found, [
            f"The data begins at the top of epoch {found} (by {name}). "
            f"If that one is over, say so: --epoch {found + 1}."
        ]
    over = int(foreign.epochs)
    if foreign.epochs == over:
        return over, []
    return over, [
        f"It was saved in the middle of epoch {over}: the data begins at the top of it. "
        "To leave the rest of it out: --epoch N."
    ]
