"""What cannot be stored or does not fit is refused in a sentence, and nothing is changed."""

from __future__ import annotations

import copy
import random
import sys

import pytest
import torch

import holdfast
from tests.frameworks.roundtrip import assert_same, folder_bytes, restore, store


class Loop:
    """Its state contains itself."""

    def state_dict(self):
        return {"me": self}

    def load_state_dict(self, state): ...


def contains_itself():
    made = [1]
    made.append({"x": made})
    return made


def quantized():
    return torch.ops.aten.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


UNSTORABLE = {
    "a function": (lambda: lambda: 1, "builtins.function"),
    "an open file": (lambda: sys.__stderr__, "io.TextIOWrapper"),
    "an object": (object, "builtins.object"),
    "a class": (lambda: torch.nn.Linear, "builtins.type"),
    "a module of Python": (lambda: random, "builtins.module"),
    "a generator expression": (lambda: (i for i in ()), "builtins.generator"),
    "a sparse tensor": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "a tensor on meta": (lambda: torch.empty(2, device="meta"), "meta"),
    "the system's randomness": (random.SystemRandom, "random.SystemRandom"),
    "a list that contains itself": (contains_itself, "contain itself"),
    "an object that contains itself": (Loop, "contain itself"),
}


@pytest.mark.parametrize("name", UNSTORABLE)
def test_what_cannot_be_stored_is_named_with_its_path_when_the_run_is_made(tmp_path, name):
    make, said = UNSTORABLE[name]
    with pytest.raises(holdfast.UnstorableState) as refused:
        holdfast.Run(tmp_path / "run", fine=1, beside={"a": [0, make()]})
    assert refused.value.path.startswith("beside.a.1")
    assert str(refused.value).startswith("beside.a.1")
    assert said in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore")  # torch's own, of quantization
def test_a_quantized_tensor_is_refused_by_its_path(tmp_path):
    tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(holdfast.UnstorableState, match="quantized") as refused:
        holdfast.Run(tmp_path / "run", weights=tensor)
    assert refused.value.path == "weights"


# -- the checkpoint does not fit ------------------------------------------------------------


def model(width=4, dtype=torch.float32, bias=True):
    torch.manual_seed(width)
    return torch.nn.Sequential(
        torch.nn.Linear(3, width, bias=bias, dtype=dtype), torch.nn.BatchNorm1d(width, dtype=dtype)
    )


def refused_by(folder, **state):
    """Resume with objects that do not fit; nothing may change."""
    before_folder = folder_bytes(folder / "checkpoints")
    before = {
        k: copy.deepcopy(v.state_dict()) for k, v in state.items() if hasattr(v, "state_dict")
    }
    with pytest.raises(holdfast.StateMismatch) as refused:
        restore(folder, **state)
    assert folder_bytes(folder / "checkpoints") == before_folder
    assert not (folder / "set-aside").exists()
    for name, then in before.items():
        for key, value in state[name].state_dict().items():
            assert_same(value, then[key])
    return refused.value


@pytest.fixture
def run(tmp_path):
    store(tmp_path / "run", first=model(), second=model(bias=False))
    return tmp_path / "run"


def test_a_tensor_that_the_checkpoint_lacks_is_missing(run):
    error = refused_by(run, first=model(), second=model())
    assert (error.missing, error.unexpected, error.reshaped) == (("second.0.bias",), (), ())
    assert "second.0.bias" in str(error)


def test_a_tensor_that_only_the_checkpoint_has_is_unexpected(run):
    error = refused_by(run, first=model(bias=False), second=model(bias=False))
    assert (error.missing, error.unexpected, error.reshaped) == ((), ("first.0.bias",), ())
    assert "first.0.bias" in str(error)


def test_tensors_of_another_shape_are_named_with_both_shapes(run):
    error = refused_by(run, first=model(), second=model(5, bias=False))
    assert len(error.reshaped) == 5
    assert "second.0.weight (float32 [4, 3] → float32 [5, 3])" in str(error)


def test_tensors_of_another_type_are_named_with_both_types(run):
    error = refused_by(run, first=model(dtype=torch.float64), second=model(bias=False))
    assert "first.0.weight (float32 [4, 3] → float64 [4, 3])" in str(error)


