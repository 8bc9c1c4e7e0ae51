"""What of a position tf.data can store, and what it cannot.

An iterator can serialize its state: seeds, counts, and the elements in its buffers. Python code
inside a dataset, and random ops in its functions, have a state that cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops, iterator_ops
from tensorflow.python.eager import context

from holdfast._text import say

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_LEAST_BYTES = 4096
_IGNORE = 1  # external state is no error: `Habits` finds it in the dataset
_PYTHON_OPS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
_ASSIGNS = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})
_UNKNOWN_BYTES = 1 << 40
_SLOT_BYTES = 160  # of a state, for each place in a shuffle's buffer, even if empty
# Other ops that count in their kernel have "Random" in their names.
_DRAW_TOO = frozenset({"Multinomial", "TruncatedNormal", "ParameterizedTruncatedNormal"})
_CLEAR_TOO = frozenset({"AnonymousRandomSeedGenerator", "RngReadAndSkip"})
# These take their seeds as arguments, or count in a variable or an iterator.
_ARE_READABLE = ("Stateless", "Stateful")
_EAGER = "__wrapped__"  # the context's prefix for an op that was called eagerly

_examined: set[str] = set()
drawing_functions: list[str] = []  # functions with random ops that cannot be restored

# Raised by an iterator that cannot be serialized.
CannotWrite = (tf.errors.OpError, NotImplementedError)


def is_dataset(value: object) -> bool:
    return isinstance(value, tf.data.Dataset)


def is_distributed_dataset(value: object) -> bool:
    """Made by a strategy: its iterators cannot be serialized."""
    return isinstance(value, tf.distribute.DistributedDataset)


def made_of(dataset: Any) -> Any:
    """The dataset that a strategy has distributed, if it still has it."""
    if is_distributed_dataset(dataset):
        return getattr(dataset, "_original_dataset", None) or tf.data.Dataset.range(0)
    return dataset


def is_iterator(value: object) -> bool:
    return isinstance(value, iterator_ops.OwnedIterator | dataset_ops.NumpyIterator)


def write_state(iterator: Any) -> bytes:
    """An iterator's state; OpError if one of its datasets cannot be serialized."""
    resource = _owned(iterator)._iterator_resource
    state = tf.raw_ops.SerializeIterator(resource_handle=resource, external_state_policy=_IGNORE)
    written: bytes = tf.io.serialize_tensor(state).numpy()
    return written


def can_write(iterator: Any) -> bool:
    """Whether an iterator can be serialized: one over Python code cannot."""
    try:
        write_state(iterator)
    except CannotWrite:
        return False
    return True


def read_state(iterator: Any, written: bytes) -> None:
    """Restore the state of an iterator of the same dataset."""
    state = tf.io.parse_tensor(written, tf.variant)
    tf.raw_ops.DeserializeIterator(
        resource_handle=_owned(iterator)._iterator_resource, serialized=state
    )


def counts_in(written: bytes) -> int:
    """How many counters for drawing seeds an iterator's state has.

    A dataset that has ended while later ones have not is no longer in the state.
    """
    return written.count(b"epoch_num_random_samples")


def _owned(iterator: Any) -> Any:
    return getattr(iterator, "_iterator", iterator)  # as_numpy_iterator() wraps one


class Packed:
    """Bytes of changing length as an array whose size seldom changes.

    Snapshots need a new arena whenever an array changes its size.
    """

    def __init__(self) -> None:
        self._capacity = _LEAST_BYTES

    def pack(self, written: bytes) -> dict[str, Any]:
        while self._capacity < len(written):
            self._capacity *= 2
        array: Bytes = np.zeros(self._capacity, np.uint8)
        array[: len(written)] = np.frombuffer(written, np.uint8)
        return {"length": len(written), "bytes": array}


def unpack(packed: dict[str, Any]) -> bytes:
    return bytes(packed["bytes"][: packed["length"]])


