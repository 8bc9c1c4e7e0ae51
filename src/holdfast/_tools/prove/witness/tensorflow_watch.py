"""Watches a training in TensorFlow from inside: each update, each batch, each file saved or loaded.

An update is a call from Python after which an optimizer of Keras has counted one more: of its own
`apply`, of a tf.function, or of a strategy's `run`. Nothing can be observed inside a call. So the
state is read before each call, and sent after it if the call was an update.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.checkpoint.checkpoint import TrackableSaver
from tensorflow.python.data.ops.iterator_ops import OwnedIterator
from tensorflow.python.distribute.distribute_lib import StrategyBase
from tensorflow.python.distribute.input_lib import DistributedIterator
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

from holdfast._run.witness.observer import Leaf, Observer, digest_of, whole_leaf
from holdfast._tools.prove.witness.bootstrap import record_fresh_generators
from holdfast._tools.prove.witness.recorder import (
    ScriptRecorder,
    intercept,
    own_frames,
    path_of,
)

if TYPE_CHECKING:
    from holdfast._tools.prove.witness.tensorflow_state import KerasStateReader

_recorder: _KerasRecorder | None = None


def watch(observer: Observer) -> None:
    global _recorder
    record_fresh_generators()
    recorder = _recorder = _KerasRecorder(observer)
    for kind in (Function, ConcreteFunction):
        intercept(kind, "__call__", recorder.call)
    intercept(StrategyBase, "run", recorder.run)
    _watch_iterators(observer, recorder)
    intercept(TrackableSaver, "save", recorder.save)
    intercept(TrackableSaver, "restore", recorder.load)
    recorder.install(tf.random, "set_seed", "tensorflow")


def watch_keras(observer: Observer) -> None:
    from keras.src import saving
    from keras.src.backend.common.variables import Variable
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    from keras.src.saving import saving_api

    from holdfast._tools.prove.witness.tensorflow_state import KerasStateReader

    recorder = _recorder
    assert recorder is not None  # TensorFlow is watched first
    reader = recorder.reader = KerasStateReader(observer)
    intercept(Variable, "__init__", _then(reader.add_variable))
    intercept(BaseOptimizer, "__init__", _then(reader.add_optimizer))
    intercept(BaseOptimizer, "apply", recorder.apply)
    # Each name by which a script or Keras itself may call them.
    keras: Any = sys.modules["keras"]
    places = (saving_api, saving, keras.saving, keras.models)
    for name, around in (
        ("save_model", recorder.save_file),
        ("save_weights", recorder.save_file),
        ("load_model", recorder.load_model),
        ("load_weights", recorder.load_weights),
    ):
        original = getattr(saving_api, name)
        for place in places:
            if getattr(place, name, None) is original:
                intercept(place, name, around)


def _then(add: Callable[[Any], None]) -> Callable[..., None]:
    def begin_and_add(begin: Any, self: Any, /, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        add(self)

    return begin_and_add


class _KerasRecorder(ScriptRecorder):
    def __init__(self, observer: Observer) -> None:
        super().__init__(observer)
        self.reader: KerasStateReader | None = None
        self._here = threading.local()  # whether this thread is in a call that is watched
        self._running = 0  # calls of a strategy, which has threads of its own

    def call(self, call: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
        call_now = functools.partial(call, function, *arguments, **named)
        with self._outermost() as is_outermost:
            return self._update(call_now, (arguments, named)) if is_outermost else call_now()

    def run(self, run: Any, strategy: Any, /, *arguments: Any, **named: Any) -> Any:
        with self._outermost() as is_outermost:
            if not is_outermost:
                return run(strategy, *arguments, **named)
            self._running += 1
            try:
                given = (arguments[1:], named)
                return self._update(lambda: run(strategy, *arguments, **named), given)
            finally:
                self._running -= 1

    def apply(self, apply: Any, optimizer: Any, /, grads: Any, *more: Any, **named: Any) -> Any:
        if self.reader is not None:
            self.reader.add_optimizer(optimizer)  # made before the watch began
        with self._outermost() as is_outermost:
            if not is_outermost:
                return apply(optimizer, grads, *more, **named)
            gradients = whole_leaf([grad for grad in grads if grad is not None])
            return self._update(lambda: apply(optimizer, grads, *more, **named), (), gradients)

    @contextmanager
    def _outermost(self) -> Iterator[bool]:
        """Whether a call is the script's own, and neither part of another nor traced."""
        is_inside = getattr(self._here, "is_inside", False) or self._running > 0
        if is_inside or self.reader is None or not self._observer.is_open or _is_traced():
            yield False
            return
        self._here.is_inside = True
        try:
            yield bool(self.reader.optimizers)
        finally:
            self._here.is_inside = False

    def _update(self, call: Callable[[], Any], given: Any, gradients: Leaf | None = None) -> Any:
        assert self.reader is not None
        before = self.reader.read(own_frames(sys._getframe(2)))
        known = len(self.batches)
        result = call()
        updated = self.reader.updated_since(before)
        if not updated:
            del self.batches[known:]  # taken inside of the call, for an evaluation
            return result
        self._record_given(given)
        batches = self.take_batches()
        for number in updated:
            self._observer.other_framework_trains = True
            self.ask_update(batches, self.reader.update_state(before, number, gradients))
            self.count_update()
        for moment in ("gradient", "update"):  # nothing between the two can be observed
            self._observer.reach(moment)
        return result

    def end(self) -> None:
        if self._observer.is_open and self.updates and self.reader is not None:
            self._observer.send("end", updates=self.updates, **self.reader.read_last())

    def _record_given(self, given: Any) -> None:
        """The arguments of the script's function are its batch, where no dataset gave one."""
        if self._observer.run_sends_batches:
            return
        tensors = [v for v in tf.nest.flatten(given, expand_composites=True) if _is_data(v)]
        if tensors and digest_of(tensors) not in [batch["bytes"] for batch in self.batches]:
            self.record_batch(0, self.updates, None, tensors)

    def save(self, save: Any, saver: Any, /, file_prefix: Any, *more: Any, **named: Any) -> Any:
        """Of tf.train.Checkpoint: several files with one prefix."""

        def save_now() -> Any:
            return save(saver, file_prefix, *more, **named)

        def wait_first() -> Any:
            # TensorFlow writes under another name and renames: no torn file has this name.
            self._observer.reach("tear")
            return save_now()

        return self.record_save(_prefix_of(file_prefix), save_now, wait_first)

    def load(self, load: Any, saver: Any, /, save_path: Any, *more: Any, **named: Any) -> Any:
        return self.record_load(
            _prefix_of(save_path), lambda: load(saver, save_path, *more, **named)
        )

    def save_file(self, save: Any, /, model: Any, filepath: Any, *more: Any, **named: Any) -> Any:
        """Of Keras: one file."""

        def save_now() -> Any:
            return save(model, filepath, *more, **named)

        def tear() -> Any:
            result, path = save_now(), Path(filepath)
            if path.is_file():
                data = path.read_bytes()
                path.write_bytes(data[: len(data) // 2])
                self._observer.reach("tear")
                path.write_bytes(data)
            return result

        return self.record_save(path_of(filepath), save_now, tear)

    def load_model(self, load: Any, /, filepath: Any, *more: Any, **named: Any) -> Any:
        return self.record_load(path_of(filepath), lambda: load(filepath, *more, **named))

    def load_weights(self, load: Any, /, model: Any, *more: Any, **named: Any) -> Any:
        return self.load_model(functools.partial(load, model), *more, **named)


def _is_traced() -> bool:
    if not tf.executing_eagerly():
        return True
    from keras.src.backend.common.stateless_scope import in_stateless_scope

    return bool(in_stateless_scope())


def _is_data(value: Any) -> bool:
    if isinstance(value, tf.Variable):
        return False
    return hasattr(value, "dtype") and hasattr(value, "shape") and value.dtype != tf.resource


def _prefix_of(path: Any) -> str | None:
    return path_of(path.numpy().decode() if isinstance(path, tf.Tensor) else path)


_passes = itertools.count(1)


def _watch_iterators(observer: Observer, recorder: _KerasRecorder) -> None:
    """The iterators of datasets: those of the script, and those inside of a tf.function."""
    since = {"pass": 0}  # batches that functions took from the newest iterator

    def create(create: Any, self: Any, dataset: Any) -> None:
        create(self, dataset)
        since["pass"] = 0

    def take(take: Any, self: Any, *arguments: Any, **named: Any) -> Any:
        batch = take(self, *arguments, **named)
        if observer.is_open and not observer.run_sends_batches:
            if tf.executing_eagerly():
                at = self.__dict__.get("_holdfast_at", 0)
                self._holdfast_at = at + 1
                of = id(self.__dict__.get("_dataset", self))
                recorder.record_batch(of, at, None, _flat(batch))
            else:
                record_in_graph(batch)
        return batch

    def record_in_graph(batch: Any) -> None:
        place = next(_passes)

        def record(*tensors: Any) -> None:
            if observer.is_open and not observer.run_sends_batches:
                recorder.record_batch(-place, since["pass"], None, tensors)
                since["pass"] += 1

        tensors = [value for value in _flat(batch) if value.dtype != tf.variant]
        if tensors:
            tf.numpy_function(record, tensors, [], stateful=True)

    intercept(OwnedIterator, "_create_iterator", create)
    intercept(OwnedIterator, "_next_internal", take)
    intercept(DistributedIterator, "get_next", take)


def _flat(batch: Any) -> list[Any]:
    return [v for v in tf.nest.flatten(batch, expand_composites=True) if hasattr(v, "dtype")]
