"""An error on the way of the data says where it happened, and a loop that cannot be is refused."""

from __future__ import annotations

import multiprocessing
import time
import traceback

import pytest

import holdfast
from holdfast._run.signals.handlers import children_deferred
from tests.data.lives_here import train

torch = pytest.importorskip("torch", reason="pip install torch")
from torch.utils.data import DataLoader

from tests.data.broken import (
    Dying,
    Failing,
    FailingByMany,
    FailingStream,
    FailingWithKey,
    fail_to_collate,
)

FORK = {"num_workers": 2, "multiprocessing_context": "fork"}
SPAWN = {"num_workers": 2, "multiprocessing_context": "spawn"}


@pytest.fixture(autouse=True)
def no_worker_is_left():
    """torch waits ten seconds for the workers of an iterator that an error has left behind."""
    yield
    with children_deferred() as deaths:  # torch would raise at the next line, whichever that is
        for worker in multiprocessing.active_children():
            worker.kill()
            worker.join()
        deaths.clear()


def told(folder, loader, kind=ValueError) -> tuple[str, str]:
    """The note of holdfast's, and all that a person sees."""
    with pytest.raises(kind) as caught:
        train(folder, lambda: loader)
    (note,) = [n for n in caught.value.__notes__ if n.startswith("holdfast: epoch")]
    return note, "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({}, "sample 9"),
        ({"batch_size": None}, "sample 9"),
        (FORK, "worker 0, sample 9"),
        ({**FORK, "prefetch_factor": 4}, "worker 0, sample 9"),
        pytest.param(SPAWN, "worker 0, sample 9", marks=pytest.mark.nightly),
    ],
    ids=["alone", "one by one", "fork", "prefetch", "spawn"],
)
def test_an_error_in_a_data_set_names_epoch_batch_worker_and_sample(folder, options, place):
    note, seen = told(folder, DataLoader(Failing(), **{"batch_size": 4, **options}))
    batch = 9 if "batch_size" in options else 2
    assert note == f"holdfast: epoch 1, batch {batch}, {place}"
    assert "planted" in seen
    assert note in seen


def test_an_error_in_a_data_set_that_makes_whole_batches_names_their_samples(folder):
    note, _ = told(folder, DataLoader(FailingByMany(), batch_size=4, **FORK))
    assert note == "holdfast: epoch 1, batch 2, worker 0, sample one of [8, 9, 10, 11]"


def test_a_key_error_in_a_worker_is_no_less_clear(folder):
    note, seen = told(folder, DataLoader(FailingWithKey(), batch_size=4, **FORK), KeyError)
    assert note == "holdfast: epoch 1, batch 2, worker 0, sample 9"
    assert note in seen


def test_an_error_in_an_iterable_says_after_how_many_samples(folder):
    note, seen = told(folder, DataLoader(FailingStream(), batch_size=4))
    assert note == "holdfast: epoch 1, batch 2"
    assert "holdfast: after 9 samples\n" in seen


def test_an_error_in_an_iterable_of_a_worker_names_the_worker(folder):
    note, seen = told(folder, DataLoader(FailingStream(), batch_size=4, **FORK))
    assert note == "holdfast: epoch 1, batch 3"
    assert "holdfast: after 4 samples of worker 1\n" in seen


@pytest.mark.parametrize("options", [{}, FORK], ids=["alone", "fork"])
def test_an_error_in_a_collate_fn_names_the_batch(folder, options):
    loader = DataLoader(torch.arange(16.0), batch_size=4, collate_fn=fail_to_collate, **options)
    note, seen = told(folder, loader)
    assert note == "holdfast: epoch 0, batch 2"
    assert ("worker process 0" in seen) == bool(options)


def test_an_error_of_a_plain_source_names_the_batch(folder):
    class Source:
        def __iter__(self):
            yield 1
            raise ValueError("planted")

    note, _ = told(folder, Source())
    assert note == "holdfast: epoch 0, batch 1"


def test_an_error_in_a_phase_names_the_batch(folder):
    with (
        pytest.raises(ValueError, match="planted") as caught,
        holdfast.Run(folder) as run,
    ):
        for _ in run.epochs(2):
            for _ in run.batches([1, 2]):
                pass
            with run.phase("eval"):
                for _ in run.batches(DataLoader(Failing(), batch_size=4)):
                    pass
    assert caught.value.__notes__ == ["holdfast: epoch 1, batch 2, sample 9"]


