"""The kinds of loaders that are interrupted: what each is, and what an epoch of it must hold."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.data.sources import (
    BATCH,
    SAMPLES,
    BatchesAsTheyCome,
    Counter,
    Mixup,
    OwnOrder,
    OwnStream,
    Reader,
    Samples,
    StatefulStream,
    Stream,
    batches_of,
)

FORK: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
SPAWN: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "spawn"}


@dataclass(frozen=True)
class Kind:
    """One way to write the loaders of a training."""

    make: Callable[[], list[Any]]  # the loaders of an epoch, in the order of their loops
    samples: int | None = SAMPLES  # different ones in a loop; None if they are drawn with return
    epochs: int = 3
    accumulate: int = 1
    eval_every: int = 0  # batches between phases within the loop; 0 is none
    start_seconds: float = 0.25  # what comes within them comes while a life starts
    state: Callable[[list[Any]], dict[str, Any]] = lambda _: {}  # given to the run


def loader(data: Any = None, cls: Any = DataLoader, **options: Any) -> Any:
    return cls(Samples() if data is None else data, **{"batch_size": BATCH, **options})


def _distributed() -> list[Any]:
    data = Samples(2 * SAMPLES)
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True)
    return [loader(data, sampler=sampler, **FORK)]


def _with_generator(**options: Any) -> list[Any]:
    return [loader(shuffle=True, generator=torch.Generator().manual_seed(3), **options)]


def _several() -> list[Any]:
    large = loader(Samples(24), shuffle=True, **FORK)
    small = loader(Stream(16), num_workers=0)
    return [large, small, large]


def _side_by_side() -> list[Any]:
    return [(loader(shuffle=True), loader(Samples(44), shuffle=True, **FORK), loader(shuffle=True))]


_weights = [1.0 + index % 5 for index in range(SAMPLES)]

#: Interrupted by real signals, in real processes.
KINDS: dict[str, Kind] = {
    "shuffle": Kind(lambda: [loader(shuffle=True)]),
    "fork": Kind(lambda: [loader(shuffle=True, **FORK)]),
    "spawn": Kind(
        lambda: [loader(Samples(60), shuffle=True, persistent_workers=True, **SPAWN)],
        samples=60,
        epochs=2,
        start_seconds=3.0,  # each worker imports torch
    ),
    "persistent": Kind(lambda: [loader(shuffle=True, persistent_workers=True, **FORK)]),
    "prefetch": Kind(lambda: [loader(shuffle=True, prefetch_factor=4, **FORK)]),
    "batch_sampler": Kind(lambda: [DataLoader(Samples(), batch_sampler=BatchesAsTheyCome())]),
    "batch_sampler_workers": Kind(
        lambda: [DataLoader(Samples(), batch_sampler=BatchesAsTheyCome(), **FORK)]
    ),
    "own_sampler": Kind(lambda: [loader(sampler=OwnOrder(random.Random(8)), **FORK)]),
    "subset": Kind(
        lambda: [loader(Samples(72), sampler=SubsetRandomSampler(range(0, 72, 2)))], samples=36
    ),
    "weighted": Kind(
        lambda: [loader(sampler=WeightedRandomSampler(_weights, SAMPLES), **FORK)], samples=None
    ),
    "drop_last": Kind(lambda: [loader(Samples(43), shuffle=True, drop_last=True, **FORK)]),
    "distributed": Kind(_distributed),
    "generator_outside": Kind(_with_generator),
    "generator_in_state": Kind(
        lambda: _with_generator(**FORK), state=lambda loaders: {"order": loaders[0].generator}
    ),
    "one_by_one": Kind(
        lambda: [loader(Samples(14), shuffle=True, batch_size=None, **FORK)], samples=14
    ),
    "iterable": Kind(lambda: [loader(Stream())]),
    "iterable_workers": Kind(lambda: [loader(Stream(), **FORK)]),
    "iterable_persistent": Kind(lambda: [loader(OwnStream(), persistent_workers=True, **FORK)]),
    "iterable_one_by_one": Kind(
        lambda: [loader(OwnStream(14), batch_size=None, persistent_workers=True, **FORK)],
        samples=14,
    ),
    "iterable_stateful": Kind(lambda: [loader(StatefulStream())]),
    "stateful_map": Kind(lambda: [loader(cls=StatefulDataLoader, shuffle=True, **FORK)]),
    "stateful_iterable": Kind(lambda: [loader(StatefulStream(), StatefulDataLoader, **FORK)]),
    "mixup": Kind(lambda: [loader(shuffle=True, collate_fn=Mixup(), **FORK)]),
    "list": Kind(lambda: [batches_of(SAMPLES)]),
    "reader": Kind(lambda: [Reader()]),
    "several": Kind(_several, samples=None, epochs=2),
    "side_by_side": Kind(_side_by_side, samples=None),
    "eval_inside": Kind(lambda: [loader(shuffle=True, **FORK)], eval_every=4),
    "accumulate": Kind(lambda: [loader(Samples(56), shuffle=True, **FORK)], 56, accumulate=4),
    "accumulate_iterable": Kind(lambda: [loader(Stream(56))], 56, accumulate=4),
}

#: Variations of these, stopped within one process.
VARIATIONS: dict[str, Kind] = {
    "generator_outside_workers": Kind(lambda: _with_generator(**FORK)),
    "one_by_one_alone": Kind(
        lambda: [loader(Samples(14), shuffle=True, batch_size=None)], samples=14
    ),
    "iterable_own": Kind(lambda: [loader(OwnStream())]),
    "iterable_one_by_one_alone": Kind(lambda: [loader(OwnStream(14), batch_size=None)], 14),
    "stateful_map_alone": Kind(lambda: [loader(cls=StatefulDataLoader, shuffle=True)]),
    "stateful_iterable_alone": Kind(lambda: [loader(StatefulStream(), StatefulDataLoader)]),
    "stateful_persistent": Kind(
        lambda: [loader(StatefulStream(), StatefulDataLoader, persistent_workers=True, **FORK)]
    ),
    "stateful_stateless": Kind(lambda: [loader(Stream(), StatefulDataLoader, **FORK)]),
    "stateful_stateless_alone": Kind(lambda: [loader(Stream(), StatefulDataLoader)]),
    "mixup_alone": Kind(lambda: [loader(shuffle=True, collate_fn=Mixup())]),
    "mixup_iterable": Kind(lambda: [loader(Stream(), collate_fn=Mixup(), **FORK)]),
    "reader_own": Kind(lambda: [Reader(random.Random(9))]),
    "counter": Kind(lambda: [Counter()]),
    "accumulate_workers": Kind(lambda: [loader(Stream(), **FORK)], accumulate=4),
    "accumulate_stateful": Kind(lambda: [loader(StatefulStream())], accumulate=4),
}
