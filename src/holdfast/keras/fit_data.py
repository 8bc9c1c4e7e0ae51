"""The data of a fit: which batch comes next, and how to come to it in another life.

Keras draws the order of its data from global generators, in other threads and ahead of what is
used. So each epoch, and where Python makes the batches each batch, is drawn from seeds of its
own: from how the generators were when the fit began, and its number.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from holdfast._run.data.feed import apart, mix_all, seeds_of
from holdfast._state.capture import capture_generators
from holdfast.keras.fit_sources import FitSource, source_of

_HOOKS = -3  # tells the seeds of an epoch's beginning and end from those of its batches


class Face:
    """What `run.batches` is given: its items are nothing, Keras takes the batches itself.

    The position is in the record of the fit. Whoever looks for random generators in here must not
    find the whole of Keras: a name in it that nobody has used yet would import TensorFlow.
    """

    def __init__(self, data: FitData) -> None:
        self._of = weakref.ref(data)

    def _data(self) -> FitData:
        data = self._of()
        assert data is not None  # the fit has it
        return data

    def state_dict(self) -> dict[str, Any]:
        self._data().keep()
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass

    def __len__(self) -> int:
        length = self._data().length
        if length is None:
            raise TypeError("how many batches there are is not known")
        return length

    def __iter__(self) -> Iterator[None]:
        return self._data().items()


class FitData:
    """The batches of one fit."""

    def __init__(
        self, run: Any, epoch_iterator: Any, stored: Any, keep: Callable[[], None]
    ) -> None:
        self._keep = keep
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
        """Something that has the shapes of a batch, or a batch that nobody misses."""
        return self._source.example()

    def keep(self) -> None:
        self._keep()

    def items(self) -> Iterator[None]:
        """As many as there are batches left in the epoch."""
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
        """These are trained."""
        self.used += batches
        self._done += batches

    def end_lap(self) -> None:
        """All batches of the epoch are used."""
        known = self._epochs._num_batches
        if not self._epochs.steps_per_epoch or (known and self.used >= known):
            self._next_pass()
        with self._hooks(self._ended, 1):
            self._epochs.data_adapter.on_epoch_end()

    def run_dry(self) -> None:
        """The iterator had nothing more; EpochIterator has noticed, and ended the epoch."""
        self._next_pass()

    def end_epoch(self) -> None:
        self._ended += 1
        self._done = 0

    def _next_pass(self) -> None:
        self.iterator = None
        self._pass += 1
        self.used = 0

    def _hooks(self, epoch: int, which: int) -> Any:
        return apart(mix_all(self._seeds, _HOOKS, epoch, which))
