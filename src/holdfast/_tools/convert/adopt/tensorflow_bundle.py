"""Checkpoints of tf.train.CheckpointManager, as the first checkpoint of a run.

Their objects exist only in the script. So the tensors and the graph of the objects are stored; the
first start of the script maps them to the objects of Run.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import ModuleType
from typing import Any

from holdfast._adapters.registry import adapter_of
from holdfast._errors import HoldfastError, SettingsError
from holdfast._state.capture import Captured
from holdfast._state.capture_cache import OBJECTS
from holdfast._store.format.image import TensorSpec
from holdfast._tools.convert.adopt.foreign import (
    COUNTERS,
    ROOT,
    Adoption,
    Prepared,
    agree_on_step,
    position_of,
    refuse_lost,
    refuse_second,
)

_BOOKKEEPING = ("save_counter",)
_ITERATIONS = "_iterations"  # where the optimizers of Keras 3 count their steps


def prepare_tensorflow(wanted: Adoption) -> Prepared:
    checkpoints = load_tensorflow()
    bundle = checkpoints.read_bundle(checkpoints.find_prefix(wanted.source))
    graph, states = _named(bundle, wanted)
    step, step_from = _find_step(bundle, graph, wanted)
    captured, counts = _captured(bundle, graph, states, wanted.epoch or 0)
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


def _named(bundle: Any, wanted: Adoption) -> tuple[Any, dict[str, int]]:
    """The graph with the states under the names that they have in the run."""
    graph = bundle.graph
    ways = dict(graph.below(0))
    plain = {n: c for n, c in graph.nodes[0].children.items() if n not in _BOOKKEEPING}
    given: dict[str, int] = {}
    for new, old in wanted.names:
        number = 0 if old == ROOT else ways.get(old.replace(".", "/"))
        if number is None:
            raise SettingsError(
                f"--name {new}={old}: {bundle.prefix} has no {old}.\n"
                f"It has: {', '.join(plain) or 'nothing'}."
            )
        refuse_second(new, old, given)
        given[new] = number
        plain = {} if old == ROOT else {n: c for n, c in plain.items() if n != old}
    refuse_lost(bundle.prefix, given, {name: name for name in plain})
    states = {**plain, **given}
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


def _find_step(bundle: Any, graph: Any, wanted: Adoption) -> tuple[int, str]:
    if wanted.step is not None:
        return wanted.step, "--step"
    counted: dict[str, int] = {}
    for way, number in graph.below(0):
        tensor = graph.nodes[number].tensor
        name = way.rpartition("/")[2]
        if tensor is not None and (name == _ITERATIONS or way in COUNTERS):
            value = bundle.values[tensor]
            if value.shape.rank == 0 and value.dtype.is_integer:
                counted[way] = int(value)
    if not counted:
        raise SettingsError(
            f"{bundle.prefix}: has no optimizer and no variable `step` that would say at which "
            "step it was saved.\nSay it: --step N, the optimizer steps that were made."
        )
    optimizers = {way: value for way, value in counted.items() if way.endswith(_ITERATIONS)}
    return agree_on_step(bundle.prefix, optimizers, counted)


def _captured(
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
    extra = {"generators": None, "position": position_of(epoch), OBJECTS: {"$t": len(specs)}}
    plain = adapter_of("bytes")
    specs.append(plain.spec(f"holdfast.{OBJECTS}", data))
    return Captured({"state": tree, "extra": extra}, specs, [*values, data]), counts
