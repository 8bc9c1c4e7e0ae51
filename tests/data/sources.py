"""Data sets and samplers of the kinds of loaders; spawned workers import this file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

SAMPLES = 40
BATCH = 4

Sample = tuple[int, torch.Tensor]


def make_sample(index: int) -> torch.Tensor:
    return torch.arange(4, dtype=torch.float32) / 4 + index / SAMPLES


class Augment:
    """Draws from all the global generators, and from one of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(11)

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(4) + float(np.random.rand()) + random.random()
        return sample + 0.1 * (noise + float(self.rng.random()))


class Samples(Dataset[Sample]):
    """By index, augmented at random."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count
        self.transforms = [Augment()]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        sample = make_sample(index)
        for transform in self.transforms:
            sample = transform(sample)
        return index, sample


class BatchesAsTheyCome(Sampler[list[int]]):
    """Decides on each batch when it is asked for: by Python's generator."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count // BATCH

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(self.count))
        while left:
            yield [left.pop(random.randrange(len(left))) for _ in range(BATCH)]


class OwnOrder(Sampler[int]):
    """Shuffles by a generator that it holds, one pass after the other."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        for at in range(SAMPLES):
            other = int(at + (SAMPLES - at) * self.rng.random())
            order[at], order[other] = order[other], order[at]
            yield order[at]


def _share(count: int) -> range:
    """The samples of this worker."""
    info = get_worker_info()
    return range(count) if info is None else range(info.id, count, info.num_workers)


def _draw_global(below: int) -> int:
    return int(torch.randint(below, ()))


def shuffled(indices: range, draw: Any = _draw_global) -> Iterator[int]:
    """By a buffer of eight, drawing while it goes."""
    buffer: list[int] = []
    for index in indices:
        buffer.append(index)
        if len(buffer) == 8:
            yield buffer.pop(draw(8))
    while buffer:
        yield buffer.pop(draw(len(buffer)))


class Stream(IterableDataset[Sample]):
    """Comes as it comes; the workers share it."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count
        self.transform = Augment()

    def __iter__(self) -> Iterator[Sample]:
        for index in shuffled(_share(self.count)):
            yield index, self.transform(make_sample(index))


class OwnStream(Stream):
    """Shuffled by a generator that it holds and that goes on from epoch to epoch."""

    def __iter__(self) -> Iterator[Sample]:
        for index in shuffled(_share(self.count), lambda n: int(self.transform.rng.integers(n))):
            yield index, self.transform(make_sample(index))


class StatefulStream(IterableDataset[Sample]):
    """Gives and takes its own position, with what it has drawn by its own generator."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count
        self.rng = torch.Generator()
        self._left: list[int] | None = None  # not begun
        self._goes_on = False

    def __iter__(self) -> Iterator[Sample]:
        if not self._goes_on or self._left is None:
            self._left = list(_share(self.count))
            self.rng.manual_seed(_draw_global(1 << 30))
        self._goes_on = False
        while self._left:
            at = int(torch.randint(len(self._left), (), generator=self.rng))
            index = self._left.pop(at)
            noise = torch.rand(4) + random.random() + float(np.random.rand())
            yield index, make_sample(index) + 0.1 * noise

    def state_dict(self) -> dict[str, Any]:
        left = None if self._left is None else list(self._left)
        return {"left": left, "rng": self.rng.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._left = None if state["left"] is None else list(state["left"])
        self.rng.set_state(state["rng"])
        self._goes_on = True


Batch = tuple[torch.Tensor, torch.Tensor]


class Mixup:
    """A collate_fn that mixes the samples of a batch, by the global generators and its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(12)

    def __call__(self, samples: list[Sample]) -> Batch:
        stacked = torch.stack([sample for _, sample in samples])
        share = float(np.random.rand()) * float(self.rng.random())
        mixed = share * stacked + (1 - share) * stacked[torch.randperm(len(samples))]
        return torch.tensor([index for index, _ in samples]), mixed


def batches_of(count: int) -> list[Batch]:
    """Batches that are made already."""
    starts = range(0, count, BATCH)
    return [
        (torch.arange(at, at + BATCH), torch.stack([make_sample(at + i) for i in range(BATCH)]))
        for at in starts
    ]


class Reader:
    """Nobody's class: all it has is __iter__."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[Batch]:
        left = list(range(SAMPLES))
        draw = random if self.rng is None else self.rng
        while left:
            chosen = [left.pop(draw.randrange(len(left))) for _ in range(BATCH)]
            made = torch.stack([make_sample(index) for index in chosen])
            yield torch.tensor(chosen), made + torch.rand(4)


class Counter:
    """A plain object that keeps its own position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Batch]:
        ready = batches_of(SAMPLES)
        while self.at < len(ready):
            self.at += 1
            indices, made = ready[self.at - 1]
            yield indices, made + torch.rand(4) + random.random()
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
