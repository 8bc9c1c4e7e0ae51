"""The feeds of one session: one for each loader, as long as the script holds it."""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Generator, Hashable, Iterator
from dataclasses import dataclass, replace
from types import CodeType
from typing import TYPE_CHECKING, Any

from holdfast._errors import HoldfastError, name_place
from holdfast._run.data.course import Course, Lap, Position, one_number
from holdfast._run.data.feed import (
    Feed,
    FeedAround,
    FeedContext,
    Seeding,
    Seeds,
    SideBySide,
    Stream,
    apart,
    begin_fresh,
    begin_in_the_middle,
    digest_states,
    each_apart,
    feed_of,
    generator_states,
    is_at_the_end,
    mix,
    mix_all,
    next_pass,
    processes,
    replay,
    scale_batches,
)
from holdfast._run.data.tensorflow_feed import feed_of_tensorflow

if TYPE_CHECKING:
    from holdfast.torch.loader import Drawing, Tickets

END = object()  # in place of a batch


class Feeds:
    """Finds the feed for the arguments of `run.batches`."""

    def __init__(self, state: list[Any], rank: int = 0, world: int = 1) -> None:
        self.context = FeedContext(state, rank, world)
        # A loader keeps its feed for the next pass, since its workers may outlive a pass. Weak: a
        # script may make a new loader for each epoch.
        self._loaders: weakref.WeakKeyDictionary[Any, Feed] = weakref.WeakKeyDictionary()
        self._once: list[Any] = []  # read outside epochs

    def of(self, sources: tuple[Any, ...]) -> Feed:
        found = [self._of_one(source) for source in sources]
        return found[0] if len(found) == 1 else SideBySide(found, self.context)

    def refuse_second_lap(self, sources: tuple[Any, ...]) -> None:
        """Outside epochs a source is read once."""
        if any(source is other for source in sources for other in self._once):
            raise HoldfastError(
                "run.batches() over the same loader a second time, outside of run.epochs(): after "
                "a restart the two could not be told apart.\n"
                "Write `for epoch in run.epochs(n):` around it."
            )
        self._once += sources

    def warn_of_looking_ahead(self, caller: CodeType, is_elsewhere: bool) -> None:
        """Code that takes a batch early makes the position run ahead of the state."""
        if is_elsewhere:
            self.context.warn_once(
                "run.batches is used in another thread than the one that opened the run. If the "
                "steps are not made in that thread too, they are saved in their middle: then let "
                "the thread work behind the loader, run.batches(prefetch(loader))."
            )
        if caller.co_flags & inspect.CO_GENERATOR and "tqdm" not in caller.co_filename:
            self.context.warn_once(
                f"run.batches is used by the generator {caller.co_qualname}. If that takes a batch "
                "before the step with the last one is made, a restart loses it: then put it "
                "inside, run.batches(prefetch(loader)). Else all is well."
            )

    def _of_one(self, source: Any) -> Feed:
        if hasattr(type(source), "holdfast_feed"):  # a trainer's data
            feed: Feed = source.holdfast_feed(self)
            return feed
        if "torch" in sys.modules:
            from holdfast.torch import loader, prepared

            is_prepared = prepared.is_prepared(source)
            if is_prepared and not prepared.has_shares(source):
                return DispatchedFeed(source, self.context)
            if is_prepared or loader.is_loader(source):
                if source not in self._loaders:
                    kind = PreparedFeed if is_prepared else LoaderFeed
                    self._loaders[source] = kind(source, self.context)
                return self._loaders[source]
        has_tensorflow = hasattr(sys.modules.get("tensorflow"), "__version__")
        if has_tensorflow and isinstance(source, Hashable):
            with contextlib.suppress(TypeError):  # not every object can be referenced weakly
                if source in self._loaders:
                    return self._loaders[source]
                if (of_tensorflow := feed_of_tensorflow(source, self.context)) is not None:
                    self._loaders[source] = of_tensorflow
                    return of_tensorflow
        return feed_of(source, self.context)


# -- Batches of a loader that Accelerate has prepared ----------------------------------------------
# The DataLoader inside is read as any other. Accelerate's wrapper reads one batch ahead, which
# would be ahead of the state; the rest of its work is done here.


