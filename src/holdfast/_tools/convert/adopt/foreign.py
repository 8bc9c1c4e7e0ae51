"""A checkpoint of another library as it was read: a tree of containers, numbers and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast._run.data.course import Position
from holdfast._state.capture import Captured

ROOT = "."  # the checkpoint itself, where it is that of one object
# How others call what holds a state; before it stands what it is the state of.
_ENDINGS = ("_state_dict", "_state", "_states")
_COUNTERS = ("step", "global_step", "steps", "iteration", "iterations")


@dataclass
class Foreign:
    """What was read, and what it tells."""

    source: str
    kind: str  # in words
    whole: Any
    parts: dict[str, str]  # the name in a run, and the way to it in the whole
    counted: tuple[str, int] | None = None  # what says at which step it was saved
    epochs: float | None = None  # those that are over
    generators: dict[str, Any] | None = None
    left_out: list[str] = field(default_factory=list)


def find(whole: Any, way: str) -> Any:
    """What is at a way: by keys, by numbers, or all names that begin with it; KeyError if not."""
    if way in (ROOT, ""):
        return whole
    if isinstance(whole, Mapping):
        if way in whole:
            return whole[way]
        for at in (at for at, sign in enumerate(way) if sign == "."):
            key, rest = way[:at], way[at + 1 :]
            if key in whole:
                return find(whole[key], rest)
        below = {
            key.removeprefix(f"{way}."): value
            for key, value in whole.items()
            if isinstance(key, str) and key.startswith(f"{way}.")
        }
        if below:
            return below
    elif isinstance(whole, list | tuple):
        first, _, rest = way.partition(".")
        if first.isdigit() and int(first) < len(whole):
            return find(whole[int(first)], rest)
    raise KeyError(way)


def guess_parts(whole: Any, is_tensor: Any) -> dict[str, str]:
    """The names that the parts of a dict have in a run."""
    if not isinstance(whole, Mapping):
        return {"model": ROOT}
    if whole and all(is_tensor(value) for value in whole.values()):
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


def find_steps(values: Mapping[str, Any], number: Any) -> dict[str, int]:
    """What counts steps in these states: optimizers first, else numbers of that name.

    `number` makes one of a value, or None.
    """
    counted: dict[str, int] = {}
    for name, value in values.items():
        entries = value.get("state") if isinstance(value, Mapping) else None
        if isinstance(entries, Mapping) and "param_groups" in value:
            found = {number(e.get("step")) for e in entries.values() if isinstance(e, Mapping)}
            if len(found) == 1 and (steps := found.pop()) is not None:
                counted[f"{name}.state"] = steps
    if counted:
        return counted
    for name, value in values.items():
        if name in _COUNTERS and (steps := number(value)) is not None:
            counted[name] = steps
    return counted


# -- What is to be adopted, and what was read of it ------------------------------------------------


@dataclass(frozen=True)
class Adoption:
    """What is to be adopted, and how."""

    source: Path
    step: int | None = None
    epoch: int | None = None  # as the checkpoint says
    names: tuple[tuple[str, str], ...] = ()  # the name in the run, and that in the checkpoint
    fresh: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """A checkpoint of another library, read and ready to be stored."""

    source: str
    kind: str  # whose it is, in words; empty for TensorFlow, whose objects have a graph
    captured: Captured
    step: int
    step_from: str  # what said so
    epoch: int
    states: dict[str, int]  # names, each with its number of tensors
    left_out: list[str]
    notes: list[str] = field(default_factory=list)


def position_of(epoch: int) -> Any:
    """Where the data stands when so many epochs are over: at the top of one."""
    return None if not epoch else Position(epoch).to_tree()
