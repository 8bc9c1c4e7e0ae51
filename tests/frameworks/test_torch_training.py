"""Whole trainings: stopped in the middle and resumed, they end in the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

import holdfast
from tests.frameworks.roundtrip import assert_same, restore, store

# What a first run stops at and a second goes on from, with other weights to begin with: one
# that only trained anew would end elsewhere.
LIVES = ((3, None, 3), (6, 3, 44))


def make_model(seed=3):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def loss_of(model, step):
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(4, 6, generator=generator)).square().mean()


def advance(model, optimizer, step):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss

    return optimizer.step(closure)


def train(folder, total, resumes_at, model, optimizer, **more):
    """Train up to a total; `more` is stepped once a step where it can be."""
    with holdfast.Run(folder, model=model, optimizer=optimizer, **more) as run:
        assert run.resumed_from == resumes_at
        for step in run.steps(total):
            loss = advance(model, optimizer, step)
            for each in more.values():
                if isinstance(each, lr_scheduler.ReduceLROnPlateau):
                    each.step(loss.detach())
                elif hasattr(each, "step"):
                    each.step()


def flat(value, path=""):
    """Every leaf of a state_dict by its path."""
    if isinstance(value, dict):
        value = list(value.items())
        return {k: v for key, item in value for k, v in flat(item, f"{path}.{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{path}.{i}").items()}
    return {path: value}


def assert_states_equal(now, then):
    now, then = flat(now), flat(then)
    assert list(now) == list(then)
    for path, item in then.items():
        if isinstance(item, torch.Tensor):
            assert_same(now[path], item)
            assert now[path].stride() == item.stride(), path
        else:
            assert type(now[path]) is type(item), path
            assert now[path] == item, path


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "AdamW single": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "AdamW lr tensor": lambda p: torch.optim.AdamW(p, torch.tensor(0.01), foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.5, max_iter=3, history_size=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_to_the_same_bits(tmp_path, name):
    make = OPTIMIZERS[name]
    whole = make_model()
    reference = make(whole.parameters())
    for step in range(6):
        advance(whole, reference, step)
    for total, resumes_at, seed in LIVES:
        model = make_model(seed)
        optimizer = make(model.parameters())
        train(tmp_path / "run", total, resumes_at, model, optimizer)
    assert_states_equal(model.state_dict(), whole.state_dict())
    assert_states_equal(optimizer.state_dict(), reference.state_dict())


SCHEDULERS = {
    "OneCycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=10),
    "Plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "Cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "Sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
    "Lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.* before .*optimizer.step")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_where_it_was(tmp_path, name):
    def make(seed=3):
        model = make_model(seed)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return model, optimizer, SCHEDULERS[name](optimizer)

    whole = make()
    train(tmp_path / "whole", 6, None, *whole[:2], scheduler=whole[2])
    for total, resumes_at, seed in LIVES:
        parts = make(seed)
        train(tmp_path / "run", total, resumes_at, *parts[:2], scheduler=parts[2])
    for part, reference in zip(parts, whole, strict=True):
        assert_states_equal(part.state_dict(), reference.state_dict())


def test_a_group_of_parameters_that_is_added_in_mid_run_comes_back(tmp_path):
    def make(groups, seed=3):
        model = make_model(seed)
        optimizer = torch.optim.Adam(model[0].parameters(), 0.01)
        if groups == 2:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
        return model, optimizer

    def run_to(total, resumes_at, model, optimizer):
        with holdfast.Run(tmp_path / "run", model=model, optimizer=optimizer) as run:
            assert run.resumed_from == resumes_at
            for step in run.steps(total):
                if step == 3 and len(optimizer.param_groups) == 1:
                    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
                advance(model, optimizer, step)

    run_to(6, None, *make(1))
    model, optimizer = make(2, seed=44)
    run_to(9, 6, model, optimizer)
    whole, reference = make(1)
    for step in range(9):
        if step == 3:
            reference.add_param_group({"params": list(whole[2].parameters()), "lr": 0.5})
        advance(whole, reference, step)
    assert_states_equal(model.state_dict(), whole.state_dict())
    assert_states_equal(optimizer.state_dict(), reference.state_dict())


class Float32Moments(torch.optim.Optimizer):
    """Moments in fp32 for parameters in bf16, as large trainings keep them."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["moment"] = torch.zeros_like(p, dtype=torch.float32)
                    state["seen"] = torch.zeros((), dtype=torch.int64)
                state["moment"].mul_(0.9).add_(p.grad.float())
                state["seen"] += 1
                p.sub_((group["lr"] * state["moment"]).to(p.dtype))
        return loss