def test_objects_that_come_or_go_are_named(run):
    error = refused_by(run, first=model(), third=model())
    assert (error.missing, error.unexpected) == (("third",), ("second",))


def test_an_object_that_has_become_a_number_is_named(run):
    error = refused_by(run, first=model(), second=5)
    assert error.reshaped == ("second (had a state_dict, is a int)",)


def test_a_run_goes_on_after_a_mismatch_was_mended(run):
    refused_by(run, first=model(), second=model())
    fresh = model(7), model(7, bias=False)
    fresh = [torch.nn.Sequential(*m) for m in (model(), model(bias=False))]
    restore(run, first=fresh[0], second=fresh[1])
    assert_same(fresh[1][0].weight, model(bias=False)[0].weight)


@pytest.mark.parametrize("kind", [list, tuple, lambda items: dict(enumerate(items)), dict])
def test_objects_in_containers_are_checked_before_any_is_loaded(tmp_path, kind):
    def pack(*items):
        return (
            {"a": items[0], **({"b": items[1]} if items[1:] else {})}
            if kind is dict
            else kind(items)
        )

    store(tmp_path / "run", models=pack(model(), model()))
    first, wider = model(4), model(5)
    with torch.no_grad():
        first[0].weight.zero_()
    for live, what in (
        (pack(first, wider), "reshaped"),
        (pack(first), "unexpected"),
        (
            {**pack(first, model()), "c": wider}
            if isinstance(pack(first), dict)
            else kind([first, model(), wider]),
            "missing",
        ),
    ):
        with pytest.raises(holdfast.StateMismatch) as refused:
            restore(tmp_path / "run", models=live)
        assert getattr(refused.value, what), what
        assert not first[0].weight.any()  # untouched, though it would have fitted


class Refusing:
    def state_dict(self):
        return {"x": 1}

    def load_state_dict(self, state):
        raise LookupError("planted")


def test_a_load_state_dict_that_raises_is_a_sentence(tmp_path):
    store(tmp_path / "run", odd=Refusing())
    before = folder_bytes(tmp_path / "run" / "checkpoints")
    with pytest.raises(holdfast.StateMismatch) as refused:
        restore(tmp_path / "run", odd=Refusing())
    assert str(refused.value).startswith("odd: this Refusing refused the stored state")
    assert "LookupError: planted" in str(refused.value)
    assert isinstance(refused.value.__cause__, LookupError)
    assert folder_bytes(tmp_path / "run" / "checkpoints") == before


# -- an object that does not take back what it gave ------------------------------------------


class Lossy:
    """Gives fp32 and takes it back through fp16."""

    def __init__(self):
        self.values, self.rate = torch.randn(100), 0.5

    def state_dict(self):
        return {"values": self.values, "rate": self.rate}

    def load_state_dict(self, state):
        self.values = state["values"].half().float()


class Forgetful(Lossy):
    def load_state_dict(self, state):
        self.values, self.rate = state["values"], 0.25


class Casting(Lossy):
    def load_state_dict(self, state):
        self.values = state["values"].double()


def test_an_object_that_halves_the_precision_is_found_when_it_loads(tmp_path):
    store(tmp_path / "run", average=Lossy())
    with pytest.raises(holdfast.RestoreDiffers, match=r"average\.values .other values") as refused:
        restore(tmp_path / "run", average=Lossy())
    assert refused.value.paths == ("average.values (other values)",)


def test_an_object_that_changes_the_type_is_found_when_it_loads(tmp_path):
    store(tmp_path / "run", average=Casting())
    with pytest.raises(holdfast.RestoreDiffers, match=r"stored as float32 \[100\], now float64"):
        restore(tmp_path / "run", average=Casting())


def test_a_number_that_does_not_stay_is_told_and_the_run_goes_on(tmp_path, capsys):
    saved = Forgetful()
    store(tmp_path / "run", average=saved)
    fresh = Forgetful()
    restore(tmp_path / "run", average=fresh)
    assert_same(fresh.values, saved.values)
    assert "average.rate (stored 0.5, now 0.25) is not as it was stored" in capsys.readouterr().err
