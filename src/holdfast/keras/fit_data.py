"""The data of a fit: which batch comes next, and how to reach it in another attempt.

Keras draws the order of its data from global generators, in other threads and ahead of the batch
that is used. So each epoch draws from seeds of its own, made of the generators' states when the
fit began and of the epoch's number. Where Python makes the batches, each batch does.
"""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
from keras.src.trainers import data_adapters
from keras.src.utils.module_utils import tensorflow as tf

from holdfast._run.data.course import Lap, Position
from holdfast._run.data.feed import (
    Seeds,
    apart,
    each_apart,
    held_generators,
    mix,
    mix_all,
    replay,
    reseed,
    seed_globals,
    seeds_of,
)
from holdfast._run.data.session_feeds import LoaderFeed
from holdfast._run.data.tensorflow_feed import DatasetFeed
from holdfast._run.driver import LoopDriver
from holdfast._state.capture import capture_generators

_HOOKS = -3  # tells the seeds of an epoch's beginning and end from those of its batches


class BatchCounter:
    """What `run.batches` is given: its items are None, Keras takes the batches itself.

    The position is in the record of the fit. The reference is weak: a search for random generators
    in here would reach all of Keras, and an unused name in it would import TensorFlow.
    """

    def __init__(self, data: FitData) -> None:
        self._data: Any = weakref.ref(data)  # the fit has it

    def state_dict(self) -> dict[str, Any]:
        self._data().store()
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass

    def __len__(self) -> int:
        length: int | None = self._data().length
        if length is None:
            raise TypeError("the number of batches is not known")
        return length

    def __iter__(self) -> Iterator[None]:
        items: Iterator[None] = self._data().items()
        return items


class FitData:
    def __init__(
        self, run: Any, epoch_iterator: Any, stored: Any, store: Callable[[], None]
    ) -> None:
        self.store = store  # writes the position into the record of the fit
        self._epochs = epoch_iterator
        self.lock = threading.RLock()
        self.iterator: Any = None
        stored = stored or {}
        self._seeds = stored.get("seeds") or seeds_of(capture_generators(devices=False))
        self._pass = stored.get("pass", 0)  # the iterator that is used, or the next one
        self.used = stored.get("used", 0)  # batches of it
        self._done = stored.get("done", 0)  # batches of this epoch
        self._ended = stored.get("ended", 0)  # epochs
        self._source: FitSource = source_of(run, epoch_iterator, self.lock)
        self._source.load(stored.get("source"))
        if self._ended:
            self._source.catch_up(self._ended, self._hooks)

    def position(self) -> dict[str, Any]:
        return {
            "seeds": self._seeds,
            "pass": self._pass,
            "used": self.used,
            "done": self._done,
            "ended": self._ended,
            "source": self._source.state(),
        }

    def example(self) -> Any:
        """A batch that is not used for training, or something with its shapes."""
        return self._source.example()

    def items(self) -> Iterator[None]:
        """One for each batch that is left in the epoch."""
        length = self.length
        if length is None:
            return itertools.repeat(None)
        return itertools.repeat(None, max(0, length - self._done))

    @property
    def length(self) -> int | None:
        """The batches of this epoch, as EpochIterator counts them."""
        per_epoch, known = self._epochs.steps_per_epoch, self._epochs._num_batches
        if not per_epoch:
            return int(known) if known else None
        if not known:
            return int(per_epoch)
        return int(min(per_epoch, known - self.used + self._done))

    # -- epochs ------------------------------------------------------------------------

    def begin_epoch(self, number: int) -> None:
        with self._hooks(number, 0):
            self._epochs.data_adapter.on_epoch_begin()
        length = self.length
        if self.iterator is None and (length is None or self._done < length):
            seeds = mix_all(self._seeds, self._pass)
            self.iterator = self._source.open(self._pass, self.used, seeds)

    def use(self, batches: int) -> None:
        self.used += batches
        self._done += batches

    def end_lap(self) -> None:
        """All batches of the epoch are used."""
        known = self._epochs._num_batches
        if not self._epochs.steps_per_epoch or (known and self.used >= known):
            self.end_pass()
        with self._hooks(self._ended, 1):
            self._epochs.data_adapter.on_epoch_end()

    def end_epoch(self) -> None:
        self._ended += 1
        self._done = 0

    def end_pass(self) -> None:
        self.iterator = None
        self._pass += 1
        self.used = 0

    def _hooks(self, epoch: int, which: int) -> Any:
        return apart(mix_all(self._seeds, _HOOKS, epoch, which))


# -- the sources of batches that Keras knows, each opened at any batch of any pass ------------