def test_fp32_moments_of_bf16_parameters_stay_fp32_and_equal(tmp_path):
    def make(seed=3):
        model = make_model(seed).to(torch.bfloat16)
        return model, Float32Moments(model.parameters())

    def run_to(folder, total, resumes_at, model, optimizer):
        with holdfast.Run(folder, model=model, optimizer=optimizer) as run:
            assert run.resumed_from == resumes_at
            for step in run.steps(total):

                def closure(step=step):
                    optimizer.zero_grad()
                    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
                    loss = model(x.to(torch.bfloat16)).square().mean()
                    loss.backward()
                    return loss

                optimizer.step(closure)

    whole = make()
    run_to(tmp_path / "whole", 6, None, *whole)
    for total, resumes_at, seed in LIVES:
        parts = make(seed)
        run_to(tmp_path / "run", total, resumes_at, *parts)
    moments = [state["moment"] for state in parts[1].state.values()]
    assert {m.dtype for m in moments} == {torch.float32}
    assert any((m != m.to(torch.bfloat16).float()).any() for m in moments)  # more than bf16 holds
    for part, reference in zip(parts, whole, strict=True):
        assert_states_equal(part.state_dict(), reference.state_dict())


def test_moments_keep_the_memory_format_of_their_parameters(tmp_path):
    def make():
        torch.manual_seed(1)
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.Adam(model.parameters(), 0.01)

    model, optimizer = make()
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    store(tmp_path / "run", model=model, optimizer=optimizer)
    fresh, again = make()
    with torch.no_grad():
        fresh.weight.zero_()
    restore(tmp_path / "run", model=fresh, optimizer=again)
    assert fresh.weight.is_contiguous(memory_format=torch.channels_last)
    assert_states_equal(again.state_dict(), optimizer.state_dict())


def test_the_grad_scaler_goes_on_with_its_scale(tmp_path):
    def make():
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    scaler, model = make(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2048.0
    store(tmp_path / "run", scaler=scaler)
    fresh = make()
    restore(tmp_path / "run", scaler=fresh)
    assert fresh.state_dict() == scaler.state_dict()
    assert fresh.get_scale() == 2048.0


def test_an_averaged_model_goes_on_with_its_average_and_its_count(tmp_path):
    def make():
        model = make_model()
        return model, swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn())

    model, average = make()
    for _ in range(3):
        with torch.no_grad():
            model[0].weight.add_(1)
        average.update_parameters(model)
    store(tmp_path / "run", model=model, average=average)
    fresh, fresh_average = make()
    restore(tmp_path / "run", model=fresh, average=fresh_average)
    assert_states_equal(fresh_average.state_dict(), average.state_dict())
    assert int(fresh_average.n_averaged) == 3


def assert_owns_its_memory(tensor):
    """Memory that torch took from somebody else, such as the image, cannot be resized."""
    assert tensor.untyped_storage().resizable()


class KeepingAverage:
    """Keeps the very tensors it is given, as many hand-written EMAs do."""

    def __init__(self, model):
        self.shadow = {k: v.clone() for k, v in model.state_dict().items()}

    def state_dict(self):
        return self.shadow

    def load_state_dict(self, state):
        self.shadow = state

    def update(self, model):
        for key, value in model.state_dict().items():
            self.shadow[key].lerp_(value, 0.1)


def test_an_object_that_keeps_what_it_is_given_owns_it(tmp_path):
    model = make_model()
    saved = KeepingAverage(model)
    store(tmp_path / "run", average=saved)
    fresh = KeepingAverage(make_model(44))
    expected = copy.deepcopy(saved)
    with holdfast.Run(tmp_path / "run", average=fresh) as run:
        with torch.no_grad():
            model[0].weight.add_(1)
        for step in run.steps(8):
            if step == 4:
                run.save()  # other snapshots are taken of it meanwhile
            fresh.update(model)
            expected.update(model)
    for key, value in expected.shadow.items():
        assert_same(fresh.shadow[key], value)
    restored = KeepingAverage(make_model(44))
    restore(tmp_path / "run", average=restored)
    for key, value in expected.shadow.items():
        assert_same(restored.shadow[key], value)
        assert_owns_its_memory(restored.shadow[key])


class WithExtra(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.calls = 0
        self.history = torch.zeros(2)

    def get_extra_state(self):
        return {"calls": self.calls, "history": self.history}

    def set_extra_state(self, state):
        self.calls, self.history = state["calls"], state["history"]

    def forward(self, x):
        self.calls += 1
        self.history = self.history + x.detach().mean()
        return self.norm(x)


def test_buffers_and_extra_state_of_a_module_come_back(tmp_path):
    saved = WithExtra()
    for _ in range(3):
        saved(torch.randn(5, 4) + 2)
    store(tmp_path / "run", model=saved)
    fresh = WithExtra()
    restore(tmp_path / "run", model=fresh)
    assert_same(fresh.norm.running_mean, saved.norm.running_mean)
    assert_same(fresh.norm.running_var, saved.norm.running_var)
    assert int(fresh.norm.num_batches_tracked) == 3
    assert fresh.calls == 3
    assert_same(fresh.history, saved.history)
    assert_owns_its_memory(fresh.history)
