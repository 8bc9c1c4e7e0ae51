"""A checkpoint of another library as it was read: its parts under the names of a run, captured."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

from holdfast._adapters.registry import adapter_of, adapters
from holdfast._errors import HoldfastError, SettingsError, UnstorableState
from holdfast._run.data.course import Position
from holdfast._state.capture import Captured, capture
from holdfast._state.capture_cache import OBJECTS
from holdfast._store.format.image import TensorSpec
from holdfast._store.format.tree import tensor_leaves

TRAINER_STATE = "trainer_state.json"
TRAINER_FILES = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}
ROOT = "."  # the checkpoint itself, where it is that of one object
_COUNTERS = ("step", "global_step", "steps", "iteration", "iterations")
_EPOCHS = ("epoch", "epochs", "current_epoch")
# How other libraries name a state: the object's name, then one of these.
_ENDINGS = ("_state_dict", "_state", "_states")
_NOTHING = object()


@dataclass(frozen=True)
class Adoption:
    source: Path
    step: int | None = None
    epoch: int | None = None  # as the checkpoint says
    names: tuple[tuple[str, str], ...] = ()  # the name in the run, and that in the checkpoint
    fresh: tuple[str, ...] = ()


@dataclass
class Foreign:
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


def _position_of(epoch: int) -> Any:
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
        if name in _COUNTERS and (steps := number_of(value)) is not None:
            counted[name] = steps
    return counted


def prepare_foreign(foreign: Foreign, wanted: Adoption) -> Prepared:
    """Name the parts, find the step and the epoch, and capture all as a run would."""
    paths = _name_parts(
        foreign.source, foreign.parts, wanted.names, lambda old: _path_in(foreign, old)
    )
    left_out = list(foreign.left_out)
    states = {n: _storable(find(foreign.whole, path), n, left_out) for n, path in paths.items()}
    states = {name: value for name, value in states.items() if value is not _NOTHING}
    step, step_from = _find_step(foreign, states, wanted)
    epoch, notes = _find_epoch(foreign, wanted)
    extra = {"generators": foreign.generators, "position": None}
    captured = capture(states, extra)
    captured.tree["extra"]["position"] = _position_of(epoch)
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


def _name_parts(
    source: str,
    parts: Mapping[str, str],
    names: Iterable[tuple[str, str]],
    path_of: Callable[[str], str | None],
) -> dict[str, str]:
    """The path of each state by its name in the run: as given, else as guessed."""
    plain, given = dict(parts), dict[str, str]()
    for new, old in names:
        path = path_of(old)
        if path is None:
            raise SettingsError(
                f"--name {new}={old}: {source} has no {old}.\n"
                f"It has: {', '.join(dict.fromkeys(parts.values())) or 'nothing'}."
            )
        if new in given:
            raise SettingsError(
                f"--name {new}={old}: {new} was given to another part of the checkpoint already.\n"
                "Each part has a name of its own."
            )
        given[new] = path
        plain = {} if path == ROOT else {n: each for n, each in plain.items() if each != path}
        above = plain.get(new, "")
        if above and (above == ROOT or path.startswith(f"{above}.")):
            del plain[new]  # a part of what had the name
    if taken := [name for name in given if name in plain]:
        raise SettingsError(
            f"--name {taken[0]}=…: {source} has a {taken[0]} itself, which would be lost.\n"
            f"Give that one another name too: --name NEW={plain[taken[0]]}."
        )
    return {**plain, **given}


def _path_in(foreign: Foreign, old: str) -> str | None:
    """A path in the whole, or one that begins with the name that was guessed for a part."""
    first, dot, rest = old.partition(".")
    guessed = foreign.parts.get(first)
    by_guess = rest or ROOT if guessed == ROOT else f"{guessed}{dot}{rest}"
    for path in (old, *([] if guessed is None else [by_guess])):
        with contextlib.suppress(KeyError):
            find(foreign.whole, path)
            return path
    return None


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
    return _agree_on_step(foreign.source, counted)


def _agree_on_step(source: str, *counters: Mapping[str, int]) -> tuple[int, str]:
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


# -- tf.train.CheckpointManager ----------------------------------------------------
# The objects exist only in the script. So the tensors and the graph of the objects are stored; the
# first start of the script maps them to the objects of Run.


_BOOKKEEPING = ("save_counter",)
_ITERATIONS = "_iterations"  # where the optimizers of Keras 3 count their steps


def prepare_tensorflow(wanted: Adoption) -> Prepared:
    checkpoints = load_tensorflow()
    bundle = checkpoints.read_bundle(checkpoints.find_prefix(wanted.source))
    graph, states = _named_in_graph(bundle, wanted)
    step, step_from = _step_in_graph(bundle, graph, wanted)
    captured, counts = _capture_graph(bundle, graph, states, wanted.epoch or 0)
    return Prepared(
        source=bundle.prefix,
        kind="",
        captured=captured,
        step=step,
        step_from=step_from,
        states=counts,
        left_out=bundle.left_out,
    )


def load_tensorflow() -> ModuleType:
    # Without its messages at the start; nothing is computed here that could differ.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    try:
        from holdfast.tensorflow import checkpoints
    except ImportError as error:
        raise HoldfastError(str(error)) from error  # with the line that installs it
    return checkpoints


def _named_in_graph(bundle: Any, wanted: Adoption) -> tuple[Any, dict[str, int]]:
    """The graph with the states under the names that they have in the run."""
    graph = bundle.graph
    ways, top = dict(graph.below(0)), graph.nodes[0].children

    def number_at(path: str) -> Any:
        return 0 if path == ROOT else top.get(path, ways.get(path.replace(".", "/")))

    parts = {name: name for name in top if name not in _BOOKKEEPING}
    paths = _name_parts(
        bundle.prefix, parts, wanted.names, lambda old: None if number_at(old) is None else old
    )
    states = {name: number_at(path) for name, path in paths.items()}
    holding = {
        name: number
        for name, number in states.items()
        if any(graph.nodes[below].tensor for _, below in graph.below(number))
    }
    if not holding:
        raise HoldfastError(
            f"{bundle.prefix}: holds no variable.\nName a checkpoint that holds a model."
        )
    # The checkpoint's root may be a state itself, so the run's root is a node of its own.
    shifted = [type(graph.nodes[0])({n: number + 1 for n, number in holding.items()})]
    for node in graph.nodes:
        children = {name: child + 1 for name, child in node.children.items()}
        shifted.append(replace(node, children=children))
    if ROOT in dict(wanted.names).values():
        for _, old in wanted.names:
            shifted[1].children.pop(old, None)
    return type(graph)(shifted), holding


def _step_in_graph(bundle: Any, graph: Any, wanted: Adoption) -> tuple[int, str]:
    if wanted.step is not None:
        return wanted.step, "--step"
    counted: dict[str, int] = {}
    for way, number in graph.below(0):
        tensor = graph.nodes[number].tensor
        name = way.rpartition("/")[2]
        if tensor is not None and (name == _ITERATIONS or way in _COUNTERS):
            value = bundle.values[tensor]
            if value.shape.rank == 0 and value.dtype.is_integer:
                counted[way] = int(value)
    if not counted:
        raise SettingsError(
            f"{bundle.prefix}: has no optimizer and no variable `step` that would say at which "
            "step it was saved.\nSay it: --step N, the optimizer steps that were made."
        )
    optimizers = {way: value for way, value in counted.items() if way.endswith(_ITERATIONS)}
    return _agree_on_step(bundle.prefix, optimizers, counted)


def _capture_graph(
    bundle: Any, graph: Any, states: dict[str, int], epoch: int
) -> tuple[Captured, dict[str, int]]:
    """As a run would capture it: each tensor once, under the first path to it."""
    adapter = adapter_of("tensorflow")
    specs: list[TensorSpec] = []
    values: list[Any] = []
    tree: dict[str, Any] = {}
    numbers: dict[str, int] = {}
    counts: dict[str, int] = {}
    for name in states:
        tree[name] = {}
        for way, below in graph.below(graph.nodes[0].children[name]):
            key = graph.nodes[below].tensor
            if key is None:
                continue
            if key not in numbers:
                numbers[key] = len(specs)
                values.append(bundle.values[key])
                path = f"{name}.{way.replace('/', '.')}" if way else name
                specs.append(adapter.spec(path, values[-1]))
            tree[name][way or name] = {"$t": numbers[key]}
        counts[name] = len(tree[name])
    for node in graph.nodes:
        if node.tensor is not None:
            known = numbers.get(node.tensor)
            node.tensor = None if known is None else specs[known].name
    data = graph.to_bytes()
    extra = {"generators": None, "position": _position_of(epoch), OBJECTS: {"$t": len(specs)}}
    plain = adapter_of("bytes")
    specs.append(plain.spec(f"holdfast.{OBJECTS}", data))
    return Captured({"state": tree, "extra": extra}, specs, [*values, data]), counts
