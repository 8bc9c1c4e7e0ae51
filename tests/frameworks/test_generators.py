"""Random generators go on with the next draw: global ones without being asked."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import holdfast
from tests.frameworks.roundtrip import restore, store


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),
        float(np.random.standard_normal()),
        float(torch.rand(())),
        float(torch.randn(())),
    )


def seed(number):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@pytest.fixture(autouse=True)
def put_back():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def drawn_by(folder, total, between=0):
    draws = []
    with holdfast.Run(folder) as run:
        for _ in range(between):
            draw()
        for _ in run.steps(total):
            draws.append(draw())
    return draws


@pytest.mark.parametrize("between", [0, 5])
def test_the_next_draws_are_those_of_the_undisturbed_run(tmp_path, between):
    seed(1)
    whole = drawn_by(tmp_path / "whole", 6, between)
    seed(1)
    first = drawn_by(tmp_path / "run", 3, between)
    seed(99)
    second = drawn_by(tmp_path / "run", 6, between)
    assert first + second == whole


def test_a_loop_by_hand_finds_the_generators_restored_as_soon_as_the_run_is_open(tmp_path):
    seed(1)
    with holdfast.Run(tmp_path / "run") as run:
        for _ in range(3):
            draw()
            run.boundary()
        run.finish()
        expected = draw()
    seed(99)
    with holdfast.Run(tmp_path / "run"):
        assert draw() == expected


def test_between_opening_and_a_loop_a_script_draws_the_same_in_every_life(tmp_path):
    found = []
    for total in (3, 6):
        seed(1)
        with holdfast.Run(tmp_path / "run") as run:
            found.append(draw())  # a split of the data, say
            drawn = [draw() for _ in run.steps(total)]
    seed(1)
    assert found == [draw()] * 2
    assert drawn == [draw() for _ in range(6)][3:]


def test_a_second_loop_of_the_same_run_does_not_repeat_the_draws(tmp_path):
    seed(1)
    drawn_by(tmp_path / "run", 2)
    with holdfast.Run(tmp_path / "run") as run:
        first = [draw() for _ in run.steps(4)]
        second = [draw() for _ in run.steps(6)]
    assert len({*first, *second}) == 4


GENERATORS = {
    "random.Random": (lambda n: random.Random(n), lambda g: (g.random(), g.gauss(0, 1))),
    "PCG64": (lambda n: np.random.Generator(np.random.PCG64(n)), lambda g: g.random()),
    "PCG64DXSM": (lambda n: np.random.Generator(np.random.PCG64DXSM(n)), lambda g: g.random()),
    "MT19937": (lambda n: np.random.Generator(np.random.MT19937(n)), lambda g: g.random()),
    "Philox": (lambda n: np.random.Generator(np.random.Philox(n)), lambda g: g.random()),
    "SFC64": (lambda n: np.random.Generator(np.random.SFC64(n)), lambda g: g.random()),
    "int32 half": (
        lambda n: np.random.default_rng(n),
        lambda g: int(g.integers(0, 1 << 30, dtype=np.int32)),  # keeps half a word
    ),
    "RandomState": (lambda n: np.random.RandomState(n), lambda g: g.standard_normal()),
    "torch.Generator": (
        lambda n: torch.Generator().manual_seed(n),
        lambda g: float(torch.randn((), generator=g)),
    ),
}


def test_generators_given_as_state_go_on_in_place(tmp_path):
    saved = {name: make(5) for name, (make, _) in GENERATORS.items()}
    for name, (_, take) in GENERATORS.items():
        take(saved[name])
    store(tmp_path / "run", rngs=saved, single=saved["PCG64"])
    fresh = {name: make(77) for name, (make, _) in GENERATORS.items()}
    single = np.random.default_rng(3)
    before = dict(fresh)
    restore(tmp_path / "run", rngs=fresh, single=single)
    assert single.random() == np.random.Generator(np.random.PCG64(5)).random(2)[1]
    for name, (_, take) in GENERATORS.items():
        assert fresh[name] is before[name]
        assert [take(fresh[name]) for _ in range(5)] == [take(saved[name]) for _ in range(5)], name


@pytest.mark.parametrize(
    "live",
    [np.random.Generator(np.random.Philox(1)), random.Random(1), np.random.RandomState(1)],
    ids=lambda g: type(g).__name__,
)
def test_a_generator_of_another_kind_is_a_mismatch_in_a_sentence(tmp_path, live):
    store(tmp_path / "run", rng=np.random.default_rng(5))
    with pytest.raises(holdfast.StateMismatch, match="rng: this "):
        restore(tmp_path / "run", rng=live)


def test_a_generator_where_there_was_a_number_is_a_mismatch(tmp_path):
    store(tmp_path / "a", rng=5)
    with pytest.raises(holdfast.StateMismatch, match=r"rng .was a plain value, is a Random"):
        restore(tmp_path / "a", rng=random.Random(1))
    store(tmp_path / "b", rng=random.Random(1))
    with pytest.raises(holdfast.StateMismatch, match=r"rng .was a random generator, is a int"):
        restore(tmp_path / "b", rng=5)
