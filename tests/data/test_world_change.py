"""With another number of ranks in the middle of an epoch, every sample is still trained once."""

from __future__ import annotations

import functools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="pip install torch")
pytest.importorskip("torchdata", reason="pip install torchdata")
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from holdfast._run.data import session_feeds
from holdfast._run.data.course import Course, Lap, Position
from holdfast._run.data.feed import begin_fresh
from holdfast._run.data.session_feeds import Feeds
from tests.data.kinds import FORK
from tests.data.lives_here import train
from tests.data.sources import Samples
from tests.data.worlds import Job, Make, Rank, distributed, indices_of
from tests.often import few


def check_each_once(job: Job, epoch: int, count: int, most_twice: int) -> None:
    seen = job.samples(epoch)
    assert sorted(seen) == list(range(count)), "a sample is missing"
    assert sum(seen.values()) - count <= most_twice, seen


def check_worlds(count, batch_size, shuffle, accumulate, lives, last):
    make = distributed(count, batch_size, shuffle=shuffle)
    job = Job(make, epochs=3, accumulate=accumulate)
    worlds = []  # of each life, with the epoch in which it has ended
    for world, steps in [*lives, (last, None)]:
        job.live(world, steps)
        worlds.append((world, job.positions[0].epoch))
    for epoch in range(3):
        # Only the world that reaches the end of an epoch fills up to equal numbers.
        ending = next(world for world, ended in worlds if ended > epoch)
        nearly = [world for world, ended in worlds if ended == epoch]
        check_each_once(job, epoch, count, max([ending, *nearly]) - 1)


_any_worlds = given(
    count=st.integers(1, 60),
    batch_size=st.integers(1, 7),
    shuffle=st.booleans(),
    accumulate=st.integers(1, 3),
    lives=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 6)), max_size=5),
    last=st.integers(1, 8),
)


@pytest.mark.nightly
@settings(max_examples=12, deadline=None)
@_any_worlds
def test_whatever_the_worlds_every_sample_of_every_epoch_comes(**drawn):
    check_worlds(**drawn)


@pytest.mark.timeout(900)
@pytest.mark.nightly  # the same, with many more examples
@settings(max_examples=200, deadline=None)
@_any_worlds
def test_of_many_worlds_too_every_sample_of_every_epoch_comes(**drawn):
    check_worlds(**drawn)


@pytest.mark.parametrize("world", few([1, 2, 3, 8], [1, 3]))
@pytest.mark.parametrize(
    ("shuffle", "accumulate", "workers"),
    [
        pytest.param(True, 1, {}, id="shuffled"),
        pytest.param(False, 1, {}, id="in order"),
        pytest.param(False, 3, {}, id="accumulating"),
        pytest.param(True, 3, FORK, id="by workers", marks=pytest.mark.nightly),
    ],
)
def test_four_ranks_go_on_as_others(world, shuffle, accumulate, workers):
    job = Job(distributed(96, 5, shuffle=shuffle, **workers), accumulate=accumulate)
    job.live(4, 1)
    used = 4 * 5 * accumulate
    assert job.positions[0].samples == used
    job.live(world)
    check_each_once(job, 0, 96, (used - 96) % world)
    check_each_once(job, 1, 96, 0)


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param({}, id="0"),
        pytest.param({**FORK, "persistent_workers": True}, id="2", marks=pytest.mark.nightly),
    ],
)
def test_an_epoch_may_change_hands_again_and_again(workers):
    job = Job(distributed(240, 3, **workers))
    for world, steps in [(4, 5), (2, 4), (2, 3), (8, 1), (1, 7), (3, 4)]:
        job.live(world, steps)
        assert job.positions[0].epoch == 0
    assert job.positions[0].before == 60 + 42 + 24 + 21
    job.live(4)
    check_each_once(job, 0, 240, 3)
    check_each_once(job, 1, 240, 0)


