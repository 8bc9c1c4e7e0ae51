"""An order is dealt out to any number of ranks as torch's own sampler does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="pip install torch")
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from holdfast.torch.loader import deal, share_of


@given(
    count=st.integers(1, 50),
    world=st.integers(1, 12),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_it_deals_like_a_distributed_sampler(count, world, shuffle, drop_last, epoch):
    data = range(count)
    for rank in range(world):
        sampler = DistributedSampler(data, world, rank, shuffle, seed=3, drop_last=drop_last)
        sampler.set_epoch(epoch)
        share = share_of(DataLoader(data, sampler=sampler, batch_size=4), world)
        assert share is not None
        rest = share.rest(0)
        assert [index for batch in rest.draws for index in batch] == list(sampler)
        assert (rest.length, rest.samples) == (-(-len(sampler) // 4), count)
        assert share.follows_order()
        assert (sampler.num_replicas, sampler.rank, sampler.drop_last) == (world, rank, drop_last)


@given(count=st.integers(0, 50), world=st.integers(1, 60), drop_last=st.booleans())
def test_all_ranks_have_the_same_number_and_no_sample_is_missing(count, world, drop_last):
    order = list(range(100, 100 + count))
    dealt = [deal(order, rank, world, drop_last) for rank in range(world)]
    assert len({len(share) for share in dealt}) == 1
    together = [index for share in dealt for index in share]
    if drop_last:
        assert len(set(together)) == len(together) == count // world * world
    else:
        assert set(together) == set(order)
        assert len(together) - count in range(world)


class Drawn(DistributedSampler):
    """Like one that shares out what another sampler draws anew each time."""

    def __iter__(self):
        drawn = torch.randperm(len(self.dataset)).tolist()
        return (drawn[index] for index in super().__iter__())


class Reversed(DistributedSampler):
    def __iter__(self):
        return reversed(list(super().__iter__()))


class Doubled(DistributedSampler):
    """The same order as the sampler that it comes from, in other words."""

    def __iter__(self):
        return (int(index) for index in super().__iter__())


class OwnOnly(BatchSampler):
    """Its order cannot be taken from it."""

    sampler = property(lambda self: self.__dict__["own"])

    def __init__(self, sampler):
        self.__dict__.update(own=sampler, batch_size=2, drop_last=False)

    def __iter__(self):
        return ([index] for index in self.own)


@pytest.mark.parametrize(
    ("kind", "follows"), [(Drawn, False), (Reversed, False), (Doubled, True)], ids=str
)
def test_samplers_that_share_out_otherwise_are_seen(kind, follows):
    loader = DataLoader(range(40), sampler=kind(range(40), 4, 1), batch_size=4)
    share = share_of(loader, 4)
    assert share is not None
    assert share.follows_order() == follows


def test_a_batch_sampler_that_takes_no_other_sampler_is_seen():
    loader = DataLoader(range(40), batch_sampler=OwnOnly(DistributedSampler(range(40), 4, 1)))
    share = share_of(loader, 4)
    assert share is not None
    assert not share.follows_order()


@pytest.mark.parametrize("world", [1, 4])
def test_only_one_process_has_all_of_an_order_for_itself(world):
    assert (share_of(DataLoader(range(9), batch_size=2), world) is not None) == (world == 1)
    assert share_of(DataLoader(range(9), shuffle=True), world) is None
    batches = BatchSampler(RandomSampler(range(9)), 2, False)
    assert share_of(DataLoader(range(9), batch_sampler=batches), world) is None
    assert share_of(DataLoader(range(9), batch_sampler=[[1, 2], [3]]), world) is None
