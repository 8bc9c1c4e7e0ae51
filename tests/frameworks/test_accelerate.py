"""A loader that Accelerate has prepared is gone through as Accelerate would, in any life."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from tests.data.lives_here import train, train_in_lives

torch = pytest.importorskip("torch", reason="pip install torch")
accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import DataLoader, Dataset, IterableDataset

SAMPLES, BATCH = 22, 4  # 6 batches in an epoch, the last of 2


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), float(torch.rand(()))])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.tensor([index, float(torch.rand(()))]) for index in range(SAMPLES))


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps what it knows for the whole process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def prepare(data: Any, *, accumulate: int = 1, loading: Any = None, **options: Any) -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    torch.manual_seed(3)
    random.seed(3)
    plugin = GradientAccumulationPlugin(num_steps=accumulate)
    accelerator = Accelerator(
        cpu=True, dataloader_config=loading, gradient_accumulation_plugin=plugin
    )
    return accelerator.prepare(DataLoader(data, batch_size=BATCH, **options))


CASES = {
    "shuffled": lambda: prepare(Noisy(), shuffle=True),
    "workers": lambda: prepare(Noisy(), shuffle=True, num_workers=1),
    "own-generator": lambda: prepare(Noisy(), shuffle=True, generator=torch.Generator()),
    "seedable": lambda: prepare(
        Noisy(), shuffle=True, loading=DataLoaderConfiguration(use_seedable_sampler=True)
    ),
    "stateful": lambda: prepare(
        Noisy(), shuffle=True, loading=DataLoaderConfiguration(use_stateful_dataloader=True)
    ),
    "dispatched": lambda: prepare(Stream()),
    "iterable": lambda: prepare(Stream(), loading=DataLoaderConfiguration(dispatch_batches=False)),
}
SOAKED = ("shuffled", "own-generator", "stateful")


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.nightly if case in SOAKED else ()) for case in CASES],
)
def test_batches_are_the_same_in_one_life_and_in_several(case, tmp_path):
    if case == "stateful":
        pytest.importorskip("torchdata", reason="pip install torchdata")
    whole = train(tmp_path / "whole", CASES[case])
    parts = train_in_lives(tmp_path / "parts", CASES[case], [2, 7 - 2])
    assert len(whole) == len(parts) == 12
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(whole[0], whole[6])  # the epochs differ


@pytest.mark.parametrize("case", ["seedable", "workers"])
def test_the_order_is_that_of_accelerate_itself(case, tmp_path):
    given = train(tmp_path / "run", CASES[case], epochs=1)
    plain = list(CASES[case]())
    assert [batch[:, 0].tolist() for batch in given] == [batch[:, 0].tolist() for batch in plain]


def test_the_accelerator_is_told_of_the_last_batch_and_steps_there(tmp_path):
    steps: list[bool] = []

    def each(run: holdfast.Run) -> Any:
        with accelerator.accumulate():
            steps.append(accelerator.sync_gradients)
        assert accelerator.sync_gradients == run.completes_step
        return run.batch

    def make() -> Any:
        nonlocal accelerator
        loader = prepare(Noisy(), accumulate=4)
        accelerator = Accelerator(
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4)
        )
        return loader

    accelerator: Any = None
    given = train_in_lives(tmp_path / "run", make, [4], accumulate=4, each=each)
    assert given == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    assert steps == 2 * [False, False, False, True, False, True]


def test_another_count_than_the_accelerators_is_refused(tmp_path):
    with pytest.raises(holdfast.HoldfastError, match=r"accumulate=4\)"):
        train(tmp_path / "run", lambda: prepare(Noisy(), accumulate=4))


def test_gradients_over_the_end_of_an_epoch_are_refused(tmp_path):
    def make() -> Any:
        loader = prepare(Noisy(), accumulate=4)
        loader.gradient_state.plugin_kwargs["sync_with_dataloader"] = False
        return loader

    with pytest.raises(holdfast.HoldfastError, match="over the end of an epoch"):
        train(tmp_path / "run", make, accumulate=4)


def test_data_without_a_length_are_refused_where_several_batches_are_a_step(tmp_path):
    with pytest.raises(holdfast.HoldfastError, match="is not known"):
        train(tmp_path / "run", lambda: prepare(Stream(), accumulate=2), accumulate=2)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_a_prepared_loader_is_no_part_of_the_state(tmp_path):
    pytest.importorskip("torchdata", reason="pip install torchdata")
    keeping = DataLoaderConfiguration(use_stateful_dataloader=True)  # others have no state
    loader = prepare(Noisy(), loading=keeping)
    with pytest.raises(holdfast.HoldfastError, match="part of the run's state"):
        train(tmp_path / "run", lambda: loader, loader=loader)


@pytest.mark.parametrize("data", [Noisy, Stream])
def test_a_prepared_loader_without_a_state_is_refused_by_a_sentence(tmp_path, data):
    with pytest.raises(holdfast.HoldfastError, match=r"^loader: a DataLoader.*\n.*run.batches"):
        holdfast.Run(tmp_path / "run", loader=prepare(data()))
