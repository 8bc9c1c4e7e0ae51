"""What `holdfast export` writes, loaded by torch and by plain safetensors."""

from __future__ import annotations

import json
import math

import pytest

torch = pytest.importorskip("torch", reason="pip install torch")
safetensors = pytest.importorskip("safetensors", reason="pip install safetensors")

from safetensors import safe_open
from safetensors.torch import load_file

from holdfast.torch.adapter import ADAPTER
from tests.cli.command import succeed
from tests.scripts import train_varied
from tests.support import SCRIPTS, Trainer


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    """One of everything, exported in both ways."""
    folder = tmp_path_factory.mktemp("varied") / "run"
    trainer = Trainer(folder, script=SCRIPTS / "train_varied.py")
    assert trainer.wait() == 0, trainer.output
    for name in ("out.pt", "out.safetensors"):
        succeed("export", folder, folder.parent / name)
    return folder.parent


@pytest.mark.nightly
def test_the_objects_load_their_part_of_a_pt_file(varied):
    state = torch.load(varied / "out.pt", weights_only=True)
    assert list(state) == list(train_varied.build())
    tensors = load_file(varied / "out.safetensors")
    fresh = train_varied.build()
    for name in ("model", "optimizer", "scheduler"):
        fresh[name].load_state_dict(state[name])
    for name, value in fresh["model"].state_dict().items():
        assert torch.equal(value, tensors[f"model.{name}"])
    moments = fresh["optimizer"].state_dict()["state"]
    assert len(moments) == 3
    for index, parts in moments.items():
        for name, value in parts.items():
            assert torch.equal(value, tensors[f"optimizer.state.{index}.{name}"])
    assert fresh["scheduler"].last_epoch == 2


def test_one_state_without_its_prefix_is_what_load_state_dict_wants(varied, tmp_path):
    for name in ("out.safetensors", "out.pt"):
        succeed("export", varied / "run", tmp_path / name, "--only", "model", "--strip")
    model = train_varied.Tied()
    model.load_state_dict(load_file(tmp_path / "out.safetensors"))
    model.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
    two = tmp_path / "two.safetensors"
    succeed("export", varied / "run", two, "--only", "model", "--only", "whole")
    assert {name.split(".")[0] for name in load_file(two)} == {"model", "whole"}


def test_everything_that_can_be_stored_is_in_the_pt_file(varied):
    state = torch.load(varied / "out.pt", weights_only=True)
    then = train_varied.build()
    assert state["optimizer"]["param_groups"][0]["params"] == [0, 1, 2]
    for name, value in then["tensors"].items():
        found = state["tensors"][name]
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert bytes(ADAPTER.bytes_of(found)) == bytes(ADAPTER.bytes_of(value))
    assert state["tensors"]["turned"].stride() == then["tensors"]["turned"].stride()
    arrays = state["arrays"]
    assert torch.equal(arrays["f4"], torch.arange(3.0))
    assert arrays["big endian"].numpy().tobytes() == then["arrays"]["big endian"].tobytes()
    assert arrays["words"].numpy().tobytes() == then["arrays"]["words"].tobytes()
    assert arrays["scalar"] == 1.5
    assert torch.equal(state["generator"], then["generator"].get_state())
    plain, before = state["plain"], then["plain"]
    assert math.isnan(plain.pop("nan"))
    del before["nan"]
    assert plain.pop("frozen") == {"a"} == before.pop("frozen")
    for name in ("a.b", "a", "keys"):
        del plain[name], before[name]
    assert plain == before
    assert torch.equal(state["whole"], then["whole"])


def test_tied_tensors_stay_tied_in_a_pt_file(varied):
    state = torch.load(varied / "out.pt", weights_only=True)
    tied = state["model"]["embed.weight"], state["model"]["head.weight"], state["ema"]["again"]
    assert len({tensor.data_ptr() for tensor in tied}) == 1
    model = train_varied.Tied()
    model.load_state_dict(state["model"])
    assert torch.equal(model.head.weight, state["ema"]["again"])


def test_tied_tensors_have_both_names_in_a_safetensors_file(varied, tmp_path):
    tensors = load_file(varied / "out.safetensors")
    for name in ("model.head.weight", "ema.again"):
        assert torch.equal(tensors[name], tensors["model.embed.weight"])
    assert torch.equal(tensors["plain.a.b"], torch.zeros(1))
    assert torch.equal(tensors["plain.a.b~2"], torch.ones(1))
    assert torch.equal(tensors["plain.keys.(1, 2)"], torch.ones(2))
    assert torch.equal(tensors["whole"], torch.arange(4.0))
    # Whichever name came first in the run, the state that is asked for has all of its own.
    succeed("export", varied / "run", tmp_path / "e.safetensors", "--only", "ema", "--strip")
    assert list(load_file(tmp_path / "e.safetensors")) == ["again"]


def test_what_safetensors_lacks_is_bytes_and_the_metadata_says_of_what(varied):
    tensors = load_file(varied / "out.safetensors")
    then = train_varied.build()["tensors"]
    assert tensors["tensors.c128"].shape == (1, 16)
    assert torch.equal(tensors["tensors.c128"].view(torch.complex128)[:, 0], then["c128"])
    for name in ("bf16", "u16", "c64", "turned", "number", "f8"):
        assert tensors[f"tensors.{name}"].dtype == then[name].dtype
    with safe_open(varied / "out.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert json.loads(metadata["holdfast.dtypes"]) == {
        "tensors.c128": "complex128",
        "arrays.big endian": ">i4",
        "arrays.words": "<U2",
        "plain.long bytes": "bytes",
        "plain.bytearray": "bytearray",
    }
    state = json.loads(metadata["holdfast.state"])
    assert state["plain"]["none"] is None
    assert state["plain"]["tuple"] == {"$tuple": [1, {"$tuple": [2.5, "x"]}]}
    assert state["ema"] == {"again": {"$t": "ema.again"}}


def test_a_state_that_is_a_tensor_itself_keeps_its_name(varied, tmp_path):
    out = tmp_path / "w.safetensors"
    succeed("export", varied / "run", out, "--only", "whole", "--strip")
    assert list(load_file(out)) == ["whole"]