def test_a_worker_that_is_killed_names_the_batch(folder):
    loader = DataLoader(Dying(), batch_size=4, prefetch_factor=1, **FORK)
    with pytest.raises(RuntimeError, match=r"killed|exited unexpectedly") as caught:
        train(folder, lambda: loader)
    assert caught.value.__notes__ == ["holdfast: epoch 0, batch 2"]


def test_a_worker_that_dies_while_a_boundary_saves_does_not_cut_it_in_two(folder, monkeypatch):
    from holdfast._store.memory.arena import Arena

    real = Arena.finish

    def finish_late(arena, slot, **record):
        time.sleep(2.5)  # the worker's death is heard in here
        real(arena, slot, **record)

    monkeypatch.setattr(Arena, "finish", finish_late)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"killed|exited unexpectedly"):
        train(folder, lambda: DataLoader(Dying(), batch_size=4, prefetch_factor=1, **FORK))
    assert time.monotonic() - began < 30
    monkeypatch.undo()
    with holdfast.Run(folder) as run:
        assert run.step >= 1


def test_a_loop_over_data_inside_another_is_refused(folder):
    with (
        pytest.raises(holdfast.HoldfastError, match=r"run.batches\(\) inside run.batches\(\)"),
        holdfast.Run(folder) as run,
    ):
        for _ in run.epochs(1):
            for _ in run.batches([1, 2]):
                for _ in run.batches([3, 4]):
                    pass


def test_a_second_lap_outside_of_epochs_is_refused(folder):
    batches = [1, 2]
    with (
        pytest.raises(holdfast.HoldfastError, match=r"a second time.*\n.*run.epochs"),
        holdfast.Run(folder) as run,
    ):
        for _ in range(2):
            for _ in run.batches(batches):
                pass


@pytest.mark.parametrize(
    "source",
    [iter([1, 2, 3]), (n for n in range(3)), {1, 2, 3}, frozenset({4, 5})],
    ids=["iterator", "generator", "set", "frozenset"],
)
def test_a_source_that_cannot_begin_anew_is_warned_of_once(folder, capsys, source):
    train(folder, lambda: source, epochs=3)
    lines = [line for line in capsys.readouterr().err.splitlines() if "To be exact" in line]
    assert len(lines) == 1
    assert "state_dict" in lines[0]


@pytest.mark.parametrize("source", [[1, 2], (1, 2), range(3)], ids=["list", "tuple", "range"])
def test_a_source_that_is_exact_is_not_warned_of(folder, capsys, source):
    train(folder, lambda: source)
    assert "To be exact" not in capsys.readouterr().err


def test_what_cannot_be_looped_over_is_refused_in_a_sentence(folder):
    with pytest.raises(holdfast.HoldfastError, match="cannot be looped over"):
        train(folder, lambda: 7)


def test_a_loader_whose_order_depends_on_speed_is_warned_of(folder, capsys):
    train(folder, lambda: DataLoader(torch.arange(8.0), batch_size=4, in_order=False, **FORK))
    assert capsys.readouterr().err.count("in_order=False") == 1


def test_in_order_does_not_matter_without_workers(folder, capsys):
    train(folder, lambda: DataLoader(torch.arange(8.0), batch_size=4, in_order=False))
    assert "in_order=False" not in capsys.readouterr().err


def test_a_loader_that_has_changed_its_length_is_warned_of(folder, capsys):
    train(folder, lambda: DataLoader(torch.arange(16.0), batch_size=4), end_after=2)
    train(folder, lambda: DataLoader(torch.arange(20.0), batch_size=4))
    assert "had 4 batches and has 5 now" in capsys.readouterr().err


def test_a_loop_that_did_not_come_again_is_told_of(folder):
    train(folder, lambda: [1, 2, 3], end_after=2)
    with (
        pytest.raises(holdfast.HoldfastError, match="did not come again"),
        holdfast.Run(folder) as run,
    ):
        for _ in run.epochs(2):
            pass
