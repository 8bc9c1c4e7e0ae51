"""Batches of a torch DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holdfast._errors import HoldfastError
from holdfast._run.data.course import Lap, Position, one_number
from holdfast._run.data.feed import (
    Feed,
    Kit,
    Stream,
    each_apart,
    is_at_the_end,
    next_pass,
    processes,
    replay,
    scale_batches,
)
from holdfast._run.data.generators import (
    Seeding,
    Seeds,
    apart,
    digest_states,
    generator_states,
    mix_all,
)
from holdfast._run.data.generators import mix as mix_seeds

if TYPE_CHECKING:
    from holdfast.torch.loader import Drawing, Rest, Share, Tickets


class LoaderFeed(Feed):
    """A torch DataLoader, referenced weakly by `Feeds`."""

    def __init__(self, source: Any, kit: Kit) -> None:
        from holdfast.torch import loader

        self._torch = loader
        self.length = self.usual_length = loader.length_of(source)
        self._way = loader.way_of(source)
        self._data = source.dataset
        self._samplers = loader.samplers_of(source)
        self._share = loader.share_of(source, kit.world) if self._way == loader.SKIPS else None
        self._batch_size = loader.batch_size_of(source)
        self._generator = source.generator
        self._is_alone = source.num_workers == 0
        self._tickets: Tickets | None = None
        self._draws_by_itself = loader.draws_by_itself(source)
        self._seeds: Seeds = {}
        self._mine: Any = source
        if loader.can_be_copied(source):
            stream = self._begin_stream if self._draws_by_itself else None
            self._mine, self._tickets = loader.copy_loader(source, Seeding(), stream)
        if any(value is mine for value in kit.state for mine in (source, *self._samplers)):
            raise HoldfastError(
                "the loader, or its sampler, is part of the run's state and is given to "
                "run.batches too: its position would be put back twice.\n"
                "Take it out of the state; run.batches keeps it."
            )
        deciding = [self._generator, *self._samplers]
        if self._way == loader.REPLAYS:
            self._hold(kit, [*deciding, self._data, source.collate_fn], [])
        else:
            self._hold(kit, deciding, [self._data])
        if not self._is_alone and not getattr(source, "in_order", True):
            kit.warn_once(
                "the loader has in_order=False, so the order of its batches depends on which "
                "worker is quicker: it cannot be the same after a restart.\n"
                "Use in_order=True, DataLoader's default."
            )

    def open(self, lap: Lap, seeds: Seeds) -> Iterator[Any]:
        part = self._part(lap)
        self._reseed_held(lap, *part)
        self._torch.set_epoch([*self._samplers, self._data], lap.epoch)
        self._set_length(lap)
        self._seeds = seeds = mix_all(seeds, *part) if part else seeds
        if self._way == self._torch.SKIPS:
            return self._open_by_draws(lap, part)
        if self._tickets is not None:
            self._tickets.aim(lap.epoch, self._seed_of_workers(), 0, mix_seeds)
        batches: Iterator[Any]
        if self._way == self._torch.REPLAYS and self._is_alone:
            # A pass leaves the global generators alone, so its number makes passes differ.
            batches = each_apart(self._mine, mix_all(seeds, lap.epoch, lap.number))
        elif self._way == self._torch.REPLAYS:
            batches = iter(self._mine)
        elif lap.goal is not None and lap.goal.state is not None:
            self._load_state(lap.goal.state)
            return iter(self._mine)
        else:
            # Workers begin each pass with a fresh copy of the data set.
            ended = lap.state if self._is_alone else None
            if ended is not None:
                self._load_state(ended)
            batches = iter(self._mine) if ended is None else next_pass(self._mine)
        replay(batches, lap.behind, self._data)
        return batches

    def _part(self, lap: Lap) -> tuple[int, ...]:
        """Makes the seeds of a part of a lap differ from the lap's: both count batches from 0."""
        if not lap.before or self._share is None:
            return ()
        return (lap.before, self._share.shares, self._share.rank)

    def _open_by_draws(self, lap: Lap, part: tuple[int, ...]) -> Iterator[Any]:
        assert self._tickets is not None  # a loader that can skip can be copied
        share, rest = self._share, None
        if share is not None and part:
            rest = share.rest(lap.before)
            self.length = rest.length
        draws = None if rest is None else rest.draws
        seed = self._seed_of_workers(*part)
        self._tickets.aim(lap.epoch, seed, lap.behind, mix_seeds, draws)
        batches: Iterator[Any] = iter(self._mine)
        drawing = self._tickets.catch_up()
        if drawing is not None:
            lap.tally = _Tally(drawing, lap.behind - lap.skip, self.kit.world, share, rest)
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
        share, used = self._share, _samples_used(goal)
        if share is None or used is None or not self._follows_order(share):
            self._warn_of_unknown(goal, self._why_unknown(goal))
            return self._behind_batches(goal, self._batches_behind(goal, used))
        used = share.samples if is_at_the_end(goal) else min(used, share.samples)
        if not isinstance(goal.order, dict):
            self._warn_of_unknown(goal, "its order was no DistributedSampler's, and now it is")
        elif {**goal.order, "shares": 0} != {**share.order, "shares": 0}:
            self._warn_of_unknown(
                goal, "the sampler's seed, its shuffling or the number of samples is another now"
            )
        elif goal.order["shares"] != share.shares:
            self.kit.warn_once_for_all(
                f"this epoch was begun by {processes(goal.order['shares'])} and goes on with "
                f"{processes(share.shares)}: what is left, {share.samples - used} of "
                f"{share.samples} samples, is shared out anew."
            )
        return replace(self._behind_batches(goal, 0), passed=0, before=used)

    def _follows_order(self, share: Share) -> bool:
        with apart():
            return share.follows_order()

    def _batches_behind(self, goal: Position, samples: int | None) -> int:
        if samples is None or not self._batch_size:
            return scale_batches(goal, self.kit.world)
        return samples // (self._batch_size * self.kit.world)

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

    def _begin_stream(self) -> Stream:
        return Stream(mix_all(self._seeds, -2))

    def _seed_of_workers(self, *part: int) -> int:
        """One seed for all generators of the workers, as torch does it."""
        if self._generator is None:
            return self._seeds["torch"]
        seed = digest_states(generator_states([self._generator]))
        return mix_seeds(seed, *part) if part else seed

    def state(self) -> Any:
        if self._way == self._torch.KEEPS:
            return self._mine.state_dict()
        if self._way == self._torch.DATA_KEEPS:
            return self._data.state_dict()
        return None

    def _load_state(self, state: Any) -> None:
        keeper = self._mine if self._way == self._torch.KEEPS else self._data
        keeper.load_state_dict(state)


class _Tally:
    """The samples that a lap has used, by what its sampler drew."""

    def __init__(
        self, drawing: Drawing, passed: int, world: int, share: Share | None, rest: Rest | None
    ) -> None:
        self._drawing = drawing
        self._passed = passed
        self._world = world if share is None else share.shares
        self._most: int | None = None
        self.order = None
        if share is not None:
            self.order = share.order
            # Some samples come twice at the end, so that all ranks have the same number.
            self._most = share.samples if rest is None else rest.samples

    def after(self, batches: int) -> int | None:
        samples = self._drawing.samples_after(self._passed + batches)
        if samples is None:
            return None
        samples *= self._world
        return samples if self._most is None else min(samples, self._most)


def _samples_used(goal: Position) -> int | None:
    if not isinstance(goal.samples, int):
        return None
    return one_number(goal.before) + goal.samples
