"""Who is named, from waiting times alone."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from holdfast._keeper.ranks.comparison import ENOUGH_SAMPLES, FEWEST_SAMPLES, name_straggler

SECONDS = st.floats(0, 10)
SAMPLES = st.lists(SECONDS, min_size=FEWEST_SAMPLES, max_size=30)


def noisy(noise: random.Random, seconds: float, spread: float) -> list[float]:
    return [seconds + noise.expovariate(1 / spread) for _ in range(ENOUGH_SAMPLES)]


def test_a_rank_that_sleeps_is_named_in_spite_of_the_noise():
    for seed in range(200):
        noise, late = random.Random(seed), seed % 4
        waits = {rank: noisy(noise, 0.0 if rank == late else 0.05, 0.008) for rank in range(4)}
        named = name_straggler(waits, 0.07)
        assert named is not None
        assert named[0] == late
        assert 0.035 < named[1] < 0.065


def test_noise_alone_names_nobody():
    for seed in range(2000):
        noise = random.Random(seed)
        waits = {rank: noisy(noise, 0.0, 0.03) for rank in range(2 + seed % 7)}
        assert name_straggler(waits, 0.02) is None


@given(waits=st.dictionaries(st.integers(0, 63), SAMPLES, max_size=6), step=SECONDS)
def test_who_is_named_waits_least_and_all_others_wait_longer(waits, step):
    named = name_straggler(waits, step)
    if named is None:
        return
    rank, seconds = named
    assert seconds >= max(0.005, 0.05 * step)
    newest = {r: sorted(w[-ENOUGH_SAMPLES:]) for r, w in waits.items()}
    least = newest.pop(rank)
    assert all(least[len(least) // 2] < other[len(other) // 2] for other in newest.values())


@given(waits=st.dictionaries(st.integers(0, 63), SAMPLES, max_size=6), seed=st.integers())
def test_the_order_of_ranks_and_samples_does_not_matter(waits, seed):
    shuffled = [(r, w[-ENOUGH_SAMPLES:]) for r, w in waits.items()]
    random.Random(seed).shuffle(shuffled)
    for _, samples in shuffled:
        random.Random(seed).shuffle(samples)
    assert name_straggler(dict(shuffled), 0.1) == name_straggler(waits, 0.1)


def test_too_few_samples_name_nobody():
    few = FEWEST_SAMPLES - 1
    assert name_straggler({0: [0.0] * few, 1: [1.0] * 20}, 0.1) is None
    assert name_straggler({0: [0.0] * 20, 1: []}, 0.1) is None
    assert name_straggler({0: [0.0] * 20}, 0.1) is None
    assert name_straggler({}, 0.1) is None


def test_two_slow_ranks_name_nobody():
    assert name_straggler({0: [0.0] * 20, 1: [0.0] * 20, 2: [0.05] * 20}, 0.1) is None


def test_what_is_little_of_a_long_step_is_no_matter():
    waits = {0: [0.1] * 20, 1: [0.2] * 20}
    assert name_straggler(waits, 1.0) == (0, 0.1)
    assert name_straggler(waits, 3.0) is None


def test_only_the_newest_samples_count():
    over = [0.05] * 40 + [0.0] * ENOUGH_SAMPLES
    assert name_straggler({0: [0.0] * 60, 1: over}, 0.1) is None
