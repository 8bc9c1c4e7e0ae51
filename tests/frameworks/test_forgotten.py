"""State that a script forgot to give, or gave as a copy: said in the first life, or refused."""

from __future__ import annotations

import numpy
import pytest
import torch

import holdfast

SETTINGS = holdfast.Settings(max_overhead=1.0)


def make(optimizer: str = "Adam") -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    return model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)


def train(folder, net, stepping, /, and_step=None, **state):
    with holdfast.Run(folder, settings=SETTINGS, **state) as run:
        for _ in run.steps(4):
            net(torch.ones(2)).sum().backward()
            stepping.step()
            if and_step is not None:
                and_step.step()


def test_an_optimizer_that_steps_and_was_not_given_is_named_once(tmp_path, capfd):
    model, optimizer = make()
    train(tmp_path / "run", model, optimizer, model=model)
    said = capfd.readouterr().err
    assert said.count("an optimizer (Adam) steps and is not part of the state") == 1
    assert "holdfast.Run(…, optimizer=optimizer)" in said


def test_the_state_dict_of_an_optimizer_is_only_a_copy(tmp_path, capfd):
    model, optimizer = make()
    train(tmp_path / "run", model, optimizer, model=model, opt=optimizer.state_dict())
    said = capfd.readouterr().err
    assert said.count("opt is the state_dict() of an optimizer (Adam)") == 1
    assert "holdfast.Run(…, opt=optimizer)" in said


def test_without_a_state_of_its_own_an_optimizer_is_forgotten_with_its_rate(tmp_path, capfd):
    model, optimizer = make("SGD")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(tmp_path / "run", model, optimizer, and_step=scheduler, model=model, s=scheduler)
    assert "an optimizer (SGD) steps" in capfd.readouterr().err


