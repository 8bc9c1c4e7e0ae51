"""Cases of adopting and exporting checkpoints of torch, in one process.

Each case runs in a folder of its own; what came of it is written as JSON.

    python adopt_torch_cases.py FOLDER [CASE]...
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tests.scripts.adopted_nets import Net, objects, same, states, train
from tests.scripts.adopting import command, refused, run_all
from torch import nn

import holdfast
import holdfast.torch.adapter


def case_a_dict_of_state_dicts_goes_on_to_the_bit(here):
    first = objects()
    train(first, 3)
    saved = {f"{name}_state_dict": value for name, value in states(first).items()}
    more = {"epoch": 1, "best": 0.5, "scale": 65536.0, "turns": torch.tensor(8)}
    torch.save({**saved, **more}, here / "all.pt")
    told = command("adopt", here / "run", "--from", here / "all.pt", "--epoch", 1)
    assert "step 3 (by optimizer.state), adopted from" in told, told
    assert "(torch.save)" in told, told
    assert "Tensors of model (13), optimizer (" in told, told
    mine = objects(seed=5)
    scale = torch.tensor(1.0)  # as that of mixed precision is a tensor here, and a number there
    with holdfast.Run(here / "run", **mine, best=0.0, scale=scale, turns=0) as run:
        assert (run.step, run.state["best"], run.state["turns"]) == (3, 0.5, 8)
        assert scale == 65536.0
        assert mine["model"].tied.weight is mine["model"].out.weight
        for name in mine:
            same(mine[name], first[name], name)
        for _ in run.steps(7):
            train(mine, 1)
    train(first, 4)
    for name in mine:
        same(mine[name], first[name], name)
    # From now on it is a run like any other.
    again = objects(seed=6)
    with holdfast.Run(here / "run", **again, best=0.0, scale=scale, turns=0) as run:
        assert run.step == 7
        same(again["optimizer"], first["optimizer"])


def case_the_epoch_is_that_of_the_file_or_said_to_be_0(here):
    first = objects()
    train(first, 3)
    torch.save({**states(first), "epoch": 4}, here / "all.pt")
    told = command("adopt", here / "run", "--from", here / "all.pt")
    assert "The data begins at the top of epoch 4 (by epoch)." in told, told
    torch.save(states(first), here / "without.pt")
    told = command("adopt", here / "other", "--from", here / "without.pt")
    assert "The data begins at epoch 0" in told, told
    mine = objects(seed=5)
    with holdfast.Run(here / "run", **mine, epoch=0) as run:
        assert (run.epoch, run.state["epoch"]) == (4, 4)


def case_weights_only_and_what_begins_anew(here):
    first = objects()
    torch.save(first["model"].state_dict(), here / "net.pt")
    told = command("adopt", here / "run", "--from", here / "net.pt", status=2)
    assert "Say it: --step N" in told, told
    command("adopt", here / "run", "--from", here / "net.pt", "--step", 0)
    told = refused(here / "run", **objects(seed=5))
    assert "not in the checkpoint: optimizer, scheduler" in told, told
    assert "--fresh optimizer --fresh scheduler" in told, told
    fresh = ("--fresh", "optimizer", "--fresh", "scheduler")
    command("adopt", here / "anew", "--from", here / "net.pt", "--step", 0, *fresh)
    mine = objects(seed=5)
    with holdfast.Run(here / "anew", **mine) as run:
        assert run.step == 0
        same(mine["model"], first["model"])
        assert not mine["optimizer"].state


def case_names_ways_and_wrappers(here):
    first = objects()
    train(first, 2)
    wrapped = {f"module.{key}": value for key, value in first["model"].state_dict().items()}
    inside = {f"net.{key}": value for key, value in first["model"].state_dict().items()}
    whole = {"net": wrapped, "both": inside, "opt": first["optimizer"].state_dict(), "steps": 9}
    torch.save(whole, here / "x.pth")
    source = ("--from", here / "x.pth")
    names = ("--name", "model=net", "--name", "optimizer=opt")
    told = command("adopt", here / "a", *source, *names)
    assert "step 2 (by optimizer.state)" in told, told
    mine = objects(seed=3)
    del mine["scheduler"]
    with holdfast.Run(here / "a", **mine) as run:
        assert run.step == 2
        same(mine["model"], first["model"])
        same(mine["optimizer"], first["optimizer"])
    command("adopt", here / "b", *source, "--name", "model=both.net", "--step", 1)
    mine = Net(seed=3)
    with holdfast.Run(here / "b", model=mine):
        same(mine, first["model"])
    told = command("adopt", here / "c", *source, "--name", "model=nets", status=2)
    assert "has no nets.\nIt has: net, both, opt, steps." in told, told
    told = command("adopt", here / "c", *source, "--name", "opt=net", status=2)
    assert "would be lost" in told, told
    assert not (here / "c").exists()


def case_what_does_not_fit_changes_nothing(here):
    first = objects()
    train(first, 1)
    torch.save(states(first), here / "all.pt")
    command("adopt", here / "run", "--from", here / "all.pt")
    wide = objects(width=5)
    before = states({"model": Net(5), "optimizer": objects(width=5)["optimizer"]})
    told = refused(here / "run", **wide)
    assert "model.inner.weight (float32 [4, 4] → float32 [5, 4])" in told, told
    same(wide["model"].state_dict(), before["model"])
    assert not wide["optimizer"].state
    command("adopt", here / "half", "--from", here / "all.pt", "--fresh", "model")
    told = refused(here / "half", **objects(width=5))
    assert "changed: optimizer.state.0.exp_avg ([4, 4] → [5, 4])" in told, told
    few = objects()
    few["optimizer"] = torch.optim.AdamW(list(few["model"].parameters())[:2])
    del few["scheduler"]
    told = refused(here / "run", **few)
    assert "optimizer (groups of parameters: 5 → 2)" in told, told
    told = refused(here / "run", net=Net())
    assert "not in the checkpoint: net" in told, told
    assert "names that Run does not have: model, optimizer, scheduler" in told, told
    deep = nn.ModuleDict({"inner": nn.Linear(4, 4), "more": nn.Linear(1, 1)})
    told = refused(here / "run", **{**objects(), "model": deep})
    assert "not in the checkpoint: model.more.weight, model.more.bias" in told, told
    assert "only in the checkpoint: model.none" in told, told
    loose = Net()
    loose.tied = nn.Linear(4, 4, bias=False)
    torch.save({"model": loose.state_dict()}, here / "loose.pt")
    command("adopt", here / "tied", "--from", here / "loose.pt", "--step", 1)
    told = refused(here / "tied", model=Net())
    assert "is tied to another here" in told, told
    with holdfast.Run(here / "run", **objects(seed=2)) as run:  # none of them has spoilt it
        assert run.step == 1


class Harm:
    def __reduce__(self):
        return (open, (str(Path(sys.argv[1]) / "harmed"), "w"))


def case_a_hostile_pickle_is_refused_in_two_lines(here):
    import pickle

    torch.save({"model": Net().state_dict(), "x": Harm()}, here / "bad.pt")
    torch.save(Net(), here / "object.pt")
    (here / "dcp").mkdir()
    (here / "dcp" / ".metadata").write_bytes(pickle.dumps(Harm()))
    (here / "hf").mkdir()
    save_file({"w": torch.ones(1)}, here / "hf" / "model.safetensors")
    torch.save(Harm(), here / "hf" / "optimizer.pt")
    for name in ("bad.pt", "object.pt", "dcp", "hf"):
        told = command("adopt", here / "run", "--from", here / name, "--step", 1, status=1)
        assert "loading that could run any code. It was not loaded." in told, told
        assert "io.open" in told or "Net" in told, told
        assert len(told.splitlines()) == 2, told
        assert not (here / "run").exists()
    assert not (here.parent / "harmed").exists()


def case_what_is_damaged_or_missing_is_two_lines(here):
    torch.save(states(objects()), here / "all.pt")
    whole = (here / "all.pt").read_bytes()
    (here / "short.pt").write_bytes(whole[: len(whole) // 2])
    (here / "text.pt").write_text("no checkpoint\n")
    save_file({"w": torch.ones(100)}, here / "w.safetensors")
    cut = (here / "w.safetensors").read_bytes()[:-4]
    (here / "cut.safetensors").write_bytes(cut)
    (here / "empty").mkdir()
    (here / "two").mkdir()
    for name in ("a.ckpt", "b.ckpt"):
        (here / "two" / name).touch()
    for name, status, part in (
        ("short.pt", 1, "cannot be read"),
        ("text.pt", 1, ""),
        ("cut.safetensors", 1, "w should be 400 bytes"),
        ("empty", 2, "no checkpoint in it that is known here"),
        ("two", 2, f"Name one: {here / 'two' / 'a.ckpt'}"),
        ("nowhere.pt", 2, "no such file or folder"),
    ):
        told = command("adopt", here / "run", "--from", here / name, "--step", 1, status=status)
        assert part in told, told
        assert len(told.splitlines()) == 2, told
        assert not (here / "run").exists()


# -- torch.distributed.checkpoint -----------------------------------------------------


def case_dcp_there_and_back(here):
    first = objects()
    train(first, 4)
    odd = {"empty": torch.zeros(0, 2), "c128": torch.randn(2, dtype=torch.complex128)}
    odd["number"] = torch.tensor(3.5, dtype=torch.float64)
    with holdfast.Run(here / "run", **first, odd=odd, best=0.25) as run:
        run.finish()
    told = command("export", here / "run", here / "out", "--to", "dcp")
    assert ".metadata" in {each.name for each in (here / "out").iterdir()}, told
    mine = objects(seed=8)
    train(mine, 1)
    wanted = states(mine)
    wanted["odd"] = {name: torch.zeros_like(value) for name, value in odd.items()}
    wanted["best"] = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(wanted, checkpoint_id=str(here / "out"))
    for name, value in first.items():
        same(wanted[name], value.state_dict(), name)
    same(wanted["odd"], odd)
    assert wanted["best"] == 0.25
    command("adopt", here / "back", "--from", here / "out")
    third = objects(seed=9)
    empty = {name: torch.zeros_like(value) for name, value in odd.items()}
    with holdfast.Run(here / "back", **third, odd=empty, best=0.0) as run:
        assert (run.step, run.state["best"]) == (4, 0.25)
        for name in third:
            same(third[name], first[name], name)
        same(empty, odd)
    assert "is there already" in command(
        "export", here / "run", here / "out", "--to", "dcp", status=2
    )
    command("export", here / "run", here / "out", "--to", "dcp", "--force")


def case_dcp_with_names_in_the_optimizer(here):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    first = objects()
    train(first, 2)
    model, optimizer = get_state_dict(first["model"], first["optimizer"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=str(here / "ck" / "step-2"))
    command("adopt", here / "run", "--from", here / "ck", "--name", "optimizer=optim", "--step", 2)
    mine = objects(seed=4)
    # Parameters in another order have other numbers, and the same names.
    with holdfast.Run(here / "run", model=mine["model"], optimizer=mine["optimizer"]):
        same(mine["optimizer"].state_dict()["state"], first["optimizer"].state_dict()["state"])
        same(mine["model"], first["model"])


# -- files that others read -------------------------------------------------------------


def case_every_dtype_there_and_back(here):
    kinds = [getattr(torch, name) for name in sorted(dir(torch))]
    odd = {}
    for kind in {each for each in kinds if isinstance(each, torch.dtype)}:
        name = str(kind).removeprefix("torch.")
        if name.startswith("bits"):  # which torch itself can hardly handle
            continue
        try:
            raw = torch.arange(1, 1 + 4 * kind.itemsize, dtype=torch.uint8).view(kind)
            holdfast.torch.adapter.ADAPTER.spec("x", raw)
            torch.save(raw.clone(), here / "probe.pt")
        except (ValueError, RuntimeError, TypeError, AttributeError):
            continue
        odd[name] = torch.tensor([True, False]) if kind is torch.bool else raw.clone()
    assert {"bfloat16", "complex64", "complex128", "float8_e4m3fn", "bool", "uint64"} <= odd.keys()
    odd["turned"] = torch.arange(6.0).reshape(2, 3).t()
    odd["one"] = odd["turned"]
    with holdfast.Run(here / "run", odd=odd) as run:
        run.finish()
    with holdfast.Run(
        here / "raw", bits=torch.zeros(4, dtype=torch.uint8).view(torch.bits16)
    ) as run:
        run.finish()
    told = command("export", here / "raw", here / "folder", "--to", "dcp", status=1)
    assert "torch.distributed.checkpoint cannot write it" in told, told
    assert not (here / "folder").exists()
    for to, out in (("torch", "file"), ("dcp", "folder"), (None, "x.pt")):
        words = () if to is None else ("--to", to)
        command("export", here / "run", here / out, *words)
        command("adopt", here / f"from-{out}", "--from", here / out, "--step", 5)
        empty = {name: torch.zeros_like(value) for name, value in odd.items()}
        empty["one"] = empty["turned"]
        with holdfast.Run(here / f"from-{out}", odd=empty) as run:
            assert run.step == 5
            same(empty, odd, out)
            assert empty["one"] is empty["turned"]
            assert empty["turned"].stride() == odd["turned"].stride()


def case_safetensors_of_a_model(here):
    first = objects()
    with holdfast.Run(here / "run", **first) as run:
        run.finish()
    command(
        *("export", here / "run", here / "out", "--to", "safetensors"),
        *("--only", "model", "--strip"),
    )
    assert load_file(here / "out").keys() == first["model"].state_dict().keys()
    (here / "out").rename(here / "out.safetensors")
    command("adopt", here / "back", "--from", here / "out.safetensors", "--step", 0)
    mine = Net(seed=3)
    with holdfast.Run(here / "back", model=mine):
        same(mine, first["model"])


def case_a_sharded_folder_of_bin_files_and_a_tied_name_that_is_not_there(here):
    first = Net(seed=2)
    weights = OrderedDict(first.state_dict())
    del weights["tied.weight"]
    (here / "hf").mkdir()
    names = list(weights)
    table = {name: f"pytorch_model-{1 + at % 2}.bin" for at, name in enumerate(names)}
    for file in set(table.values()):
        torch.save({n: weights[n] for n in names if table[n] == file}, here / "hf" / file)
    index = here / "hf" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    command("adopt", here / "run", "--from", here / "hf", "--step", 0)
    mine = Net(seed=3)
    with holdfast.Run(here / "run", model=mine):
        same(mine, first)
        assert mine.tied.weight is mine.out.weight
    index.write_text(json.dumps({"weight_map": {"w": "../net.bin"}}))
    told = command("adopt", here / "no", "--from", here / "hf", "--step", 0, status=2)
    assert "is not in its folder" in told, told


if __name__ == "__main__":
    cases = [name for name in globals() if name.startswith("case_")]
    run_all(Path(sys.argv[1]), {name: globals()[name] for name in sys.argv[2:] or cases})