class FitSource:
    """Batches that Python makes, in the thread that trains; this one replays them."""

    def __init__(self, run: Any, epochs: Any, lock: Any) -> None:
        self._epochs = epochs
        self._adapter = epochs.data_adapter
        self._lock = lock
        self._context = LoopDriver(run).context
        self._prepare()

    def _prepare(self) -> None:
        """Make the source ready, before its state is loaded."""

    def open(self, number: int, used: int, seeds: Seeds) -> Any:  # noqa: ARG002  other sources use it
        batches = each_apart(self._epochs._get_iterator(), seeds)
        replay(batches, used, self._adapter)
        return batches

    def state(self) -> Any:
        """The state of a source that can store its position."""

    def load(self, state: Any) -> None:
        pass

    def catch_up(self, ended: int, hooks: Callable[[int, int], Any]) -> None:
        """Repeat what the epochs of earlier attempts did to the source."""

    def example(self) -> Any:
        with apart():
            return next(iter(self._epochs._get_iterator()))


class TorchLoader(FitSource):
    """A torch DataLoader on the torch backend: the user's own, or the one made of arrays."""

    def _prepare(self) -> None:
        self._feed = LoaderFeed(self._epochs._get_iterator(), self._context)

    def open(self, number: int, used: int, seeds: Seeds) -> Any:
        return open_loader(self._feed, number, used, seeds)


def open_loader(feed: LoaderFeed, number: int, used: int, seeds: Seeds) -> Iterator[Any]:
    goal = Position(number, batches=used, world=feed.context.world) if used else None
    with apart(mix_all(seeds, -1)):
        batches = feed.open(Lap(number, 0, goal=goal), seeds)
        first = list(itertools.islice(batches, 1))  # with it the sampler has drawn its order
    return itertools.chain(first, batches)


class ForTensorFlow(FitSource):
    """Data that Keras makes a tf.data.Dataset of, and trains on in a graph."""

    def example(self) -> Any:
        spec = self._epochs._distributed_dataset.element_spec
        return keras.tree.map_structure(_with_shape, spec)

    def _make_again(self) -> None:
        strategy = self._epochs._distribute_strategy
        dataset = self._adapter.get_tf_dataset()
        self._epochs._distributed_dataset = strategy.experimental_distribute_dataset(dataset)


class Dataset(ForTensorFlow):
    """A tf.data.Dataset of the user: its iterator stores its position, if it can."""

    def _prepare(self) -> None:
        self._feed = DatasetFeed(self._epochs._distributed_dataset, self._context)
        self._stored: Any = None

    def state(self) -> Any:
        # In an attempt that began after the last batch of a pass, the stored state is still valid.
        return self._stored if self._feed._iterator is None else self._feed.state()

    def load(self, state: Any) -> None:
        self._stored = state

    def open(self, number: int, used: int, seeds: Seeds) -> Any:
        stored, self._stored = self._stored, None
        world = self._context.world
        goal = Position(number, batches=used, state=stored, world=world) if used else None
        self._feed.open(Lap(number, 0, goal=goal, state=None if used else stored), seeds)
        return self._feed._iterator


def _with_shape(spec: Any) -> Any:
    if spec is None or not hasattr(spec, "shape"):
        return None
    values = getattr(spec, "_value_specs", None)  # of several replicas
    first = values[0] if values else spec
    # A symbolic build reads no more of a tensor than this.
    return SimpleNamespace(shape=tuple(first.shape), dtype=first.dtype)


class Arrays(ForTensorFlow):
    """Arrays on TensorFlow: the order is ours, everything else is done by Keras."""

    def _prepare(self) -> None:
        self._how = self._adapter._shuffle
        if not self._how:
            return
        self._order: Any = None
        shuffle, self._adapter._shuffle = tf.random.shuffle, True
        # Keras calls it once when it makes batches of arrays, and it does so here.
        tf.random.shuffle = self._ordered
        try:
            self._make_again()
        finally:
            tf.random.shuffle = shuffle
            self._adapter._shuffle = self._how

    def open(self, number: int, used: int, seeds: Seeds) -> Any:  # noqa: ARG002  the seeds depend on it
        if self._how:
            self._order = self._draw(seeds)
        iterator = iter(self._epochs._distributed_dataset)
        replay(iterator, used, self._adapter)
        return iterator

    def _ordered(self, indices: Any) -> Any:
        order = tf.numpy_function(lambda: self._order, [], tf.int64)
        return tf.ensure_shape(order, indices.shape)

    def _draw(self, seeds: Seeds) -> np.ndarray[Any, Any]:
        draw = np.random.default_rng(seeds["numpy"])
        count, size = self._adapter._num_samples, self._adapter._batch_size
        if self._how != "batch":
            return draw.permutation(count).astype(np.int64)
        starts = range(0, count, size)
        parts = [draw.permutation(np.arange(at, min(at + size, count))) for at in starts]
        return np.concatenate(parts).astype(np.int64)


class Generated(ForTensorFlow):
    """Batches that Python makes for TensorFlow, in a thread of its own."""

    def _prepare(self) -> None:
        self._aim: tuple[int, int, Seeds] = (0, 0, {})
        self._wrap()
        self._make_again()

    def _wrap(self) -> None:
        own = self._adapter.generator
        self._adapter.generator = lambda: self._apart(own())

    def open(self, number: int, used: int, seeds: Seeds) -> Any:
        self._aim = (number, used, seeds)
        return iter(self._epochs._distributed_dataset)

    def _apart(self, batches: Any) -> Iterator[Any]:
        _, used, seeds = self._aim
        made = each_apart(batches, seeds)
        with self._lock:
            replay(made, used, self._adapter)
        return self._locked(made)

    def _locked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """No snapshot is taken while the global generators are those of a batch."""
        while True:
            with self._lock:
                batch = next(batches, self)
            if batch is self:
                return
            yield batch