class Agent:
    """Saves its optimizer itself."""

    def __init__(self) -> None:
        self.model, self.optimizer = make()

    def state_dict(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def test_what_is_saved_by_any_way_is_not_forgotten(tmp_path, capfd):
    agent, (model, optimizer) = Agent(), make()
    train(tmp_path / "a", agent.model, agent.optimizer, agent=agent)
    train(tmp_path / "b", model, optimizer, both=[model, {"of": optimizer}])
    model, optimizer = make("SGD")
    train(tmp_path / "c", model, optimizer, model=model)  # which keeps nothing
    assert "optimizer" not in capfd.readouterr().err


def test_an_optimizer_that_is_made_for_one_step_keeps_nothing(tmp_path, capfd):
    model, optimizer = make()
    with holdfast.Run(tmp_path / "run", settings=SETTINGS, m=model, o=optimizer) as run:
        for _ in run.steps(4):
            image = torch.nn.Parameter(torch.ones(2))
            inner = torch.optim.Adam([image])
            for _ in range(3):
                model(image).sum().backward()
                inner.step()
            optimizer.step()
    assert "not part of the state" not in capfd.readouterr().err


def test_a_number_that_is_never_handed_over_is_said_when_the_first_life_ends(tmp_path, capfd):
    for _ in range(2):
        with holdfast.Run(tmp_path / "run", settings=SETTINGS, best=9.5, seen=0) as run:
            for step in run.steps(run.step + 3):
                run.update(seen=step)
    said = capfd.readouterr().err
    assert said.count("best is a number") == 1
    assert "run.update(best=best)" in said
    assert "seen is a number" not in said


def test_a_number_that_is_never_handed_over_is_said_before_a_kill_could_prevent_it(tmp_path, capfd):
    for _ in range(2):
        with holdfast.Run(tmp_path / "run", settings=SETTINGS, best=9.5) as run:
            for step in run.steps(run.step + 150):
                if step == 110:
                    run.save()  # the state is inspected when it is captured
                if step == 112:
                    said = capfd.readouterr().err
    assert said.count("best is a number") == 1
    assert "before the loop: best = run.state[" in said
    assert "best is a number" not in capfd.readouterr().err


def test_a_restored_number_that_is_replaced_unread_is_said(tmp_path, capfd):
    def train(*, read: bool) -> str:
        best = 9.5
        with holdfast.Run(tmp_path / "run", settings=SETTINGS, best=best) as run:
            if read:
                best = run.state["best"]
            for _ in run.steps(run.step + 3):
                best *= 0.9
                run.update(best=best)
        return capfd.readouterr().err

    assert "does not come from it" not in train(read=False)  # the first attempt
    assert "does not come from it" not in train(read=True)
    said = train(read=False)
    assert said.count("best was restored, and run.update() has replaced it") == 1
    assert 'best = run.state["best"]' in said


def test_a_dict_for_an_object_is_refused_at_the_call(tmp_path):
    model, _ = make()
    with holdfast.Run(tmp_path / "run", settings=SETTINGS, model=model) as run:
        with pytest.raises(holdfast.HoldfastError, match="dict for an object, a Linear"):
            run.update(model=model.state_dict())
        run.update(model=make()[0])


# -- other classes ---------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [("SGD", "Adam"), ("Adam", "SGD"), ("Adam", "AdamW")])
def test_another_optimizer_is_refused_before_anything_is_touched(tmp_path, before, after):
    model, optimizer = make(before)
    train(tmp_path / "run", model, optimizer, model=model, groups=[optimizer])
    model, optimizer = make(after)
    weight = model.weight.clone()
    with pytest.raises(holdfast.StateMismatch, match=rf"groups\.0 \(was a {before}, is a {after}"):
        train(tmp_path / "run", model, optimizer, model=model, groups=[optimizer])
    assert torch.equal(model.weight, weight)


def test_another_scheduler_is_refused_before_anything_is_touched(tmp_path):
    schedulers = torch.optim.lr_scheduler
    for kind in (schedulers.ExponentialLR, schedulers.ExponentialLR, schedulers.StepLR):
        model, optimizer = make()
        weight, scheduler = model.weight.clone(), kind(optimizer, 1)
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        if kind is schedulers.StepLR:
            with pytest.raises(holdfast.StateMismatch, match="was a ExponentialLR, is a StepLR"):
                train(tmp_path / "run", model, optimizer, and_step=scheduler, **given)
            assert torch.equal(model.weight, weight)
        else:
            train(tmp_path / "run", model, optimizer, and_step=scheduler, **given)


def test_a_run_without_a_step_says_how_steps_are_made(tmp_path, capfd):
    model, _ = make()
    with holdfast.Run(tmp_path / "run", model=model) as run, pytest.raises(AttributeError):
        run.state.best = 4.0
    said = capfd.readouterr().err
    assert "this run has seen no step, so nothing is saved.\nLoop over run.steps(n)" in said


def train_plainly(folder, step, steps=130, **state):
    with holdfast.Run(folder, settings=SETTINGS, **state) as run:
        for _ in run.steps(steps):
            step(run)
            if run.step in (0, 120):
                run.save()  # which captures the state


@pytest.mark.parametrize("zeros", [numpy.zeros, torch.zeros])
def test_an_array_that_the_script_replaces_is_named_once(tmp_path, capfd, zeros):
    weights, total = zeros(3), zeros(3)

    def step(_run):
        nonlocal weights, total
        weights = weights + 1  # not the one that the run was given
        total += weights

    train_plainly(tmp_path / "run", step, weights=weights, total=total)
    said = capfd.readouterr().err
    assert said.count("weights: no change in the state") == 1
    assert "run.update(weights=weights)" in said
    assert 'weights = run.state["weights"]' in said
    train_plainly(tmp_path / "run", step, steps=260, weights=zeros(3), total=zeros(3))
    assert "no change in the state" not in capfd.readouterr().err


def test_an_array_that_changes_or_is_handed_over_is_not_named(tmp_path, capfd):
    in_place, handed, constant_in_a_list = numpy.zeros(3), numpy.zeros(3), [numpy.ones(3)]

    def step(run):
        nonlocal in_place, handed
        in_place += 1
        handed = handed + 1
        run.update(handed=handed)

    state = {"in_place": in_place, "handed": handed, "listed": constant_in_a_list}
    train_plainly(tmp_path / "run", step, **state)
    assert "no change in the state" not in capfd.readouterr().err


@pytest.mark.parametrize("hands_over", [True, False])
def test_a_number_is_judged_once_an_epoch_has_ended(tmp_path, capfd, hands_over):
    best, order = 0.0, numpy.arange(9)
    with holdfast.Run(tmp_path / "run", settings=SETTINGS, best=best, order=order) as run:
        for _ in run.epochs(2):
            for _ in run.batches([torch.ones(1)] * 130):
                if run.batch in (0, 120):
                    run.save()
            if run.epoch == 0:
                assert "run.update" not in capfd.readouterr().err
            order += 1
            if hands_over:
                best += 1
                run.update(best=best)
    assert ("best is a number" in capfd.readouterr().err) is not hands_over
