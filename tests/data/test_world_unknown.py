"""Where nobody can know what other ranks had used, the run goes on nearby and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install torch")
pytest.importorskip("torchdata", reason="pip install torchdata")
from torch.utils.data import DataLoader, Subset, TensorDataset

from holdfast._run.data.course import Position
from tests.data.sources import Counter, Samples, StatefulStream, Stream, batches_of
from tests.data.worlds import Job, distributed

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it

# What a position had before it knew of ranks.
OLD = ("epoch", "lap", "batches", "is_over", "length", "top", "start", "state", "states")
TWICE = "some samples of it will be trained twice and some not at all"


def stateful() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(StatefulStream(), batch_size=4)


KINDS: dict[str, Callable[[], Any]] = {
    "a list": lambda: batches_of(40),
    "a Counter": Counter,
    "a dict_values": lambda: dict(enumerate(batches_of(40))).values(),
    "a loader of Stream": lambda: DataLoader(Stream(), batch_size=4),
    "a loader of StatefulStream": lambda: DataLoader(StatefulStream(), batch_size=4),
    "a loader of StatefulStream ": stateful,
    "a loader with a RandomSampler": lambda: DataLoader(Samples(40), batch_size=4, shuffle=True),
    "a loader with a SequentialSampler": lambda: DataLoader(Samples(40), batch_size=4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_behind_as_many_batches_of_all_ranks_and_says_so_once(kind, capsys):
    job = Job(lambda *_: KINDS[kind](), epochs=3)
    job.live(4, 3)
    capsys.readouterr()
    ranks = job.live(2, 2)
    said = capsys.readouterr().err
    assert said.count(TWICE) == 1
    assert f"cannot be known of {kind.strip()}." in said
    assert "begun by 4 processes and goes on with 2 processes" in said
    for rank in ranks:
        assert [at for _, at, _ in rank.given] == [0, 1]
    # The same ranks again: nothing is left to be said, and nothing begins anew.
    ranks = job.live(2)
    assert TWICE not in capsys.readouterr().err
    batches = [[(epoch, at) for epoch, at, _ in rank.given] for rank in ranks]
    first = [(0, 2), (0, 3)]
    whole = [(epoch, at) for epoch in (1, 2) for at in range(10)]
    assert batches == [first + whole, first + whole]


def test_batches_are_scaled_by_the_ranks_again_and_again():
    job = Job(lambda *_: [torch.tensor([index]) for index in range(48)], epochs=1)
    job.live(2, 9)
    job.live(3, 2)  # behind 6
    assert (job.positions[0].passed, job.positions[0].batches) == (6, 2)
    (rank,) = job.live(1)  # behind 24
    assert [at for _, at, _ in rank.given] == list(range(24))
    assert [int(batch) for _, _, batch in rank.given] == list(range(24, 48))


@pytest.mark.parametrize("world", [2, 8])
def test_of_a_list_whose_last_batch_was_trained_nothing_is_left(world):
    job = Job(lambda *_: batches_of(40))
    job.live(4, 10)
    job.live(world)
    assert list(job.given[1]) == [1]


def test_steps_of_several_batches_begin_with_their_first():
    job = Job(lambda *_: batches_of(160), epochs=1, accumulate=3)
    job.live(3, 2)
    (rank,) = job.live(1)  # behind 18 of 40
    assert len(rank.given) == 22
    assert rank.step == 2 + 8
    assert rank.expected == [10]


def test_ranks_with_samples_and_an_order_of_their_own_are_counted_by_samples():
    def make(rank: int, world: int) -> Any:
        mine = Subset(TensorDataset(torch.arange(96)), range(rank, 96, world))
        return DataLoader(mine, batch_size=16 // world, shuffle=True)

    job = Job(make)
    job.live(4, 3)
    assert job.positions[0].samples == 48
    job.live(2)
    assert sum(job.samples(0).values()) == 96
    assert sorted(job.samples(1).values()) == [1] * 96


@pytest.mark.parametrize("worlds", [(4, 1), (1, 4)])
def test_an_order_of_one_process_is_not_that_of_many(worlds, capsys):
    def make(rank: int, world: int) -> Any:
        if world > 1:
            return distributed(48)(rank, world)
        return DataLoader(TensorDataset(torch.arange(48)), batch_size=4, shuffle=True)

    job = Job(make)
    job.live(worlds[0], 2)
    used = job.positions[0].samples
    capsys.readouterr()
    job.live(worlds[1])
    said = capsys.readouterr().err
    assert said.count(TWICE) == 1
    assert "DistributedSampler's" in said
    assert sum(job.samples(0).values()) == 48  # as many as ever, if not the same
    assert used == 8 * worlds[0]
    assert sorted(job.samples(1).values()) == [1] * 48


def test_another_seed_is_another_order(capsys):
    make, other = distributed(48), distributed(48, seed=6)
    job = Job(make)
    job.live(4, 1)
    job.make = other
    job.live(2)
    assert "the sampler's seed, its shuffling or the number of samples" in capsys.readouterr().err
    assert sum(job.samples(0).values()) == 48


def test_a_position_that_knows_of_no_samples_counts_batches(capsys):
    job = Job(distributed(48))
    job.live(1, 4)
    old = {name: value for name, value in job.positions[0].to_tree().items() if name in OLD}
    job.positions = [Position.from_tree(old)]
    job.live(2)
    assert TWICE in capsys.readouterr().err
    assert len(job.given[1][0]) == 2 * 4  # behind 2 of 6


def test_a_position_that_knows_of_no_samples_is_exact_for_one_process(capsys):
    job = Job(distributed(48))
    job.live(1, 4)
    old = {name: value for name, value in job.positions[0].to_tree().items() if name in OLD}
    job.positions = [Position.from_tree(old)]
    job.live(1)
    assert capsys.readouterr().err == ""
    assert sorted(job.samples(0).values()) == [1] * 48


@pytest.mark.parametrize("is_first_alone", [True, False])
def test_a_script_that_takes_another_loader_beside_it_goes_on(is_first_alone):
    alone = distributed(48)

    def both(rank, world):
        return alone(rank, world), alone(rank, world)

    job = Job(alone if is_first_alone else both)
    job.live(4, 1)
    job.live(2, 1)
    job.make = both if is_first_alone else alone
    job.live(2, 1)
    job.live(3)