class Habits:
    """Properties of datasets that decide how their position can be restored."""

    def __init__(self, roots: list[Any]) -> None:
        self.calls_python = False
        self.generates = False  # from_generator
        self.draws: list[str] = []  # random ops that count in their kernel
        self.draws_seeded = False
        self.draws_in_parallel = False
        self.draws_variables = False  # of a tf.random.Generator
        self.writes_variables = False  # such as the seeds of Keras layers
        self.runs_ahead = False  # it prefetches
        self.is_ordered = all(each.options().deterministic is not False for each in roots)
        self.drawing: list[Any] = []  # datasets that draw seeds for each iterator
        self.joins = False  # concatenates datasets
        self.seeds: list[int] = []  # of the shuffles
        self.repeats = False  # a dataset that draws seeds, more than once in a pass
        self.slot_bytes = 0  # approximate, of the state of a new iterator
        self.buffer_bytes = 0  # approximate, in shuffles and caches
        self.cache_bytes = 0  # approximate, in caches in memory
        self.python_functions: list[Any] = []
        for each in (part for root in roots for part in _all_of(root)):
            self._examine(each)

    @property
    def shuffles_unseeded(self) -> bool:
        pairs = zip(self.seeds[::2], self.seeds[1::2], strict=True)
        return any(pair == (0, 0) for pair in pairs)

    @property
    def keeps_place(self) -> bool:
        """Whether an iterator's state in mid-pass is its whole position.

        Random ops restart their count in each pass: their position is restored by a replay.
        """
        return not self.generates and (not self.draws_seeded or self.draws_in_parallel)

    def warnings(self) -> list[str]:
        said = (
            (
                self.draws_seeded and self.draws_in_parallel,
                f"the dataset draws random numbers by {', '.join(self.draws)} in parallel calls: "
                "which element gets which differs in every attempt.\n"
                "To be exact, use tf.random.stateless_… with seeds from the data, for example of "
                "Dataset.random(seed), or no num_parallel_calls.",
            ),
            (
                self.draws_variables and self.runs_ahead,
                "the dataset draws from a tf.random.Generator ahead of the batch that is used: "
                "after a restart it is not where it was.\n"
                "To be exact, use tf.random.stateless_… with seeds from the data, for example of "
                "Dataset.random(seed).",
            ),
            (
                self.writes_variables,
                "the dataset changes variables, as random layers of Keras do, and TensorFlow does "
                "so ahead of the batch that is used: after a restart they are not where they "
                "were.\n"
                "To be exact, call the layer in the training step, or use tf.random.stateless_… "
                "with seeds from the data, for example of Dataset.random(seed).",
            ),
            (
                self.calls_python,
                "the dataset calls Python code, and TensorFlow does so ahead of the batch that is "
                "used: what that code draws from global generators (random, np.random) is "
                "something else after a restart.\n"
                "To be exact, let it draw from a generator of its own, np.random.default_rng(seed),"
                " and not in parallel calls. Code that draws nothing is exact.",
            ),
            (
                not self.is_ordered,
                "the dataset's order is not deterministic, as it was told: which batch comes "
                "next depends on what is ready first, in every attempt.",
            ),
        )
        return [text for holds, text in said if holds]

    def _examine(self, dataset: Any) -> None:
        kind = type(dataset).__name__
        is_parallel = kind.startswith("_Parallel")
        if _draws_seeds(dataset):
            self.drawing.append(dataset)
        self.joins |= kind == "_ConcatenateDataset"
        if kind == "_ShuffleDataset":
            self.seeds += [int(dataset._seed), int(dataset._seed2)]
            self.slot_bytes += _buffer_size(dataset) * _SLOT_BYTES
            self.buffer_bytes += _buffer_size(dataset) * _element_bytes(dataset._input_dataset)
        if kind == "_RepeatDataset" and int(dataset._count) not in (0, 1):
            self.repeats |= any(_draws_seeds(each) for each in _all_of(dataset))
        if kind == "CacheDataset" and not dataset._filename.numpy():
            count = int(dataset._input_dataset.cardinality())
            element = _element_bytes(dataset._input_dataset)
            size = count * element if count >= 0 and element else _UNKNOWN_BYTES
            self.cache_bytes += size
            self.buffer_bytes += size
        self.runs_ahead |= is_parallel or kind.startswith("_Prefetch")
        if is_parallel and getattr(dataset, "_deterministic", None) == "false":
            self.is_ordered = False
        functions = dataset._functions()
        nodes = [node for function in functions for node in _nodes(function)]
        ops = {node.op for node in nodes}
        self.generates |= "GeneratorDataset" in ops
        if ops & _PYTHON_OPS or "GeneratorDataset" in ops:
            self.calls_python = True
            self.python_functions += [getattr(each, "_func", None) for each in functions]
        draws = hidden_draws(nodes)
        self.draws += draws
        self.draws_seeded |= any(
            is_hidden_draw(node.op) and (node.attr["seed"].i or node.attr["seed2"].i)
            for node in nodes
        )
        self.draws_in_parallel |= is_parallel and bool(draws)
        self.draws_variables |= any(
            op.startswith("Stateful") or op == "RngReadAndSkip" for op in ops
        )
        self.writes_variables |= bool(ops & _ASSIGNS)