def test_the_part_that_other_ranks_begin_is_counted_anew_and_the_next_epoch_as_usual():
    job = Job(distributed(48, 4), epochs=3)
    job.live(4, 1)
    ranks = job.live(2, 2)  # 32 samples are left, 4 batches for each
    assert [at for _, at, _ in ranks[0].given] == [0, 1]
    assert ranks[0].expected == [1 + 4 + 2 * 6]
    position = job.positions[1]
    assert (position.batches, position.before, position.samples) == (2, 16, 16)
    assert (position.length, position.world) == (4, 2)
    ranks = job.live(2)
    assert [(epoch, at) for epoch, at, _ in ranks[0].given[:4]] == [(0, 2), (0, 3), (1, 0), (1, 1)]
    assert ranks[0].expected == [17, 17, 17]
    assert ranks[0].course.position.before == 0


def test_the_order_is_the_one_that_the_other_ranks_had_begun():
    undisturbed = Job(distributed(48, 4))
    undisturbed.live(1)
    order = [i for _, batch in undisturbed.given[0][0] for i in indices_of(batch)]
    job = Job(distributed(48, 4))
    job.live(4, 2)
    job.live(1)
    assert [i for _, batch in job.given[1][0] for i in indices_of(batch)] == order[32:]


def test_a_life_that_ended_before_its_first_step_is_no_change():
    job = Job(distributed(48, 4))
    job.live(4, 2)
    positions = job.positions
    job.live(3, 1)
    job.positions, job.given[1], job.step = positions, {}, 2
    job.live(2)
    check_each_once(job, 0, 48, 0)


