"""Checkpoints that can be read and are made as nobody makes them: two lines, and no folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install 'holdfast[torch]'")

from holdfast._adapters.adapter import Unfit
from holdfast._errors import HoldfastError
from holdfast._state.restore_adopted import _Overlay
from holdfast._tools.convert.adoption import adopt_files
from holdfast._tools.convert.foreign import Adoption

_WEIGHTS = {"w": torch.ones(2)}
_OF_LIGHTNING = {"pytorch-lightning_version": "2", "state_dict": _WEIGHTS, "global_step": 3}


def _refused(place: Path, source: Path) -> str:
    with pytest.raises(HoldfastError) as caught:
        adopt_files(place / "runs" / "a", Adoption(source, step=1))
    assert not (place / "runs").exists() or not any((place / "runs").iterdir())
    text = str(caught.value)
    assert text.count("\n") == 1
    return text


def _holding_itself() -> list[Any]:
    found: list[Any] = [1]
    found.append(found)
    return found


def test_what_holds_itself_is_refused(tmp_path):
    torch.save({"model": _WEIGHTS, "loop": _holding_itself()}, tmp_path / "a.pt")
    assert "holds itself" in _refused(tmp_path, tmp_path / "a.pt")


@pytest.mark.parametrize(
    "more",
    [
        {"loops": 5},
        {"loops": {"fit_loop": [1]}},
        {"optimizer_states": 5},
        {"optimizer_states": torch.ones(3)},
    ],
    ids=repr,
)
def test_a_file_that_only_looks_like_lightning_s_is_not_understood(tmp_path, more):
    torch.save({**_OF_LIGHTNING, **more}, tmp_path / "a.ckpt")
    assert "is not understood" in _refused(tmp_path, tmp_path / "a.ckpt")


@pytest.mark.parametrize("index", [[1], {}, {"weight_map": 5}, {"weight_map": {"a": 5}}], ids=repr)
def test_an_index_that_is_none_is_not_understood(tmp_path, index):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is not understood" in _refused(tmp_path, tmp_path / "hf")


def _folder(place: Path, state: str) -> Path:
    torch.save(_WEIGHTS, place / "pytorch_model.bin")
    (place / "trainer_state.json").write_text(state)
    return place


def test_a_trainer_s_state_of_another_kind_is_not_understood(tmp_path):
    (tmp_path / "hf").mkdir()
    assert "is not understood" in _refused(tmp_path, _folder(tmp_path / "hf", "[1]"))


@pytest.mark.parametrize("epoch", ["NaN", "Infinity", "-3", '"x"', "null", "[]"])
def test_an_epoch_that_is_none_is_not_believed(tmp_path, epoch):
    (tmp_path / "hf").mkdir()
    source = _folder(tmp_path / "hf", f'{{"global_step": 5, "epoch": {epoch}}}')
    adopted = adopt_files(tmp_path / "runs" / "a", Adoption(source))
    assert adopted.step == 5
    assert adopted.captured.tree["extra"]["position"] is None
    assert any("The data begins at epoch 0" in note for note in adopted.notes)


@pytest.mark.parametrize("data", [b"\x13noise" * 100, b"hello"])
def test_noise_is_told_in_our_own_words(tmp_path, data):
    (tmp_path / "a.pt").write_bytes(data)
    assert "weights_only" not in _refused(tmp_path, tmp_path / "a.pt")


def test_weights_that_are_arrays_of_numpy_fit_a_module():
    module = torch.nn.Linear(2, 1, bias=False)
    overlay = _Overlay({"model": module})
    made = overlay.value(module, {"weight": torch.ones(1, 2).numpy()}, "model")
    assert torch.equal(made.state["weight"], torch.ones(1, 2))
    assert overlay.unfit == Unfit()


def test_weights_that_are_no_arrays_are_told_for_tied_ones_too():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].weight = module[0].weight
    stored = {**module.state_dict(), "0.weight": "none"}
    overlay = _Overlay({"model": module})
    overlay.value(module, stored, "model")
    assert overlay.unfit.changed == ["model.0.weight (was a str, is a Tensor)"]
