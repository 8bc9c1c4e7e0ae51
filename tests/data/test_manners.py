"""What run.batches leaves alone: the seeds that a script has set, and memory that it let go."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import holdfast
from tests.data.lives_here import SETTINGS, Interrupted
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


class NoisyPasses:
    """Anything that `for` takes, and that draws while it is gone through."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.tensor([random.random(), float(torch.rand(()))]) for _ in range(6))


REPLAYED = {
    "loader": lambda: DataLoader(NoisyStream("torch numpy python"), batch_size=4),
    "object": NoisyPasses,
}


@pytest.mark.parametrize("kind", REPLAYED)
def test_what_is_replayed_draws_other_numbers_in_each_pass_and_the_same_in_each_life(
    tmp_path, kind
):
    """Though nothing else draws: then the generators are the same at the top of every epoch."""

    def live(folder: Path, end_after: int | None = None) -> list[Any]:
        saved, found = None, []
        with contextlib.suppress(Interrupted), begin(folder) as run:
            first, second = REPLAYED[kind](), REPLAYED[kind]()
            for _ in run.epochs(2):
                for loader in (first, second):
                    for batch in run.batches(loader):
                        if saved is not None and saved.step is not None:
                            raise Interrupted
                        found.append(batch.tolist())
                        if len(found) == end_after:
                            saved = run.save()
        return found

    seed_all(3)
    whole = live(tmp_path / "whole")
    assert len({repr(batch) for batch in whole}) == len(whole)
    parts = []
    for end_after in (2, 5, 1, None):
        seed_all(3)
        parts += live(tmp_path / "parts", end_after)
    assert parts == whole


def begin(folder: Path) -> holdfast.Run:
    return holdfast.Run(folder, settings=SETTINGS, weights=torch.zeros(1))


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


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
