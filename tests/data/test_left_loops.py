"""A loop that the script leaves by itself, and the ways to say that training is complete."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tqdm

import holdfast
from tests.support import checkpoint_steps, journal_events

# No snapshot comes by itself, so whatever is durable at the end was saved by leaving.
SETTINGS = holdfast.Settings(max_overhead=0, checkpoint_every="1h")
OFTEN = holdfast.Settings(max_overhead=1.0)
NUMBERS = list(range(20))


class Net:
    """A net and its optimizer; the weight tells which batches it was trained on, in which order."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.5)

    def train(self, batch: float) -> None:
        self.model.weight.grad = torch.full((1, 1), -float(batch + 1), dtype=torch.float64)
        self.optimizer.step()

    def open(self, folder: Path) -> holdfast.Run:
        given = {"model": self.model, "optimizer": self.optimizer}
        return holdfast.Run(folder, settings=SETTINGS, **given)

    @property
    def weight(self) -> float:
        return self.model.weight.item()


def trained_on(batches: list[int]) -> float:
    net = Net()
    for batch in batches:
        net.train(batch)
    return net.weight


def leave_before(run: holdfast.Run, net: Net, limit: int) -> None:
    for batch in run.batches(NUMBERS):
        if run.step >= limit:
            break
        net.train(batch)


def leave_after(run: holdfast.Run, net: Net, limit: int) -> None:
    for batch in run.batches(NUMBERS):
        net.train(batch)
        if batch + 1 >= limit:
            break


def leave_after_by_return(run: holdfast.Run, net: Net, limit: int) -> None:
    for number, batch in enumerate(run.batches(NUMBERS), run.step):
        net.train(batch)
        if number + 1 >= limit:
            return


def leave_after_a_bar(run: holdfast.Run, net: Net, limit: int) -> None:
    for batch in tqdm.tqdm(run.batches(NUMBERS), disable=None):
        net.train(batch)
        if batch + 1 >= limit:
            break


def leave_with_the_iterator_kept(run: holdfast.Run, net: Net, limit: int) -> None:
    batches = run.batches(NUMBERS)
    run.kept = batches
    for batch in batches:
        net.train(batch)
        if batch + 1 >= limit:
            break


def leave_steps(run: holdfast.Run, net: Net, limit: int) -> None:
    for step in run.steps(20):
        net.train(step)
        if step + 1 >= limit:
            break


def leave_epochs(run: holdfast.Run, net: Net, limit: int) -> None:
    for epoch in run.epochs(4):
        for batch in run.batches(NUMBERS[:5]):
            net.train(5 * epoch + batch)
            if 5 * epoch + batch + 1 >= limit:
                break
        if run.step >= limit:
            break


LEAVE = (
    leave_before,
    leave_after,
    leave_after_by_return,
    leave_after_a_bar,
    leave_with_the_iterator_kept,
    leave_steps,
    leave_epochs,
)


@pytest.mark.parametrize("leave", LEAVE)
def test_a_loop_that_is_left_is_durable_at_its_last_step_and_goes_on_exactly(tmp_path, leave):
    net = Net()
    with net.open(tmp_path / "run") as run:
        leave(run, net, 13)
    assert checkpoint_steps(tmp_path / "run")[-1] == 13
    assert net.weight == trained_on(NUMBERS[:13])
    again = Net()
    with again.open(tmp_path / "run") as run:
        assert run.resumed_from == 13
        leave(run, again, 17)
    assert again.weight == trained_on(NUMBERS[:17])
    assert checkpoint_steps(tmp_path / "run")[-1] == 17


def test_values_that_were_handed_over_tell_that_the_step_was_made(tmp_path):
    with holdfast.Run(tmp_path / "run", settings=SETTINGS, total=0) as run:
        for batch in run.batches(NUMBERS):
            run.update(total=run.state["total"] + batch)
            if batch == 4:
                break
    with holdfast.Run(tmp_path / "run", settings=SETTINGS, total=0) as run:
        assert (run.step, run.state["total"]) == (5, 10)


def test_of_arrays_the_step_at_which_a_loop_is_left_does_not_count(tmp_path, capfd):
    weights = np.zeros(3)
    with holdfast.Run(tmp_path / "run", settings=SETTINGS, w=weights) as run:
        for batch in run.batches(NUMBERS):
            if run.step == 9:
                break
            weights += batch
    assert checkpoint_steps(tmp_path / "run") == [9]
    said = capfd.readouterr().err
    assert "left at step 9, which is durable" in said
    assert "run.finish()" in said


