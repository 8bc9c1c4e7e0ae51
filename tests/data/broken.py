"""Data that fails, each in a way of its own; spawned workers import this file."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

BAD = 9


class Failing(Dataset[torch.Tensor]):
    """Fails for one sample, and only in the second epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == BAD and self.epoch == 1:
            raise ValueError("planted")
        return torch.tensor(float(index))


class FailingByMany(Failing):
    """Makes a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class FailingWithKey(Failing):
    """A KeyError shows its message by repr, which hides line ends."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == BAD and self.epoch == 1:
            raise KeyError("planted")
        return torch.tensor(float(index))


class FailingStream(IterableDataset[torch.Tensor]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, 16, step):
            if index == BAD and self.epoch == 1:
                raise ValueError("planted")
            yield torch.tensor(float(index))


class Dying(Dataset[torch.Tensor]):
    """Its worker is killed, as the system does when memory is short.

    Only when the batches before have been used: torch's handler raises wherever the trainer is.
    """

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == BAD:
            time.sleep(1.0)  # till then the trainer has used the batches before
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(float(index))


def fail_to_collate(samples: list[Any]) -> torch.Tensor:
    if any(float(sample) == BAD for sample in samples):
        raise ValueError("planted")
    return torch.stack(samples)


class Split(IterableDataset[int]):
    """As in torch's documentation: a worker_init_fn gives each worker its part."""

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def give_part(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    data: Any = info.dataset
    each = (data.end - data.start) // info.num_workers
    start = data.start + worker * each
    data.start, data.end = start, start + each
