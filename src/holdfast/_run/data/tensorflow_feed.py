"""Batches of tf.data.

An iterator can save its state, and another iterator of the same dataset goes on from there. The
state contains the elements in its buffers, so a large one is not kept with every snapshot. Then the
state from the beginning of the lap is used, which is small and has the seeds of the order, and the
batches are made again from there.

Each iterator of a dataset that shuffles draws its seeds from a counter of that dataset. So that the
next pass is as it would have been, as many iterators are made as there were passes. A nested
dataset begins with its first element, not with an iterator of the whole: each is counted by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from holdfast._errors import HoldfastError
from holdfast._run.data.course import Lap
from holdfast._run.data.feed import Feed, FeedContext, Seeds, replay
from holdfast._text import say

_MOST_BYTES = 32 << 20
# How often each dataset has drawn seeds in this process: two datasets may contain the same one.
_passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class DatasetFeed(Feed):
    """A tf.data.Dataset, or one that a strategy has distributed; referenced weakly."""

    def __init__(self, source: Any, context: FeedContext) -> None:
        from holdfast.tensorflow import datasets

        self._tf = datasets
        self._weak = weakref.ref(source)
        self._kind = type(source).__name__.strip("_")
        self.length = self.usual_length = datasets.length_of(source)
        self._top: bytes | None = None  # the state of the lap's iterator when it was new
        self._iterator: Any = None
        self._is_over = False
        self._packed_top, self._packed = datasets.Packed(), datasets.Packed()
        self._is_distributed = datasets.is_distributed_dataset(source)
        self._habits = datasets.Habits([datasets.made_of(source)])
        drawing = [source] if self._is_distributed else self._habits.drawing or [source]
        self._drawing = [weakref.ref(each) for each in drawing]
        if self._is_distributed and len(self._habits.drawing) > 1:
            context.warn_once_for_all(
                f"the {self._kind} shuffles in several places, and how far each has come is not "
                "known of one that a strategy has distributed: after a restart the passes may have "
                "another order.\nTo be exact, shuffle in one place."
            )
        self._habits.drawing = []  # drop the strong references
        self._keeps_state = not self._is_distributed
        self._keeps_now = self._keeps_state and self._habits.keeps_place
        self._hold(context, self._habits.python_functions, [])
        # Code with a generator of its own begins again with each pass.
        if self._held or self._habits.buffer_bytes + self._habits.slot_bytes > _MOST_BYTES:
            self._keeps_now = False
        if self._habits.slot_bytes > _MOST_BYTES:
            self._keeps_state = False
        for line in self._habits.warnings():
            context.warn_once_for_all(line)
        if self._habits.shuffles_unseeded and (not self._keeps_state or self._habits.cache_bytes):
            context.warn_once_for_all(
                f"the {self._kind} shuffles without a seed, and its position is found again by "
                "count only: after a restart the rest of the epoch has another order.\n"
                "Call tf.random.set_seed before it is made, or give shuffle a seed."
            )
        if self._habits.repeats and not self._keeps_state:
            self._warn_of_repeats()

    @property
    def _name(self) -> str:
        return f"a {self._kind}"

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:  # noqa: ARG002  it has its own
        """The batches of this lap that are left."""
        self._set_length(lap)
        self._reseed_held(lap)
        self._is_over = False
        source = self._weak()
        assert source is not None  # the caller holds it
        goal = None if lap.goal is None else lap.goal.state
        if isinstance(goal, dict) and self._go_to(source, goal, lap.batches_to_skip):
            return self._each()
        if not isinstance(goal, dict):
            passed = lap.state if isinstance(lap.state, dict) else {}
            # This dataset is that of earlier attempts, not a new one for each epoch.
            is_known = passed.get("seeds") == self._habits.seeds
            if passed and is_known and (passed["passes"] > 1 or lap.epoch == 1):
                self._make_passes(passed["draws"])
                if self._habits.repeats:
                    self._go_through(source, passed)
            self._begin(source)
        batches = self._each()
        replay(batches, lap.batches_to_skip, self._kind)
        return batches

    def state(self) -> Any:
        top = None if self._top is None else self._packed_top.pack(self._top)
        now = None if self._is_over else self._now()
        order = self._habits.seeds
        draws = self._draws()
        return {"passes": max(draws), "draws": draws, "seeds": order, "top": top, "now": now}

    def _now(self) -> Any:
        if not self._keeps_now:
            return None
        try:
            written = self._tf.write_state(self._iterator)
        except self._tf.CannotWrite:
            self._keeps_now = False
            return None
        if len(written) > _MOST_BYTES:
            self._keeps_now = False
            self.context.warn_once_for_all(
                f"the buffers of the {self._kind} hold {len(written) >> 20} MB, too much to keep "
                "with every snapshot: after a restart its batches are made again from the "
                "beginning of the epoch. A smaller shuffle buffer, or cache() in a file, is kept."
            )
            return None
        return self._packed.pack(written)

    def _begin(self, source: Any) -> None:
        """A new pass from its first batch."""
        self._make(source)
        self._top = None
        # The contents of a cache in memory would be written with every state.
        is_first = max(self._draws()) == 1
        if self._keeps_state and (is_first or self._habits.cache_bytes <= _MOST_BYTES):
            try:
                self._top = self._tf.write_state(self._iterator)
            except self._tf.CannotWrite:
                self._keeps_state = self._keeps_now = False
        is_known = self._top is None or self._tf.counts_in(self._top) == len(self._drawing)
        if self._habits.repeats and not is_known:
            self._warn_of_repeats()  # a nested one that begins with its first element

    def _go_to(self, source: Any, goal: dict[str, Any], batches_to_skip: int) -> bool:
        """Go back into a pass; True if at its position, False if at its beginning."""
        now, top = (_unpacked(goal[name], self._tf) for name in ("now", "top"))
        repeats = self._habits.repeats and top is not None
        if self.usual_length == batches_to_skip and not self._is_distributed and not repeats:
            self._make_passes(goal["draws"])
            self._iterator, self._top = iter(source.take(0)), top
            return True
        if now is not None and (repeats or self._habits.joins):
            # It lacks datasets that have not begun or have ended, and only a replay shows what
            # those have drawn.
            now = now if self._tf.counts_in(now) == len(self._drawing) else None
        counted = self._counted()
        # The counts before the pass that led to these.
        self._make_passes(
            [n - counted.count(e) for e, n in zip(counted, goal["draws"], strict=False)]
        )
        written = now or top
        if written is None:
            self._begin(source)
            return False
        try:
            if now is not None and not repeats:
                # Each dataset has drawn its seeds within the pass.
                last = self._make_passes(goal["draws"])
                counts = [(each, self._tf.write_state(made)) for each, made in last.items()]
                self._iterator = iter(source)
                self._tf.read_state(self._iterator, now)
                for each, drawn in counts:  # on the way there, some have drawn once more
                    self._tf.read_state(iter(each), drawn)
            else:
                self._make(source)
                self._tf.read_state(self._iterator, written)
        except self._tf.CannotWrite as error:
            say(
                f"the {self._kind} is made in another way than when the run was stored, and did "
                f"not take its position ({str(error).splitlines()[0][:120]}). The run goes on "
                "after as many batches as it had used, in another order."
            )
            self._begin(source)
            return False
        self._top = top
        return now is not None

    def _go_through(self, source: Any, state: dict[str, Any]) -> None:
        """Draw the seeds of a finished pass: only another pass shows how many there were."""
        top = _unpacked(state["top"], self._tf)
        if top is None:
            return
        iterator = iter(source)
        try:
            self._tf.read_state(iterator, top)
        except self._tf.CannotWrite:
            return  # another dataset by now, with new seeds
        say(
            f"the {self._kind} repeats what it shuffles: its last pass is read once more, "
            "so that the next one has the right order."
        )
        for _ in iterator:
            pass

    def _make(self, source: Any) -> None:
        for each in self._counted():
            _passes[each] = _passes.get(each, 0) + 1
        self._iterator = iter(source)

    def _make_passes(self, draws: list[int]) -> dict[Any, Any]:
        """Count the passes of earlier attempts: the next draws other seeds.

        Returns, of each dataset that draws, the iterator that drew last.
        """
        last = {}
        for each, count in zip(self._counted(), draws, strict=False):
            while _passes.get(each, 0) < count:
                _passes[each] = _passes.get(each, 0) + 1
                last[each] = iter(each)
        return last

    def _draws(self) -> list[int]:
        return [_passes.get(each, 0) for each in self._counted()] or [0]

    def _counted(self) -> list[Any]:
        found = [each() for each in self._drawing]
        return [each for each in found if each is not None]

    def _each(self) -> Iterator[Any]:
        yield from self._iterator
        self._is_over = True

    def _warn_of_repeats(self) -> None:
        self.context.warn_once_for_all(
            f"the {self._kind} repeats what it shuffles, and its position is found again by count "
            "only: after a restart the passes have another order.\n"
            "Leave out repeat(): run.epochs goes through the dataset as often as it is to."
        )


def _unpacked(packed: Any, tf: Any) -> bytes | None:
    return None if packed is None else tf.unpack(packed)


class IteratorFeed(Feed):
    """An iterator of tf.data that the script has made: it goes on where it is."""

    def __init__(self, source: Any, context: FeedContext) -> None:
        from holdfast.tensorflow import datasets

        super().__init__(source, context)
        self._tf = datasets
        self._packed = datasets.Packed()
        if any(value is source for value in context.state):
            raise HoldfastError(
                "the iterator is part of the run's state and is given to run.batches too: its "
                "position would be restored twice.\nTake it out of the state; run.batches keeps it."
            )

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:  # noqa: ARG002  it has its own
        state = lap.state if lap.goal is None else lap.goal.state
        if isinstance(state, dict):
            self._tf.read_state(self._source, self._tf.unpack(state))
        return iter(self._source)

    def state(self) -> Any:
        return self._packed.pack(self._tf.write_state(self._source))


def feed_of_tensorflow(source: Any, context: FeedContext) -> Feed | None:
    """The feed for objects of tf.data; None for anything else."""
    from holdfast.tensorflow import datasets

    if datasets.is_dataset(source) or datasets.is_distributed_dataset(source):
        return DatasetFeed(source, context)
    if datasets.is_iterator(source) and datasets.can_write(source):
        return IteratorFeed(source, context)
    return Feed(source, context) if datasets.is_iterator(source) else None
