"""What run.batches leaves alone: the seeds that a script has set, and memory that it let go."""

from __future__ import annotations

import random

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import holdfast
from tests.support import wait_until


class Noisy(Dataset):
    """Draws from one global generator, or from all."""

    def __init__(self, draws: str) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return index + draw(self.draws)


class NoisyStream(IterableDataset):
    def __init__(self, draws: str) -> None:
        self.draws = draws

    def __iter__(self):
        return (index + draw(self.draws) for index in range(12))


def draw(which: str) -> float:
    drawn = {
        "torch": lambda: float(torch.rand(())),
        "numpy": np.random.rand,
        "python": random.random,
    }
    return sum(drawn[name]() for name in which.split())


def batches_of(folder, loader) -> list[list[float]]:
    found = []
    with holdfast.Run(folder, weights=torch.zeros(1)) as run:
        for _ in run.epochs(2):
            found += [batch.tolist() for batch in run.batches(loader)]
    return found


def forget_seeds() -> None:
    random.seed()
    np.random.seed()
    torch.seed()


@pytest.mark.parametrize("make", [Noisy, NoisyStream])
def test_with_workers_torch_s_seed_decides_on_everything_as_it_does_without_us(tmp_path, make):
    found = []
    for name in "ab":
        forget_seeds()
        torch.manual_seed(3)
        loader = DataLoader(make("torch numpy python"), batch_size=4, num_workers=2)
        found.append(batches_of(tmp_path / name, loader))
    assert found[0] == found[1]


@pytest.mark.parametrize("make", [Noisy, NoisyStream])
@pytest.mark.parametrize("draws", ["torch", "numpy", "python"])
def test_in_process_each_generator_answers_for_itself(tmp_path, make, draws):
    seed = {"torch": torch.manual_seed, "numpy": np.random.seed, "python": random.seed}[draws]
    found = []
    for name in "ab":
        forget_seeds()
        seed(3)
        found.append(batches_of(tmp_path / name, DataLoader(make(draws), batch_size=4)))
    assert found[0] == found[1]
    forget_seeds()
    assert batches_of(tmp_path / "c", DataLoader(make(draws), batch_size=4)) != found[0]


def test_the_loader_s_own_generator_decides_where_there_is_one(tmp_path):
    found = []
    for name in "ab":
        forget_seeds()
        generator = torch.Generator().manual_seed(3)
        loader = DataLoader(
            Noisy("torch"), batch_size=4, shuffle=True, num_workers=2, generator=generator
        )
        found.append(batches_of(tmp_path / name, loader))
    assert found[0] == found[1]


def test_a_loader_made_anew_for_each_epoch_leaves_no_workers_behind(tmp_path):
    me = psutil.Process()
    with holdfast.Run(tmp_path / "run", weights=torch.zeros(1)) as run:
        before = len(me.children())
        for _ in run.epochs(4):
            loader = DataLoader(
                Noisy("torch"), batch_size=4, num_workers=1, persistent_workers=True
            )
            for _ in run.batches(loader):
                pass
            wait_until(lambda: len(me.children()) <= before + 2, 20, "the end of old workers")


def test_a_list_made_anew_for_each_epoch_is_let_go(tmp_path):
    import gc
    import weakref

    class Batches(list):
        pass

    seen = []
    with holdfast.Run(tmp_path / "run", weights=torch.zeros(1)) as run:
        for _ in run.epochs(3):
            batches = Batches([1, 2, 3])
            seen.append(weakref.ref(batches))
            for _ in run.batches(batches):
                pass
        del batches
        gc.collect()
        assert [each() for each in seen] == [None] * 3