class PreparedFeed(FeedAround):
    """A loader of which each rank reads its own share; the wrapper is referenced weakly."""

    def __init__(self, source: Any, context: FeedContext) -> None:
        from holdfast.torch import prepared

        self._accelerate = prepared
        self._weak = weakref.ref(source)
        if any(value is source for value in context.state):
            raise HoldfastError(
                "the prepared loader is part of the run's state and is given to run.batches too: "
                "its position would be restored twice.\n"
                "Take it out of the state; run.batches keeps it."
            )
        prepared.share_generator(source)
        super().__init__(LoaderFeed(source.base_dataloader, context))

    def expect(self, accumulate: int) -> None:
        source = self._weak()
        assert source is not None  # the caller holds it
        refuse_other_counts(self._accelerate, source, accumulate, self.usual_length)

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:
        source = self._weak()
        assert source is not None
        self._accelerate.set_epoch(source, lap.epoch)
        self._accelerate.share_globals(source)
        batches = self._inner.open(lap, seeds)
        self.length = self._inner.length
        return self._each(source, batches, lap.skip)

    def _each(self, source: Any, batches: Iterator[Any], number: int) -> Iterator[Any]:
        source.begin()  # from now on it is the active loader of the accelerator
        try:
            found: Iterator[tuple[Any, bool]] = self._look_ahead(batches)
            if self.length is not None:
                numbered = enumerate(batches, number + 1)
                found = ((batch, at == self.length) for at, batch in numbered)
            for batch, is_last in found:
                source.end_of_dataloader = is_last
                yield self._accelerate.put_in_place(source, batch)
        finally:
            source.end()

    def _look_ahead(self, batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
        ahead = next(batches, END)
        while ahead is not END:
            batch, self._state = ahead, self._inner.state()
            ahead = next(batches, END)
            yield batch, ahead is END
        self._state = None


class DispatchedFeed(Feed):
    """A loader that rank 0 reads for all: replayed from its beginning."""

    def expect(self, accumulate: int) -> None:
        from holdfast.torch import prepared

        refuse_other_counts(prepared, self._source, accumulate, self.usual_length)

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:
        from holdfast.torch import prepared

        prepared.set_epoch(self._source, lap.epoch)
        return super().open(lap, seeds)


def refuse_other_counts(accelerate: Any, source: Any, accumulate: int, length: int | None) -> None:
    """A boundary must be where the accelerator steps, and nowhere else."""
    count = accelerate.accumulated(source)
    if count != accumulate:
        raise HoldfastError(
            f"the accelerator makes one step of {count} batches, and run.batches of {accumulate}: "
            "gradients would be lost at a restart.\n"
            f"Say the same to both: run.batches(loader, accumulate={count})."
        )
    if count == 1:
        return
    if not accelerate.restarts_with_epochs(source):
        raise HoldfastError(
            "the accelerator carries gradients over the end of an epoch "
            "(sync_with_dataloader=False), where they would be lost at a restart.\n"
            "Leave it at its default, GradientAccumulationPlugin(sync_with_dataloader=True)."
        )
    if length is None:
        raise HoldfastError(
            f"{count} batches are one step, and how many batches there are is not known: the "
            "accelerator and run.batches would end the epoch's last step at different ones.\n"
            "Give the data set a length, or accumulate by hand (accumulate= of run.batches alone)."
        )


# -- Where in its data a session is, and what of that a snapshot stores ----------------------------


class DataCursor:
    """The course through the data, and the feed that is being read."""

    def __init__(self, position: Position | None, state: list[Any], rank: int, size: int) -> None:
        self.course = Course(position, size)
        self.feeds = Feeds(state, rank, size)
        self.feed: Feed | None = None  # of the lap that is running
        self.lap: tuple[Lap, int | None, Any] | None = None  # as Course.use wants it
        # Of the last loader that keeps its own position:
        self._loader_state: Any = None if position is None else position.state

    def open(self, feed: Feed, lap: Lap) -> tuple[Any, Iterator[Any]]:
        """The batches of a lap that are left, and the states to begin it again."""
        if lap.goal is not None:
            start, batches = begin_in_the_middle(feed, lap)
        elif lap.is_over:
            start, batches = None, iter(())
        else:
            start, batches = begin_fresh(feed, lap)
        if not lap.is_over:
            self.feed, self.lap = feed, (lap, feed.length, start)
        return start, batches

    def close(self, feed: Feed) -> None:
        if self.feed is feed:
            self.feed, self.lap = None, None

    def take(self, batches: Iterator[Any], number: int) -> Any:
        """The next batch, or END; an error says where in the data it came from."""
        try:
            return next(batches, END)
        except Exception as error:
            name_place(error, self.course.epoch, number)
            raise

    def uncounted(self, feed: Feed) -> Generator[Any, None, None]:
        """All batches, in a phase: it is repeated as a whole, so nothing is counted."""
        _, batches = begin_fresh(feed, Lap(self.course.epoch, -1))
        number = 0
        while (batch := self.take(batches, number)) is not END:
            yield batch
            number += 1

    def use_batch_at_hand(self) -> None:
        """The step of the batch that was given last is complete."""
        if self.lap is not None:
            lap, length, start = self.lap
            self.course.use(lap, self.course.batch + 1, length, start)

    def tree(self) -> dict[str, Any] | None:
        return self.course.position.to_tree() if self.course.is_used else None

    def stored(self) -> dict[str, Any] | None:
        """The position for a snapshot, with the state of a loader that keeps its own."""
        tree = self.tree()
        if tree is not None:
            if self.feed is not None and not self.course.position.is_over:
                self._loader_state = self.feed.state()
            # After a lap its last state stays, unused: another layout would need a new arena.
            tree["state"] = self._loader_state
        return tree

    def release(self) -> None:
        self.feeds = Feeds([])  # with the old ones go the workers that outlive an epoch


# -- Batches of a torch DataLoader -----------------------------------------------------------------


class LoaderFeed(Feed):
    """A torch DataLoader, referenced weakly by `Feeds`."""

    def __init__(self, source: Any, context: FeedContext) -> None:
        from holdfast.torch import loader

        self._torch = loader
        self.length = self.usual_length = loader.length_of(source)
        self._way = loader.way_of(source)
        self._data = source.dataset
        self._samplers = loader.samplers_of(source)
        self._share = loader.share_of(source, context.world) if self._way == loader.SKIPS else None
        self._batch_size = loader.batch_size_of(source)
        self._generator = source.generator
        self._is_alone = source.num_workers == 0
        self._tickets: Tickets | None = None
        self._draws_by_itself = loader.draws_by_itself(source)
        self._seeds: Seeds = {}
        self._mine: Any = source
        if loader.can_be_copied(source):
            stream = (lambda: Stream(mix_all(self._seeds, -2))) if self._draws_by_itself else None
            self._mine, self._tickets = loader.copy_loader(source, Seeding(), stream)
        if any(value is mine for value in context.state for mine in (source, *self._samplers)):
            raise HoldfastError(
                "the loader, or its sampler, is part of the run's state and is given to "
                "run.batches too: its position would be restored twice.\n"
                "Take it out of the state; run.batches keeps it."
            )
        deciding = [self._generator, *self._samplers]
        if self._way == loader.REPLAYS:
            self._hold(context, [*deciding, self._data, source.collate_fn], [])
        else:
            self._hold(context, deciding, [self._data])
        if not self._is_alone and not getattr(source, "in_order", True):
            context.warn_once(
                "the loader has in_order=False, so the order of its batches depends on which "
                "worker is quicker: it cannot be the same after a restart.\n"
                "Use in_order=True, DataLoader's default."
            )

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:
        share, part = self._share, tuple[int, ...]()
        if lap.before and share is not None:
            # The seeds of a part of a lap differ from the lap's: both count batches from 0.
            part = (lap.before, share.shares, share.rank)
        self._reseed_held(lap, *part)
        self._torch.set_epoch([*self._samplers, self._data], lap.epoch)
        self._set_length(lap)
        self._seeds = seeds = mix_all(seeds, *part) if part else seeds
        if self._way == self._torch.SKIPS:
            return self._open_by_draws(lap, part)
        if self._tickets is not None:
            self._tickets.aim(lap.epoch, self._seed_of_workers(), 0, mix)
        batches: Iterator[Any]
        if self._way == self._torch.REPLAYS and self._is_alone:
            # A pass leaves the global generators alone, so its number makes passes differ.
            batches = each_apart(self._mine, mix_all(seeds, lap.epoch, lap.number))
        elif self._way == self._torch.REPLAYS:
            batches = iter(self._mine)
        elif lap.goal is not None and lap.goal.state is not None:
            self._keeper.load_state_dict(lap.goal.state)
            return iter(self._mine)
        else:
            # Workers begin each pass with a fresh copy of the data set.
            ended = lap.state if self._is_alone else None
            if ended is not None:
                self._keeper.load_state_dict(ended)
            batches = iter(self._mine) if ended is None else next_pass(self._mine)
        replay(batches, lap.batches_to_skip, self._data)
        return batches

    def _open_by_draws(self, lap: Lap, part: tuple[int, ...]) -> Iterator[Any]:
        assert self._tickets is not None  # a loader that can skip can be copied
        share, rest = self._share, None
        if share is not None and part:
            rest = share.rest(lap.before)
            self.length = rest.length
        draws = None if rest is None else rest.draws
        seed = self._seed_of_workers(*part)
        self._tickets.aim(lap.epoch, seed, lap.batches_to_skip, mix, draws)
        batches: Iterator[Any] = iter(self._mine)
        drawing = self._tickets.catch_up()
        if drawing is not None:
            passed = lap.batches_to_skip - lap.skip
            if share is None:
                lap.tally = _Tally(drawing, passed, self.context.world, None, None)
            else:
                most = share.samples if rest is None else rest.samples
                lap.tally = _Tally(drawing, passed, share.shares, most, share.order)
        return batches

    def fits(self, goal: Position) -> bool:
        theirs = goal.order if isinstance(goal.order, dict) else None
        ours = None if self._share is None else self._share.order
        if one_number(goal.before) and theirs != ours:
            return False
        if theirs is not None and ours is not None and theirs["shares"] != ours["shares"]:
            return False  # of the same number of ranks, some may have shared samples
        return super().fits(goal)

    def carry_over(self, goal: Position) -> Position:
        share, used = self._share, None
        if isinstance(goal.samples, int):
            used = one_number(goal.before) + goal.samples
        with apart():
            is_known = share is not None and used is not None and share.follows_order()
        if share is None or used is None or not is_known:
            self._warn_of_unknown(goal, self._why_unknown(goal))
            passed = scale_batches(goal, self.context.world)
            if used is not None and self._batch_size:
                passed = used // (self._batch_size * self.context.world)
            return self._behind_batches(goal, passed)
        used = share.samples if is_at_the_end(goal) else min(used, share.samples)
        if not isinstance(goal.order, dict):
            self._warn_of_unknown(goal, "its order was no DistributedSampler's, and now it is")
        elif {**goal.order, "shares": 0} != {**share.order, "shares": 0}:
            self._warn_of_unknown(
                goal, "the sampler's seed, its shuffling or the number of samples is another now"
            )
        elif goal.order["shares"] != share.shares:
            self.context.warn_once_for_all(
                f"this epoch was begun by {processes(goal.order['shares'])} and goes on with "
                f"{processes(share.shares)}: what is left, {share.samples - used} of "
                f"{share.samples} samples, is shared out again."
            )
        return replace(self._behind_batches(goal, 0), passed=0, before=used)

    def _why_unknown(self, goal: Position) -> str:
        order: dict[str, Any] = goal.order if isinstance(goal.order, dict) else {}
        was_shared = order.get("shares", 1) > 1 or order.get("seed") is not None
        if self._share is None and was_shared:
            return "its order was a DistributedSampler's, and the loader has none now"
        return super()._why_unknown(goal)

    @property
    def _name(self) -> str:
        if self._way != self._torch.SKIPS:
            return f"a loader of {type(self._data).__name__}"
        names = [type(each).__name__ for each in self._samplers]
        return f"a loader with a {next((n for n in names if n != 'BatchSampler'), 'BatchSampler')}"

    def _seed_of_workers(self, *part: int) -> int:
        """One seed for all generators of the workers, as torch does it."""
        if self._generator is None:
            return self._seeds["torch"]
        seed = digest_states(generator_states([self._generator]))
        return mix(seed, *part) if part else seed

    def state(self) -> Any:
        keeps = (self._torch.KEEPS, self._torch.DATA_KEEPS)
        return self._keeper.state_dict() if self._way in keeps else None

    @property
    def _keeper(self) -> Any:
        """What keeps the position, where the loader does not begin each pass by itself."""
        return self._mine if self._way == self._torch.KEEPS else self._data


@dataclass(frozen=True)
class _Tally:
    """The samples that a lap has used, by what its sampler drew."""

    drawing: Drawing
    passed: int  # batches before this part of the lap
    shares: int
    most: int | None  # some samples come twice at the end, so that all ranks have the same number
    order: Any

    def after(self, batches: int) -> int | None:
        samples = self.drawing.samples_after(self.passed + batches)
        if samples is None:
            return None
        samples *= self.shares
        return samples if self.most is None else min(samples, self.most)
