"""Stored tensors sent to a device: the same bits and checksums, and every change is noticed.

Where there is no GPU, memory of the CPU stands for the device's: all but the sending is the same.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
import xxhash

import holdfast
from holdfast._adapters.registry import send_to_device
from holdfast._state.capture import capture
from holdfast._state.restore import restore_state
from holdfast._store.format.image import encode_scalars, plan_image
from holdfast._store.read.verify import SentAhead, verify_image
from holdfast.torch import receive
from holdfast.torch.adapter import ADAPTER as adapter

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_every_byte_arrives_wherever_it_lies(device, threads, monkeypatch):
    monkeypatch.setattr(receive, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(receive, "_TAKEN_BYTES", 1 << 12)
    chance = random.Random(threads)
    whole = memoryview(bytearray(chance.randbytes(1 << 20)))
    views, at = [], 0
    while at < len(whole):
        size = chance.choice([0, 1, 3, 64, 4096, 70_001, 200_000])
        views.append(whole[at : at + size])
        at += size + chance.choice([0, 0, 0, 5, 5000])
    chance.shuffle(views)
    views.append(memoryview(bytearray(b"of another memory")))
    sent = receive.upload(views, torch.device(device), threads=threads)
    assert sent.digests == [xxhash.xxh3_128_digest(view) for view in views]
    assert [bytes(raw.cpu().numpy()) for raw in sent.raw] == [bytes(view) for view in views]
    assert receive.upload(views, torch.device(device), hashed=False).digests == []


def test_what_a_thread_fails_with_is_raised(monkeypatch):
    def fail(*_):
        raise RuntimeError("no such device")

    monkeypatch.setattr(receive, "_copy_now", fail)
    with pytest.raises(RuntimeError, match="no such device"):
        receive.upload([memoryview(bytearray(100))], torch.device("cpu"))


def objects(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.BatchNorm1d(50))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 30)).sum().backward()
    optimizer.step()
    plain = torch.randn(7, 3).t()  # not in C order
    empty = torch.zeros(0, 4)
    half = torch.randn(5).bfloat16()
    return {"model": model, "optimizer": optimizer, "plain": plain, "empty": empty, "half": half}


def loaded_from(state, damage=None):
    """The state as it is read on resume, with every tensor of it on its 'device'."""
    captured = capture(state, {"generators": {}, "position": None})
    scalars = encode_scalars({"step": 1, "tree": captured.tree})
    plan = plan_image(captured.specs, len(scalars))
    image = bytearray(plan.size_bytes)
    image[: len(plan.header)] = plan.header
    places = list(zip(plan.specs, plan.offsets, strict=True))
    for (spec, at), value in zip(places, captured.values, strict=True):
        image[at : at + spec.size_bytes] = adapter.bytes_of(value)
    image[plan.scalars.offset :] = scalars.ljust(plan.scalars.size_bytes)
    extents = plan.extents()
    digests = [xxhash.xxh3_128_digest(image[e[1] : e[1] + e[2]]) for e in extents]
    if damage is not None:
        image[plan.offsets[damage] + 1] ^= 1
    return verify_image(memoryview(image), plan, digests, "here", send_to_device)


@pytest.fixture
def as_device(monkeypatch):
    """Everything was on a device, and the CPU's memory is that device."""
    here = torch.device("cpu")

    def send(self, _, specs, views, *, hashed, slot):
        assert slot is None
        batch = receive.OnDevice(receive.upload(views, here, hashed=hashed), specs)
        self._batches.append(batch)
        self.tensors.update(enumerate(batch.tensors))
        return dict(enumerate(batch.digests))

    monkeypatch.setattr(SentAhead, "send", send)


def same_bits(one, other):
    a, b = capture(one), capture(other)
    return a.tree == b.tree and all(
        adapter.bytes_of(x) == adapter.bytes_of(y) and x.stride() == y.stride()
        for x, y in zip(a.values, b.values, strict=True)
    )


def test_a_state_is_restored_from_there(as_device):
    given, fresh = objects(1), objects(2)
    loaded = loaded_from(given)
    assert len(loaded.sent.tensors) == len(loaded.plan.specs)
    ranges = loaded.sent.memory
    assert restore_state(fresh, loaded) == []
    assert same_bits(given, fresh)
    assert not loaded.sent.tensors  # its memory is given back
    kept = [value.data_ptr() for value in capture(fresh).values]
    assert not any(first <= at < last for at in kept for first, last in ranges)


@pytest.mark.parametrize("number", [0, 3, -1])
def test_damage_is_found_on_the_way(as_device, number):
    given = objects(1)
    with pytest.raises(holdfast.DamagedCheckpoint, match="has checksum"):
        loaded_from(given, damage=number)


class Doubling(torch.nn.Module):
    """Changes what it loads, in one of several ways."""

    def __init__(self, how):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(10))
        self.how = how

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        stored = state_dict[f"{prefix}weight"]
        with torch.no_grad():
            if self.how == "its own":
                self.weight.copy_(stored * 2)
            else:  # also what it was given
                self.weight.copy_(stored.mul_(2))


@pytest.mark.parametrize("how", ["its own", "what it was given"])
def test_an_object_that_changes_what_it_loads_is_found(as_device, how):
    given = {"model": Doubling(how)}
    torch.nn.init.ones_(given["model"].weight)
    with pytest.raises(holdfast.RestoreDiffers, match=r"model.weight \(other values\)"):
        restore_state({"model": Doubling(how)}, loaded_from(given))


class Keeping(torch.nn.Module):
    """Keeps the tensor that it is given."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(10))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.kept = state_dict[f"{prefix}kept"]


def test_an_object_that_keeps_what_it_is_given_gets_one_of_its_own(as_device):
    given = {"model": Keeping()}
    given["model"].kept.fill_(3)
    fresh = {"model": Keeping()}
    loaded = loaded_from(given)
    first, last = loaded.sent.memory[0]
    restore_state(fresh, loaded)
    assert not first <= fresh["model"].kept.data_ptr() < last
    assert torch.equal(fresh["model"].kept, given["model"].kept)


def test_every_bit_counts():
    ones = [torch.tensor([0.0, 1.0]), torch.tensor([float("nan")] * 4), torch.zeros(0)]
    others = [torch.tensor([-0.0, 1.0]), torch.tensor([float("nan")] * 4), torch.zeros(0)]
    assert receive.differing(list(zip(ones, others, strict=True))) == [True, False, False]
    changed = copy.deepcopy(ones[1])
    changed.view(torch.int32)[2] ^= 1
    assert receive.differing([(ones[1], changed)]) == [True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_state_on_a_gpu_is_sent_and_restored(monkeypatch):
    def on_gpu(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(300, 500).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.randn(8, 300, device="cuda")).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "plain": torch.randn(9, device="cuda")}

    given, fresh = on_gpu(1), on_gpu(2)
    loaded = loaded_from(given)
    assert loaded.sent.tensors
    assert all(tensor.is_cuda for tensor in loaded.sent.tensors.values())
    restore_state(fresh, loaded)
    assert same_bits(given, fresh)
    monkeypatch.setattr(receive, "_room", lambda _: 0)  # no room: the way through the CPU
    assert not loaded_from(given).sent.tensors
