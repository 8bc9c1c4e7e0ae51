"""The order of an epoch that is divided among ranks, and its rest for another number of ranks.

A DistributedSampler deals one order to the ranks like cards. After the same number of batches on
each rank, they have used a prefix of that order: so the rest can be dealt to any number of ranks,
and no sample comes twice or is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

_KNOWN = ("torch.utils.data", "torchdata.")


def share_of(loader: DataLoader[Any], world: int) -> Share | None:
    """How this loader shares an order with other ranks; None if it does not."""
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        return Share(sampler, batches, sampler.rank, sampler.num_replicas, sampler.drop_last)
    if world == 1 and type(sampler) is SequentialSampler and hasattr(loader.dataset, "__len__"):
        # One process reads all of the order that a DistributedSampler without shuffling divides.
        return Share(sampler, batches, 0, 1, False)
    return None


@dataclass(frozen=True)
class Share:
    """One rank's share of an order."""

    sampler: Any
    batches: Any  # the batch sampler; None if there are no batches
    rank: int
    shares: int
    drop_last: bool

    @property
    def order(self) -> dict[str, Any]:
        """What identifies an order, and among how many ranks it is divided."""
        seed = int(self.sampler.seed) if getattr(self.sampler, "shuffle", False) else None
        return {"samples": self.samples, "seed": seed, "shares": self.shares}

    @property
    def samples(self) -> int:
        """The length of the whole order."""
        if isinstance(self.sampler, DistributedSampler):
            return len(self.sampler.dataset)  # type: ignore[arg-type]  # it needs one with a length
        return len(self.sampler)

    def rest(self, before: int) -> Rest:
        """This rank's share of what follows the first samples of this epoch."""
        left = self._whole()[before:]
        mine = deal(left, self.rank, self.shares, self.drop_last)
        draws = self._batched(mine)
        is_known = self.batches is None or _is_known(self.batches)
        return Rest(draws, len(draws) if is_known else None, len(left))

    def follows_order(self) -> bool:
        """Whether its batches are consecutive pieces of the order.

        A sampler of the user may group samples by length, or not use the order.
        """
        share = list(copy.copy(self.sampler))
        if not _is_known(self.sampler):
            dealt = deal(self._whole(), self.rank, self.shares, self.drop_last)
            if share != dealt:
                return False
        if self.batches is None or _is_known(self.batches):
            return True
        try:
            drawn = [index for batch in self._batched(share) for index in batch]
        except (AttributeError, TypeError):  # it takes no other sampler, or draws no indices
            return False
        return drawn == share[: len(drawn)]

    def _whole(self) -> list[Any]:
        """The order of this epoch, drawn by the sampler as if there were one rank."""
        alone = copy.copy(self.sampler)
        if isinstance(alone, DistributedSampler):
            alone.num_replicas, alone.rank, alone.drop_last = 1, 0, False
            alone.num_samples = alone.total_size = self.samples
        return list(alone)

    def _batched(self, indices: list[Any]) -> Any:
        if self.batches is None:
            return _Drawn(indices)
        batches = copy.copy(self.batches)
        batches.sampler = _Drawn(indices)
        return batches


@dataclass(frozen=True)
class Rest:
    """The rest of an order, for one rank."""

    draws: Any  # replaces the loader's batch sampler
    length: int | None  # of the batches, if it is known
    samples: int  # for all ranks together


class _Drawn:
    def __init__(self, indices: list[Any]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


def deal(order: list[Any], rank: int, shares: int, drop_last: bool) -> list[Any]:
    """One rank's share, as a DistributedSampler deals: all have the same length.

    >>> [deal([5, 6, 7], rank, 2, drop_last=False) for rank in range(2)]
    [[5, 7], [6, 5]]
    >>> [deal([5, 6, 7], rank, 2, drop_last=True) for rank in range(2)]
    [[5], [6]]
    """
    if drop_last:
        return order[: len(order) // shares * shares][rank::shares]
    missing = -len(order) % shares
    filling = (order * -(-missing // max(1, len(order))))[:missing]
    return (order + filling)[rank::shares]


def _is_known(sampler: Any) -> bool:
    """Whether it draws and counts like torch's own samplers."""
    methods = [getattr(type(sampler), name, None) for name in ("__iter__", "__len__")]
    return all(str(getattr(each, "__module__", "")).startswith(_KNOWN) for each in methods)
