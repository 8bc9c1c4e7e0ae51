"""What a script does before, between and after its loops is done once, however often it runs.

Each shape of script is run undisturbed, and in two lives of which the first ends at some step.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

import holdfast
from tests.often import few

Shape = Callable[[holdfast.Run, "Training"], None]


class Training:
    """A model whose every step depends on data and on the global generators."""

    def __init__(self, end_at: int | None) -> None:
        torch.manual_seed(4)
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.numbers = np.random.default_rng(5)
        self.torch_numbers = torch.Generator().manual_seed(6)
        self.python_numbers = random.Random(7)
        self._end_at = end_at

    def step(self, run: holdfast.Run, batch: Any) -> None:
        if run.step == self._end_at:
            run.stop("the life ends here")
        batch = torch.as_tensor(batch, dtype=torch.float32).reshape(-1, 1).expand(-1, 3) / 10
        loss = self.model(batch + 0.1 * torch.randn(batch.shape)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def weights(self) -> list[float]:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).tolist()


def train(folder: Path, shape: Shape, end_at: int | None = None) -> list[float] | None:
    training = Training(end_at)
    state = {
        "model": training.model,
        "optimizer": training.optimizer,
        "numbers": training.numbers,
        "torch_numbers": training.torch_numbers,
        "python_numbers": training.python_numbers,
    }
    try:
        with holdfast.Run(folder, **state) as run:
            shape(run, training)
    except SystemExit:
        return None
    return training.weights()


def draws_at_the_top(run: holdfast.Run, training: Training) -> None:
    for _ in run.epochs(3):
        order = torch.randperm(8)
        for number in run.batches(range(8)):
            training.step(run, order[number])


def draws_at_the_top_from_its_own(run: holdfast.Run, training: Training) -> None:
    for _ in run.epochs(3):
        order = training.numbers.permutation(8)
        shift = torch.rand(8, generator=training.torch_numbers)
        for number in run.batches(range(8)):
            sign = training.numbers.choice([-1, 1]) * training.python_numbers.choice([1, 2])
            training.step(run, sign * order[number] + shift[number])


def splits_within_the_block(run: holdfast.Run, training: Training) -> None:
    data = torch.utils.data.random_split(range(16), [8, 8])[0]
    for _ in run.epochs(3):
        for batch in run.batches(DataLoader(data, shuffle=True)):
            training.step(run, batch)


def decays_between_loops(run: holdfast.Run, training: Training) -> None:
    for _ in run.epochs(1):
        for batch in run.batches(range(8)):
            training.step(run, batch)
    training.optimizer.param_groups[0]["lr"] *= 0.1
    for _ in run.epochs(3):
        for batch in run.batches(range(8)):
            training.step(run, batch)


def resets_between_steps(run: holdfast.Run, training: Training) -> None:
    for step in run.steps(8):
        training.step(run, step)
    torch.nn.init.ones_(training.model.weight)
    for step in run.steps(24):
        training.step(run, step)


def loops_without_epochs(run: holdfast.Run, training: Training) -> None:
    for batch in run.batches(range(8)):
        training.step(run, batch)
    training.optimizer.param_groups[0]["lr"] *= 0.1
    for batch in run.batches(range(16)):
        training.step(run, batch)


def writes_through_data(run: holdfast.Run, training: Training) -> None:
    for _ in run.epochs(3):
        for parameter in training.model.parameters():
            parameter.data.mul_(0.9)
        for batch in run.batches(range(8)):
            training.step(run, batch)


class Counting(IterableDataset):
    """Shuffles by an epoch that it counts itself, and gives its state."""

    def __init__(self) -> None:
        self.epoch, self.position = 0, 0

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(8).tolist()
        while self.position < 8:
            self.position += 1
            yield order[self.position - 1]
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def counts_its_epochs(run: holdfast.Run, training: Training) -> None:
    loader = DataLoader(Counting(), batch_size=1)
    for _ in run.epochs(3):
        for batch in run.batches(loader):
            training.step(run, batch)
        with run.phase("eval"):
            pass


class Hidden(Dataset):
    """Its generator is made on first use, and held in a slot."""

    class Transform:
        __slots__ = ("generator",)

        def __init__(self) -> None:
            self.generator: Any = None

        def __call__(self, value: float) -> float:
            if self.generator is None:
                self.generator = np.random.default_rng(1)
            return value + self.generator.normal()

    def __init__(self) -> None:
        self.transform = self.Transform()
        self.annotations = [{f"key {k}": [k] for k in range(40)} for _ in range(100)]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return self.transform(index)


def hides_its_generator(run: holdfast.Run, training: Training) -> None:
    loader = DataLoader(Hidden(), shuffle=True)
    for _ in run.epochs(3):
        for batch in run.batches(loader):
            training.step(run, batch)


def evaluates_on_the_same_loader(run: holdfast.Run, training: Training) -> None:
    loader = DataLoader(Hidden(), shuffle=True)
    for _ in run.epochs(3):
        for batch in run.batches(loader):
            training.step(run, batch)
            if run.batch == 2:
                with run.phase("eval"):
                    list(run.batches(loader))


SHAPES = [
    draws_at_the_top,
    draws_at_the_top_from_its_own,
    splits_within_the_block,
    decays_between_loops,
    resets_between_steps,
    loops_without_epochs,
    writes_through_data,
    counts_its_epochs,
    hides_its_generator,
    evaluates_on_the_same_loader,
]
OFTEN = (
    draws_at_the_top,
    draws_at_the_top_from_its_own,
    splits_within_the_block,
    decays_between_loops,
    hides_its_generator,
)
SOME_SHAPES = [
    pytest.param(shape, id=shape.__name__, marks=[] if shape in OFTEN else [pytest.mark.nightly])
    for shape in SHAPES
]


# In the middle of loops, at their last step, and at the turn behind it.
@pytest.mark.parametrize("ends", few([[8, 15, 20], [3], [7, 12]], [[8, 15, 20]]), ids=str)
@pytest.mark.parametrize("shape", SOME_SHAPES)
def test_however_often_it_runs_it_is_done_once(tmp_path, shape, ends):
    undisturbed = train(tmp_path / "undisturbed", shape)
    assert undisturbed is not None
    folder = tmp_path / "run"
    for end_at in ends:
        assert train(folder, shape, end_at) is None
    assert train(folder, shape) == undisturbed


def test_a_loop_that_does_not_come_again_is_an_error(tmp_path):
    def shape(run: holdfast.Run, training: Training) -> None:
        for _ in run.epochs(2):
            if run.step < 2:
                for batch in run.batches(range(4)):
                    training.step(run, batch)
            for batch in run.batches(range(8)):
                training.step(run, batch)

    assert train(tmp_path / "run", shape, 6) is None
    with pytest.raises(holdfast.HoldfastError, match="did not come again"):
        train(tmp_path / "run", shape)


def test_a_sampler_that_is_part_of_the_state_is_refused(tmp_path):
    class Resumable(Sampler[int]):
        def __iter__(self):
            return iter(range(4))

        def __len__(self) -> int:
            return 4

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    sampler = Resumable()
    loader = DataLoader(TensorDataset(torch.zeros(4)), sampler=sampler)
    with (
        holdfast.Run(tmp_path / "run", sampler=sampler) as run,
        pytest.raises(holdfast.HoldfastError, match="Take it out of the state"),
    ):
        list(run.batches(loader))


def test_whoever_may_look_ahead_is_told_where_that_belongs(tmp_path, capfd):
    def prefetch(batches):
        yield from batches

    with holdfast.Run(tmp_path / "run", weights=torch.zeros(1)) as run:
        for _ in run.epochs(2):
            for _ in prefetch(run.batches([1, 2])):
                pass
        told = capfd.readouterr().err
        assert told.count("run.batches(prefetch(loader))") == 1
        work = threading.Thread(target=lambda: list(run.batches([3])))
        work.start()
        work.join()
    assert "another thread" in capfd.readouterr().err


def test_what_a_data_set_gives_for_a_whole_batch_is_passed_on(tmp_path):
    class Whole(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitems__(self, indices: list[int]) -> torch.Tensor:
            return torch.tensor(indices)

    loader = DataLoader(Whole(), batch_size=4, collate_fn=lambda batch: batch)
    with holdfast.Run(tmp_path / "run", weights=torch.zeros(1)) as run:
        assert [type(batch) for batch in run.batches(loader)] == [torch.Tensor] * 2


def test_a_home_made_loader_with_samples_by_index_is_looped_over(tmp_path):
    class Home:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            return index

        def __iter__(self):
            return iter([[0, 1, 2, 3], [4, 5, 6, 7]])

    with holdfast.Run(tmp_path / "run", weights=torch.zeros(1)) as run:
        assert list(run.batches(Home())) == [[0, 1, 2, 3], [4, 5, 6, 7]]