def _all_of(dataset: Any) -> Iterator[Any]:
    yield dataset
    for each in dataset._inputs():
        yield from _all_of(each)


def _nodes(function: Any) -> Iterator[Any]:
    """The nodes of a function of a dataset, and of those that it calls."""
    graph = function.function.graph.as_graph_def()
    yield from graph.node
    for inner in graph.library.function:
        yield from inner.node_def


def _draws_seeds(dataset: Any) -> bool:
    return type(dataset).__name__ in ("_ShuffleDataset", "_RandomDataset")


def _buffer_size(shuffle: Any) -> int:
    elements, count = int(shuffle._buffer_size), int(shuffle._input_dataset.cardinality())
    return min(elements, count) if count >= 0 else elements


def _element_bytes(dataset: Any) -> int:
    """Approximate: elements without a shape do not count."""
    total = 0
    for spec in tf.nest.flatten(dataset.element_spec):
        shape = getattr(spec, "shape", None)
        count = None if shape is None else shape.num_elements()
        size = getattr(getattr(spec, "dtype", None), "size", 0)
        total += (count or 0) * size
    return total


def length_of(dataset: Any) -> int | None:
    """The number of batches of one pass, if it is known."""
    if is_distributed_dataset(dataset) and not hasattr(dataset, "_original_dataset"):
        return None
    count = int(made_of(dataset).cardinality())
    if count == tf.data.INFINITE_CARDINALITY or count < 0:
        return None
    return count


# -- Random ops that count only in their kernels, which cannot be read ------------------


def is_hidden_draw(op: str) -> bool:
    """Whether an op draws random numbers and counts them in its kernel."""
    if op.startswith(_ARE_READABLE) or op in _CLEAR_TOO or "Dataset" in op:
        return False
    return "Random" in op or op in _DRAW_TOO


def hidden_draws(nodes: Iterable[Any]) -> list[str]:
    return sorted({node.op for node in nodes if is_hidden_draw(node.op)})


def find_hidden_draws() -> None:
    """Find tf.functions whose draws differ after a restart; the first one is reported."""
    if not context.executing_eagerly():
        return
    held = context.context()
    if not held._initialized:
        return
    for name in held.list_function_names() - _examined:
        _examined.add(name)
        if name.startswith(_EAGER) or "_Dataset_" in name:  # a feed examines those of its data
            continue
        ops = hidden_draws(held.get_function_def(name).node_def)
        if ops:
            drawing_functions.append(name)
            if len(drawing_functions) == 1:
                say(
                    f"a tf.function draws random numbers by {', '.join(ops)}, whose count "
                    f"cannot be read ({plain_name(name)}): after a restart they start over, so the "
                    "run does not go on to the same bits.\n"
                    "To be exact, draw from a tf.random.Generator that is part of the state, or "
                    "by tf.random.stateless_… and Keras layers, which keep their seeds."
                )


def plain_name(name: str) -> str:
    """A function's name in the script: __inference_step_517 is step.

    >>> plain_name("__inference_step_517")
    'step'
    """
    bare = re.sub("^__(inference|forward|backward)_", "", name)
    head, _, number = bare.rpartition("_")
    return head if head and number.isdigit() else bare