def test_arrays_that_changed_before_a_loop_is_left_are_not_taken_for_the_step_before(tmp_path):
    undisturbed = np.zeros(3)
    for number in NUMBERS:
        undisturbed = 0.9 * undisturbed + number
    for end in (9, len(NUMBERS)):
        weights = np.zeros(3)
        with holdfast.Run(tmp_path / "run", settings=OFTEN, w=weights) as run:
            for batch in run.batches(NUMBERS):
                weights *= 0.9
                weights += batch
                for _ in ():  # the head of another loop is no head of this one
                    pass
                if run.step == end:
                    break
            assert end > 9 or run.step == 9
    assert weights.tolist() == undisturbed.tolist()


@pytest.mark.parametrize("catch", [ValueError, KeyError])
def test_a_step_that_failed_is_never_saved(tmp_path, catch):
    net = Net()
    try:
        with net.open(tmp_path / "run") as run:
            try:
                for batch in run.batches(NUMBERS):
                    net.train(batch)
                    if batch == 3:
                        run.save()
                    if batch == 5:
                        raise ValueError("in mid-step")
            except catch:
                pass
    except ValueError:
        pass
    assert checkpoint_steps(tmp_path / "run") == [4]


def test_half_accumulated_gradients_complete_no_step(tmp_path):
    net = Net()
    with net.open(tmp_path / "run") as run:
        for batch in run.batches(NUMBERS, accumulate=4):
            if run.completes_step:
                net.train(batch)
            if batch == 9:
                break
    assert checkpoint_steps(tmp_path / "run") == [2]


# -- done ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_before", [True, False])
def test_finish_in_a_loop_ends_the_run_for_good(tmp_path, capfd, is_before):
    for expected in (None, 6):
        net = Net()
        with net.open(tmp_path / "run") as run:
            assert run.resumed_from == expected
            for epoch in run.epochs(3):
                for batch in run.batches(NUMBERS[:4]):
                    if is_before and run.step == 6:
                        run.finish()
                        break
                    net.train(4 * epoch + batch)
                    if not is_before and run.step == 5:
                        run.finish()
                        break
                if run.over:
                    break
        assert net.weight == trained_on(NUMBERS[:6])
    assert len(journal_events(tmp_path / "run", "finished")) == 1
    assert "finished at step 6 (run.finish()); nothing left to train" in capfd.readouterr().err


class Endless:
    def __iter__(self) -> Any:
        return itertools.count()


def test_steps_bound_an_endless_loader(tmp_path, capfd):
    for limit in (7, 7, 11):
        net = Net()
        with net.open(tmp_path / "run") as run:
            for batch in run.batches(Endless(), steps=limit):
                net.train(batch)
        assert net.weight == trained_on(list(range(limit)))
    assert [each["step"] for each in journal_events(tmp_path / "run", "finished")] == [7, 11]
    assert "finished at step 7 of 7; nothing left to train" in capfd.readouterr().err


def test_steps_bound_epochs_of_which_each_goes_on_for_ever(tmp_path):
    for _ in range(2):
        net, ends = Net(), 0
        with net.open(tmp_path / "run") as run:
            for _ in run.epochs(3, steps=7):
                for batch in run.batches(NUMBERS[:5]):
                    net.train(batch)
                ends += 1
        assert net.weight == trained_on([0, 1, 2, 3, 4, 0, 1])
    assert ends == 0, "the second life had nothing left"
    assert checkpoint_steps(tmp_path / "run")[-1] == 7
    assert [each["step"] for each in journal_events(tmp_path / "run", "finished")] == [7]


def test_steps_of_a_loop_inside_of_epochs_belong_to_the_epochs(tmp_path):
    with holdfast.Run(tmp_path / "run", settings=SETTINGS, w=np.zeros(1)) as run:
        for _ in run.epochs(2):
            with pytest.raises(holdfast.HoldfastError, match=r"run\.epochs\(n, steps="):
                next(run.batches(NUMBERS, steps=3))
            break


# -- len -------------------------------------------------------------------------------


def test_batches_have_the_length_that_their_loaders_have(tmp_path):
    with holdfast.Run(tmp_path / "run", settings=SETTINGS, w=np.zeros(1)) as run:
        assert len(run.batches(NUMBERS)) == 20
        assert len(run.batches(NUMBERS, NUMBERS[:3])) == 3
        with pytest.raises(TypeError):
            len(run.batches(Endless()))
        with run.phase("eval"):
            assert len(run.batches(NUMBERS)) == 20
            assert list(run.batches(NUMBERS)) == NUMBERS
        assert tqdm.tqdm(run.batches(NUMBERS), disable=True).total in (20, None)
        assert [batch for _, batch in zip(range(3), run.batches(NUMBERS), strict=False)]
