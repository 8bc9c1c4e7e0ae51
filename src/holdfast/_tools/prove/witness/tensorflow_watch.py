"""Watches a training in TensorFlow from inside: each update, each batch, each file saved or loaded.

An update is a call from Python after which an optimizer of Keras has counted one more: of its own
`apply`, of a tf.function, or of a strategy's `run`. Nothing can be seen in the middle of a call, so
the sight of an update is told after it, with what there was before it.
"""

from __future__ import annotations

import atexit
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

from holdfast._run.witness.eye import Eye
from holdfast._run.witness.leaves import Leaf, digest_of, whole_leaf
from holdfast._tools.prove.witness.arrive import SEEDS, note_fresh_generators, note_seeds
from holdfast._tools.prove.witness.telling import Teller, path_of
from holdfast._tools.prove.witness.variables import own_frames

if TYPE_CHECKING:
    from holdfast._tools.prove.witness.tensorflow_state import Sights

_watcher: _Watcher | None = None


def watch(eye: Eye) -> None:
    """Watch everything that this process trains with TensorFlow."""
    global _watcher
    note_fresh_generators()
    watcher = _watcher = _Watcher(eye)
    for kind in (Function, ConcreteFunction):
        _replace(kind, "__call__", watcher.calling)
    _replace(StrategyBase, "run", watcher.running)
    _watch_iterators(eye, watcher)
    _replace(TrackableSaver, "save", watcher.saving)
    _replace(TrackableSaver, "restore", watcher.loading)
    note_seeds(tf.random, "set_seed", "tensorflow")
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        note_seeds(numpy.random, "seed", "numpy")
    sys.addaudithook(watcher.hear_renames)
    atexit.register(watcher.end)


def watch_keras(eye: Eye) -> None:
    """Watch the optimizers, variables and files of Keras as well."""
    from keras.src import saving
    from keras.src.backend.common.variables import Variable
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    from keras.src.saving import saving_api

    from holdfast._tools.prove.witness.tensorflow_state import Sights

    watcher = _watcher
    if watcher is None:
        return
    sights = watcher.sights = Sights(eye)
    _replace(Variable, "__init__", _then(sights.note_variable))
    _replace(BaseOptimizer, "__init__", _then(sights.note_optimizer))
    _replace(BaseOptimizer, "apply", watcher.applying)
    # Each name by which a script or Keras itself may call them.
    keras: Any = sys.modules["keras"]
    places = (saving_api, saving, keras.saving, keras.models)
    changed: dict[str, tuple[Any, Callable[..., Any]]] = {
        "save_model": (saving_api.save_model, watcher.saving_file),
        "save_weights": (saving_api.save_weights, watcher.saving_file),
        "load_model": (saving_api.load_model, watcher.loading_model),
        "load_weights": (saving_api.load_weights, watcher.loading_weights),
    }
    for name, (function, change) in changed.items():
        noted = change(function)
        for place in places:
            if getattr(place, name, None) is function:
                setattr(place, name, noted)


def _replace(kind: Any, name: str, change: Callable[[Any], Any]) -> None:
    setattr(kind, name, change(getattr(kind, name)))


def _then(note: Callable[[Any], None]) -> Callable[[Any], Any]:
    def change(begin: Any) -> Any:
        @functools.wraps(begin)
        def begin_and_note(self: Any, *arguments: Any, **named: Any) -> None:
            begin(self, *arguments, **named)
            note(self)

        return begin_and_note

    return change


