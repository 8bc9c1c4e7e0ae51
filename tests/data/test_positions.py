"""What a resumed run knows of its place, and what holdfast leaves as it was."""

from __future__ import annotations

import functools
import itertools
import os
import random

import numpy as np
import pytest

import holdfast
from tests.data.lives_here import train, train_in_lives
from tests.often import few

torch = pytest.importorskip("torch", reason="pip install torch")
pytest.importorskip("torchdata", reason="pip install torchdata")
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from holdfast.torch.loader import WorkerStart
from tests.data.broken import Split, give_part
from tests.data.kinds import VARIATIONS
from tests.data.sources import OwnOrder, Samples

FORK = {"num_workers": 2, "multiprocessing_context": "fork"}


class OrderAtOnce:
    """A sampler as most people write it: all is drawn as a pass begins."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        return iter(torch.randperm(self.count).tolist())


def numbers(count: int = 24) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def draw_two(_) -> None:
    torch.rand(2)


def as_lists(batches) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


@pytest.mark.parametrize("workers", [{}, FORK], ids=["alone", "fork"])
@pytest.mark.parametrize("order", ["shuffle", "sampler", "replacement"])
def test_holdfast_does_not_change_the_order(folder, workers, order):
    def make():
        if order == "shuffle":
            return DataLoader(numbers(), batch_size=4, shuffle=True, **workers)
        sampler = OrderAtOnce(24)
        if order == "replacement":
            sampler = RandomSampler(range(24), replacement=True, num_samples=24)
        return DataLoader(numbers(), batch_size=4, sampler=sampler, **workers)

    torch.manual_seed(6)
    loader = make()
    plain = []
    for _ in range(3):
        for batch in loader:
            plain.append(batch)
            draw_two(None)  # as a training does
    torch.manual_seed(6)
    given = train(folder, make, epochs=3, each=draw_two)
    assert as_lists(given) == as_lists(plain)


def test_the_loader_stays_the_users_own(folder):
    data = numbers()
    for options in ({}, FORK, {**FORK, "persistent_workers": True}):
        loader = DataLoader(data, batch_size=4, shuffle=True, **options)
        before = dict(vars(loader))
        train(folder.with_name(f"run{len(options)}"), lambda loader=loader: loader)
        assert {name: vars(loader)[name] for name in before} == before
        assert loader.dataset is data
        assert sorted(itertools.chain(*as_lists(loader))) == list(range(24))


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"batch_size": None}])
def test_a_worker_init_fn_may_split_an_iterable(folder, options):
    loader = DataLoader(Split(3, 15), worker_init_fn=give_part, **FORK, **options)
    given = [torch.as_tensor(batch).reshape(-1).tolist() for batch in train(folder, lambda: loader)]
    assert sorted(itertools.chain(*given)) == sorted([*range(3, 15)] * 2)


def test_a_worker_whose_trainer_is_gone_does_not_start():
    start = WorkerStart(None, "fork")
    pid = os.fork()
    if pid == 0:
        between = os.fork()  # the child of a child: its parent is not the trainer
        if between == 0:
            start(0)
            os._exit(0)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(between, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_a_resumed_run_knows_its_place_at_once(folder):
    batches = [10, 20, 30, 40, 50]
    seen = train(folder, lambda: batches, accumulate=2, end_after=7, each=where)
    assert seen == [
        (0, 0, 0, False),
        (0, 1, 0, True),
        (0, 2, 1, False),
        (0, 3, 1, True),
        (0, 4, 2, True),
        (1, 0, 3, False),
        (1, 1, 3, True),
    ]
    with holdfast.Run(folder) as run:
        assert (run.epoch, run.batch, run.step) == (1, 1, 4)
        assert run.completes_step
    rest = train(folder, lambda: batches, accumulate=2, each=where)
    assert rest == [(1, 2, 4, False), (1, 3, 4, True), (1, 4, 5, True)]


def where(run) -> tuple[int, int, int, bool]:
    return run.epoch, run.batch, run.step, run.completes_step


def test_a_save_asked_for_within_a_step_is_taken_when_it_is_complete(folder):
    given = train(folder, lambda: [*range(10)], accumulate=4, end_after=2, epochs=1)
    assert given == [0, 1, 2, 3]
    assert train(folder, lambda: [*range(10)], accumulate=4, epochs=1) == [*range(4, 10)]


def test_epochs_without_batches_are_a_step_each(folder):
    with holdfast.Run(folder) as run:
        assert [(epoch, run.step) for epoch in run.epochs(4)] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert run.step == 4


def test_an_epoch_without_batches_between_others_is_a_step(folder):
    with holdfast.Run(folder) as run:
        steps = []
        for epoch in run.epochs(4):
            steps.append(run.step)
            for _ in run.batches([1, 2] if epoch % 2 else []):
                pass
    assert [*steps, run.step] == [0, 1, 3, 4, 6]


# -- generators that somebody holds -------------------------------------------------------


def make_unseeded(kind: str):
    rng = {"python": random.Random, "numpy": np.random.default_rng}[kind]()
    return DataLoader(Samples(), batch_size=4, sampler=OwnOrder(rng))


@pytest.mark.parametrize("kind", ["python", "numpy"])
def test_an_order_that_nobody_seeded_is_the_same_after_a_restart(folder, kind):
    given = train_in_lives(folder, lambda: make_unseeded(kind), [3, 2], epochs=1)
    assert sorted(itertools.chain(*as_lists(given))) == list(range(40))


def undisturbed_and_ended(folder, make, ends=(2, 5, 6), **options):
    """What is given without and with interruptions, the training drawing in between."""
    found = []
    for name, at in (("undisturbed", []), ("ended", list(ends))):
        torch.manual_seed(4)
        np.random.seed(4)
        random.seed(4)
        run_folder = folder.with_name(name)
        given = []
        for end_after in [*at, None]:
            options = {**options, "end_after": end_after, "epochs": 3, "each": draw}
            given += train(run_folder, make, **options)
            torch.manual_seed(99)  # a new process has nothing of the old one
            random.seed(99)
            np.random.seed(99)
        found.append([as_list(batch) for batch in given])
    return found


def as_list(batch):
    """A batch as it can be compared: the tensor, or samples and their indices."""
    if isinstance(batch, tuple | list):
        return [as_list(part) for part in batch]
    return torch.as_tensor(batch).tolist()


def draw(_) -> None:
    torch.rand(1)
    random.random()
    np.random.rand()


@pytest.mark.parametrize("name", few(VARIATIONS, list(VARIATIONS)[::8]))
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_a_variation_of_the_kinds_goes_on_exactly(folder, name):
    kind = VARIATIONS[name]
    undisturbed, ended = undisturbed_and_ended(
        folder, lambda: kind.make()[0], (3, 5, 9), accumulate=kind.accumulate
    )
    assert ended == undisturbed
    indices = [int(i) for batch in undisturbed for i in np.ravel(batch[0])]
    each = len(indices) // 3
    for epoch in range(3):
        samples = indices[epoch * each : (epoch + 1) * each]
        assert len(set(samples)) == len(samples) == kind.samples


@pytest.mark.parametrize("workers", [{}, FORK], ids=["alone", "fork"])
def test_the_global_generator_may_be_given_by_name(folder, workers):
    def make():
        generator = torch.default_generator
        return DataLoader(
            torch.arange(16), batch_size=4, shuffle=True, generator=generator, **workers
        )

    undisturbed, ended = undisturbed_and_ended(folder, make)
    assert ended == undisturbed


class Holding:
    """A collate_fn whose generator is not simply an attribute."""

    def __init__(self, way: str) -> None:
        rng = np.random.default_rng(5)
        self.random = random  # a module is no generator
        if way == "partial":
            self.draw = functools.partial(draw_by, rng)
        elif way == "closure":
            self.draw = lambda: rng.random()
        else:
            self.draw = rng.random

    def __call__(self, samples):
        return torch.tensor([float(s) + self.draw() + self.random.random() for s in samples])


def draw_by(rng) -> float:
    return float(rng.random())


@pytest.mark.parametrize("way", few(["partial", "closure", "method"], ["method"]))
@pytest.mark.parametrize("workers", [{}, FORK], ids=["alone", "fork"])
def test_a_generator_is_found_where_people_keep_them(folder, way, workers):
    def make():
        return DataLoader(
            torch.arange(16), batch_size=4, shuffle=True, collate_fn=Holding(way), **workers
        )

    undisturbed, ended = undisturbed_and_ended(folder, make)
    assert ended == undisturbed