class TorchLoaderForTensorFlow(Generated):
    def _wrap(self) -> None:
        self._feed = LoaderFeed(self._adapter._dataloader, self._context)
        self._adapter.get_numpy_iterator = self._arrays

    def _arrays(self) -> Iterator[Any]:
        number, used, seeds = self._aim
        with self._lock:
            batches = open_loader(self._feed, number, used, seeds)
        for batch in self._locked(batches):
            yield tuple(keras.tree.map_structure(lambda each: np.asarray(each.cpu()), batch))


class _View:
    """A PyDataset in the order of one pass, from some batch on, each batch from its own seed."""

    def __init__(self, own: Any, lock: Any) -> None:
        self.own = own
        self._lock = lock
        self._is_alone = own.workers <= 1 and not own.use_multiprocessing
        self.shares_generators = own.workers > 1 and not own.use_multiprocessing
        self._held = held_generators([own], [])
        self.aim(None, 0, {"python": 0})

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None}  # for a worker that is not forked

    def __getattr__(self, name: str) -> Any:
        if name == "own":
            raise AttributeError(name)
        return getattr(self.own, name)

    def aim(self, order: list[int] | None, skipped: int, seeds: Seeds) -> None:
        self._order, self._skipped, self._seeds = order, skipped, seeds

    @property
    def num_batches(self) -> int | None:
        own: int | None = self.own.num_batches
        return None if own is None else own - self._skipped

    def __getitem__(self, index: int) -> Any:
        number = self._skipped + index
        index = number if self._order is None else self._order[number]
        seeds = mix_all(self._seeds, number)
        if multiprocessing.parent_process() is not None and not self._is_alone:
            seed_globals(seeds)
            reseed(self._held, mix(*seeds.values()))
            return self.own[index]
        if not self._is_alone:
            return self.own[index]  # several threads share the generators: their order is unknown
        with self._lock, apart(seeds):
            reseed(self._held, mix(*seeds.values()))
            return self.own[index]


class Indexed(FitSource):
    """A PyDataset: begun at any batch, without those before it."""

    def _prepare(self) -> None:
        adapter = self._adapter
        self._is_shuffled = bool(adapter.shuffle) and adapter.num_batches is not None
        self._view = _View(adapter.py_dataset, self._lock)
        if self._view.shares_generators:
            self._context.warn_once(
                "the PyDataset makes its batches in several threads: what it draws from the global "
                "random generators cannot be the same after a restart; its order can.\n"
                "If it draws at random, give it workers=1 or use_multiprocessing=True."
            )
        adapter.py_dataset, adapter.shuffle = self._view, False
        if adapter.enqueuer is not None:
            adapter.enqueuer.py_dataset, adapter.enqueuer.shuffle = self._view, False

    def open(self, number: int, used: int, seeds: Seeds) -> Any:  # noqa: ARG002  the seeds depend on it
        order = None
        if self._is_shuffled:
            draw = np.random.default_rng(seeds["numpy"])
            order = draw.permutation(self._view.own.num_batches).tolist()
        self._view.aim(order, used, seeds)
        if self._adapter.enqueuer is not None and self._adapter.enqueuer.is_running():
            self._adapter.enqueuer.stop()  # it began at the first batch of the epoch
            self._adapter.enqueuer.ready_queue.queue.clear()
            self._adapter.enqueuer.start()
        return iter(self._epochs._get_iterator())

    def catch_up(self, ended: int, hooks: Callable[[int, int], Any]) -> None:
        for epoch in range(ended):
            with hooks(epoch, 0):
                self._view.own.on_epoch_begin()
            with hooks(epoch, 1):
                self._view.own.on_epoch_end()


def source_of(run: Any, epochs: Any, lock: Any) -> FitSource:
    backend = keras.backend.backend()
    kinds: dict[Any, Any] = {data_adapters.PyDatasetAdapter: Indexed}
    default: Any = FitSource
    if backend == "tensorflow":
        kinds[data_adapters.ArrayDataAdapter] = Arrays
        kinds[data_adapters.GeneratorDataAdapter] = Generated
        kinds[data_adapters.TorchDataLoaderAdapter] = TorchLoaderForTensorFlow
        default = Dataset
    elif backend == "torch":
        kinds[data_adapters.ArrayDataAdapter] = TorchLoader
        kinds[data_adapters.TorchDataLoaderAdapter] = TorchLoader
    adapter = epochs.data_adapter
    source = next((kinds[kind] for kind in kinds if isinstance(adapter, kind)), default)
    found: FitSource = source(run, epochs, lock)
    return found