class _Watcher(Teller):
    def __init__(self, eye: Eye) -> None:
        super().__init__(eye)
        self.sights: Sights | None = None
        self._here = threading.local()  # whether this thread is in a call that is watched
        self._running = 0  # calls of a strategy, which has threads of its own

    # -- updates ----------------------------------------------------------------------

    def calling(self, call: Any) -> Any:
        @functools.wraps(call)
        def call_and_tell(function: Any, *arguments: Any, **named: Any) -> Any:
            with self._outermost() as is_outermost:
                if not is_outermost:
                    return call(function, *arguments, **named)
                return self._update(lambda: call(function, *arguments, **named), (arguments, named))

        return call_and_tell

    def running(self, run: Any) -> Any:
        @functools.wraps(run)
        def run_and_tell(strategy: Any, *arguments: Any, **named: Any) -> Any:
            with self._outermost() as is_outermost:
                if not is_outermost:
                    return run(strategy, *arguments, **named)
                self._running += 1
                try:
                    return self._update(
                        lambda: run(strategy, *arguments, **named), (arguments[1:], named)
                    )
                finally:
                    self._running -= 1

        return run_and_tell

    def applying(self, apply: Any) -> Any:
        @functools.wraps(apply)
        def apply_and_tell(optimizer: Any, grads: Any, *more: Any, **named: Any) -> Any:
            if self.sights is not None:
                self.sights.note_optimizer(optimizer)  # made before it was watched
            with self._outermost() as is_outermost:
                if not is_outermost:
                    return apply(optimizer, grads, *more, **named)
                gradients = whole_leaf([grad for grad in grads if grad is not None])
                return self._update(lambda: apply(optimizer, grads, *more, **named), (), gradients)

        return apply_and_tell

    @contextmanager
    def _outermost(self) -> Iterator[bool]:
        """Whether a call is the script's own, and neither part of another nor traced."""
        is_inside = getattr(self._here, "is_inside", False) or self._running > 0
        if is_inside or self.sights is None or not self._eye.is_open or _is_traced():
            yield False
            return
        self._here.is_inside = True
        try:
            yield bool(self.sights.optimizers)
        finally:
            self._here.is_inside = False

    def _update(self, call: Callable[[], Any], given: Any, gradients: Leaf | None = None) -> Any:
        assert self.sights is not None
        look = self.sights.look(own_frames(sys._getframe(2)))
        known = len(self.batches)
        result = call()
        updated = self.sights.updated(look)
        if updated:
            self._note_given(given)
        else:
            del self.batches[known:]  # taken inside of the call, for an evaluation
        batches = self.take_batches() if updated else []
        for number in updated:
            self._eye.is_elsewhere_told = True
            self._amid = "update"
            self._eye.ask(
                "sight",
                number=self.updates,
                mark=self._eye.mark,
                batches=batches,
                seeds=SEEDS if self.updates == 0 else {},
                **self.sights.sight(look, number, gradients),
            )
            self.updates += 1
            self._amid = "after the update"
        if updated:
            for moment in ("gradient", "update"):  # nothing lies between them that is seen
                self._eye.reach(moment)
        return result

    def end(self) -> None:
        """The script is over: what it has in the end."""
        if self._eye.is_open and self.updates and self.sights is not None:
            self._eye.tell("end", updates=self.updates, **self.sights.take_last())

    # -- batches ----------------------------------------------------------------------

    def _note_given(self, given: Any) -> None:
        """What a function of the script was given is its batch, where no dataset gave one."""
        if self._eye.run_tells_batches:
            return
        tensors = [v for v in tf.nest.flatten(given, expand_composites=True) if _is_data(v)]
        if tensors and digest_of(tensors) not in [batch["bytes"] for batch in self.batches]:
            self.note_batch(0, self.updates, None, tensors)

    # -- files ------------------------------------------------------------------------

    def saving(self, save: Any) -> Any:
        """Of tf.train.Checkpoint, whatever calls it: several files with one beginning."""

        @functools.wraps(save)
        def save_and_tell(saver: Any, file_prefix: Any, *more: Any, **named: Any) -> Any:
            def save_now() -> Any:
                return save(saver, file_prefix, *more, **named)

            def wait_first() -> Any:
                # TensorFlow writes beside and renames: what is torn is not there yet.
                self._eye.reach("tear")
                return save_now()

            return self.tell_save(_prefix_of(file_prefix), save_now, wait_first)

        return save_and_tell

    def loading(self, load: Any) -> Any:
        @functools.wraps(load)
        def load_and_tell(saver: Any, save_path: Any, *more: Any, **named: Any) -> Any:
            return self.tell_load(
                _prefix_of(save_path), lambda: load(saver, save_path, *more, **named)
            )

        return load_and_tell

    def saving_file(self, save: Any) -> Any:
        """Of Keras: one file."""

        @functools.wraps(save)
        def save_and_tell(model: Any, filepath: Any, *more: Any, **named: Any) -> Any:
            def save_now() -> Any:
                return save(model, filepath, *more, **named)

            def tear() -> Any:
                result, path = save_now(), Path(filepath)
                if path.is_file():
                    data = path.read_bytes()
                    path.write_bytes(data[: len(data) // 2])
                    self._eye.reach("tear")
                    path.write_bytes(data)
                return result

            return self.tell_save(path_of(filepath), save_now, tear)

        return save_and_tell

    def loading_model(self, load: Any) -> Any:
        @functools.wraps(load)
        def load_and_tell(filepath: Any, *more: Any, **named: Any) -> Any:
            return self.tell_load(path_of(filepath), lambda: load(filepath, *more, **named))

        return load_and_tell

    def loading_weights(self, load: Any) -> Any:
        @functools.wraps(load)
        def load_and_tell(model: Any, filepath: Any, *more: Any, **named: Any) -> Any:
            return self.tell_load(path_of(filepath), lambda: load(model, filepath, *more, **named))

        return load_and_tell


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


def _watch_iterators(eye: Eye, watcher: _Watcher) -> None:
    """The iterators of datasets: those of the script, and those inside of a tf.function."""
    since = {"pass": 0}  # batches that functions took from the newest iterator

    def creating(create: Any) -> Any:
        @functools.wraps(create)
        def create_and_note(self: Any, dataset: Any) -> None:
            create(self, dataset)
            since["pass"] = 0

        return create_and_note

    def giving(give: Any) -> Any:
        @functools.wraps(give)
        def give_and_note(self: Any, *arguments: Any, **named: Any) -> Any:
            batch = give(self, *arguments, **named)
            if eye.is_open and not eye.run_tells_batches:
                if tf.executing_eagerly():
                    at = self.__dict__.get("_holdfast_at", 0)
                    self._holdfast_at = at + 1
                    of = id(self.__dict__.get("_dataset", self))
                    watcher.note_batch(of, at, None, _flat(batch))
                else:
                    _note_in_graph(batch)
            return batch

        return give_and_note

    def _note_in_graph(batch: Any) -> None:
        place = next(_passes)

        def note(*tensors: Any) -> None:
            if eye.is_open and not eye.run_tells_batches:
                watcher.note_batch(-place, since["pass"], None, tensors)
                since["pass"] += 1

        tensors = [value for value in _flat(batch) if value.dtype != tf.variant]
        if tensors:
            tf.numpy_function(note, tensors, [], stateful=True)

    _replace(OwnedIterator, "_create_iterator", creating)
    _replace(OwnedIterator, "_next_internal", giving)
    _replace(DistributedIterator, "get_next", giving)


def _flat(batch: Any) -> list[Any]:
    return [v for v in tf.nest.flatten(batch, expand_composites=True) if hasattr(v, "dtype")]