def test_other_batch_sizes_do_not_matter_as_samples_are_counted():
    job = Job(lambda rank, world: distributed(64, 16 // world)(rank, world))
    job.live(4, 2)
    job.live(2, 1)
    job.live(1)
    check_each_once(job, 0, 64, 0)
    assert [len(life[0]) for life in job.given] == [8, 2, 1]


def test_of_an_epoch_whose_last_batch_was_trained_nothing_is_left():
    job = Job(distributed(30, 4))  # 8 for each, two of them twice
    job.live(4, 2)
    assert (job.positions[0].samples, job.positions[0].is_over) == (30, False)
    job.live(3)
    assert 0 not in job.given[1]
    check_each_once(job, 0, 30, 2)
    check_each_once(job, 1, 30, 0)


@pytest.mark.parametrize("of", ["sampler", "loader"])
def test_with_drop_last_no_sample_comes_twice(of):
    options = {"drop_last": True} if of == "sampler" else {}
    make = distributed(50, 4, **options)

    def make_one(rank: int, world: int) -> Any:
        made = make(rank, world)
        if of == "sampler":
            return made
        return DataLoader(made.dataset, batch_size=4, sampler=made.sampler, drop_last=True)

    job = Job(make_one)
    job.live(4, 1)
    job.live(3, 1)
    ranks = job.live(2)
    assert max(job.samples(0).values()) == 1
    left = 50 - 16 - 12
    assert len(job.samples(0)) == 50 - left % (2 if of == "sampler" else 8)
    sizes = [len(indices_of(batch)) for epoch, _, batch in ranks[0].given if epoch == 0]
    assert sizes == ([4, 4, 3] if of == "sampler" else [4, 4])


def test_what_drop_last_leaves_over_is_not_trained_by_others():
    def make(rank: int, world: int) -> Any:
        made = distributed(48, 5)(rank, world)
        return DataLoader(made.dataset, batch_size=5, sampler=made.sampler, drop_last=True)

    job = Job(make)
    job.live(4, 2)  # two of the twelve of each rank are left over
    job.live(1)
    assert list(job.given[1]) == [1]


def test_one_process_and_many_agree_on_an_order_that_nobody_shuffles(capsys):
    def make(rank: int, world: int) -> Any:
        if world > 1:
            return distributed(48, 4, shuffle=False)(rank, world)
        return DataLoader(TensorDataset(torch.arange(48)), batch_size=4)

    job = Job(make)
    for world, steps in [(1, 2), (4, 1), (1, 1), (2, None)]:
        job.live(world, steps)
    check_each_once(job, 0, 48, 0)
    assert "twice" not in capsys.readouterr().err


def test_samples_that_are_drawn_one_by_one_are_counted_too():
    job = Job(distributed(24, None))
    job.live(4, 2)
    job.live(2, 3)
    job.live(3)
    check_each_once(job, 0, 24, 2)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("workers", [{}, FORK], ids=["alone", "fork"])
def test_a_stateful_loader_of_samples_by_index_is_like_any_other(workers):
    make = distributed(
        48, 4, sampler=StatefulDistributedSampler, loader=StatefulDataLoader, **workers
    )
    job = Job(make)
    for world, steps in [(4, 1), (2, 2), (2, 1), (1, None)]:
        job.live(world, steps)
    check_each_once(job, 0, 48, 0)
    check_each_once(job, 1, 48, 0)


class Growing(BatchSampler):
    """Batches of 1, 2, 3, … samples: a class of the user's own."""

    def __iter__(self):
        batch: list[int] = []
        size = 1
        for index in self.sampler:
            batch.append(index)
            if len(batch) == size:
                yield batch
                batch, size = [], size + 1
        if batch:
            yield batch

    def __len__(self):
        return next(n for n in range(99) if n * (n + 1) // 2 >= len(self.sampler))


class Sorted(BatchSampler):
    """Puts like samples together."""

    def __iter__(self):
        ordered = sorted(self.sampler)
        return (ordered[at : at + self.batch_size] for at in range(0, len(ordered), 4))


def with_batches(kind: type[BatchSampler], count: int) -> Make:
    def make(rank: int, world: int) -> Any:
        made = distributed(count)(rank, world)
        return DataLoader(made.dataset, batch_sampler=kind(made.sampler, 4, False))

    return make


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_of_unlike_sizes_are_counted_by_their_samples(accumulate):
    job = Job(with_batches(Growing, 64), accumulate=accumulate)
    job.live(4, 3 // accumulate)
    job.live(2, 2 // accumulate)
    used = 24 if accumulate == 1 else 12
    assert (job.positions[0].before, job.positions[0].samples) == (used, 6)
    job.live(1)
    check_each_once(job, 0, 64, 0)


def test_batches_that_do_not_follow_the_order_are_said_to(capsys):
    job = Job(with_batches(Sorted, 64))
    job.live(4, 2)
    job.live(2)
    said = capsys.readouterr().err
    assert said.count("cannot be known of a loader with a Sorted") == 1
    assert [len(batches) for batches in job.given[1].values()] == [2 * 4, 2 * 8]
    check_each_once(job, 1, 64, 0)


class Noise(TensorDataset):
    """Nothing but what is drawn for a sample."""

    def __getitem__(self, index):
        return torch.rand(1)


@pytest.mark.nightly
def test_no_two_batches_are_made_from_one_seed():
    make = distributed(0, 4, data=Noise(torch.arange(64)), **FORK)
    job = Job(make, epochs=1)
    job.live(2, 3)
    job.live(4, 1)  # two of them go on from the position of the same rank
    job.live(4)
    drawn = [float(noise) for life in job.given for _, batch in life[0] for noise in batch]
    assert len(set(drawn)) == len(drawn) == 64


@pytest.mark.nightly
def test_a_part_goes_on_with_the_same_bits():
    make = distributed(0, 4, data=Samples(96), **FORK)
    lives: list[list[tuple[int, int, Any]]] = []
    for ends in ([5], [2, 2]):
        job = Job(make)
        job.live(4, 3)
        given = [rank.given for steps in [*ends, None] for rank in job.live(2, steps)[1:]]
        lives.append([batch for life in given for batch in life])
    for (*here, one), (*there, other) in zip(*lives, strict=True):
        assert here == there
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.nightly
def test_loaders_side_by_side_are_counted_each_by_itself():
    small, large = distributed(48, 3), distributed(200, 8)
    job = Job(lambda rank, world: (small(rank, world), large(rank, world)))
    job.live(4, 2)
    assert job.positions[0].samples == [24, 64]
    job.live(2, 1)
    assert (job.positions[0].before, job.positions[0].samples) == ([24, 64], [6, 16])
    job.live(2, 1)
    job.live(1)
    of_one, of_other = [
        [i for life in job.given for _, batch in life[0] for i in indices_of(batch[number])]
        for number in range(2)
    ]
    assert sorted(of_one) == list(range(48))
    assert len(set(of_other)) == len(of_other) == 64 + 32 + 4 * 8


def test_a_loader_beside_a_list_goes_on_with_its_own_samples(capsys):
    make = distributed(48, 3)
    job = Job(lambda rank, world: (make(rank, world), [torch.tensor(i) for i in range(16)]))
    job.live(4, 2)
    (rank,) = job.live(1)
    assert "cannot be known of a list" in capsys.readouterr().err
    assert sorted(job.samples(0).values()) == [1] * 48
    assert [int(other) for _, (_, other) in job.given[1][0]] == list(range(8, 16))
    assert rank.expected == [2 + 8 + 16, 10 + 16]


def test_ranks_that_have_their_samples_in_common_count_them_once():
    """Four ranks, of which two by two work on one batch, and then all four for themselves."""

    def by_twos(rank: int, world: int) -> Any:
        return distributed(48, 4)(rank // 2, world // 2)

    job = Job(by_twos)
    ranks = job.live(4, 2)
    assert indices_of(ranks[0].given[0][2]) == indices_of(ranks[1].given[0][2])
    assert job.positions[0].samples == 16
    job.make = distributed(48, 4)
    job.live(4)
    seen = Counter(i for _, batch in job.given[1][0] for i in indices_of(batch))
    assert len(seen) == sum(seen.values()) == 32


def test_a_pass_in_a_phase_does_not_disturb_the_count():
    make = distributed(48, 4, **FORK)
    rank = Rank(0, 2, accumulate=1, epochs=1, position=None, step=0)
    loader = make(0, 2)
    feed = rank.feeds.of((loader,))
    laps = rank._lap(feed)
    next(laps)
    _, evaluated = begin_fresh(rank.feeds.of((loader,)), Lap(0, -1))
    assert len(list(evaluated)) == 6
    next(laps)
    assert rank.stored().samples == 16
    laps.close()


@pytest.mark.nightly  # the others of this file count the same in one process
def test_real_runs_go_on_with_fewer_ranks(tmp_path, monkeypatch):
    straight = _train_ranks(tmp_path / "straight", monkeypatch, [(4, 2), (2, None)])
    again = _train_ranks(tmp_path / "again", monkeypatch, [(4, 2), (2, 3), (2, None)])
    for rank in range(4):
        pairs = zip(straight[rank], again[rank], strict=True)
        assert all(torch.equal(one[1], other[1]) for one, other in pairs)
    # In the first epoch, two batches as one of four ranks and then eight as one of two.
    firsts = [batch for rank in range(4) for batch in again[rank][: 2 + 8]]
    assert sorted(i for batch in firsts for i in indices_of(batch)) == list(range(96))


def _train_ranks(folder, monkeypatch, lives: list[tuple[int, int | None]]) -> dict[int, list[Any]]:
    """What each rank is given by real runs, which live one after the other."""
    make = distributed(0, 4, data=Samples(96))
    found: dict[int, list[Any]] = {}
    for world, end_after in lives:
        for rank in range(world):
            course = functools.partial(_course_of, world)
            feeds = functools.partial(_feeds_of, rank, world)
            monkeypatch.setattr(session_feeds, "Course", course)
            monkeypatch.setattr(session_feeds, "Feeds", feeds)
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(rank)
            loader = make(rank, world)
            given = train(folder / str(rank), lambda made=loader: made, end_after=end_after)
            found.setdefault(rank, []).extend(given)
    return found


def _course_of(world: int, position: Position | None, *_: Any, **__: Any) -> Course:
    return Course(position, world)


def _feeds_of(rank: int, world: int, state: list[Any], *_: Any, **__: Any) -> Feeds:
    return Feeds(state, rank, world)
